"""Evaluate: the score of a program on a split, from rollouts that were collected for it."""

import dataclasses
from pathlib import Path

from tasks.step import Manifest, step
from twofold import evaluation
from twofold.records import money_of, read_rollouts, usage_of, write_json, write_rollouts
from twofold.seeds import derive
from twofold.settings import Settings

SCORE = "score.json"


@step(reads=("seed", "evaluate.resamples"))
def evaluate(folder: Path, *, settings: Settings, shards: list[Manifest]) -> dict[str, float]:
    """Write the rollouts of all shards and their score."""
    rollouts = [rollout for shard in shards for rollout in read_rollouts(shard.folder)]
    score = evaluation.score(rollouts, settings.evaluate.resamples, derive(settings.seed, "bootstrap"))
    write_rollouts(rollouts, folder)
    write_json(score, folder / SCORE)
    numbers = dataclasses.asdict(score)
    statuses, channels = numbers.pop("statuses"), numbers.pop("channels")
    return {
        **numbers,
        **{f"status/{name}": float(count) for name, count in statuses.items()},
        **{f"channel/{name}/{part}": value for name, found in channels.items() for part, value in found.items()},
        **usage_of(rollouts),
        "money": money_of(rollouts),
    }
