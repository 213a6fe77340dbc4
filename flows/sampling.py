"""What several flows do: collect rollouts in shards, and evaluate a candidate on a split."""

from pathlib import Path

from tasks.candidate import Candidate
from tasks.collect import collect, shards
from tasks.evaluate import evaluate
from tasks.step import Manifest
from twofold.examples import example_id, read_examples
from twofold.settings import Settings


def ids_of(data: Manifest, split: str) -> list[str]:
    """Ids of the split's examples, in order."""
    return [example_id(example) for example in read_examples(data.folder / f"{split}.jsonl")]


def collect_for_training(
    folder: Path, settings: Settings, candidate: Candidate, data: Manifest, examples: list[str], round_number: int
) -> list[Manifest]:
    """Rollouts of one round, `weights.rollouts_per_example` for each example."""
    weights = settings.weights
    return [
        collect(
            folder / f"rollouts-{shard}",
            settings=settings,
            candidate=candidate,
            data=data,
            split="train",
            examples=examples,
            per_example=weights.rollouts_per_example,
            names=["round", round_number],
            draw=weights.draw,
            parse_retries=0,
            judge="metric",
            shard=shard,
        )
        for shard in shards(settings, len(examples) * weights.rollouts_per_example)
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
