"""Exploration potential: values by hand and by an independent formula, guards, routing, and properties."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy.special import softmax

from twofold.eps import Score, accuracy, potential, route, score, score_examples, score_groups, verdict
from twofold.records import Group, Member, Rollout
from twofold.settings import Eps


def binary(successes: int, n: int) -> list[float]:
    return [1.0] * successes + [0.0] * (n - successes)


def scored(rewards: list[float], **settings) -> Score:
    return score(rewards, Eps(**settings), policy="base", metric="v1")


def verdict_of(rewards: list[float], **settings) -> str:
    return verdict(scored(rewards, **settings), Eps(**settings))


def rollout(example_id: str, number: int, reward: float, **kw) -> Rollout:
    return Rollout(f"{example_id}/{number}", example_id, 0, "student", (), {}, reward, **kw)


# Values


def test_by_hand():
    # β = 1 / ln 2 makes exp(r / β) = 2^r: weights 1, 2, 4 of 7, so E = (0 + 2 + 8) / 7 - 1 = 3/7.
    assert potential([0, 1, 2], 1 / math.log(2), 0) == pytest.approx(3 / 7, rel=1e-14)
    # Weights 1, 1, 2 of 4: E = 2/4 - 1/3 = 1/6.
    assert potential([0, 0, 1], 1 / math.log(2), 0) == pytest.approx(1 / 6, rel=1e-14)


@pytest.mark.parametrize(("successes", "value"), [(2, 0.75), (3, 0.625), (4, 0.5)])
def test_the_papers_example(successes, value):
    # The paper prints .75, .63 and .50 for 8 rollouts.
    assert potential(binary(successes, 8), 0.01, 1e-9) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("successes", range(1, 8))
def test_limits_of_binary_rewards(successes):
    p = successes / 8
    rewards = binary(successes, 8)
    assert potential(rewards, 1e-4, 1e-9) == pytest.approx(1 - p, rel=1e-14)
    # The next term of the series in 1/β is p (1 - p) (1 - 2p) / (2β²): at β = 1e6 the limit is good to 1e-6.
    assert potential(rewards, 1e6, 1e-9) == pytest.approx(p * (1 - p) / 1e6, rel=1e-6, abs=0)


@pytest.mark.parametrize("beta", [0.1, 0.25, 1.0, 10.0])
def test_the_best_share_of_successes_scores_tanh(beta):
    n = 20_000
    # E(p) = p (1-p) (x-1) / (1 + p (x-1)) with x = exp(1/β): its maximum is at p = 1 / (1 + √x).
    best = n / (1 + math.exp(0.5 / beta))
    around = [potential(binary(round(best) + step, n), beta, 1e-9) for step in (-200, -20, 0, 20, 200)]
    assert max(around) == pytest.approx(math.tanh(1 / (4 * beta)), rel=1e-5)
    assert max(around) == around[2]
    assert max(around) <= math.tanh(1 / (4 * beta)) * (1 + 1e-14)


def test_a_small_beta_ranks_the_hardest_unsolved_input_first():
    values = [potential(binary(k, 8), 0.01, 1e-9) for k in range(9)]
    assert values[0] == values[8] == 0
    assert values[1:8] == sorted(values[1:8], reverse=True)


def test_no_precision_is_lost_for_large_beta():
    # Rewards -1 and 1: E = tanh(1 / β), 1e-12 here. The other form, Σ w r, has a relative error of 1e-4 already.
    assert potential([-1, 1], 1e12, 0) == pytest.approx(1e-12, rel=1e-12, abs=0)


@pytest.mark.parametrize("huge", [1e6, 1e150, 8e307])
def test_huge_rewards_do_not_overflow(huge):
    with np.errstate(all="raise", under="ignore"):
        assert potential([huge] * 3 + [-huge], 0.01, 1e-9) == pytest.approx(huge / 2, rel=1e-14)
        assert potential([huge] * 8, 0.01, 1e-9) == 0
    assert scored([huge] * 4).mean == huge


@pytest.mark.parametrize("rewards", [[0.1] * 3, [1, 1], [0] * 32, [1 / 3] * 7, [-1e300] * 5, [True] * 4])
def test_a_tie_is_exactly_zero(rewards):
    assert potential(rewards, 0.01, 0) == 0


@pytest.mark.parametrize(("difference", "tied"), [(0.125, True), (0.1875, False)])
def test_rewards_within_the_tolerance_tie(difference, tied):
    assert (potential([0.5, 0.5 + difference], 0.01, 0.125) == 0) == tied


# Guards


@pytest.mark.parametrize("rewards", [[], [1.0], [[1.0, 0.0], [0.0, 1.0]]])
def test_too_few_rewards_or_too_many_dimensions(rewards):
    with pytest.raises(ValueError, match="at least two rollouts"):
        potential(rewards, 0.01, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_not_finite(bad):
    with pytest.raises(ValueError, match=f"reward 2 is {bad}"):
        potential([0.0, 1.0, bad], 0.01, 0)


@pytest.mark.parametrize("beta", [0.0, -1.0, math.nan, math.inf])
def test_beta_must_be_positive_and_finite(beta):
    with pytest.raises(ValueError, match="beta is"):
        potential([0.0, 1.0], beta, 0)


def test_a_range_that_no_float_holds():
    with pytest.raises(ValueError, match="span more than a float holds"):
        potential([-1e308, 1e308], 0.01, 0)


@pytest.mark.parametrize("wrong", [{"beta": 0}, {"tau": -0.1}, {"tolerance": -1}, {"visits_before_teacher": 0}])
def test_settings_refuse_what_makes_no_sense(wrong):
    with pytest.raises(ValidationError):
        Eps(**wrong)


# Scores


def test_a_score_keeps_what_it_depends_on():
    found = score(binary(2, 8), Eps(beta=0.02, tau=0.1), policy="abc", metric="v7")
    assert (found.value, found.n, found.mean) == (pytest.approx(0.75), 8, 0.25)
    assert (found.beta, found.tau, found.policy, found.metric) == (0.02, 0.1, "abc", "v7")


def test_interval_of_no_and_of_all_successes():
    # Beta(1, 9) has the distribution function 1 - (1 - p)^9, Beta(9, 1) has p^9.
    none, every = scored(binary(0, 8)), scored(binary(8, 8))
    assert (none.p_low, none.p_high) == pytest.approx((1 - 0.975 ** (1 / 9), 1 - 0.025 ** (1 / 9)))
    assert (every.p_low, every.p_high) == pytest.approx((0.025 ** (1 / 9), 0.975 ** (1 / 9)))


def test_interval_of_one_success_of_two():
    # Beta(2, 2) has the distribution function 3p² - 2p³, and is symmetric around 1/2.
    found = scored(binary(1, 2))
    assert 3 * found.p_low**2 - 2 * found.p_low**3 == pytest.approx(0.025)
    assert found.p_low + found.p_high == pytest.approx(1)


@pytest.mark.parametrize("rewards", [[0.0, 0.5], [0.5] * 8, [2.0, 0.0], [-1.0, 1.0]])
def test_rewards_that_are_not_binary_have_no_interval(rewards):
    assert (scored(rewards).p_low, scored(rewards).p_high) == (None, None)


def test_examples_are_scored_by_accuracy_and_not_by_the_reward_mixed_with_format():
    rollouts = [
        rollout("x", 0, 0.1, channels={"accuracy": 0.0, "format": 1.0}),
        rollout("y", 0, 1.0, channels={"accuracy": 1.0, "format": 1.0}),
        rollout("x", 1, 0.0, channels={"accuracy": 0.0, "format": 0.0}),
        rollout("y", 1, 0.0, status="timeout"),
    ]
    found = score_examples(rollouts, Eps(), "base", "v1")
    assert list(found) == ["x", "y"]
    assert (found["x"].value, found["x"].mean, found["x"].n) == (0, 0, 2)
    assert (found["y"].value, found["y"].mean, found["y"].n) == (0.5, 0.5, 2)
    assert [accuracy(r) for r in rollouts] == [0, 1, 0, 0]


def test_failures_of_different_kinds_keep_no_input_that_nobody_solved():
    failed = [rollout("x", 0, -0.5, status="parse_error"), rollout("x", 1, -0.1, status="parse_error")]
    wrong = rollout("x", 2, 0.0, channels={"accuracy": 0.0})
    found = score_examples([*failed, wrong], Eps(), "base", "v1")["x"]
    assert (found.value, found.mean, verdict(found, Eps())) == (0, 0, "too_hard")
    assert accuracy(rollout("x", 3, -0.5, status="timeout", channels={"accuracy": 0.25})) == 0.25


def test_an_example_that_cannot_be_scored_is_named():
    with pytest.raises(ValueError, match="example lone: rewards of shape"):
        score_examples([rollout("x", 0, 1.0), rollout("x", 1, 1.0), rollout("lone", 0, 1.0)], Eps(), "base", "v1")


@pytest.mark.parametrize("weight", [1.0, 1 / 3])
def test_copies_of_a_rollout_count_once_in_a_group(weight):
    copies = [Member("r0", 0, 1.0, weight, 0.0)] * 3
    others = [Member(f"r{i}", 0, 0.0, 1.0, 0.0) for i in (1, 2, 3)]
    group = Group("e/m/0", "e", "m", 0, (*copies, *others), 0.25, 0.5, False)
    found = score_groups([group], Eps(), "base", "v1")
    assert list(found) == ["e/m/0"]
    # One success of four, where three of six would give 0.5.
    assert (found["e/m/0"].value, found["e/m/0"].n, found["e/m/0"].mean) == (pytest.approx(0.75), 4, 0.25)


def test_a_group_that_cannot_be_scored_is_named():
    group = Group("e/m/0", "e", "m", 0, (Member("r", 0, 1.0, 0.5, 0.0),) * 2, 1.0, 0.0, True)
    with pytest.raises(ValueError, match="group e/m/0: rewards of shape"):
        score_groups([group], Eps(), "base", "v1")


# Routing


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        (binary(1, 8), "keep"),
        (binary(7, 8), "keep"),
        (binary(0, 8), "too_hard"),
        ([-1.0] * 8, "too_hard"),
        (binary(8, 8), "solved"),
        ([0.5] * 8, "flat"),
        ([1.0, 1.0 - 5e-10], "solved"),
        ([0.0, 5e-10], "too_hard"),
    ],
)
def test_verdicts_at_tau_zero(rewards, said):
    assert verdict_of(rewards) == said


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        (binary(5, 8), "keep"),  # E = 0.375
        (binary(7, 8), "solved"),  # E = 0.125 and the mean is within τ of 1
        ([0.0, 0.0, 0.0, 0.2], "too_hard"),  # E = 0.15
        ([0.5, 0.5, 0.5, 0.6], "flat"),  # E = 0.075
    ],
)
def test_verdicts_below_tau_go_by_the_mean(rewards, said):
    assert verdict_of(rewards, tau=0.2) == said


def test_a_score_of_exactly_tau_is_not_kept():
    assert verdict_of(binary(1, 2), beta=1e-4, tau=0.5) != "keep"
    assert verdict_of(binary(1, 2), beta=1e-4, tau=0.499) == "keep"


@pytest.mark.parametrize(
    ("said", "visits", "split", "paper"),
    [
        ("keep", 1, "train", "train"),
        ("keep", 9, "train", "train"),
        ("too_hard", 1, "wait", "wait"),
        ("too_hard", 2, "wait", "wait"),
        ("too_hard", 3, "scaffold", "scaffold"),
        ("flat", 2, "wait", "wait"),
        ("flat", 3, "scaffold", "scaffold"),
        ("solved", 1, "retire", "wait"),
        ("solved", 3, "retire", "scaffold"),
    ],
)
def test_actions(said, visits, split, paper):
    assert route(said, visits, Eps(routing="split", visits_before_teacher=3)) == split
    assert route(said, visits, Eps(routing="paper", visits_before_teacher=3)) == paper


# Properties


number = st.sampled_from([-1.0, 0.0, 0.1, 0.5, 1.0]) | st.floats(-100, 100, allow_subnormal=False)
some_rewards = st.lists(number, min_size=2, max_size=16)
some_beta = st.floats(1e-3, 1e6)


@given(some_rewards, st.floats(1e-2, 1e3))
def test_the_pairwise_form_is_the_expected_gain(rewards, beta):
    r = np.array(rewards)
    expected = float(softmax(r / beta) @ r - r.mean())
    assert potential(rewards, beta, 0) == pytest.approx(expected, rel=1e-6, abs=1e-11)


@given(some_rewards, some_beta, st.sampled_from([0.0, 1e-9, 0.25]))
def test_zero_exactly_on_ties_and_never_negative(rewards, beta, tolerance):
    value = potential(rewards, beta, tolerance)
    assert value >= 0
    spread = max(rewards) - min(rewards)
    if spread <= tolerance:
        assert value == 0
    elif spread > 1e-9:  # below that E, about spread² / β, may be less than the smallest float
        assert value > 0
    assert value <= max(rewards) - sum(rewards) / len(rewards) + 1e-12


@given(some_rewards, some_beta, st.randoms())
def test_the_order_of_rollouts_changes_no_bit(rewards, beta, random):
    shuffled = random.sample(rewards, len(rewards))
    assert scored(shuffled, beta=beta) == scored(rewards, beta=beta)


@given(st.lists(st.integers(-64, 64), min_size=2, max_size=16), some_beta, st.integers(-1000, 1000))
def test_adding_a_number_to_all_rewards_changes_nothing(eighths, beta, shift):
    rewards = [eighth / 8 for eighth in eighths]
    assert potential([reward + shift for reward in rewards], beta, 0) == potential(rewards, beta, 0)


@given(some_rewards, some_beta)
def test_reward_and_beta_have_the_same_unit(rewards, beta):
    assert potential([4 * reward for reward in rewards], 4 * beta, 0) == 4 * potential(rewards, beta, 0)


@given(some_rewards, some_beta, st.integers(2, 5))
def test_repeating_all_rewards_changes_nothing(rewards, beta, times):
    assert potential(rewards * times, beta, 0) == pytest.approx(potential(rewards, beta, 0), rel=1e-12)
