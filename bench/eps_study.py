"""What choosing inputs by EPS, and a teacher's hints, are worth on the default task: `make eps-study`. Takes hours.

1. For each seed, start and arm, train in a run of its own; runs of one seed and start differ in `scaffold` alone. What
   is finished is not run again.
2. Before, roll out each training input. Those that no rollout solved are rolled out again by the start, as luck solves
   some, and by the weights after the last round, without a hint and even if the strategy undid the training. Count
   what a rollout solves then.
3. Compare the arms by their score on dev at equal rollouts: those of training and of the teacher's trials. Between two
   evaluations the score is interpolated.

After each run docs/eps-study.json, .md and .png show all that is finished.
"""

import argparse
import csv
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

import dspy
import numpy as np

from tasks import WORK
from tasks.stage import fetched_model, prepared_data
from tasks.step import code_digest
from twofold import digests, plots, rollouts
from twofold.evaluation import student_interval
from twofold.examples import example_id, read_examples
from twofold.presets import as_yaml
from twofold.programs import STATE, load_pipeline, load_state
from twofold.records import read_json, write_json
from twofold.sampling.local import LocalEngine
from twofold.settings import Settings, load

STARTS = {"vanilla": ["w"], "prompts": ["p", "w"]}
ARMS = ("off", "filter_only", "scaffold_only", "random_routing", "whole")
SEEDS = (0, 1, 2)
TRIES = 4
"""Rollouts that show whether an input is solved."""

PARAMS = Path("bench/eps-study.yaml")
"""The committed settings, with so little data that every input is visited again: else there is nothing to choose."""

FOLDER = WORK / "eps-study"
REPORT = Path("docs/eps-study")

COLUMNS = (
    "arm",
    "score at equal rollouts",
    "less that of `off`",
    "rollouts to the last score of `off`, by seed",
    "unsolved inputs solved at the end",
    "less those of `filter_only`",
)

Curve = list[tuple[float, float]]
"""Rollouts spent since the start, and the score on dev; in order, from the start's own score on."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one training came to."""

    seed: int
    start: str
    arm: str
    curve: Curve
    unsolved: int
    """Training inputs that no rollout of the start solved."""
    again: int
    """How many of them a rollout of the start solves at a second look."""
    solved: int
    """How many of them a rollout solves after training."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.eps_study", description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=Path, default=PARAMS, help="settings of all runs (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    options = parser.parse_args()
    base = load(options.params).model_dump(mode="json")
    done: list[Run] = []
    for start, seed, arm in product(STARTS, options.seeds, ARMS):
        scaffold = None if arm == "off" else {**(base["scaffold"] or {}), "arm": arm}
        name = f"{start}-{arm}"
        changed = {"seed": seed, "scaffold": scaffold, "strategies": {name: STARTS[start]}}
        done.append(_run(Settings.model_validate(base | changed), name, start, arm))
        _report(done)


def _run(settings: Settings, name: str, start: str, arm: str) -> Run:
    """Train and measure, unless that was done before."""
    key = digests.short(digests.of_json([settings.model_dump(mode="json"), code_digest()]))
    folder = FOLDER / f"{name}-{settings.seed}-{key}"
    kept = folder / "run.json"
    if kept.is_file():
        return Run(**read_json(kept)["run"])
    folder.mkdir(parents=True, exist_ok=True)
    params = folder / "params.yaml"
    params.write_text(as_yaml(settings), encoding="utf-8")
    command = [sys.executable, "-m", "flows.strategy", "--params", str(params), "--name", name, "--out", str(folder)]
    subprocess.run(command, check=True)
    step = sorted((folder / name).glob("*-w"))[-1]
    # A child's memory is free again before the next training begins.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as child:
        counts = child.submit(_counts, settings, folder / name / "program" / STATE, step / "adapters").result()
    run = Run(settings.seed, start, arm, curve_of(read_json(folder / name / "metrics.json"), step), **counts)
    write_json({"run": asdict(run)}, kept)
    return run


def curve_of(metrics: Mapping, step: Path) -> Curve:
    """The training's curve: its start's score on dev, and then each evaluation of its history."""
    gain = metrics["steps"][step.name]
    points = [(0.0, metrics["dev"]["score"] - gain["kept"] * gain["difference"])]
    spent = 0.0
    with (step / "history.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            spent += float(row["spent/rollouts"]) - float(row["dev/rollouts"] or 0)
            if row["dev/score"]:
                points.append((spent, float(row["dev/score"])))
    return points


def _counts(settings: Settings, state: Path, adapters: Path) -> dict[str, int]:
    """How many training inputs no rollout of the start solves, and how many of them one solves again and afterwards."""
    pipeline, model = load_pipeline(settings.pipeline), fetched_model(settings)
    program = pipeline.program()
    load_state(program, state)
    examples = read_examples(prepared_data().folder / "train.jsonl")
    engine = LocalEngine(model.folder, settings)

    def solved(examples: Sequence[dspy.Example], policies: dict[str, str], name: str) -> list[str]:
        jobs = rollouts.plan(examples, TRIES, settings.seed, "eps-study", name)
        judge = pipeline.accuracy or pipeline.metric
        found = rollouts.run(program, jobs, judge, engine, settings, settings.weights.draw, policies)
        return sorted({rollout.example_id for rollout in found if rollout.reward > 0})

    def unsolved(known: Sequence[str]) -> list[dspy.Example]:
        return [example for example in examples if example_id(example) not in known]

    # A start and what it solves are the same for all arms.
    shared = settings.model_dump(mode="json", exclude={"scaffold", "strategies"})
    key = digests.short(digests.of_json([shared, digests.of_file(state), code_digest()]))
    kept = FOLDER / f"start-{key}.json"
    if not kept.is_file():
        known = solved(examples, {}, "before")
        write_json({"solved": known, "again": solved(unsolved(known), {}, "after")}, kept)
    start = read_json(kept)
    left = unsolved(start["solved"])
    trained = {folder.name: engine.load(folder) for folder in sorted(adapters.iterdir())}
    return {"unsolved": len(left), "again": len(start["again"]), "solved": len(solved(left, trained, "after"))}


def score_at(curve: Curve, spent: float) -> float:
    """The score after so many rollouts; that of the last evaluation when there were not so many."""
    return float(np.interp(spent, *zip(*curve, strict=True)))


def spent_to(curve: Curve, score: float) -> float | None:
    """After how many rollouts the score was first reached; None when it never was."""
    if curve[0][1] >= score:
        return 0.0
    for (x, low), (end, high) in pairwise(curve):
        if high >= score:
            return x + (end - x) * (score - low) / (high - low)
    return None


def _report(done: Sequence[Run]) -> None:
    REPORT.parent.mkdir(exist_ok=True)
    write_json({"runs": [asdict(run) for run in done]}, REPORT.with_suffix(".json"))
    text = "\n".join(line for start in STARTS for line in _table(start, [run for run in done if run.start == start]))
    REPORT.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    panels = {f"from {start}": _curves([run for run in done if run.start == start]) for start in STARTS}
    plots.curves(panels, "rollouts spent", "score on dev", REPORT.with_suffix(".png"))


def _curves(runs: Sequence[Run]) -> dict[str, list[Curve]]:
    """Curves by arm, those of all its seeds."""
    return {arm: [run.curve for run in runs if run.arm == arm] for arm in dict.fromkeys(run.arm for run in runs)}


def _table(start: str, runs: Sequence[Run]) -> Iterator[str]:
    """Markdown: a row for each arm, over the seeds that all arms have finished."""
    found = {(run.seed, run.arm): run for run in runs}
    seeds = [seed for seed in dict.fromkeys(run.seed for run in runs) if all((seed, arm) in found for arm in ARMS)]
    yield f"## From {start}, seeds {', '.join(map(str, seeds)) or 'to come'}"
    yield ""
    yield "| " + " | ".join(COLUMNS) + " |"
    yield "|---" + "|---:" * (len(COLUMNS) - 1) + "|"
    if seeds:
        by_arm = {arm: [found[seed, arm] for seed in seeds] for arm in ARMS}
        yield from _rows(by_arm)
        # All arms of a seed have the same start.
        again, unsolved = sum(run.again for run in by_arm["off"]), sum(run.unsolved for run in by_arm["off"])
        yield f"\nAt a second look the start itself solves {again} of the {unsolved} unsolved inputs."
    yield ""


def _rows(found: Mapping[str, Sequence[Run]]) -> Iterator[str]:
    """Each arm's figures over its seeds, the same for all; its differences from another arm are paired by seed."""
    equal = [min(run.curve[-1][0] for run in runs) for runs in zip(*found.values(), strict=True)]
    scores = {arm: [score_at(run.curve, at) for run, at in zip(found[arm], equal, strict=True)] for arm in found}
    shares = {arm: [run.solved / run.unsolved for run in found[arm] if run.unsolved] for arm in found}
    for arm, runs in found.items():
        costs = [spent_to(run.curve, off.curve[-1][1]) for run, off in zip(runs, found["off"], strict=True)]
        solved, unsolved = sum(run.solved for run in runs), sum(run.unsolved for run in runs)
        cells = [
            arm,
            _mean(scores[arm]),
            "" if arm == "off" else _mean(_less(scores[arm], scores["off"]), "+"),
            ", ".join("never" if cost is None else f"{cost:,.0f}" for cost in costs),
            f"{_mean(shares[arm])}, {solved} of {unsolved}",
            "" if arm == "filter_only" else _mean(_less(shares[arm], shares["filter_only"]), "+"),
        ]
        yield "| " + " | ".join(cells) + " |"


def _less(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [value - other for value, other in zip(values, others, strict=True)]


def _mean(values: Sequence[float], sign: str = "") -> str:
    """The mean with its 95% interval (Student's t), where there are values to make one of."""
    if not values:
        return "none"
    found = student_interval(values)
    return f"{mean(values):{sign}.3f}" + (f" ({found[0]:.3f} to {found[1]:.3f})" if found else "")


if __name__ == "__main__":
    main()
