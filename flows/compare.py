"""Stage `compare`: every strategy once on test, and the differences between them. The only look at test there is."""

import dataclasses
from itertools import combinations
from pathlib import Path
from typing import Any

from prefect import flow
from rich.console import Console
from rich.table import Table

from flows.sampling import evaluate_on
from flows.train_weights import SPENT
from tasks import stage, tracking
from tasks.candidate import Candidate
from tasks.step import Manifest
from twofold import evaluation
from twofold.programs import load_pipeline
from twofold.records import read_json, read_rollouts, write_json
from twofold.seeds import derive
from twofold.settings import Settings, load

COLUMNS = ("score", "ci_low", "ci_high", "n", "format_rate", *SPENT)


@flow(name="compare")
def compare(params: str) -> None:
    """Evaluate the vanilla program and the trained one on test; writes reports/compare.json."""
    settings = load(Path(params))
    data, model = stage.prepared_data(), stage.fetched_model(settings)
    pipeline = load_pipeline(settings.pipeline)
    outputs = {name: stage.published(name) for name in ("vanilla", "weights")}
    inputs = {"data": data.digest, "model": model.digest, "pipeline": pipeline.digest}
    work = stage.work_folder("compare", settings, inputs | {name: made.digest for name, made in outputs.items()})
    with tracking.stage_run("compare", settings, data.digest) as run:
        tests, table = {}, {}
        for name, made in outputs.items():
            candidate = Candidate(
                settings.pipeline, pipeline.digest, Manifest.of(made.folder / "program"), model, _checkpoint(made)
            )
            tests[name] = evaluate_on("test", work / name, settings, candidate, data)
            table[name] = _row(tests[name], _training(made))
            run.log({f"test/{name}/{column}": table[name][column] for column in COLUMNS})
    report = {"strategies": table, "differences": _differences(tests, settings)}
    write_json(report, Path("reports/compare.json"))
    _show(report)


def _checkpoint(made: Manifest) -> Manifest | None:
    folder = made.folder / "checkpoint"
    return Manifest.of(folder) if folder.is_dir() else None


def _training(made: Manifest) -> dict[str, float]:
    """What it took to make the strategy; nothing for a program that was not trained."""
    return read_json(made.folder / "metrics.json") if _checkpoint(made) else dict.fromkeys(SPENT, 0.0)


def _row(test: Manifest, training: dict[str, float]) -> dict[str, float]:
    """A strategy's score on test, and all it cost: its training and this evaluation."""
    costs = {name: test.metrics[name] + training[name] for name in SPENT}
    return {**{name: test.metrics[name] for name in COLUMNS}, **costs}


def _differences(tests: dict[str, Manifest], settings: Settings) -> dict[str, Any]:
    """Every later strategy less every earlier one, paired by example."""
    rollouts = {name: read_rollouts(test.folder) for name, test in tests.items()}
    seed = derive(settings.seed, "bootstrap")
    return {
        f"{later} - {earlier}": dataclasses.asdict(
            evaluation.difference(rollouts[later], rollouts[earlier], settings.evaluate.resamples, seed)
        )
        for earlier, later in combinations(rollouts, 2)
    }


def _show(report: dict[str, Any]) -> None:
    table = Table("strategy", *COLUMNS, title="On test (costs: training and this evaluation)")
    for name, row in report["strategies"].items():
        table.add_row(name, *(_text(row[column]) for column in COLUMNS))
    console = Console(width=None if Console().is_terminal else 120)
    console.print(table)
    for name, found in report["differences"].items():
        interval = f"95% interval {found['ci_low']:+.3f} to {found['ci_high']:+.3f}"
        console.print(f"{name}: {found['difference']:+.3f} ({interval}, n = {found['n']})")


def _text(value: float) -> str:
    return f"{value:.3f}" if isinstance(value, float) and abs(value) <= 1 else f"{value:,.0f}"


def main() -> None:
    stage.run("compare", compare)


if __name__ == "__main__":
    main()
