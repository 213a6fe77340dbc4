"""How much inputs of each EPS band learned in a training.

1. An input's band is that of its first visit: too hard, flat or solved when nothing was kept of it, else by its score.
2. What it learned is its accuracy at the last visit less that at the first; inputs that were visited once say nothing.

The first visit is a draw. Inputs that were too hard in it can only rise and solved ones can only fall, whatever the
training does: bands are to be compared with the same bands of another training, not with zero alone.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import Any

from twofold.eps import verdict
from twofold.evaluation import interval
from twofold.scores import Scored
from twofold.settings import Eps

BANDS = ("too hard", "flat", "EPS to 1/3", "EPS to 2/3", "EPS above 2/3", "solved")


def band(row: Scored, settings: Eps) -> str:
    """The band of one score; accuracies are from 0 to 1, so a score is below 1."""
    found = verdict(row.score, settings)
    if found != "keep":
        return found.replace("_", " ")
    return BANDS[2 + min(2, int(3 * row.score.value))]


def by_band(rows: Iterable[Scored], settings: Eps, resamples: int, seed: int) -> Iterator[dict[str, Any]]:
    """For each band that has inputs with two visits: mean change `value`, `low`, `high` and `n`; a single input has no
    interval. `rows` are scores of inputs."""
    visits: dict[str, list[Scored]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.round):
        visits[row.example_id].append(row)
    changes: dict[str, list[float]] = defaultdict(list)
    for own in visits.values():
        if len(own) > 1:
            changes[band(own[0], settings)].append(own[-1].score.mean - own[0].score.mean)
    for name in BANDS:
        if found := changes[name]:
            low, high = interval(found, resamples, seed) if len(found) > 1 else (None, None)
            yield {"band": name, "value": fmean(found), "low": low, "high": high, "n": len(found)}
