"""The rollouts of a run, as its published records have them, and which of them a report shows.

1. A set is the rollouts that were made for one purpose: those of one round of a training, of one evaluation, of a
   teacher's trials, of a search for prompts.
2. The sets take turns, those outside of rounds first and then the rounds in random order: each time an input is drawn
   at random, and all its rollouts are shown, so that a group can be seen side by side. It ends when another input would
   make more than `LIMIT` rollouts, or about `TEXT` characters.
"""

import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twofold import bands
from twofold.attempts import ATTEMPTS, Tried, read_attempts
from twofold.bands import Band
from twofold.hints import Placed, read_hints
from twofold.records import Group, Rollout, read_groups, read_outcomes, read_rollouts
from twofold.scores import Scored, of_examples, read_scores
from twofold.seeds import derive

LIMIT = 600
"""Most rollouts in a page."""

TEXT = 3_000_000
"""Most characters of prompts and answers in a page, about; one input is shown however long it is."""


@dataclass(frozen=True, slots=True)
class Set:
    """Rollouts that were made for one purpose."""

    strategy: str
    step: str
    """Such as `0-w`; empty for what is no part of a step."""
    purpose: str
    """`test`, `dev`, `training`, `trials` or `search`."""
    round: int | None
    """As in `history.csv`, from 1; None outside of rounds."""
    folder: Path
    outcomes: tuple[Rollout, ...]
    """All of them, without their calls."""


@dataclass(frozen=True, slots=True)
class Training:
    """What a step left beside its rollouts."""

    groups: Mapping[tuple[str, str, int], Sequence[Group]]
    """By rollout, module and index of the call."""
    scores: Mapping[tuple[int, str], Scored]
    """By round and prompt."""
    hints: Mapping[str, Placed]
    attempts: Sequence[Tried]
    learned: Sequence[Band]


NOTHING = Training({}, {}, {}, (), ())


def sets_of(strategy: str, folder: Path, test: Path) -> list[Set]:
    """All sets of a strategy.

    Args:
        folder: what the strategy published.
        test: its rollouts on test.
    """
    found = [_set(strategy, "", "test", None, test)]
    steps = sorted(path for path in folder.iterdir() if re.fullmatch(r"\d+-[pw]", path.name))
    if not steps:
        found.append(_set(strategy, "", "dev", None, folder / "dev"))
    for step in steps:
        found += _sets_of_prompts(strategy, step) if step.name.endswith("p") else _sets_of_weights(strategy, step)
    return found


def training_of(step: Path) -> Training:
    """What a step left beside its rollouts; empty where it leaves none."""
    records, pool = step / "records", step / "pool"
    groups: dict[tuple[str, str, int], list[Group]] = defaultdict(list)
    for group in _there(read_groups, records / "groups.parquet"):
        for place in dict.fromkeys((member.rollout_id, group.module, member.call_index) for member in group.members):
            groups[place].append(group)
    rows = of_examples(_there(read_scores, records / "scores.parquet"))
    return Training(
        groups,
        {(row.round, row.example_id): row for row in rows},
        read_hints(pool) if pool.is_dir() else {},
        _there(read_attempts, records / ATTEMPTS),
        _there(bands.read_bands, step / bands.FILE),
    )


def _there(read: Callable[[Path], list[Any]], path: Path) -> list[Any]:
    """What is in a file that only some trainings leave."""
    return read(path) if path.exists() else []


def _set(strategy: str, step: str, purpose: str, round_number: int | None, folder: Path) -> Set:
    return Set(strategy, step, purpose, round_number, folder, tuple(read_outcomes(folder)))


def _sets_of_prompts(strategy: str, step: Path) -> list[Set]:
    return [
        _set(strategy, step.name, "search", None, step / "records"),
        _set(strategy, step.name, "dev", None, step / "dev"),
    ]


def _sets_of_weights(strategy: str, step: Path) -> Iterator[Set]:
    yield from _by_round(strategy, step.name, "training", step / "records")
    for dev in sorted((step / "dev").glob("round-*")):
        yield _set(strategy, step.name, "dev", int(dev.name.removeprefix("round-")), dev)
    if (step / "records" / "trials").is_dir():
        yield from _by_round(strategy, step.name, "trials", step / "records" / "trials")


def _by_round(strategy: str, step: str, purpose: str, folder: Path) -> Iterator[Set]:
    """A set for each round; the third part of a rollout's id is its round, counted from 0."""
    rounds: dict[int, list[Rollout]] = defaultdict(list)
    for one in read_outcomes(folder):
        rounds[int(one.rollout_id.split("/")[2]) + 1].append(one)
    for number, own in sorted(rounds.items()):
        yield Set(strategy, step, purpose, number, folder, tuple(own))


def draw(sets: Sequence[Set], seed: int) -> list[list[str]]:
    """Ids of the rollouts to show, for each set in the order of its inputs' draw."""
    waiting = [_inputs(one, random.Random(derive(seed, *_named(one)))) for one in sets]
    sizes = _characters(sets)
    turns = list(range(len(sets)))
    random.Random(derive(seed, "turns")).shuffle(turns)
    turns.sort(key=lambda number: sets[number].round is not None)
    drawn: list[list[str]] = [[] for _ in sets]
    rollouts, text = 0, 0.0
    while any(waiting):
        for number in turns:
            if not waiting[number]:
                continue
            own = waiting[number].pop()
            more, longer = rollouts + len(own), text + len(own) * sizes[sets[number].folder]
            if rollouts and (more > LIMIT or longer > TEXT):
                waiting[number].clear()
                continue
            drawn[number] += own
            rollouts, text = more, longer
    return drawn


def _named(one: Set) -> tuple[str | int, ...]:
    return (one.strategy, one.step, one.purpose, one.round or 0)


def _inputs(one: Set, rng: random.Random) -> list[list[str]]:
    """The set's rollouts by input, the inputs in random order."""
    by_input: dict[str, list[str]] = defaultdict(list)
    for rollout in one.outcomes:
        by_input[rollout.example_id].append(rollout.rollout_id)
    found = list(by_input.values())
    rng.shuffle(found)
    return found


def _characters(sets: Sequence[Set]) -> dict[Path, float]:
    """About how many characters a rollout in each folder has: four for each token of its calls, from a few of them."""
    some: dict[Path, list[str]] = {}
    for one in sets:
        some.setdefault(one.folder, [rollout.rollout_id for rollout in one.outcomes[:8]])
    return {folder: _length(read_rollouts(folder, ids)) for folder, ids in some.items()}


def _length(rollouts: Sequence[Rollout]) -> float:
    tokens = [len(call.prompt_ids) + len(call.completion_ids) for rollout in rollouts for call in rollout.calls]
    return 4 * sum(tokens) / max(1, len(rollouts))
