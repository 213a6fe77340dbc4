"""Scores with confidence intervals, and paired comparison of two programs.

Rollouts of one example are averaged first: examples are what is drawn at random, so they are what is resampled.
Intervals are bootstrap intervals of the mean at 95%, bias-corrected and accelerated (Efron 1987); where there are too
few values to draw from, such as one a seed, those of Student's t.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean, stdev

import numpy as np
from scipy.stats import bootstrap, t

from twofold.errors import RecordError
from twofold.records import Rollout, tokens_of

CONFIDENCE = 0.95

_BATCH = 1000
"""Resamples held in memory at a time."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over examples, with its 95% interval."""

    mean: float
    ci_low: float
    ci_high: float
    n: int
    """Examples."""


@dataclass(frozen=True, slots=True)
class Score:
    """How a program did on a split."""

    score: float
    """Mean over examples of the mean reward of their rollouts."""
    ci_low: float
    ci_high: float
    n: int
    """Examples."""
    format_rate: float
    """Share of rollouts in which every call's answer parsed at the first try."""
    rollouts: int
    tokens_in: int
    tokens_out: int
    statuses: dict[str, int]
    """How many rollouts ended with each status."""
    channels: dict[str, Mean]
    """Of the metric's other numbers, over the rollouts that have them: those that failed have none."""


@dataclass(frozen=True, slots=True)
class Difference:
    """By how much one program scores above another on the same examples."""

    difference: float
    ci_low: float
    ci_high: float
    n: int


@dataclass(frozen=True, slots=True)
class Gain:
    """What a change of a program brought, on the same examples."""

    difference: float
    standard_error: float
    """Of the difference; infinite for a single example."""
    n: int

    @property
    def pays(self) -> bool:
        """Whether it is more than one standard error, the rule of Breiman et al. (1984, section 3.4.3).

        Two programs that are equally good differ by less in two of three evaluations.
        """
        return self.difference > self.standard_error


def score(rollouts: Sequence[Rollout], resamples: int, seed: int) -> Score:
    """Score of these rollouts.

    Raises:
        RecordError: there are none.
    """
    means = _by_example(rollouts)
    whole = _mean(means, resamples, seed)
    calls = [call for rollout in rollouts for call in rollout.calls]
    return Score(
        score=whole.mean,
        ci_low=whole.ci_low,
        ci_high=whole.ci_high,
        n=whole.n,
        format_rate=sum(all(call.parsed for call in rollout.calls) for rollout in rollouts) / len(rollouts),
        rollouts=len(rollouts),
        **tokens_of(calls),
        statuses=dict(sorted(Counter(rollout.status for rollout in rollouts).items())),
        channels={name: _mean(found, resamples, seed) for name, found in _channels(rollouts).items()},
    )


def difference(a: Sequence[Rollout], b: Sequence[Rollout], resamples: int, seed: int) -> Difference:
    """Score of `a` less score of `b`, paired by example.

    Raises:
        RecordError: there are no rollouts, or the two are not of the same examples.
    """
    gains = _gains(a, b)
    low, high = interval(gains, resamples, seed)
    return Difference(float(np.mean(gains)), low, high, len(gains))


def sentence(name: str, found: Mapping[str, float]) -> str:
    """A difference of that name in words; arguments as of `in_words`."""
    return f"{name}: {in_words(found)}"


def in_words(found: Mapping[str, float]) -> str:
    """A difference with its interval and n; `found` holds the fields of a `Difference`."""
    return (
        f"{found['difference']:+.3f} (95% interval {found['ci_low']:+.3f} to {found['ci_high']:+.3f}, "
        f"n = {found['n']:.0f})"
    )


def gain(after: Sequence[Rollout], before: Sequence[Rollout]) -> Gain:
    """What the change from one program to another brought, paired by example; raises like `difference`."""
    gains = _gains(after, before)
    error = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else inf
    return Gain(float(np.mean(gains)), error, len(gains))


def _gains(a: Sequence[Rollout], b: Sequence[Rollout]) -> list[float]:
    """By how much `a` scores above `b`, for each example."""
    first, second = _by_example(a), _by_example(b)
    odd = sorted(first.keys() ^ second.keys())
    if odd:
        raise RecordError(
            f"Only rollouts of the same examples can be compared; {len(odd)} examples are on one side alone, such as "
            f"{', '.join(odd[:3])}. Evaluate both programs on the same split."
        )
    return [mean - second[example] for example, mean in first.items()]


def _by_example(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean reward of each example, in order of the examples' ids."""
    if not rollouts:
        raise RecordError("There are no rollouts to score. Run the stage that makes them again.")
    return _means((rollout.example_id, rollout.reward) for rollout in rollouts)


def _channels(rollouts: Sequence[Rollout]) -> dict[str, dict[str, float]]:
    """Mean of each channel for each example; a channel that is the reward itself says nothing new."""
    names = {k for rollout in rollouts for k, v in rollout.channels.items() if v != rollout.reward}
    return {
        name: _means((one.example_id, one.channels[name]) for one in rollouts if name in one.channels)
        for name in sorted(names)
    }


def _means(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Mean for each example, in order of the examples' ids."""
    found: dict[str, list[float]] = {}
    for example, value in values:
        found.setdefault(example, []).append(value)
    return {example: sum(numbers) / len(numbers) for example, numbers in sorted(found.items())}


def _mean(by_example: Mapping[str, float], resamples: int, seed: int) -> Mean:
    values = list(by_example.values())
    return Mean(float(np.mean(values)), *interval(values, resamples, seed), len(values))


def student_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95% interval of the mean of a few independent values, by Student's t; None for a single one."""
    if len(values) < 2:
        return None
    half = t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return fmean(values) - half, fmean(values) + half


def interval(values: list[float], resamples: int, seed: int) -> tuple[float, float]:
    """95% interval of the mean of independent values."""
    if min(values) == max(values):
        # Every resample has this mean; the bias correction would divide by zero.
        return values[0], values[0]
    found = bootstrap(
        (np.array(values),),
        np.mean,
        n_resamples=resamples,
        batch=_BATCH,
        confidence_level=CONFIDENCE,
        method="BCa",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)
