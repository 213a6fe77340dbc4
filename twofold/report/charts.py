"""The charts of a report, as Vega-Lite specifications. Colours are the page's own: it has a light and a dark form."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from twofold.records import FAILURES

ROW = 46
"""Height of a row in pixels."""

VERDICTS = ("flat", "too_hard", "keep", "solved")

STATES = ("reserve", "queued", "active", "solved", "refresh", "suspect")
"""In the order of the page's colours, in which an input that teaches is blue and a solved one green."""

ROOM = 26
"""Pixels beside the values, where one may be 0 and its number must not meet the names."""

_PLAIN = "replace(datum.label, '_', ' ')"

Rows = Sequence[Mapping[str, Any]]
Spec = dict[str, Any]


def scores(rows: Rows, title: str, strategies: Sequence[str], form: str = ".3f", padding: int = 0) -> Spec:
    """A point with its interval for each strategy; rows have `strategy`, `value`, `low`, `high` and `n`."""
    named = alt.Y("strategy:N", sort=None, title=None, axis=alt.Axis(domain=False, ticks=False, labelFontSize=13))
    hover = _hover("strategy:N", "value:Q", "low:Q", "high:Q", "n:Q")
    base = alt.Chart().encode(y=named, tooltip=hover)
    line = _interval(base.encode(color=_colour(strategies))).encode(x="low:Q", x2="high:Q")
    dot = _dot(base.encode(color=_colour(strategies)))
    point = dot.encode(x=alt.X("value:Q", title=title, scale=alt.Scale(zero=True, padding=padding)))
    text = base.mark_text(dy=-14, fontSize=12).encode(x="value:Q", text=alt.Text("value:Q", format=form))
    return _spec(alt.layer(line, point, text, data=_values(rows)), ROW * len(rows) + 10)


def cost(rows: Rows, column: str, title: str, strategies: Sequence[str]) -> Spec:
    """Score against what was spent; rows as of `scores`, with the column."""
    x = alt.X(f"{column}:Q", title=title, axis=alt.Axis(format="~s", tickCount=5), scale=alt.Scale(zero=True))
    hover = _hover("strategy:N", "value:Q", "low:Q", "high:Q", "n:Q", f"{column}:Q")
    base = alt.Chart().encode(x=x, tooltip=hover)
    line = _interval(base.encode(color=_colour(strategies))).encode(y="low:Q", y2="high:Q")
    y = alt.Y("value:Q", title="score on test", scale=alt.Scale(zero=True))
    point = _dot(base.encode(color=_colour(strategies))).encode(y=y)
    text = base.mark_text(align="left", dx=11, fontSize=12).encode(y="value:Q", text="strategy:N")
    return _spec(alt.layer(line, point, text, data=_values(rows)), 240)


def curve(rows: Rows, title: str, strategies: Sequence[str]) -> Spec:
    """A line for each training; rows have `round`, `value`, `training` and `strategy`, some `low`, `high` and `n`."""
    rounds = sorted({int(row["round"]) for row in rows})
    ticks = rounds[:: -(-len(rounds) // 10)]
    x = alt.X(
        "round:Q", title="round", scale=alt.Scale(zero=False), axis=alt.Axis(values=ticks, format="d", grid=False)
    )
    y = alt.Y("value:Q", title=None, scale=alt.Scale(zero=True), axis=alt.Axis(tickCount=5))
    measured = [name for name in ("low", "high", "n") if any(name in row for row in rows)]
    hover = _hover("training:N", "round:Q", "value:Q", *(f"{name}:Q" for name in measured))
    base = alt.Chart().encode(x=x, color=_colour(strategies), tooltip=hover, detail="training:N")
    line = base.mark_line(strokeWidth=2.5).encode(y=y)
    point = base.mark_circle(size=60, opacity=1).encode(y="value:Q")
    rule = base.mark_rule(strokeWidth=2, opacity=0.4).encode(y="low:Q", y2="high:Q")
    layers = (rule, line, point) if measured else (line, point)
    return _spec(alt.layer(*layers, data=_values(rows)), 190, title)


def losses(rows: Rows) -> Spec:
    """Shares of failed rollouts by reason; rows have `made` (which rollouts), `status`, `share`, `count` and `n`."""
    x = alt.X("share:Q", title="share of rollouts", axis=alt.Axis(format="%"))
    y = alt.Y("made:N", sort=None, title=None, axis=alt.Axis(domain=False, ticks=False))
    colour = alt.Color("status:N", scale=alt.Scale(domain=list(FAILURES)), legend=_legend(rows, "status"))
    hover = _hover("made:N", "status:N", "count:Q", "share:Q", "n:Q")
    chart = alt.Chart(_values(rows)).mark_bar(height=16).encode(x=x, y=y, color=colour, tooltip=hover)
    return _spec(chart, 30 * len({row["made"] for row in rows}) + 40)


def bands(rows: Rows) -> Spec:
    """What visited inputs still teach, by round; rows have `round`, `verdict` and `share`."""
    return _stacked(rows, "verdict", "share", VERDICTS, alt.Axis(format="%"))


def pool(rows: Rows) -> Spec:
    """Prompts in the pool by state and round; rows have `round`, `state` and `prompts`."""
    return _stacked(rows, "state", "prompts", STATES, alt.Axis())


def learning(rows: Rows) -> Spec:
    """Change of accuracy by band of the score; rows have `band`, `value`, `low`, `high`, `n` and `training`."""
    order = list(dict.fromkeys(row["band"] for row in rows))
    y = alt.Y("band:N", sort=order, title=None, axis=alt.Axis(domain=False, ticks=False))
    hover = _hover("training:N", "band:N", "value:Q", "low:Q", "high:Q", "n:Q")
    base = alt.Chart().encode(y=y, tooltip=hover)
    zero = alt.Chart(_values([{"at": 0}])).mark_rule(strokeDash=[4, 4], opacity=0.6).encode(x="at:Q")
    line = _interval(base).encode(x="low:Q", x2="high:Q")
    point = _dot(base).encode(x=alt.X("value:Q", title="change of accuracy", scale=alt.Scale(padding=ROOM)))
    text = base.mark_text(dy=-14, fontSize=12).encode(x="value:Q", text="label:N")
    labelled = [{**row, "label": f"{row['value']:+.2f}, n = {row['n']}"} for row in rows]
    return _spec(alt.layer(zero, line, point, text, data=_values(labelled)), ROW * len(order))


def _stacked(rows: Rows, kind: str, column: str, order: Sequence[str], axis: alt.Axis) -> Spec:
    x = alt.X("round:O", title="round", axis=alt.Axis(labelAngle=0, labelOverlap=True))
    y = alt.Y(f"{column}:Q", title=None, axis=axis, stack="zero")
    colour = alt.Color(f"{kind}:N", scale=alt.Scale(domain=list(order)), legend=_legend(rows, kind))
    hover = _hover("round:O", f"{kind}:N", f"{column}:Q", *(("n:Q",) if any("n" in row for row in rows) else ()))
    place = alt.Order("place:Q")
    placed = [{**row, "place": order.index(row[kind])} for row in rows]
    chart = alt.Chart(_values(placed)).mark_bar().encode(x=x, y=y, color=colour, order=place, tooltip=hover)
    return _spec(chart, 220)


def _values(rows: Rows) -> alt.Data:
    return alt.Data(values=[dict(row) for row in rows])


def _interval(base: alt.Chart) -> alt.Chart:
    return base.mark_rule(strokeWidth=3, strokeCap="round", opacity=0.55)


def _dot(base: alt.Chart) -> alt.Chart:
    return base.mark_circle(size=130, opacity=1)


def _colour(strategies: Sequence[str]) -> alt.Color:
    """A strategy has one colour in all charts."""
    return alt.Color("strategy:N", scale=alt.Scale(domain=list(strategies)), legend=None)


def _legend(rows: Rows, column: str) -> alt.Legend:
    """Of what there is."""
    there = sorted({row[column] for row in rows})
    return alt.Legend(title=None, orient="top", columns=3, symbolType="circle", values=there, labelExpr=_PLAIN)


def _hover(*columns: str) -> list[alt.Tooltip]:
    """What is shown beside the pointer; `n` and counts are whole numbers."""
    whole = ("n:Q", "count:Q", "round:Q", "prompts:Q", "rollouts:Q", "tokens:Q")
    names = {"low:Q": "95% from", "high:Q": "95% to"}
    return [
        alt.Tooltip(column, title=names.get(column, column[:-2]), **_formatted(column, whole)) for column in columns
    ]


def _formatted(column: str, whole: Sequence[str]) -> dict[str, str]:
    if not column.endswith(":Q"):
        return {}
    return {"format": ",d" if column in whole else ".3f"}


def _spec(chart: alt.Chart | alt.LayerChart, height: int, title: str = "") -> Spec:
    sized = chart.properties(width="container", height=height, **({"title": title} if title else {}))
    return sized.to_dict()
