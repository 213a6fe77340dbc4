"""The report: one page with all figures of a comparison, and the rollouts that they came from.

The page needs nothing but itself. Its policy lets only its own two scripts run, and nothing be fetched; what models
wrote is data to them, and never markup.
"""

import base64
import csv
import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import altair
import vl_convert
from jinja2 import Environment, StrictUndefined
from scipy.stats import binomtest

from twofold.bands import CAUTION, Band
from twofold.evaluation import CONFIDENCE
from twofold.programs import Pipeline
from twofold.records import FAILURES
from twofold.report import charts
from twofold.report.browse import Decode, shown
from twofold.report.sets import Set, Training, sets_of, training_of
from twofold.settings import Settings

CURVES = {
    "reward": "Reward of training rollouts",
    "dev/score": "Score on dev",
    "groups_all_equal_share": "Share of groups that are all equal",
    "kl": "KL divergence to the base model",
}
"""Columns of a training's history that are shown by round."""

History = list[dict[str, float]]
"""Numbers of each round by name; those that a round has not, or that are no numbers, are left out."""


def write_page(
    path: Path,
    report: Mapping[str, Any],
    outputs: Mapping[str, Path],
    tests: Mapping[str, Path],
    data: Path,
    pipeline: Pipeline,
    settings: Settings,
    decode: Decode,
) -> None:
    """Write the page. Equal records give equal bytes.

    Args:
        report: what compare.json holds: `strategies`, `steps` and `differences`.
        outputs: what each strategy published.
        tests: each strategy's rollouts on test.
        data: folder of the prepared examples.
        decode: token ids to text.
    """
    sets = [one for name, folder in outputs.items() for one in sets_of(name, folder, tests[name])]
    steps = {(one.strategy, one.step): outputs[one.strategy] / one.step for one in sets if one.step.endswith("w")}
    trainings = {key: training_of(folder) for key, folder in steps.items()}
    histories = {key: _history(folder / "history.csv") for key, folder in steps.items()}
    lost = [_lost(name, own) for name, own in _by_purpose(sets).items()]
    drawn = _charts(report, histories, trainings, lost)
    rollouts = shown(sets, trainings, data, pipeline, decode, settings.seed)
    context = {
        "settings": settings,
        "headline": _headline(report),
        "first": next(iter(report["strategies"])),
        "strategies": _strategies(report),
        # Hosted models have a row, and no rollouts on the page.
        "browsed": list(outputs),
        "spends": any(row["money"] for row in report["strategies"].values()),
        "losses": lost,
        "charts": drawn,
        "curves": [column for column in CURVES if f"curve/{column}" in drawn],
        "pooled": [f"{strategy} {step}" for (strategy, step), own in trainings.items() if own.scores],
        "rollouts": rollouts,
        "caution": CAUTION,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(context), encoding="utf-8", newline="\n")


def render(context: Mapping[str, Any]) -> str:
    """The page's HTML."""
    own, vega = _asset("page.js"), _vega()
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    template = environment.from_string(_asset("page.html.j2"))
    scripts = {"style": _asset("page.css"), "vega": vega, "script": own, "allowed": f"{_source(vega)} {_source(own)}"}
    return template.render(**context, **scripts)


def _asset(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


@cache
def _vega() -> str:
    """Vega-Embed with Vega and Vega-Lite, as one script."""
    version = altair.VEGALITE_VERSION.rsplit(".", 1)[0]
    return vl_convert.javascript_bundle(vl_version=version).replace("\r\n", "\n")


def _source(script: str) -> str:
    """What lets this script run, and no other, in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _history(path: Path) -> History:
    with path.open(encoding="utf-8", newline="") as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [{name: value for name, value in row.items() if math.isfinite(value)} for row in rows]


def _headline(report: Mapping[str, Any]) -> str:
    strategies = report["strategies"]
    first, best = next(iter(strategies)), max(strategies, key=lambda name: strategies[name]["score"])
    said = f"Best on test: {best}, {_between(strategies[best], 'score')}"
    found = report["differences"].get(f"{best} - {first}")
    more = f"; {_between(found, 'difference', '+')} over {first}" if found else ""
    return f"{said}{more}, n = {strategies[best]['n']:.0f}."


def _between(row: Mapping[str, float], name: str, sign: str = "") -> str:
    return f"{row[name]:{sign}.3f} ({row['ci_low']:{sign}.3f} to {row['ci_high']:{sign}.3f})"


def _strategies(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each strategy: its figures, its difference to the first, and what became of its steps."""
    first = next(iter(report["strategies"]))
    return [
        {
            "name": name,
            **row,
            "difference": report["differences"].get(f"{name} - {first}"),
            "steps": report["steps"].get(name, {}),
        }
        for name, row in report["strategies"].items()
    ]


def _by_purpose(sets: Sequence[Set]) -> dict[tuple[str, str, str], list[Set]]:
    """Sets by strategy, step and purpose, the rounds together."""
    found: dict[tuple[str, str, str], list[Set]] = {}
    for one in sets:
        found.setdefault((one.strategy, one.step, one.purpose), []).append(one)
    return found


def _lost(name: tuple[str, str, str], sets: Sequence[Set]) -> dict[str, Any]:
    """How many rollouts failed, by reason, and the share of all with its interval (Wilson 1927)."""
    statuses = Counter(rollout.status for one in sets for rollout in one.outcomes)
    n = statuses.total()
    lost = n - statuses["ok"]
    low, high = binomtest(lost, n).proportion_ci(CONFIDENCE, method="wilson") if n else (0.0, 0.0)
    strategy, step, purpose = name
    return {
        "strategy": strategy,
        "step": step,
        "purpose": purpose,
        "made": " ".join(part for part in name if part),
        "n": n,
        "lost": lost,
        "share": lost / n if n else 0.0,
        "low": low,
        "high": high,
        "reasons": {status: statuses[status] for status in FAILURES if statuses[status]},
    }


def _charts(
    report: Mapping[str, Any],
    histories: Mapping[tuple[str, str], History],
    trainings: Mapping[tuple[str, str], Training],
    lost: Sequence[Mapping[str, Any]],
) -> dict[str, charts.Spec]:
    """All charts that have something to show, by name."""
    strategies = list(report["strategies"])
    scores = [_scored(name, row) for name, row in report["strategies"].items()]
    found = {
        "scores": charts.scores(scores, "score on test", strategies),
        "cost/rollouts": charts.cost(scores, "rollouts", "rollouts", strategies),
        "cost/tokens": charts.cost(scores, "tokens", "tokens, read and written", strategies),
    }
    if differences := list(_to_first(report)):
        title = f"paired difference to {strategies[0]}"
        found["differences"] = charts.scores(differences, title, strategies, "+.3f", charts.ROOM)
    for column, title in CURVES.items():
        if rows := list(_curve(histories, column)):
            found[f"curve/{column}"] = charts.curve(rows, title, strategies)
    if reasons := [row for one in lost for row in _reasons(one)]:
        found["losses"] = charts.losses(reasons)
    for (strategy, step), training in trainings.items():
        if training.scores:
            found |= _pool_charts(f"{strategy} {step}", histories[strategy, step], training)
    return found


def _scored(name: str, row: Mapping[str, float]) -> dict[str, Any]:
    spent = {"rollouts": row["rollouts"], "tokens": row["tokens_in"] + row["tokens_out"]}
    opens = {"strategy": name, "purpose": "test"}
    return {**opens, "value": row["score"], "low": row["ci_low"], "high": row["ci_high"], "n": row["n"], **spent}


def _to_first(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    first = next(iter(report["strategies"]))
    for name in report["strategies"]:
        if row := report["differences"].get(f"{name} - {first}"):
            value = {"value": row["difference"], "low": row["ci_low"], "high": row["ci_high"], "n": row["n"]}
            yield {"strategy": name, "purpose": "test", **value}


def _curve(histories: Mapping[tuple[str, str], History], column: str) -> Iterator[dict[str, Any]]:
    """One number of each round of each training; a score on dev has its interval."""
    dev = {"low": "dev/ci_low", "high": "dev/ci_high", "n": "dev/n"} if column == "dev/score" else {}
    for (strategy, step), history in histories.items():
        opens = {"training": f"{strategy} {step}", "strategy": strategy, "step": step}
        purpose = "dev" if dev else "training"
        for row in history:
            if column in row:
                own = {name: row[source] for name, source in dev.items()}
                yield {**opens, "purpose": purpose, "round": row["round"], "value": row[column], **own}


def _reasons(one: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for status, count in one["reasons"].items():
        opens = {name: one[name] for name in ("strategy", "step", "purpose", "made", "n")}
        yield {**opens, "status": status, "count": count, "share": count / one["n"]}


def _pool_charts(name: str, history: History, training: Training) -> dict[str, charts.Spec]:
    """What inputs still taught, how the pool moved, and what each band learned, of one training with a pool."""
    strategy, step = name.rsplit(" ", 1)
    opens = {"strategy": strategy, "step": step, "purpose": "training"}
    visited = [
        {**opens, "round": row["round"], "verdict": verdict, "share": row[f"visited/{verdict}"], "n": _visits(row)}
        for row in history
        for verdict in charts.VERDICTS
    ]
    states = [
        {**opens, "round": row["round"], "state": column.removeprefix("pool/"), "prompts": value}
        for row in history
        for column, value in row.items()
        if column.startswith("pool/")
    ]
    found = {f"bands/{name}": charts.bands(visited), f"pool/{name}": charts.pool(states)}
    if learned := [_learned(name, band) for band in training.learned]:
        found[f"learning/{name}"] = charts.learning(learned)
    return found


def _learned(name: str, band: Band) -> dict[str, Any]:
    known = {"value": band.change, "low": band.ci_low, "high": band.ci_high, "n": band.n}
    return {"training": name, "band": band.band.replace("_", " "), "visits": band.pairs, **known}


def _visits(row: Mapping[str, float]) -> float:
    return row["drawn"] + row["due"]
