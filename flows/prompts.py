"""Step `p` of a strategy: better instructions and demos for the program, with the weights as they are."""

from dataclasses import replace
from pathlib import Path

from flows.sampling import Made, evaluate_on, on_dev, spent_on
from tasks.candidate import Candidate
from tasks.optimize import PROGRAM, RECORDS, TRIALS, optimize
from tasks.step import Manifest
from tasks.tracking import StageRun
from twofold.programs import load_pipeline
from twofold.records import read_json
from twofold.settings import Settings


def optimize_prompts(
    folder: Path, settings: Settings, candidate: Candidate, data: Manifest, run: StageRun, number: int
) -> Made:
    """Optimize the candidate's prompts on train, and evaluate the found program on dev; one step for MLflow."""
    found = optimize(folder / "search", settings=settings, candidate=candidate, data=data)
    program = found.part(PROGRAM)
    better = replace(candidate, program=program)
    dev = evaluate_on("dev", folder / "dev", settings, better, data)
    run.log({f"prompts/{name}": value for name, value in found.metrics.items()}, 1)
    run.log(on_dev(dev), 1)
    run.log_prompts(load_pipeline(candidate.pipeline), program)
    trials = read_json(found.folder / TRIALS)["trials"]
    columns = ("program", "score", "n", "full")
    history = [{"trial": k, **{name: trial[name] for name in columns}} for k, trial in enumerate(trials)]
    records = {name: found.folder / name for name in (TRIALS, RECORDS)} | {"dev": dev.folder}
    return Made([(better, dev)], spent_on([found, dev]), history, records)
