"""Stage `weights`: rounds of collect, group and train (mmGRPO); the checkpoint that does best on dev is published.

Each round samples from the checkpoint of the round before. Every step is cached, so a run that was killed goes on where
it stopped and ends in the same bytes.
"""

import csv
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from prefect import flow

from flows.sampling import collect_for_training, evaluate_on, ids_of
from tasks import stage, tracking
from tasks.candidate import Candidate
from tasks.group import GROUPS, group
from tasks.step import Manifest, publish
from tasks.train import train
from twofold.plan import examples_of_round
from twofold.programs import load_pipeline
from twofold.records import read_groups, read_rollouts, write_groups, write_json, write_rollouts
from twofold.settings import Settings, load

SPENT = ("rollouts", "tokens_in", "tokens_out", "seconds")
"""What a strategy costs, summed over its steps."""


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
        dev = {f"dev/{name}": value for name, value in self.dev.metrics.items()} if self.dev else {}
        return {**self.grouped.metrics, **self.checkpoint.metrics, **self.spent, **dev}


@flow(name="weights")
def train_weights(params: str) -> None:
    """Train the weights under the vanilla program; writes outputs/weights."""
    settings = load(Path(params))
    data, model, vanilla = stage.prepared_data(), stage.fetched_model(settings), stage.published("vanilla")
    pipeline = load_pipeline(settings.pipeline)
    program = Manifest.of(vanilla.folder / "program")
    candidate = Candidate(settings.pipeline, pipeline.digest, program, model)
    inputs = {"data": data.digest, "model": model.digest, "pipeline": pipeline.digest, "program": program.digest}
    work = stage.work_folder("weights", settings, inputs)
    with tracking.stage_run("weights", settings, data.digest) as run:
        rounds: list[Round] = []
        for number in range(settings.weights.rounds):
            done = train_round(work / f"round-{number:04d}", settings, candidate, data, number)
            candidate = replace(candidate, checkpoint=done.checkpoint)
            rounds.append(done)
            _track(run, done)
    chosen = best(rounds)
    _write_out(work / "out", rounds, chosen, program)
    publish(work / "out", Path("outputs/weights"))
    print(f"weights: round {chosen.number} of {len(rounds)} is best on dev, {chosen.dev.metrics['score']:.3f}")


def train_round(folder: Path, settings: Settings, candidate: Candidate, data: Manifest, number: int) -> Round:
    """One round from the candidate's checkpoint to the next, with an evaluation on dev when it is time for one."""
    weights = settings.weights
    examples = examples_of_round(ids_of(data, "train"), weights.examples_per_step, number, settings.seed)
    collected = collect_for_training(folder, settings, candidate, data, examples, number)
    grouped = group(folder / "groups", settings=settings, shards=collected, round_number=number)
    checkpoint = train(
        folder / "checkpoint",
        settings=settings,
        candidate=candidate,
        data=data,
        grouped=grouped,
        round_number=number,
    )
    done = number + 1
    dev = None
    if done % settings.evaluate.every == 0 or done == weights.rounds:
        dev = evaluate_on("dev", folder / "dev", settings, replace(candidate, checkpoint=checkpoint), data)
    sampled = [*collected, *([dev] if dev else [])]
    spent = {name: sum(made.metrics[name] for made in sampled) for name in SPENT}
    spent["seconds"] += grouped.metrics["seconds"] + checkpoint.metrics["seconds"]
    return Round(done, grouped, checkpoint, spent, dev)


def best(rounds: list[Round]) -> Round:
    """The round with the highest dev score; of equal ones the earliest."""
    return max((done for done in rounds if done.dev), key=lambda done: (done.dev.metrics["score"], -done.number))


def _track(run: tracking.StageRun, done: Round) -> None:
    policy = {"round": str(done.number)}
    model = run.log_checkpoint(done.checkpoint, f"weights-round-{done.number}", done.number, policy)
    run.log(done.metrics, done.number, model)
    dev = f", dev {done.dev.metrics['score']:.3f}" if done.dev else ""
    print(f"round {done.number}: reward {done.metrics['reward']:.3f}{dev}, {done.spent['seconds']:.0f} s", flush=True)


def _write_out(folder: Path, rounds: list[Round], chosen: Round, program: Manifest) -> None:
    """The stage's output: the chosen checkpoint, its program, and the history and records of all rounds."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    publish(chosen.checkpoint.folder, folder / "checkpoint")
    publish(program.folder, folder / "program")
    publish(chosen.dev.folder, folder / "dev")
    write_rollouts([one for done in rounds for one in read_rollouts(done.grouped.folder)], folder / "records")
    write_groups(
        [one for done in rounds for one in read_groups(done.grouped.folder / GROUPS)], folder / "records" / GROUPS
    )
    _write_history(folder / "rounds.csv", rounds)
    totals = {name: sum(done.spent[name] for done in rounds) for name in SPENT}
    write_json({**totals, "round": chosen.number, "dev": chosen.dev.metrics}, folder / "metrics.json")


def _write_history(path: Path, rounds: list[Round]) -> None:
    """One line per round: number, reward and dev score, then all other metrics by name."""
    first = ["round", "reward", "dev/score"]
    others = sorted({name for done in rounds for name in done.metrics} - set(first))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*first, *others], lineterminator="\n")
        writer.writeheader()
        writer.writerows({"round": done.number, **done.metrics} for done in rounds)


def main() -> None:
    stage.run("train_weights", train_weights)


if __name__ == "__main__":
    main()
