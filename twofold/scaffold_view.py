"""What a person sees of one input and its scaffolds: what was tried for it, and what became of it."""

from collections import Counter
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from twofold.attempts import ATTEMPTS, read_attempts
from twofold.console import console
from twofold.errors import RecordError
from twofold.hints import lineage, read_hints
from twofold.pool import Transition, read_pool
from twofold.pool_view import VISIT, seen
from twofold.records import Rollout, of_student, read_rollouts


def show(prompt_id: str, folder: Path) -> None:
    """Print the lineage of an input: attempts of teachers, rollouts, and every change of it and of its scaffolds.

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
    console().print(_tried(folder / "records", family))
    states = ", ".join(f"{name} {pool.state(name) or 'left'}" for name in pool.ids if name in family)
    changes = Table("round", "prompt", "before", "after", "cause", *VISIT, title=escape(states))
    for row in pool.log:
        if row.prompt_id in family:
            changes.add_row(*_change(row))
    console().print(changes)


def _tried(records: Path, family: set[str]) -> Table:
    """The student's rollouts; equal ones of a round in one row."""
    found = Counter(
        (int(one.rollout_id.split("/")[2]) + 1, one.example_id, f"{one.reward:g}", _end(one))
        for one in of_student(read_rollouts(records))
        if one.example_id in family
    )
    table = Table("round", "prompt", "rollouts", "reward", "output", title="rollouts")
    for (number, prompt_id, reward, end), times in found.items():
        table.add_row(str(number), escape(prompt_id), str(times), reward, escape(end))
    return table


def _end(rollout: Rollout) -> str:
    if rollout.status != "ok":
        return rollout.status
    return ", ".join(f"{name}: {value}" for name, value in rollout.output.items())


def _change(row: Transition) -> tuple[str, ...]:
    return str(row.round), escape(row.prompt_id), row.before or "-", row.after or "-", row.cause, *seen(row)
