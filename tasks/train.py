"""Train: one update of the policy, from checkpoint to checkpoint."""

import shutil
from pathlib import Path

from tasks.candidate import Candidate
from tasks.group import GROUPS
from tasks.pool import POOL
from tasks.step import Manifest, step
from twofold import digests, policy
from twofold.records import Checkpoint, read_groups, read_rollouts, write_json
from twofold.settings import Settings

CHECKPOINT = "checkpoint.json"


@step(reads=("seed", "model.device", "model.dtype", "sampling", "weights"))
def train(
    folder: Path, *, settings: Settings, candidate: Candidate, data: Manifest, grouped: Manifest, round_number: int
) -> dict[str, float]:
    """Write the checkpoint after this round: adapters, optimizer, scheduler, and a record of what it came from.

    Where the round had a pool, the checkpoint holds it as it was after the round.
    """
    trainer = candidate.open_trainer(settings)
    groups = read_groups(grouped.folder / GROUPS)
    pool = grouped.part(POOL)
    if pool.outputs:
        shutil.copytree(pool.folder, folder / POOL)
    metrics = trainer.update(read_rollouts(grouped.folder), groups, round_number)
    checkpoint = Checkpoint(
        path=".",
        policies=trainer.save(folder),
        round=round_number + 1,
        parents={name: policy.digest(path) for name, path in candidate.adapters.items()},
        digests={
            "model": candidate.model.digest,
            "data": data.digest,
            "program": candidate.program.digest,
            "pipeline": candidate.code,
            "settings": digests.of_json(settings.weights.model_dump(mode="json")),
            "groups": grouped.outputs[GROUPS],
            **({"pool": pool.digest} if pool.outputs else {}),
        },
        metrics=metrics,
    )
    write_json(checkpoint, folder / CHECKPOINT)
    return metrics
