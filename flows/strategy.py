"""Stage `strategy`: a sequence of steps from the program as it was written to a better one.

1. The vanilla program is evaluated on dev.
2. Each step starts from the best candidate so far by dev score: `p` optimizes its prompts, `w` trains its weights.
3. The best candidate of all is the strategy's result. Of equal ones the earliest is best. Test is never looked at.

What two strategies begin with in common runs once: their steps have the same keys.
"""

import argparse
import csv
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect import flow

from flows.prompts import optimize_prompts
from flows.sampling import SPENT, Made, evaluate_on, on_dev
from flows.weights import train_weights
from tasks import stage, tracking
from tasks.candidate import Candidate
from tasks.step import Manifest, publish
from twofold.errors import SettingsError
from twofold.programs import STATE, load_pipeline, save_state
from twofold.records import write_json
from twofold.settings import Settings, load

STEPS = {"p": optimize_prompts, "w": train_weights}


@flow(name="strategy", flow_run_name="{name}")
def strategy(params: str, name: str) -> None:
    """Carry out one strategy of the settings; writes outputs/NAME."""
    settings = load(Path(params))
    if name not in settings.strategies:
        raise SettingsError(f"{params}: there is no strategy '{name}'. There are: {', '.join(settings.strategies)}.")
    data, model = stage.prepared_data(), stage.fetched_model(settings)
    pipeline = load_pipeline(settings.pipeline)
    inputs = {"data": data.digest, "model": model.digest, "pipeline": pipeline.digest}
    work = stage.work_folder(name, settings, inputs)
    save_state(pipeline.program(), work / "program" / STATE)
    vanilla = Candidate(settings.pipeline, pipeline.digest, Manifest.of(work / "program"), model)
    with tracking.stage_run(name, settings, data.digest) as run:
        made = [_vanilla(work / "vanilla", settings, vanilla, data, run)]
        for place, step in enumerate(settings.strategies[name]):
            start, _ = best(made)
            number = settings.strategies[name][:place].count(step)
            made.append(STEPS[step](work / f"{place}-{step}", settings, start, data, run, number))
            run = replace(run, offset=run.offset + (settings.weights.rounds if step == "w" else 1))
    chosen, dev = best(made)
    _write_out(work / "out", settings.strategies[name], made, chosen, dev)
    publish(work / "out", Path("outputs") / name)
    print(f"{name} on dev: {dev.metrics['score']:.3f}")


def best(made: list[Made]) -> tuple[Candidate, Manifest]:
    """The candidate with the highest dev score; all were evaluated on the same examples."""
    return max((found for step in made for found in step.candidates), key=lambda found: found[1].metrics["score"])


def _vanilla(folder: Path, settings: Settings, candidate: Candidate, data: Manifest, run: tracking.StageRun) -> Made:
    dev = evaluate_on("dev", folder, settings, candidate, data)
    run.log(on_dev(dev))
    # The same for all strategies, and no part of what any of them costs.
    return Made([(candidate, dev)], dict.fromkeys(SPENT, 0.0), [], {})


def _write_out(folder: Path, steps: tuple[str, ...], made: list[Made], chosen: Candidate, dev: Manifest) -> None:
    """The stage's output: the chosen candidate and its evaluation, and the history and records of every step."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    publish(chosen.program.folder, folder / "program")
    publish(dev.folder, folder / "dev")
    if chosen.checkpoint:
        publish(chosen.checkpoint.folder, folder / "checkpoint")
    for place, (step, part) in enumerate(zip(steps, made[1:], strict=True)):
        _write_step(folder / f"{place}-{step}", part)
    spent = {name: sum(part.spent[name] for part in made) for name in SPENT}
    write_json({**spent, "steps": list(steps), "dev": dev.metrics}, folder / "metrics.json")


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


def main() -> None:
    stage.run("strategy", strategy, _arguments)


if __name__ == "__main__":
    main()
