"""Score: what rollouts of inputs that were visited together say of these inputs."""

from pathlib import Path

from tasks.candidate import Candidate
from tasks.step import Manifest, step
from twofold.groups import make_groups
from twofold.records import of_student, read_rollouts
from twofold.scores import score_visit, write_scores
from twofold.seeds import derive
from twofold.settings import Settings

SCORES = "scores.parquet"


@step(reads=("seed", "rewards", "weights.groups", "scaffold.arm", "scaffold.eps"))
def score(
    folder: Path, *, settings: Settings, candidate: Candidate, shards: list[Manifest], round_number: int
) -> dict[str, float]:
    """Write a score for each example and each group of the rollouts that the candidate made, sources left aside."""
    rollouts = of_student([rollout for shard in shards for rollout in read_rollouts(shard.folder)])
    seed = derive(settings.seed, "groups", round_number)
    rows = score_visit(
        rollouts,
        make_groups(rollouts, settings.weights.groups, settings.rewards, seed),
        settings.scaffold,
        candidate.policy,
        candidate.code,
        round_number + 1,
        derive(settings.seed, "routing", round_number),
    )
    write_scores(rows, folder / SCORES)
    return {}
