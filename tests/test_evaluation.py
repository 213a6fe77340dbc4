import math
from dataclasses import replace

import pytest

from twofold.errors import RecordError
from twofold.evaluation import difference, score
from twofold.records import Call, Rollout


def call(parsed=True, prompt=3, completion=2):
    return Call(
        rollout_id="r",
        module="m",
        index=0,
        order=0,
        prompt_ids=(1,) * prompt,
        completion_ids=(2,) * completion,
        logprobs=(-0.1,) * completion,
        text="t",
        finish_reason="stop",
        policy="base",
        temperature=0.0,
        seed=0,
        parsed=parsed,
        parsed_share=float(parsed),
    )


def rollout(example_id, reward, calls=(), status="ok"):
    return Rollout(f"{example_id}/0", str(example_id), 0, "student", tuple(calls), {}, reward, status=status)


def many(rewards):
    return [rollout(f"{number:04}", reward) for number, reward in enumerate(rewards)]


def test_rollouts_are_averaged_by_example_before_examples_are():
    rollouts = [rollout("a", 1.0), rollout("a", 0.0), rollout("b", 1.0), rollout("a", 0.5)]
    found = score(rollouts, resamples=100, seed=0)
    assert found.score == (0.5 + 1.0) / 2
    assert (found.n, found.rollouts) == (2, 4)
    assert 0.5 <= found.ci_low <= found.score <= found.ci_high <= 1.0


def test_tokens_formats_and_statuses_are_counted():
    rollouts = [
        rollout("a", 1.0, [call(), call(prompt=5)]),
        rollout("b", 0.0, [call(), call(parsed=False, completion=7)], "parse_error"),
        rollout("c", 1.0, [call(parsed=False), call()]),
        rollout("d", 0.0, [], "lm_error"),
    ]
    found = score(rollouts, resamples=100, seed=0)
    assert found.format_rate == 2 / 4
    assert (found.tokens_in, found.tokens_out) == (3 * 5 + 5, 2 * 5 + 7)
    assert found.statuses == {"lm_error": 1, "ok": 2, "parse_error": 1}


def test_channels_are_averaged_over_the_rollouts_that_have_them():
    rollouts = [
        replace(rollout("a", 0.5), channels={"accuracy": 0.5, "leakage": 0.2}),
        replace(rollout("a", 0.5), channels={"accuracy": 0.5, "leakage": 0.4}),
        replace(rollout("b", 1.0), channels={"accuracy": 1.0, "leakage": 0.9}),
        rollout("c", 0.0, status="lm_error"),
    ]
    found = score(rollouts, resamples=100, seed=0)
    # `accuracy` is the reward here.
    assert list(found.channels) == ["leakage"]
    leakage = found.channels["leakage"]
    assert (leakage.mean, leakage.n, found.n) == (pytest.approx((0.3 + 0.9) / 2), 2, 3)
    assert 0.3 <= leakage.ci_low <= leakage.mean <= leakage.ci_high <= 0.9


@pytest.mark.parametrize("share", [0.5, 0.2])
def test_the_interval_of_a_share_is_about_the_normal_one(share):
    n = 400
    found = score(many([1.0] * round(n * share) + [0.0] * round(n * (1 - share))), resamples=5000, seed=0)
    half = 1.96 * math.sqrt(share * (1 - share) / n)
    assert found.score == pytest.approx(share)
    assert found.ci_low == pytest.approx(share - half, abs=0.01)
    assert found.ci_high == pytest.approx(share + half, abs=0.01)


@pytest.mark.parametrize("rewards", [[0.0] * 5, [1.0] * 5, [0.3] * 4, [0.7]])
def test_equal_rewards_give_an_interval_of_no_width(rewards):
    found = score(many(rewards), resamples=100, seed=0)
    assert found.ci_low == found.score == found.ci_high == rewards[0]


def test_the_order_of_rollouts_does_not_matter_and_the_seed_does():
    rollouts = many([i % 7 / 7 for i in range(50)])
    found = score(rollouts, resamples=500, seed=1)
    assert score(rollouts[::-1], resamples=500, seed=1) == found
    assert score(rollouts, resamples=500, seed=2).ci_low != found.ci_low


def test_a_difference_is_paired_by_example():
    a = many([1.0, 0.5, 0.9, 0.1])
    b = many([0.75, 0.25, 0.65, -0.15])[::-1]
    found = difference(a, b, resamples=200, seed=0)
    assert found.n == 4
    # Every example gains a quarter, though the examples differ: there is no doubt about the gain.
    for value in (found.difference, found.ci_low, found.ci_high):
        assert value == pytest.approx(0.25)
    back = difference(b, a, resamples=200, seed=0)
    assert back.difference == pytest.approx(-0.25)


def test_a_difference_of_shares_is_about_the_normal_one():
    # Of 300 examples 60 are won and 30 are lost: mean 0.1, variance (60 + 30)/300 - 0.01.
    n, won, lost = 300, 60, 30
    a = many([1.0] * won + [0.0] * lost + [1.0] * (n - won - lost))
    b = many([0.0] * won + [1.0] * lost + [1.0] * (n - won - lost))
    found = difference(a, b, resamples=5000, seed=0)
    half = 1.96 * math.sqrt(((won + lost) / n - 0.1**2) / n)
    assert found.difference == pytest.approx(0.1)
    assert found.ci_low == pytest.approx(0.1 - half, abs=0.008)
    assert found.ci_high == pytest.approx(0.1 + half, abs=0.008)


def test_rollouts_of_other_examples_cannot_be_compared():
    with pytest.raises(RecordError, match=r"2 examples are on one side alone, such as a, c\..*same split"):
        difference([rollout("a", 1.0), rollout("b", 1.0)], [rollout("b", 1.0), rollout("c", 1.0)], 100, 0)


def test_no_rollouts_have_no_score():
    with pytest.raises(RecordError, match="no rollouts to score"):
        score([], resamples=100, seed=0)
    with pytest.raises(RecordError, match="no rollouts to score"):
        difference([], [], resamples=100, seed=0)
