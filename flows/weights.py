"""Step `w` of a strategy: mmGRPO on the weights, under the program as it is.

One round: collect rollouts with the newest weights, and those of teacher programs; group them, update the weights.
Every few rounds, evaluate on dev.
Which inputs a round trains on, `pool.py` says; how a teacher helps with those that teach nothing, `teacher.py`.
"""

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from flows.pool import Batch, next_batch, pooled_batch
from flows.sampling import Made, evaluate_on, on_dev, spent_on
from flows.teacher import Taught, teach_beside
from tasks.candidate import Candidate
from tasks.group import GROUPS
from tasks.pool import ANSWERS, POOL
from tasks.score import SCORES
from tasks.source import Source, sources_of
from tasks.step import Manifest
from tasks.tracking import StageRun
from tasks.train import train
from twofold import bands, correction
from twofold.asking import read_answers
from twofold.attempts import ATTEMPTS, attempts_of, write_attempts
from twofold.endpoints import Spent
from twofold.examples import read_examples
from twofold.hints import read_hints
from twofold.programs import load_pipeline
from twofold.records import read_groups, read_rollouts, write_groups, write_rollouts
from twofold.scaffolds import check_teacher
from twofold.scores import read_scores, write_scores
from twofold.settings import Correction, Settings


@dataclass(frozen=True, slots=True)
class Round:
    """What one round made."""

    number: int
    """Rounds of training done."""
    grouped: Manifest
    checkpoint: Manifest
    spent: dict[str, float]
    """Seconds are those of all steps: the teacher's count too, though the training went on beside them."""
    dev: Manifest | None
    taught: Taught
    """Without a teacher: nothing."""
    teacher: dict[str, float]
    """Numbers of the teacher's part; empty without one."""

    @property
    def metrics(self) -> dict[str, float]:
        """All numbers of the round, under the names that every stage uses."""
        dev = on_dev(self.dev) if self.dev else {}
        costs = {f"spent/{name}": value for name, value in self.spent.items()}
        return {**self.grouped.metrics, **self.checkpoint.metrics, **costs, **self.teacher, **dev}


def train_weights(
    folder: Path, settings: Settings, candidate: Candidate, data: Manifest, run: StageRun, number: int
) -> Made:
    """Train the candidate's weights; every evaluated checkpoint is a candidate, every round a step for MLflow.

    `number` tells this step from other trainings in the same strategy.
    """
    if settings.teaches:
        examples = read_examples(data.folder / "train.jsonl")
        check_teacher(settings.scaffold, load_pipeline(settings.pipeline), examples)
    sources = sources_of(settings, candidate, folder / "sources")
    rounds: list[Round] = []
    taught = Taught(None, Spent())
    evaluated: list[tuple[Candidate, Manifest]] = []
    for k in range(settings.weights.rounds):
        done = train_round(folder / f"round-{k:04d}", settings, candidate, data, number, k, taught, sources)
        candidate, taught = replace(candidate, checkpoint=done.checkpoint), done.taught
        rounds.append(done)
        if done.dev:
            evaluated.append((candidate, done.dev))
        _track(run, done, settings.weights.correction)
    spent = {name: sum(done.spent[name] for done in rounds) for name in rounds[0].spent}
    history = [{"round": done.number, **done.metrics} for done in rounds]
    records = {"records": _records(folder / "records", rounds)}
    records |= {f"dev/round-{done.number:04d}": done.dev.folder for done in rounds if done.dev}
    # Else the last weights of a training that is undone, or was better before its end, would be nowhere.
    records |= {f"adapters/{name}": adapter for name, adapter in candidate.adapters.items()}
    if settings.scaffold:
        _add_scores(folder / "records", rounds)
        records[POOL] = rounds[-1].checkpoint.folder / POOL
        records[bands.FILE] = _bands(folder, rounds[-1], run)
        if settings.teaches:
            _add_attempts(folder / "records", rounds)
    return Made(evaluated, spent, history, records)


def train_round(
    folder: Path,
    settings: Settings,
    candidate: Candidate,
    data: Manifest,
    number: int,
    round_number: int,
    taught: Taught,
    sources: list[Source],
) -> Round:
    """One round from the candidate's checkpoint to the next, with an evaluation on dev when it is time for one.

    `taught` is what the teacher made in the round before.
    """
    done, last = round_number + 1, round_number + 1 == settings.weights.rounds
    if settings.scaffold:
        batch = pooled_batch(folder, settings, candidate, data, number, round_number, taught.answers, sources)
    else:
        batch = next_batch(folder, settings, candidate, data, number, round_number, sources)
    training = partial(
        train,
        folder / "checkpoint",
        settings=settings,
        candidate=candidate,
        data=data,
        grouped=batch.grouped,
        round_number=round_number,
    )
    if settings.teaches and not last:
        names, hints = ["weights", number, round_number], folder / "hints"
        checkpoint, now = teach_beside(training, hints, settings, candidate, data, batch.grouped, taught, names)
    else:
        checkpoint, now = training(), Taught(None, taught.spent)
    dev = None
    if done % settings.evaluate.every == 0 or last:
        dev = evaluate_on("dev", folder / "dev", settings, replace(candidate, checkpoint=checkpoint), data)
    sampled = [*batch.collected, *now.made, *([dev] if dev else [])]
    spent = spent_on(sampled, [*batch.worked, batch.grouped, checkpoint])
    return Round(done, batch.grouped, checkpoint, spent, dev, now, _teaching(settings, batch, taught, now))


def _teaching(settings: Settings, batch: Batch, before: Taught, now: Taught) -> dict[str, float]:
    """Numbers of the teacher's part in a round; none without a teacher."""
    if not settings.teaches:
        return {}
    return now.metrics(before.spent, batch.grouped.metrics["scaffolds/gain"])


def _records(folder: Path, rounds: list[Round]) -> Path:
    """All rounds' rollouts and groups, in one place."""
    write_rollouts([one for done in rounds for one in read_rollouts(done.grouped.folder)], folder)
    write_groups([one for done in rounds for one in read_groups(done.grouped.folder / GROUPS)], folder / GROUPS)
    return folder


def _add_scores(folder: Path, rounds: list[Round]) -> None:
    write_scores([one for done in rounds for one in read_scores(done.grouped.folder / SCORES)], folder / SCORES)


def _bands(folder: Path, last: Round, run: StageRun) -> Path:
    """What was learned of inputs by the band of their score."""
    hints = read_hints(last.checkpoint.folder / POOL)
    rows = read_scores(folder / "records" / SCORES)
    found = bands.learning(rows, {row.example_id for row in rows} - hints.keys())
    bands.write_bands(found, folder / bands.FILE)
    run.log(bands.metrics(found), last.number)
    return folder / bands.FILE


def _add_attempts(folder: Path, rounds: list[Round]) -> None:
    """All that the teacher tried, and the rollouts in which the student tried its hints."""
    answered = [(done.number, done.taught.answers) for done in rounds if done.taught.answers]
    rows = [row for number, made in answered for row in attempts_of(number, read_answers(made.folder / ANSWERS))]
    write_attempts(rows, folder / ATTEMPTS)
    trials = [made for done in rounds for made in done.taught.made if "rollouts" in made.metrics]
    write_rollouts([one for made in trials for one in read_rollouts(made.folder)], folder / "trials")


def _track(run: StageRun, done: Round, settings: Correction) -> None:
    model = run.log_checkpoint(done.checkpoint, done.number, {"round": str(done.number)})
    run.log(done.metrics, done.number, model)
    print(f"round {done.number}: {_said(done)}, {done.spent['seconds']:.0f} s", flush=True)
    if warning := correction.warning(done.metrics, settings):
        print(f"warning: {warning}", file=sys.stderr)


def _said(done: Round) -> str:
    found = done.grouped.metrics
    said = [f"reward {found['reward']:.3f}" if "reward" in found else "no input to draw"]
    if "kept" in found:
        said.append(f"kept {found['kept']:.0f} of {found['drawn']:.0f} drawn")
    if "sources/rollouts" in found:
        said.append(f"{found['sources/rollouts']:.0f} rollouts of sources, {found['sources/lost']:.0f} lost")
    if done.dev:
        said.append(f"dev {done.dev.metrics['score']:.3f}")
    return ", ".join(said)
