"""Exploration Potential Score (arXiv 2609.15051): which inputs still teach the policy something.

A policy learns from an input whose rollouts earn different rewards. For rewards r_1 … r_N of one input's rollouts:

1. Weigh each rollout by w = softmax(r / β), the policy that would seek these rewards at temperature β.
2. Score what that policy would gain: E = Σ w_i r_i - mean(r), in units of reward.
3. Compute it as E = 1/(2N) Σ_i Σ_j (r_i - r_j)(w_i - w_j), of which no term is negative; E = 0 when the rewards tie,
   that is when max - min is at most the tolerance. With 1 - exp for the difference of two w nothing cancels.
4. Verdict: `keep` when E > τ. Else the mean decides: about 0 is `too_hard`, about 1 is `solved`, others are `flat`.
5. Action: train on what is kept and retire what is solved. The rest is scaffolded by a teacher, after a number of
   visits in a row: 0 of 8 successes still allow a success rate of 0.3. (`paper` sends solved inputs there too.)

E ranks inputs; it is no calibrated measure, and depends on N and β. Of binary rewards with a share p of successes,
0 < p < 1, it is about 1 - p for small β, and p (1 - p) / β for large β. What is scored is the accuracy: format rewards
in the mixture would keep inputs that nobody solves.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.stats import beta as beta_distribution

from twofold.evaluation import CONFIDENCE
from twofold.records import Group, Rollout
from twofold.settings import Eps

Verdict = Literal["keep", "too_hard", "solved", "flat"]
"""What the rewards of one visit say of an input."""

Action = Literal["train", "scaffold", "retire", "wait"]
"""What becomes of the input; `wait` leaves it where it is until it has been visited often enough."""

FAILED, PASSED = 0.0, 1.0
"""The accuracy of a wrong and of a right answer."""


@dataclass(frozen=True, slots=True)
class Score:
    """The exploration potential of one input or group, and what it depends on."""

    value: float
    """E, in units of reward: 0 exactly when the rewards tie, never negative."""
    n: int
    """Rollouts it was computed from."""
    beta: float
    tau: float
    mean: float
    """Mean reward."""
    policy: str
    """The policy that made the rollouts: a digest, or `base`."""
    metric: str
    """Version of the metric that gave the rewards."""
    p_low: float | None = None
    p_high: float | None = None
    """For rewards of 0 and 1 only: 95% interval of the success probability, equal tails of its posterior
    Beta(1 + successes, 1 + failures)."""


def potential(rewards: Sequence[float] | np.ndarray, beta: float, tolerance: float) -> float:
    """E of one input's rewards, in units of reward; the order of the rewards changes no bit of it.

    It takes N + D² steps and memory for N numbers, D being how many of the rewards are distinct.

    Args:
        rewards: N numbers, N at least 2.
        beta: temperature of the softmax, in units of reward.
        tolerance: rewards tie, and E is 0, when none differs from another by more.

    Raises:
        ValueError: there are fewer than two rewards, one is not finite, their range is not, or `beta` is not above 0.
    """
    given = _checked(rewards, beta)
    values, counts = np.unique(given, return_counts=True)
    if values[-1] - values[0] <= tolerance:
        return 0.0
    with np.errstate(over="ignore"):  # a range of more than 1e308 betas has exp(-inf) = 0, as it should
        chances = np.exp((values - values[-1]) / beta)
        chances *= counts / (counts @ chances)
        shares = counts / len(given)
        gains = [_gain_over_lower(values, shares, at, beta) for at in range(len(values))]
    return float(chances @ gains)


def score(rewards: Sequence[float], settings: Eps, policy: str, metric: str) -> Score:
    """Score the rewards of one input's rollouts; raises `ValueError` like `potential`."""
    value = potential(rewards, settings.beta, settings.tolerance)
    low, high = _success_interval(rewards)
    mean = statistics.mean(map(float, rewards))  # exact, so that the order of the rollouts leaves no trace
    return Score(value, len(rewards), settings.beta, settings.tau, mean, policy, metric, low, high)


def score_examples(rollouts: Sequence[Rollout], settings: Eps, policy: str, metric: str) -> dict[str, Score]:
    """Scores by example, in order of first appearance, each of the accuracy of all the example's rollouts.

    Raises:
        ValueError: naming an example whose rollouts cannot be scored.
    """
    rewards: dict[str, list[float]] = {}
    for rollout in rollouts:
        rewards.setdefault(rollout.example_id, []).append(accuracy(rollout))
    return {example: _score_of(f"example {example}", own, settings, policy, metric) for example, own in rewards.items()}


def score_groups(groups: Sequence[Group], settings: Eps, policy: str, metric: str) -> dict[str, Score]:
    """Scores by group id, each of the members' rewards; the copies of one rollout count once, whatever their weight.

    Raises:
        ValueError: naming a group whose members cannot be scored.
    """
    return {
        group.group_id: _score_of(
            f"group {group.group_id}",
            list({member.rollout_id: member.reward for member in group.members}.values()),
            settings,
            policy,
            metric,
        )
        for group in groups
    }


def accuracy(rollout: Rollout) -> float:
    """The channel that is scored: `accuracy` where the metric named one, else the reward; of a failed rollout, 0.

    The rewards of failures in the settings differ by kind, and would keep an input that nobody solved.
    """
    return rollout.channels.get("accuracy", rollout.reward if rollout.status == "ok" else FAILED)


def verdict(found: Score, settings: Eps) -> Verdict:
    """What a score says of its input. Below τ as on a tie, the mean tells failure from success, give or take τ."""
    slack = max(found.tau, settings.tolerance)
    if found.value > found.tau:
        return "keep"
    if found.mean <= FAILED + slack:
        return "too_hard"
    return "solved" if found.mean >= PASSED - slack else "flat"


def route(said: Verdict, visits: int, settings: Eps) -> Action:
    """What to do with an input.

    Args:
        visits: visits in a row, this one included, that did not teach.
    """
    if said == "keep":
        return "train"
    if said == "solved" and settings.routing == "split":
        return "retire"
    return "scaffold" if visits >= settings.visits_before_teacher else "wait"


def _checked(rewards: Sequence[float] | np.ndarray, beta: float) -> np.ndarray:
    given = np.asarray(rewards, dtype=np.float64)
    if not 0 < beta < np.inf:
        raise ValueError(f"beta is {beta}: the softmax divides by it. Use a finite number above 0.")
    if given.ndim != 1 or given.size < 2:
        raise ValueError(f"rewards of shape {given.shape} cannot be compared. Give those of at least two rollouts.")
    if not np.isfinite(given).all():
        at = int(np.flatnonzero(~np.isfinite(given))[0])
        raise ValueError(f"reward {at} is {given[at]}. Let the metric return a finite number.")
    with np.errstate(over="ignore"):
        if np.isinf(np.ptp(given)):
            raise ValueError(f"rewards from {given.min()} to {given.max()} span more than a float holds. Scale them.")
    return given


def _gain_over_lower(values: np.ndarray, shares: np.ndarray, at: int, beta: float) -> float:
    """Σ over lower values of share · (r - lower) · (1 - w_lower / w), the part of E that the value at `at` brings."""
    above = values[at] - values[:at]
    return float((shares[:at] * above) @ -np.expm1(-above / beta))


def _success_interval(rewards: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    if not set(rewards) <= {FAILED, PASSED}:
        return None, None
    successes = sum(reward == PASSED for reward in rewards)
    low, high = beta_distribution.interval(CONFIDENCE, 1 + successes, 1 + len(rewards) - successes)
    return float(low), float(high)


def _score_of(what: str, rewards: list[float], settings: Eps, policy: str, metric: str) -> Score:
    try:
        return score(rewards, settings, policy, metric)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
