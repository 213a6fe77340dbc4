"""Stage `compare`: every strategy once on test, and the differences between them. The only look at test there is."""

import csv
import dataclasses
from collections.abc import Iterator, Sequence
from itertools import combinations, starmap
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import create_table_artifact
from rich.table import Table
from transformers import AutoTokenizer

from flows.sampling import SPENT, evaluate_on
from tasks import stage, tracking
from tasks.candidate import Candidate
from tasks.step import Manifest, publish
from twofold import bands, evaluation, plots
from twofold.bands import Band
from twofold.console import console
from twofold.programs import STATE, Pipeline, load_pipeline, save_state
from twofold.records import read_json, read_rollouts, write_json
from twofold.report import write_page
from twofold.seeds import derive
from twofold.settings import Settings, load

REPORTS = Path("reports")
COLUMNS = ("score", "ci_low", "ci_high", "n", "format_rate", *SPENT)
CURVES = (
    "reward",
    "dev/score",
    "groups_all_equal_share",
    "kl",
    "visited/keep",
    "visited/too_hard",
    "visited/solved",
    "visited/flat",
    "pool/active",
    "drawn",
    "pool/queued",
    "scaffolds/asked",
    "scaffolds/admitted",
    "scaffolds/useful",
    *(f"scaffolds/gate/{check}" for check in ("form", "answer", "equal", "one_step", "probe", "effect")),
    "teacher/calls",
    "teacher/tokens_in",
    "teacher/tokens_out",
    "teacher/money",
    "teacher/gain_per_call",
    "sources/rollouts",
    "sources/lost",
    "sources/usable_share",
    "spent/rollouts",
)
"""Columns of reports/rounds.csv beside strategy, step and round."""


@flow(name="compare", flow_run_name="compare")
def compare(params: str) -> None:
    """Evaluate the result of every strategy on test; writes reports/."""
    settings = load(Path(params))
    data, model = stage.prepared_data(), stage.fetched_model(settings)
    pipeline = load_pipeline(settings.pipeline)
    outputs = {name: stage.published(name) for name in settings.strategies}
    inputs = {"data": data.digest, "model": model.digest, "pipeline": pipeline.digest}
    work = stage.work_folder("compare", settings, inputs | {name: made.digest for name, made in outputs.items()})
    tests, table, steps = {}, {}, {}
    for name, made in outputs.items():
        program, checkpoint = made.part("program"), made.part("checkpoint")
        candidate = Candidate(
            settings.pipeline, pipeline.digest, program, model, checkpoint if checkpoint.outputs else None
        )
        tests[name] = evaluate_on("test", work / name, settings, candidate, data)
        metrics = read_json(made.folder / "metrics.json")
        table[name], steps[name] = _row(tests[name], metrics), metrics["steps"]
    for name in settings.hosted:
        row = f"hosted-{name}"
        candidate = _hosted(work / row / "program", settings, pipeline, model, name)
        tests[row] = evaluate_on("test", work / row, settings, candidate, data)
        table[row], steps[row] = _hosted_row(tests[row], f"endpoints/hosted/{name}"), {}
    for name, row in table.items():
        tracking.log_test(name, settings, data.digest, {f"test/{column}": value for column, value in row.items()})
    report = {"strategies": table, "steps": steps, "differences": _differences(tests, settings)}
    _write(report, outputs)
    _write_page(report, outputs, tests, settings, pipeline, data, model)
    _publish(report)


def _hosted(folder: Path, settings: Settings, pipeline: Pipeline, model: Manifest, name: str) -> Candidate:
    """The untrained program on a server."""
    save_state(pipeline.program(), folder / STATE)
    server = (name, *settings.hosted[name].asked)
    return Candidate(settings.pipeline, pipeline.digest, Manifest.of(folder), model, hosted=server)


def _row(test: Manifest, made: dict[str, Any]) -> dict[str, float]:
    """A strategy's score on test, and all it cost: its steps and this evaluation."""
    found = {name: test.metrics.get(name, 0.0) for name in COLUMNS}
    channels = {name: value for name, value in test.metrics.items() if name.startswith("channel/")}
    return {**found, **{name: found[name] + made[name] for name in SPENT}, **channels}


def _hosted_row(test: Manifest, used: str) -> dict[str, float]:
    """As of a strategy; its tokens are those that the server counted."""
    tokens = {name: test.metrics.get(f"{used}/{name}", 0.0) for name in ("tokens_in", "tokens_out")}
    return {**_row(test, dict.fromkeys(SPENT, 0.0)), **tokens}


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


def _write(report: dict[str, Any], outputs: dict[str, Manifest]) -> None:
    rounds = [row for name, made in outputs.items() for row in _rounds(name, made.folder)]
    write_json(report, REPORTS / "compare.json")
    learned = [row for name, made in outputs.items() for row in _learned(name, made.folder)]
    (REPORTS / "compare.md").write_text(_markdown(report) + _by_band(learned), encoding="utf-8")
    with (REPORTS / "rounds.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["strategy", "step", "round", *CURVES], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rounds)
    plots.scores(report["strategies"], REPORTS / "scores.png")
    plots.rounds(rounds, REPORTS / "rounds.png")


def _write_page(
    report: dict[str, Any],
    outputs: dict[str, Manifest],
    tests: dict[str, Manifest],
    settings: Settings,
    pipeline: Pipeline,
    data: Manifest,
    model: Manifest,
) -> None:
    """The rollouts on test, as no strategy published them, and the page that shows all."""
    for name, test in tests.items():
        publish(test.folder, REPORTS / "test" / name)
    decode = AutoTokenizer.from_pretrained(model.folder).decode
    folders = {name: made.folder for name, made in outputs.items()}
    published = {name: REPORTS / "test" / name for name in outputs}
    write_page(REPORTS / "index.html", report, folders, published, data.folder, pipeline, settings, decode)


def _rounds(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """What every round of the strategy's trainings came to; a number that a round has not is left empty."""
    for history in sorted(folder.glob("*-w/history.csv")):
        with history.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                found = {column: row.get(column, "") for column in ("round", *CURVES)}
                yield {"strategy": name, "step": history.parent.name, **found}


def _learned(name: str, folder: Path) -> Iterator[tuple[str, Band]]:
    """What was learned of inputs by the band of their score, in each of the strategy's trainings with a pool."""
    for learned in sorted(folder.glob(f"*-w/{bands.FILE}")):
        yield from ((f"{name} {learned.parent.name}", band) for band in bands.read_bands(learned))


def _by_band(learned: Sequence[tuple[str, Band]]) -> str:
    """Markdown: a row for each band of each training; nothing where no training scored its inputs."""
    if not learned:
        return ""
    title = "## Change of the accuracy from a visit without a hint to the next, by score at the first"
    header = "| training | score | inputs | visits | rounds between | before | change (95% interval) |"
    lines = [title, "", header, f"|---|---|{'---:|' * 5}", *starmap(_band, learned), ""]
    return "\n" + "\n".join([*lines, bands.CAUTION, ""])


def _band(training: str, band: Band) -> str:
    interval = "" if band.ci_low is None else f" ({band.ci_low:+.3f} to {band.ci_high:+.3f})"
    found = [str(band.n), str(band.pairs), f"{band.rounds:.1f}", f"{band.before:.3f}", f"{band.change:+.3f}{interval}"]
    return f"| {' | '.join([training, band.band, *found])} |"


def _publish(report: dict[str, Any]) -> None:
    """On the terminal, and as an artifact of the Prefect run."""
    columns = _columns(report)
    rows = _shown(report)
    named = [dict(zip(columns, row, strict=True)) for row in rows]
    create_table_artifact(table=named, key="compare", description=_bullets(report))
    table = Table(*columns, title="On test (costs: all steps and this evaluation)")
    for row in rows:
        table.add_row(*row)
    screen = console()
    screen.print(table)
    for line in _sentences(report):
        screen.print(line)


def _columns(report: dict[str, Any]) -> list[str]:
    """What is shown: money only where some was spent; channels of the metric by their name alone."""
    rows = report["strategies"].values()
    spent = any(row["money"] for row in rows)
    return ["strategy", *(name for name in COLUMNS if spent or name != "money"), *_channels(report)]


def _channels(report: dict[str, Any]) -> list[str]:
    """Names of the metric's channels that some strategy has."""
    return sorted({name.split("/")[1] for row in report["strategies"].values() for name in row if "/" in name})


def _shown(report: dict[str, Any]) -> list[list[str]]:
    """A row for each strategy, its numbers as texts; a channel that it has not is a dash."""
    _, *columns = _columns(report)
    return [
        [name, *(_text(row.get(column, row.get(f"channel/{column}/mean"))) for column in columns)]
        for name, row in report["strategies"].items()
    ]


def _markdown(report: dict[str, Any]) -> str:
    columns = _columns(report)
    header = f"| {' | '.join(columns)} |\n|---|{'---:|' * (len(columns) - 1)}\n"
    rows = [f"| {' | '.join(row)} |\n" for row in _shown(report)]
    return header + "".join(rows) + "\n" + _bullets(report)


def _bullets(report: dict[str, Any]) -> str:
    return "".join(f"- {line}\n" for line in _sentences(report))


def _sentences(report: dict[str, Any]) -> list[str]:
    differences = [evaluation.sentence(name, found) for name, found in report["differences"].items()]
    channels = [
        _channel(name, channel, row)
        for name, row in report["strategies"].items()
        for channel in _channels(report)
        if f"channel/{channel}/mean" in row
    ]
    undone = [
        f"{name}: step {step} was undone: {found['difference']:+.3f} on dev (standard error "
        f"{found['standard_error']:.3f}, n = {found['n']})"
        for name, steps in report["steps"].items()
        for step, found in steps.items()
        if not found["kept"]
    ]
    return differences + channels + undone


def _channel(strategy: str, name: str, row: dict[str, float]) -> str:
    mean, low, high, n = (row[f"channel/{name}/{part}"] for part in ("mean", "ci_low", "ci_high", "n"))
    return f"{strategy}: {name} {mean:.3f} (95% interval {low:.3f} to {high:.3f}, n = {n:.0f})"


def _text(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) and abs(value) <= 1 else f"{value:,.0f}"


def main() -> None:
    stage.run("compare", compare)


if __name__ == "__main__":
    main()
