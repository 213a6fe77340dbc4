"""Whether a new result takes the champion's place.

1. Both answered the same examples of dev. The gain is the mean over examples of the candidate's reward less the
   champion's, with its 95% interval.
2. The gain must be above 0, and the lower end of its interval above `bound`.
3. The share of rollouts whose answers could be read may be lower than the champion's by `format_drop` at most.
4. Where the metric has a channel `leakage`, its mean may be higher than the champion's by `leakage_rise` at most.
5. Whatever is missing is said in words. Where nothing is, the candidate is promoted.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from twofold.evaluation import Difference, difference, in_words
from twofold.records import Rollout
from twofold.settings import Promotion

LEAKAGE = "leakage"
"""The channel of a metric that says how much a program gave away; less is better."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A candidate compared with the champion; every difference is the candidate's value less the champion's."""

    gain: Difference
    readable: Difference
    """Of the shares of rollouts that did not end as `parse_error`."""
    leakage: Difference | None
    """None where the metric has no such channel."""
    reasons: tuple[str, ...]
    """Why the candidate is refused; empty when it passes."""


def compare(
    candidate: Sequence[Rollout], champion: Sequence[Rollout], settings: Promotion, resamples: int, seed: int
) -> Verdict:
    """Compare two programs by their rollouts of the same examples.

    Raises:
        RecordError: there are no rollouts, or the two are not of the same examples.
    """
    gain = difference(candidate, champion, resamples, seed)
    readable = difference(*map(_readable, (candidate, champion)), resamples, seed)
    leaking = _leaking(candidate, champion)
    leakage = difference(*leaking, resamples, seed) if all(leaking) else None
    return Verdict(gain, readable, leakage, reasons(gain, readable, leakage, settings))


def reasons(gain: Difference, readable: Difference, leakage: Difference | None, settings: Promotion) -> tuple[str, ...]:
    """What speaks against a candidate: rules 2 to 4."""
    found = []
    if gain.difference <= 0:
        found.append(f"It scores no higher than the champion: {_said(gain)}.")
    elif gain.ci_low <= settings.bound:
        found.append(f"Its gain may be chance: {_said(gain)}; the interval must lie above {settings.bound:g}.")
    if readable.difference < -settings.format_drop:
        found.append(
            f"Fewer of its answers can be read: {_said(readable)}; at most {settings.format_drop:g} less is allowed."
        )
    if leakage and leakage.difference > settings.leakage_rise:
        found.append(f"It gives more away: {_said(leakage)}; at most {settings.leakage_rise:g} more is allowed.")
    return tuple(found)


def _said(found: Difference) -> str:
    return in_words(dataclasses.asdict(found))


def _readable(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts with 1 for a reward where the answer could be read, else 0."""
    return [dataclasses.replace(one, reward=float(one.status != "parse_error")) for one in rollouts]


def _leaking(candidate: Sequence[Rollout], champion: Sequence[Rollout]) -> tuple[list[Rollout], list[Rollout]]:
    """The rollouts with their leakage for a reward, of the examples for which both sides have one."""
    a, b = (
        [dataclasses.replace(one, reward=one.channels[LEAKAGE]) for one in rollouts if LEAKAGE in one.channels]
        for rollouts in (candidate, champion)
    )
    both = {one.example_id for one in a} & {one.example_id for one in b}
    return [one for one in a if one.example_id in both], [one for one in b if one.example_id in both]
