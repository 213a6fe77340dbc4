"""Group: turn a round's rollouts into groups of calls that are compared with each other."""

from collections import defaultdict
from pathlib import Path
from statistics import fmean

from tasks.step import Manifest, step
from twofold.groups import account, make_groups
from twofold.records import Rollout, read_rollouts, usage_of, write_groups, write_rollouts
from twofold.seeds import derive
from twofold.settings import Settings

GROUPS = "groups.parquet"


@step(reads=("seed", "rewards", "weights.groups"))
def group(folder: Path, *, settings: Settings, shards: list[Manifest], round_number: int) -> dict[str, float]:
    """Write the round's rollouts and groups, and say where every rollout went."""
    rollouts = [rollout for shard in shards for rollout in read_rollouts(shard.folder)]
    seed = derive(settings.seed, "groups", round_number)
    groups = make_groups(rollouts, settings.weights.groups, settings.rewards, seed)
    write_rollouts(rollouts, folder)
    write_groups(groups, folder / GROUPS)
    return {**means(rollouts), **usage_of(rollouts), **account(rollouts, groups)}


def means(rollouts: list[Rollout]) -> dict[str, float]:
    """Mean reward, and mean of each channel of the metric over the rollouts that have it; of no rollouts nothing.

    A failed rollout has no channels: it must not look like one that leaked nothing.
    """
    if not rollouts:
        return {}
    found: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.channels.items():
            found[name].append(value)
    channels = {f"channel/{name}": fmean(values) for name, values in found.items()}
    return {"reward": fmean(rollout.reward for rollout in rollouts), **channels}
