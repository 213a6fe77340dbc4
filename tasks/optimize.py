"""Optimize: search better prompts for a candidate, from a program to a program."""

import dataclasses
import sys
from pathlib import Path

from tasks.candidate import Candidate
from tasks.step import Manifest, step
from twofold import prompts
from twofold.examples import read_examples
from twofold.programs import STATE, load_pipeline, save_state
from twofold.prompts import Trial
from twofold.records import write_json, write_rollouts
from twofold.settings import Settings

TRIALS = "trials.json"
PROGRAM = "program"
RECORDS = "records"


@step(reads=("seed", "model.device", "model.dtype", "sampling", "rewards", "evaluate.draw", "prompts", "asked"))
def optimize(folder: Path, *, settings: Settings, candidate: Candidate, data: Manifest) -> dict[str, float]:
    """Write the best program, all that was tried, and the rollouts behind every score.

    Finished evaluations lie beside the folder, where a search that starts again after a kill finds them.
    """
    pipeline = load_pipeline(candidate.pipeline)
    engine, policies = candidate.open_engine(settings)
    found = prompts.optimize(
        candidate.open_program(),
        read_examples(data.folder / "train.jsonl"),
        pipeline.metric,
        engine,
        settings,
        policies,
        folder.parent / "evaluations",
        candidate.open_endpoints(settings),
        _line(sys.stderr),
    )
    save_state(found.program, folder / PROGRAM / STATE)
    write_rollouts(found.rollouts, folder / RECORDS)
    write_json({"trials": [dataclasses.asdict(trial) for trial in found.trials], "lost": found.lost}, folder / TRIALS)
    best = max(trial.score for trial in found.trials if trial.full)
    lost = {f"lost/{reason}": float(count) for reason, count in found.lost.items()}
    return {"trials": float(len(found.trials)), "best": best, **found.spent, **lost}


def _line(stream: object) -> object:
    """Shows each trial as it is scored."""

    def show(trial: Trial) -> None:
        demos = ", ".join(f"{name} {count}" for name, count in trial.demos.items())
        part = "validation part" if trial.full else "minibatch"
        print(f"prompts {trial.program}: {trial.score:.3f} on {trial.n} ({part}); demos: {demos}", file=stream)

    return show
