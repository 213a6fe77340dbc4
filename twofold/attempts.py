"""All that teachers were asked and answered in a training, as a table: a row for each attempt."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from twofold.asking import Answers
from twofold.records import read_table, write_table

ATTEMPTS = "attempts.parquet"


@dataclass(frozen=True, slots=True)
class Tried:
    """One attempt of a teacher to help with one prompt."""

    round: int
    """As in `history.csv`, from 1."""
    prompt_id: str
    number: int
    """The attempts for one prompt count from 1."""
    end: str
    """`admitted`, the teacher's failure, or the check that refused the hint, as in `gate/answer`."""
    text: str
    """The hint; empty on failure."""
    reason: str
    """Why it came to nothing; empty when it did not."""
    checks: tuple[str, ...]
    """The checks it went through, in order."""
    place: str
    teacher: str
    prompt_version: str
    tokens_in: int
    tokens_out: int
    money: float


def attempts_of(round_number: int, answers: Answers) -> list[Tried]:
    """All attempts of one round."""
    return [
        Tried(
            round_number,
            one.prompt_id,
            number,
            attempt.end,
            attempt.hint.text,
            next((check.reason for check in attempt.checks if not check.passed), attempt.hint.error),
            tuple(check.rule for check in attempt.checks),
            answers.places[one.prompt_id],
            attempt.hint.teacher,
            attempt.hint.prompt_version,
            attempt.hint.tokens_in,
            attempt.hint.tokens_out,
            attempt.hint.money,
        )
        for one in answers.scaffoldings
        for number, attempt in enumerate(one.attempts, 1)
    ]


_COLUMNS = pa.schema(
    [
        ("round", pa.int32()),
        ("prompt_id", pa.string()),
        ("number", pa.int32()),
        ("end", pa.string()),
        ("text", pa.string()),
        ("reason", pa.string()),
        ("checks", pa.list_(pa.string())),
        ("place", pa.string()),
        ("teacher", pa.string()),
        ("prompt_version", pa.string()),
        ("tokens_in", pa.int32()),
        ("tokens_out", pa.int32()),
        ("money", pa.float64()),
    ]
)


def write_attempts(rows: Sequence[Tried], path: Path) -> None:
    """Write one row for each attempt; equal ones as equal bytes."""
    write_table(pa.Table.from_pylist([dataclasses.asdict(row) for row in rows], schema=_COLUMNS), path)


def read_attempts(path: Path) -> list[Tried]:
    """Read what `write_attempts` wrote; raises `RecordError` when it is missing, torn, or from a newer version."""
    rows = read_table(_COLUMNS, "attempt", path).to_pylist()
    return [Tried(**{**row, "checks": tuple(row["checks"])}) for row in rows]
