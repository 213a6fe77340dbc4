"""Stage `strategy`: a sequence of steps from the program as it was written to a better one.

1. The vanilla program is evaluated on dev.
2. A step makes candidates from the program it begins with: `p` optimizes its prompts, `w` trains its weights.
3. Its best candidate on dev goes on, if the step pays: it must score above what the step began with by more than the
   standard error of their difference, paired by example. Else the step is undone, and the next begins where it began.
4. What is left after the last step is the strategy's result. Test is never looked at.

What two strategies begin with in common runs once: their steps have the same keys.
"""

import argparse
import csv
import dataclasses
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prefect import flow

from flows.prompts import optimize_prompts
from flows.sampling import SPENT, Made, evaluate_on, on_dev
from flows.weights import train_weights
from tasks import stage, tracking
from tasks.candidate import Candidate
from tasks.step import Manifest, publish
from twofold import evaluation
from twofold.evaluation import Gain
from twofold.programs import STATE, load_pipeline, save_state
from twofold.records import read_rollouts, write_json
from twofold.settings import load, steps_of

STEPS = {"p": optimize_prompts, "w": train_weights}

Evaluated = tuple[Candidate, Manifest]
"""A candidate and its evaluation on dev."""


@flow(name="strategy", flow_run_name="{name}")
def strategy(params: str, name: str, out: str = "outputs") -> None:
    """Carry out one strategy of the settings; writes OUT/NAME."""
    settings = load(Path(params))
    steps = steps_of(settings, name, Path(params))
    data, model = stage.prepared_data(), stage.fetched_model(settings)
    pipeline = load_pipeline(settings.pipeline)
    inputs = {"data": data.digest, "model": model.digest, "pipeline": pipeline.digest}
    work = stage.work_folder(name, settings, inputs)
    save_state(pipeline.program(), work / "program" / STATE)
    vanilla = Candidate(settings.pipeline, pipeline.digest, Manifest.of(work / "program"), model)
    with tracking.stage_run(name, settings, data.digest) as run:
        # The same for all strategies, and no part of what any of them costs.
        chosen = (vanilla, evaluate_on("dev", work / "vanilla", settings, vanilla, data))
        run.log(on_dev(chosen[1]))
        done: list[Done] = []
        for place, step in enumerate(steps):
            number = steps[:place].count(step)
            made = STEPS[step](work / f"{place}-{step}", settings, chosen[0], data, run, number)
            chosen, gain = go_on(chosen, made)
            done.append(Done(f"{place}-{step}", made, gain))
            print(done[-1].said, flush=True)
            run = replace(run, offset=run.offset + (settings.weights.rounds if step == "w" else 1))
    _write_out(work / "out", done, *chosen)
    publish(work / "out", Path(out) / name)
    print(f"{name} on dev: {chosen[1].metrics['score']:.3f}")


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was carried out."""

    name: str
    """Its place and kind, such as `0-p`."""
    made: Made
    gain: Gain
    """Of its best candidate, on dev, over what it began with."""

    @property
    def said(self) -> str:
        end = "goes on" if self.gain.pays else "is undone"
        gain = f"{self.gain.difference:+.3f} on dev, standard error {self.gain.standard_error:.3f}"
        return f"step {self.name} {end}: {gain}, n = {self.gain.n}"


def go_on(start: Evaluated, made: Made) -> tuple[Evaluated, Gain]:
    """What the next step begins with, and what the step's best candidate brought; of equal ones the first is best."""
    found = max(made.candidates, key=lambda candidate: candidate[1].metrics["score"])
    gain = evaluation.gain(read_rollouts(found[1].folder), read_rollouts(start[1].folder))
    return (found if gain.pays else start), gain


def _write_out(folder: Path, steps: list[Done], chosen: Candidate, dev: Manifest) -> None:
    """The stage's output: the chosen candidate and its evaluation, and the history and records of every step."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    publish(chosen.program.folder, folder / "program")
    publish(dev.folder, folder / "dev")
    if chosen.checkpoint:
        publish(chosen.checkpoint.folder, folder / "checkpoint")
    for step in steps:
        _write_step(folder / step.name, step.made)
    spent = {name: sum((step.made.spent[name] for step in steps), 0.0) for name in SPENT}
    gains = {step.name: {**dataclasses.asdict(step.gain), "kept": step.gain.pays} for step in steps}
    write_json({**spent, "steps": gains, "dev": dev.metrics}, folder / "metrics.json")


def _write_step(folder: Path, made: Made) -> None:
    _write_history(folder / "history.csv", made.history)
    for place, source in made.records.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, folder / place)


def _write_history(path: Path, rows: list[dict[str, Any]]) -> None:
    """One line per trial or round: its number, then all other columns by name."""
    first = next(iter(rows[0]))
    others = sorted({name for row in rows for name in row} - {first})
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [first, *others], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", required=True, help="strategy of the settings file")
    parser.add_argument("--out", default="outputs", help="folder to put the result in (default: %(default)s)")


def main() -> None:
    stage.run("strategy", strategy, _arguments)


if __name__ == "__main__":
    main()
