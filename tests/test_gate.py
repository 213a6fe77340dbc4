"""The gate: what passes and what does not, with values worked out by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twofold.evaluation import Difference
from twofold.gate import compare, reasons
from twofold.records import Rollout
from twofold.settings import Promotion

RULES = Promotion(bound=0.1, format_drop=0.02, leakage_rise=0.05)
SAME = Difference(0.0, 0.0, 0.0, 10)


def rollouts(*rewards: float, status: str = "ok", leakage: float | None = None) -> list[Rollout]:
    channels = {} if leakage is None else {"leakage": leakage}
    return [
        Rollout(f"r{k}", f"e{k}", 0, "student", (), {}, reward, channels, status) for k, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    ("gain", "readable", "leakage", "said"),
    [
        ((0.3, 0.11, 0.5), SAME, None, []),
        ((0.3, 0.10, 0.5), SAME, None, ["chance"]),
        ((0.0, 0.0, 0.0), SAME, None, ["no higher"]),
        ((-0.3, -0.5, -0.1), SAME, None, ["no higher"]),
        ((0.3, 0.2, 0.5), Difference(-0.02, -0.1, 0.1, 10), None, []),
        ((0.3, 0.2, 0.5), Difference(-0.03, -0.1, 0.1, 10), None, ["can be read"]),
        ((0.3, 0.2, 0.5), SAME, Difference(0.05, 0, 1, 10), []),
        ((0.3, 0.2, 0.5), SAME, Difference(0.06, 0, 1, 10), ["gives more away"]),
        (
            (0.0, 0.0, 0.0),
            Difference(-1, -1, -1, 10),
            Difference(1, 1, 1, 10),
            ["no higher", "can be read", "more away"],
        ),
    ],
)
def test_each_rule(
    gain: tuple[float, float, float], readable: Difference, leakage: Difference | None, said: list[str]
) -> None:
    found = reasons(Difference(*gain, 10), readable, leakage, RULES)
    assert len(found) == len(said)
    assert all(part in reason for part, reason in zip(said, found, strict=True))


def test_a_reason_has_its_numbers() -> None:
    (reason,) = reasons(Difference(0.2, -0.05, 0.45, 8), SAME, None, Promotion())
    assert reason == (
        "Its gain may be chance: +0.200 (95% interval -0.050 to +0.450, n = 8); the interval must lie above 0."
    )


def test_differences_are_paired_by_example() -> None:
    # Gains of 1, 0, 1, 1: mean 0.75. Two of four answers became unreadable: -0.5.
    after = rollouts(1, 1, 1, 1)
    after = [*after[:2], *rollouts(0, 0, 1, 1, status="parse_error")[2:]]
    verdict = compare(after, rollouts(0, 1, 0, 0)[::-1], Promotion(format_drop=0.4), 500, 0)
    assert (verdict.gain.difference, verdict.gain.n) == (0.75, 4)
    assert verdict.readable.difference == -0.5
    assert verdict.leakage is None
    assert len(verdict.reasons) == 1


def test_leakage_is_compared_where_both_have_it() -> None:
    before = rollouts(0, 0, 0, leakage=0.5)
    # The third rollout failed, so it has no channels.
    after = [*rollouts(1, 1, leakage=0.75), *rollouts(1, 1, 1)[2:]]
    verdict = compare(after, before, Promotion(), 500, 0)
    assert (verdict.leakage.difference, verdict.leakage.n) == (0.25, 2)
    assert verdict.reasons == (
        "It gives more away: +0.250 (95% interval +0.250 to +0.250, n = 2); at most 0 more is allowed.",
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=12))
def test_never_both_ways(pairs: list[tuple[bool, bool]]) -> None:
    """Whatever two programs answer, at most one may replace the other, and none itself."""
    a, b = (rollouts(*(float(pair[side]) for pair in pairs)) for side in (0, 1))
    there, back = (compare(x, y, Promotion(), 200, 0).reasons for x, y in ((a, b), (b, a)))
    assert there or back
    assert compare(a, a, Promotion(), 200, 0).reasons
