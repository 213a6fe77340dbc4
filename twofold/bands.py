"""Learning by band of the exploration potential (as in arXiv 2609.15051): what the policy learned of inputs until it
met them again.

1. Visits to an original, without hints, follow each other round by round; a pair is a visit and the next one.
2. The score at a pair's first visit says its band. Where the rewards tied, the mean does: nobody solved it, all did, or
   neither.
3. A pair's change is the mean accuracy of its second visit less that of its first. Changes of one original are averaged
   first, for they are not independent; over originals follow the mean and its 95% interval (Student's t).

A band is chosen by the same rollouts that its changes begin with: see `CAUTION`.
"""

import csv
import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from twofold.eps import FAILED, PASSED, Score
from twofold.evaluation import student_interval
from twofold.scores import Scored, of_examples

FILE = "bands.csv"

CAUTION = """\
An accuracy that chance made too low rises by itself, and one too high falls. So compare a band with that of another
training, such as one with `random_routing`, and not with 0."""

EDGES = {"0.75-1": 0.75, "0.5-0.75": 0.5, "0.25-0.5": 0.25, "0-0.25": 0.0}
"""Bands of scores above 0, by the score that they begin with. The paper's are those below and above 0.5."""

BANDS = ("too_hard", "flat", "solved", *reversed(EDGES))


@dataclass(frozen=True, slots=True)
class Band:
    """What became of the originals whose visits fell into one band."""

    band: str
    n: int
    """Originals."""
    pairs: int
    """Visits that were followed by another."""
    rounds: float
    """Mean number of rounds between the two."""
    before: float
    """Mean accuracy at the first visit, over originals."""
    change: float
    """Mean change of it until the next visit, over originals."""
    ci_low: float | None
    ci_high: float | None
    """None for a single original."""


def learning(rows: Sequence[Scored], originals: Collection[str]) -> list[Band]:
    """A row for each band that a pair of visits fell into, from the tied ones to the highest scores.

    Args:
        rows: scores of a training, those of hinted prompts and of groups among them.
        originals: the prompts without hints.
    """
    visits: dict[str, list[Scored]] = defaultdict(list)
    for row in sorted(of_examples(rows), key=lambda row: row.round):
        if row.example_id in originals:
            visits[row.example_id].append(row)
    pairs: dict[str, list[tuple[Scored, Scored]]] = defaultdict(list)
    for own in visits.values():
        for first, second in pairwise(own):
            pairs[band_of(first.score)].append((first, second))
    return [_band(name, pairs[name]) for name in BANDS if pairs[name]]


def band_of(score: Score) -> str:
    """The band of a visit with this score."""
    if score.value > 0:
        return next(name for name, edge in EDGES.items() if score.value >= edge)
    if score.mean <= FAILED:
        return "too_hard"
    return "solved" if score.mean >= PASSED else "flat"


def _band(name: str, pairs: Sequence[tuple[Scored, Scored]]) -> Band:
    before, changes = defaultdict(list), defaultdict(list)
    for first, second in pairs:
        before[first.example_id].append(first.score.mean)
        changes[first.example_id].append(second.score.mean - first.score.mean)
    own = [fmean(values) for values in changes.values()]
    rounds = fmean(second.round - first.round for first, second in pairs)
    started = fmean(map(fmean, before.values()))
    low, high = student_interval(own) or (None, None)
    return Band(name, len(own), len(pairs), rounds, started, fmean(own), low, high)


def metrics(bands: Iterable[Band]) -> dict[str, float]:
    """Each band's numbers under flat metric names, such as `bands/too_hard/change`."""
    return {
        f"bands/{one.band}/{name}": float(value)
        for one in bands
        for name, value in dataclasses.asdict(one).items()
        if name != "band" and value is not None
    }


def write_bands(bands: Iterable[Band], path: Path) -> None:
    """Write a line for each band; an interval that there is none of is left empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Band)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(dataclasses.asdict, bands))


def read_bands(path: Path) -> list[Band]:
    """What `write_bands` wrote."""
    with path.open(encoding="utf-8", newline="") as file:
        return [_read(row) for row in csv.DictReader(file)]


def _read(row: dict[str, str]) -> Band:
    numbers = {name: float(value) if value else None for name, value in row.items() if name != "band"}
    return Band(row["band"], **numbers | {"n": int(row["n"]), "pairs": int(row["pairs"])})
