"""The champion of a pipeline and the decisions about it, for a person."""

from collections.abc import Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from twofold.champion import decisions, folder_of, standing
from twofold.console import console
from twofold.errors import ChampionError


def show(pipeline: str) -> None:
    """Print who is champion, who was it before, and a row for each decision.

    Raises:
        ChampionError: nothing was decided yet.
    """
    made = decisions(pipeline)
    if not made:
        raise ChampionError(f"Nothing was decided about {pipeline} yet. A retraining makes the first champion.")
    table = Table("", "decision", "candidate", "champion then", "gain on dev", "time (UTC)", "why")
    for number, one in enumerate(made, 1):
        why = escape(" ".join(one.reasons))
        table.add_row(f"{number:04d}", one.kind, one.candidate, one.champion, _gain(one.numbers), one.time[:19], why)
    screen = console()
    screen.print(table)
    now = standing(made)
    for name, result in (("champion", now.champion), ("previous", now.previous)):
        screen.print(f"{name}: {folder_of(pipeline, result) if result else 'none'}")


def _gain(numbers: Mapping[str, Any]) -> str:
    if not numbers:
        return ""
    gain = numbers["gain"]
    return f"{gain['difference']:+.3f} ({gain['ci_low']:+.3f} to {gain['ci_high']:+.3f}), n = {gain['n']}"
