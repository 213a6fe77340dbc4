"""What a person sees of pools: prompts with their states, what changed between two, and how one was in a round."""

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from twofold.console import console
from twofold.errors import RecordError
from twofold.hints import read_hints, write_hints
from twofold.pool import Pool, Transition, at_round, counts, diff, read_pool, write_pool

VISIT = ("verdict", "score", "n", "accuracy (95%)")
"""Columns of a visit. The interval is that of the success rate, for rewards of 0 and 1."""


def show(folder: Path, round_number: int | None) -> None:
    """Print how many prompts are in each state, and every prompt in the pool with its last visit.

    Args:
        folder: where a pool was written, such as outputs/weights/0-w/pool.
        round_number: shows the pool as it was after this round, from 1; 0 is before the first, None is now.

    Raises:
        RecordError: there is no pool in the folder, or it logged nothing in or after the round.
    """
    pool = _read(folder, round_number)
    visits = {row.prompt_id: row for row in pool.log if row.cause == "score"}
    table = Table("prompt", "state", "turns", "round", *VISIT, title=_sizes(pool))
    for prompt_id, state in pool.states().items():
        if state:
            turns = pool.table["turns"][pool.positions[prompt_id]]
            table.add_row(escape(prompt_id), state, str(turns), *_visit(visits.get(prompt_id)))
    console().print(table)


def show_difference(a: Path, b: Path, round_a: int | None, round_b: int | None) -> None:
    """Print every prompt whose state in pool `b` is not what it was in pool `a`; arguments and errors as of `show`."""
    before, after = _read(a, round_a), _read(b, round_b)
    changes = diff(before, after)
    table = Table("prompt", "before", "after", title=f"prompts that differ: {len(changes)}")
    for change in changes:
        table.add_row(escape(change.prompt_id), change.before or "-", change.after or "-")
    console().print(table)


def restore(folder: Path, round_number: int, out: Path) -> None:
    """Write the pool as it was after this round, with the hints of its scaffolds, as a folder that training can begin
    with; errors as of `show`, and when `out` is there already with something in it."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecordError(f"{out} is not empty. Name a new folder, or remove this one.")
    pool, hints = _read(folder, round_number), read_hints(folder)
    write_pool(pool, out)
    write_hints({name: hint for name, hint in hints.items() if name in pool.positions}, out)
    console().print(f"{escape(str(out))}: the pool after round {round_number}: {_sizes(pool)}. To begin with it, set:")
    console().print(f"scaffold: {{pool: {{start: {escape(str(out))}}}}}")


def _read(folder: Path, round_number: int | None) -> Pool:
    pool = read_pool(folder)
    last = max(0, pool.log[-1].round) if pool.log else 0
    if round_number is None:
        return pool
    if not 0 <= round_number <= last:
        raise RecordError(
            f"{folder}: nothing is logged for round {round_number}. Name one from 0, before the first, to {last}."
        )
    return at_round(pool, round_number)


def _sizes(pool: Pool) -> str:
    return ", ".join(f"{count} {state}" for state, count in counts(pool).items() if count)


def _visit(row: Transition | None) -> tuple[str, ...]:
    return (str(row.round), *seen(row)) if row else ()


def seen(row: Transition) -> tuple[str, ...]:
    """What a visit found, for the columns `VISIT`; nothing for another row of the log."""
    if row.score is None:
        return ()
    interval = "" if row.score.p_low is None else f" ({row.score.p_low:.3f} to {row.score.p_high:.3f})"
    return str(row.verdict), f"{row.score.value:.3f}", str(row.score.n), f"{row.score.mean:.3f}{interval}"
