"""What the steps of all strategies share: rollouts in shards, a score on a split, and what a step leaves behind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.candidate import Candidate
from tasks.collect import collect, shards
from tasks.evaluate import evaluate
from tasks.source import Source
from tasks.step import Manifest
from twofold.examples import example_id, read_examples
from twofold.records import STUDENT
from twofold.settings import Settings

SPENT = ("rollouts", "tokens_in", "tokens_out", "seconds", "money")
"""What a strategy costs, summed over its steps; money for endpoints alone."""


@dataclass(frozen=True, slots=True)
class Made:
    """What a step of a strategy made."""

    candidates: list[tuple[Candidate, Manifest]]
    """In the order they were made, each with its evaluation on dev."""
    spent: dict[str, float]
    history: list[dict[str, Any]]
    """Numbers along the way: a row for each trial or round."""
    records: Mapping[str, Path]
    """Files and folders to publish, by their place in the step's output."""


def ids_of(data: Manifest, split: str) -> list[str]:
    """Ids of the split's examples, in order."""
    return [example_id(example) for example in read_examples(data.folder / f"{split}.jsonl")]


def collect_for_training(
    folder: Path,
    settings: Settings,
    candidate: Candidate,
    data: Manifest,
    examples: list[str],
    names: list[str | int],
    pool: Manifest | None = None,
    source: Source | None = None,
) -> list[Manifest]:
    """Rollouts of one round, named by `names`: the student's share for each example or prompt of a pool, or the
    source's."""
    weights = settings.weights
    count = source.rollouts if source else weights.rollouts_by_source[STUDENT]
    return [
        collect(
            folder / f"rollouts-{shard}",
            settings=settings,
            candidate=candidate,
            data=data,
            split="train",
            examples=examples,
            per_example=count,
            names=[*names, source.name] if source else names,
            draw=weights.draw,
            parse_retries=0,
            judge="metric",
            shard=shard,
            pool=pool,
            source=source,
        )
        for shard in shards(settings, len(examples) * count)
    ]


def collect_from_sources(
    folder: Path,
    settings: Settings,
    candidate: Candidate,
    data: Manifest,
    examples: list[str],
    names: list[str | int],
    sources: Sequence[Source],
    pool: Manifest | None = None,
) -> list[Manifest]:
    """Rollouts of all sources on these examples."""
    return [
        shard
        for one in sources
        for shard in collect_for_training(
            folder / "sources" / one.name, settings, candidate, data, examples, names, pool, one
        )
    ]


def evaluate_on(split: str, folder: Path, settings: Settings, candidate: Candidate, data: Manifest) -> Manifest:
    """One rollout for each example of the split, and their score.

    The manifest's metrics are the score's numbers and all `seconds` it took.
    """
    examples = ids_of(data, split)
    collected = [
        collect(
            folder / f"rollouts-{shard}",
            settings=settings,
            candidate=candidate,
            data=data,
            split=split,
            examples=examples,
            per_example=1,
            names=["evaluate", split],
            draw=settings.evaluate.draw,
            parse_retries=settings.evaluate.parse_retries,
            judge="accuracy",
            shard=shard,
        )
        for shard in shards(settings, len(examples))
    ]
    scored = evaluate(folder / "score", settings=settings, shards=collected)
    seconds = sum(part.metrics["seconds"] for part in (*collected, scored))
    return Manifest(scored.path, scored.outputs, {**scored.metrics, "seconds": seconds})


def on_dev(evaluated: Manifest) -> dict[str, float]:
    """The numbers of an evaluation on dev, under the names that every stage uses."""
    return {f"dev/{name}": value for name, value in evaluated.metrics.items()}


def spent_on(sampled: Sequence[Manifest], worked: Sequence[Manifest] = ()) -> dict[str, float]:
    """What it cost to sample these, and to work these out of them."""
    spent = {name: sum(made.metrics.get(name, 0.0) for made in sampled) for name in SPENT}
    return {**spent, "seconds": spent["seconds"] + sum(made.metrics["seconds"] for made in worked)}
