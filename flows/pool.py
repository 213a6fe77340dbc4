"""Which inputs a round of `w` trains on: the next ones in turn, or those of the pool that still teach.

With a pool:

1. The teacher's answers join the pool that the last checkpoint holds. Draw active inputs from it, and find those that
   are due for another look.
2. Visit the drawn ones, as many at a time as the batch lacks: collect their rollouts, score them, keep what teaches.
3. Visit those that are due. They are not trained on in this round; the pool may make them active for the next.
4. Ask the teacher programs for their rollouts of what is kept: the student's alone decide what that is.
5. Route all that were visited, and group the calls of those that are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.sampling import collect_for_training, collect_from_sources, ids_of
from tasks.candidate import Candidate
from tasks.group import group
from tasks.pool import DRAWN, POOL, draw, kept_in, select
from tasks.score import score
from tasks.source import Source
from tasks.step import Manifest
from twofold.plan import examples_of_round
from twofold.pool import fill
from twofold.records import read_json
from twofold.settings import Settings


@dataclass(frozen=True, slots=True)
class Batch:
    """What a round trains on."""

    grouped: Manifest
    """Rollouts, and the groups to train on; with a pool the scores and the pool as well."""
    collected: list[Manifest]
    worked: list[Manifest]
    """What else was made on the way to `grouped`."""


def next_batch(
    folder: Path,
    settings: Settings,
    candidate: Candidate,
    data: Manifest,
    number: int,
    round_number: int,
    sources: Sequence[Source],
) -> Batch:
    """Every training example in turn, whatever it teaches."""
    per_step = settings.weights.examples_per_round
    examples = examples_of_round(ids_of(data, "train"), per_step, round_number, settings.seed)
    names = ["weights", number, round_number]
    collected = collect_for_training(folder, settings, candidate, data, examples, names)
    collected += collect_from_sources(folder, settings, candidate, data, examples, names, sources)
    grouped = group(folder / "groups", settings=settings, shards=collected, round_number=round_number)
    return Batch(grouped, collected, [])


def pooled_batch(
    folder: Path,
    settings: Settings,
    candidate: Candidate,
    data: Manifest,
    number: int,
    round_number: int,
    answers: Manifest | None,
    sources: Sequence[Source],
) -> Batch:
    """What is kept of the inputs that are drawn; less than was asked for, or nothing, when too few of them teach.

    A training begins with a new pool: what an input taught under other prompts says little of what it teaches now. Only
    where the settings name one does it go on from that.

    Args:
        answers: the teacher's, of the round before.
    """
    before = candidate.checkpoint.part(POOL) if candidate.checkpoint and round_number else _start(settings)
    drawn = draw(
        folder / "draw", settings=settings, data=data, before=before, answers=answers, round_number=round_number
    )
    asked = read_json(drawn.folder / DRAWN)
    collected: list[Manifest] = []
    scored: list[Manifest] = []
    names = ["weights", number, round_number]

    def visit(inputs: Sequence[str]) -> set[str]:
        place = folder / f"visit-{len(scored)}"
        shards = collect_for_training(place, settings, candidate, data, list(inputs), names, drawn.part(POOL))
        collected.extend(shards)
        scored.append(
            score(place / "scores", settings=settings, candidate=candidate, shards=shards, round_number=round_number)
        )
        return kept_in(scored[-1], settings)

    kept = fill(asked["drawn"], settings.weights.examples_per_round, visit).kept
    if asked["due"]:
        visit(asked["due"])
    pool = drawn.part(POOL)
    collected += collect_from_sources(folder, settings, candidate, data, list(kept), names, sources, pool)
    grouped = select(
        folder / "groups",
        settings=settings,
        drawn=drawn,
        shards=collected,
        scored=scored,
        kept=list(kept),
        round_number=round_number,
    )
    return Batch(grouped, collected, [drawn, *scored])


def _start(settings: Settings) -> Manifest | None:
    """The pool that a training begins with."""
    start = settings.scaffold.pool.start
    return Manifest.of(Path(start)) if start else None
