"""What a visit to some inputs found, as a table: a row for each example, and one for each group of its calls.

1. Score each example by the accuracy of its rollouts, and each group by the rewards of its members.
2. Route each example by its own score. Under `random_routing` the examples that were visited together deal their
   scores out among themselves: as many are kept and retired as before, but any.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa

from twofold.eps import Action, Score, Verdict, score_examples, score_groups, verdict
from twofold.records import Group, Rollout, read_table, write_table
from twofold.settings import Scaffold


@dataclass(frozen=True, slots=True)
class Scored:
    """The score of one example or group in one round."""

    round: int
    """As in `history.csv`, from 1."""
    example_id: str
    group_id: str | None
    """`None` for the score of the example."""
    score: Score
    routed_by: str | None
    """The example whose score decided for this one: itself, save under `random_routing`. `None` for a group."""
    verdict: Verdict
    """Of the score that decided."""
    action: Action | None = None
    """What became of the example; `None` for a group, and until the pool has taken the score in."""


def score_visit(
    rollouts: Sequence[Rollout],
    groups: Sequence[Group],
    settings: Scaffold,
    policy: str,
    metric: str,
    round_number: int,
    seed: int,
) -> list[Scored]:
    """The scores of examples that were visited together, then those of their groups.

    Args:
        policy: what made the rollouts: a digest, or `base`.
        metric: version of the metric that gave the rewards.
        seed: deals the scores out under `random_routing`.

    Raises:
        ValueError: naming an example or a group that cannot be scored.
    """
    eps = settings.eps
    scores = score_examples(rollouts, eps, policy, metric)
    deciding = deal(list(scores), seed) if settings.arm == "random_routing" else dict(zip(scores, scores, strict=True))
    examples = [
        Scored(round_number, example, None, score, deciding[example], verdict(scores[deciding[example]], eps))
        for example, score in scores.items()
    ]
    of_groups = score_groups(groups, eps, policy, metric)
    return examples + [
        Scored(round_number, group.example_id, group.group_id, score, None, verdict(score, eps))
        for group, score in zip(groups, of_groups.values(), strict=True)
    ]


def deal(examples: Sequence[str], seed: int) -> dict[str, str]:
    """To each of the examples one of them, at random, and each once."""
    return dict(zip(examples, Random(seed).sample(examples, len(examples)), strict=True))


def of_examples(rows: Sequence[Scored]) -> list[Scored]:
    """The rows of examples, without those of groups."""
    return [row for row in rows if row.group_id is None]


def deciding_scores(rows: Sequence[Scored]) -> dict[str, Score]:
    """The score that decides for each example; `rows` hold all examples that were visited together."""
    own = {row.example_id: row.score for row in of_examples(rows)}
    return {row.example_id: own[row.routed_by] for row in of_examples(rows)}


SCORE_COLUMNS = [
    ("value", pa.float64()),
    ("n", pa.int32()),
    ("beta", pa.float64()),
    ("tau", pa.float64()),
    ("mean", pa.float64()),
    ("policy", pa.string()),
    ("metric", pa.string()),
    ("p_low", pa.float64()),
    ("p_high", pa.float64()),
]
"""The fields of a `Score`."""

_COLUMNS = pa.schema(
    [
        ("round", pa.int32()),
        ("example_id", pa.string()),
        ("group_id", pa.string()),
        *SCORE_COLUMNS,
        ("routed_by", pa.string()),
        ("verdict", pa.string()),
        ("action", pa.string()),
    ]
)


def write_scores(rows: Sequence[Scored], path: Path) -> None:
    """Write one row for each score, its fields as columns; equal scores as equal bytes."""
    flat = [dataclasses.asdict(row) | dataclasses.asdict(row.score) for row in rows]
    write_table(pa.Table.from_pylist([{name: row[name] for name in _COLUMNS.names} for row in flat], _COLUMNS), path)


def read_scores(path: Path) -> list[Scored]:
    """Read what `write_scores` wrote.

    Raises:
        RecordError: the file is missing, torn, or from a newer version.
    """
    return [_scored(row) for row in read_table(_COLUMNS, "score", path).to_pylist()]


def _scored(row: dict[str, Any]) -> Scored:
    score = Score(**{name: row.pop(name) for name, _ in SCORE_COLUMNS})
    return Scored(**row, score=score)
