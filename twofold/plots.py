"""Pictures of a comparison, as PNG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

PANELS = {
    "reward": "reward of training rollouts",
    "dev/score": "score on dev",
    "groups_all_equal_share": "all-equal groups",
}
"""What `rounds` shows, and how each panel is titled."""

Curve = Sequence[tuple[float, float]]
"""Points, from left to right."""


def scores(strategies: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """One bar per strategy: its score on test, with the 95% interval."""
    figure = Figure(figsize=(1.6 + 1.1 * len(strategies), 3.6), layout="constrained")
    axes = figure.subplots()
    heights = [row["score"] for row in strategies.values()]
    below = [row["score"] - row["ci_low"] for row in strategies.values()]
    above = [row["ci_high"] - row["score"] for row in strategies.values()]
    bars = axes.bar(list(strategies), heights, yerr=[below, above], capsize=4, color="#4477aa", width=0.6)
    axes.bar_label(bars, fmt="%.2f", label_type="center", color="white")
    n = next(iter(strategies.values()))["n"]
    axes.set(ylabel="score on test", title=f"n = {n:.0f}, 95% intervals", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def rounds(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Curves over the rounds of training, one line for each training of each strategy."""
    figure = Figure(figsize=(3.4 * len(PANELS), 3.2), layout="constrained")
    lines = dict.fromkeys((row["strategy"], row["step"]) for row in rows)
    for axes, (column, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for strategy, step in lines:
            own = [row for row in rows if (row["strategy"], row["step"]) == (strategy, step) and row[column] != ""]
            axes.plot(
                [int(row["round"]) for row in own],
                [float(row[column]) for row in own],
                marker="o",
                markersize=3,
                label=f"{strategy} {step}",
            )
        axes.set(xlabel="round", title=title, ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    if lines:
        figure.axes[0].legend(frameon=False)
    _save(figure, path)


def curves(panels: Mapping[str, Mapping[str, Sequence[Curve]]], x: str, y: str, path: Path) -> None:
    """A panel for each title. In it each name has its curves, pale, and their mean, point by point.

    Curves of one name have equally many points. The last mean is dashed, so that an equal one under it is seen.
    """
    figure = Figure(figsize=(4.6 * len(panels), 3.6), layout="constrained")
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, lines) in zip(row, panels.items(), strict=True):
        for number, (name, own) in enumerate(lines.items()):
            colour, style = f"C{number}", "--" if number == len(lines) - 1 else "-"
            for points in own:
                axes.plot(*zip(*points, strict=True), color=colour, alpha=0.2)
            axes.plot(*np.mean(own, axis=0).T, color=colour, linestyle=style, marker="o", label=name)
        axes.set(xlabel=x, title=title, ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set(ylabel=y)
    figure.axes[0].legend(frameon=False)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    # Without metadata, equal pictures are equal bytes.
    figure.savefig(path, dpi=120, metadata={"Software": None})
