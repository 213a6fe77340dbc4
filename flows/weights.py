"""Step `w` of a strategy: mmGRPO on the weights, under the program as it is.

One round: collect rollouts with the newest weights, group them, update the weights. Every few rounds, evaluate on dev.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from flows.sampling import Made, collect_for_training, evaluate_on, ids_of, on_dev, spent_on
from tasks.candidate import Candidate
from tasks.group import GROUPS, group
from tasks.step import Manifest
from tasks.tracking import StageRun
from tasks.train import train
from twofold.plan import examples_of_round
from twofold.records import read_groups, read_rollouts, write_groups, write_rollouts
from twofold.settings import Settings


@dataclass(frozen=True, slots=True)
class Round:
    """What one round made."""

    number: int
    """Rounds of training done."""
    grouped: Manifest
    checkpoint: Manifest
    spent: dict[str, float]
    dev: Manifest | None

    @property
    def metrics(self) -> dict[str, float]:
        """All numbers of the round, under the names that every stage uses."""
        dev = on_dev(self.dev) if self.dev else {}
        costs = {f"spent/{name}": value for name, value in self.spent.items()}
        return {**self.grouped.metrics, **self.checkpoint.metrics, **costs, **dev}


def train_weights(
    folder: Path, settings: Settings, candidate: Candidate, data: Manifest, run: StageRun, number: int
) -> Made:
    """Train the candidate's weights; every evaluated checkpoint is a candidate, every round a step for MLflow.

    `number` tells this step from other trainings in the same strategy.
    """
    rounds: list[Round] = []
    evaluated: list[tuple[Candidate, Manifest]] = []
    for k in range(settings.weights.rounds):
        done = train_round(folder / f"round-{k:04d}", settings, candidate, data, number, k)
        candidate = replace(candidate, checkpoint=done.checkpoint)
        rounds.append(done)
        if done.dev:
            evaluated.append((candidate, done.dev))
        _track(run, done)
    spent = {name: sum(done.spent[name] for done in rounds) for name in rounds[0].spent}
    history = [{"round": done.number, **done.metrics} for done in rounds]
    return Made(evaluated, spent, history, {"records": _records(folder / "records", rounds)})


def train_round(
    folder: Path, settings: Settings, candidate: Candidate, data: Manifest, number: int, round_number: int
) -> Round:
    """One round from the candidate's checkpoint to the next, with an evaluation on dev when it is time for one."""
    weights = settings.weights
    examples = examples_of_round(ids_of(data, "train"), weights.examples_per_round, round_number, settings.seed)
    names = ["weights", number, round_number]
    collected = collect_for_training(folder, settings, candidate, data, examples, names)
    grouped = group(folder / "groups", settings=settings, shards=collected, round_number=round_number)
    checkpoint = train(
        folder / "checkpoint",
        settings=settings,
        candidate=candidate,
        data=data,
        grouped=grouped,
        round_number=round_number,
    )
    done = round_number + 1
    dev = None
    if done % settings.evaluate.every == 0 or done == weights.rounds:
        dev = evaluate_on("dev", folder / "dev", settings, replace(candidate, checkpoint=checkpoint), data)
    spent = spent_on([*collected, *([dev] if dev else [])], [grouped, checkpoint])
    return Round(done, grouped, checkpoint, spent, dev)


def _records(folder: Path, rounds: list[Round]) -> Path:
    """All rounds' rollouts and groups, in one place."""
    write_rollouts([one for done in rounds for one in read_rollouts(done.grouped.folder)], folder)
    write_groups([one for done in rounds for one in read_groups(done.grouped.folder / GROUPS)], folder / GROUPS)
    return folder


def _track(run: StageRun, done: Round) -> None:
    model = run.log_checkpoint(done.checkpoint, done.number, {"round": str(done.number)})
    run.log(done.metrics, done.number, model)
    dev = f", dev {done.dev.metrics['score']:.3f}" if done.dev else ""
    seconds = done.spent["seconds"]
    print(f"round {done.number}: reward {done.grouped.metrics['reward']:.3f}{dev}, {seconds:.0f} s", flush=True)
