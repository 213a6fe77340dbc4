"""What a person sees of one input and its scaffolds: what was tried for it, and what became of it."""

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from twofold.attempts import ATTEMPTS, read_attempts
from twofold.console import console
from twofold.errors import RecordError
from twofold.hints import lineage, read_hints
from twofold.pool import Transition, read_pool


def show(prompt_id: str, folder: Path) -> None:
    """Print the lineage of an input: every attempt of a teacher, and every change of it and of its scaffolds.

    Args:
        prompt_id: the input, or any scaffold of it.
        folder: what a training left, such as outputs/weights/0-w.

    Raises:
        RecordError: the training had no teacher, or never saw the prompt.
    """
    pool, hints = read_pool(folder / "pool"), read_hints(folder / "pool")
    if prompt_id not in pool.positions:
        raise RecordError(f"{folder}: there is no prompt '{prompt_id}'. See all: twofold pool show {folder / 'pool'}")
    original = lineage(prompt_id, hints)[0]
    family = {name for name in pool.ids if lineage(name, hints)[0] == original}
    tried = Table("round", "prompt", "try", "end", "hint", "why", title=f"hints for {escape(original)}")
    for row in read_attempts(folder / "records" / ATTEMPTS):
        if row.prompt_id in family:
            texts = map(escape, (row.prompt_id, str(row.number), row.end, row.text, row.reason))
            tried.add_row(str(row.round), *texts)
    console().print(tried)
    states = ", ".join(f"{name} {pool.state(name) or 'left'}" for name in pool.ids if name in family)
    changes = Table("round", "prompt", "before", "after", "cause", "verdict", "score", "mean", title=escape(states))
    for row in pool.log:
        if row.prompt_id in family:
            changes.add_row(*_change(row))
    console().print(changes)


def _change(row: Transition) -> tuple[str, ...]:
    moved = (str(row.round), escape(row.prompt_id), row.before or "-", row.after or "-", row.cause)
    if row.score is None:
        return moved
    return (*moved, str(row.verdict), f"{row.score.value:.3f}", f"{row.score.mean:.3f}")
