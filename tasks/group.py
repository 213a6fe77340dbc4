"""Group: turn a round's rollouts into groups of calls that are compared with each other."""

from collections import defaultdict
from pathlib import Path
from statistics import fmean

from tasks.step import Manifest, step
from twofold.groups import account, account_sources, make_groups, taking_part
from twofold.records import Rollout, of_student, read_rollouts, usage_of, write_groups, write_rollouts
from twofold.seeds import derive
from twofold.settings import Settings

GROUPS = "groups.parquet"


@step(reads=("seed", "rewards", "weights.groups"))
def group(folder: Path, *, settings: Settings, shards: list[Manifest], round_number: int) -> dict[str, float]:
    """Write the round's rollouts and groups, and say where every rollout went."""
    rollouts = [rollout for shard in shards for rollout in read_rollouts(shard.folder)]
    seed = derive(settings.seed, "groups", round_number)
    compared = taking_part(rollouts)
    groups = make_groups(compared, settings.weights.groups, settings.rewards, seed)
    write_rollouts(rollouts, folder)
    write_groups(groups, folder / GROUPS)
    counts = {**account(compared, groups), **account_sources(rollouts, groups)}
    return {**means(rollouts), **usage_of(rollouts), **counts}


def means(rollouts: list[Rollout]) -> dict[str, float]:
    """Mean reward of the student, and mean of each channel of its metric over the rollouts that have it.

    A failed rollout has no channels: it must not look like one that leaked nothing. Of no rollouts nothing.
    """
    own = of_student(rollouts)
    if not own:
        return {}
    found: dict[str, list[float]] = defaultdict(list)
    for rollout in own:
        for name, value in rollout.channels.items():
            found[name].append(value)
    channels = {f"channel/{name}": fmean(values) for name, values in found.items()}
    return {"reward": fmean(rollout.reward for rollout in own), **channels}
