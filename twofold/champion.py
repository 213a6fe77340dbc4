"""The champion: the result in use, and every decision that made it so.

1. A program with its weights is kept in `champion/PIPELINE/models/ID`; ID is a digest of it, and nothing there changes.
2. A decision is a file of `champion/PIPELINE/records`, numbered in order. `first` makes the program as it was written
   the champion; `promoted` puts a candidate in the champion's place; `refused` leaves it; `rolled_back` puts the
   previous champion back.
3. Who is champion follows from the decisions alone. So the file that is written last, at once or not at all, moves it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from twofold import digests
from twofold.errors import ChampionError
from twofold.records import read_json, write_json

CHAMPION = Path("champion")
PARTS = ("program", "checkpoint")
"""Folders that make a result what it is; those of a program on the base model lack the second."""

Kind = Literal["first", "promoted", "refused", "rolled_back"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided about a candidate."""

    kind: Kind
    candidate: str
    """The id of what was judged; for `rolled_back`, of the champion put back."""
    champion: str | None
    """The id of the champion until then."""
    time: str
    reasons: tuple[str, ...] = ()
    """Why a candidate was refused; a person's note, where one was asked."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """The fields of a `Verdict`."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """What the candidate came from: strategy, data, runs."""
    question: str = ""
    """Digest of all that the decision depends on: equal ones need no second decision."""


@dataclass(frozen=True, slots=True)
class Standing:
    champion: str | None = None
    previous: str | None = None


def id_of(files: Mapping[str, str]) -> str:
    """The id of a result, from the digests of its files by path; only those in its folders `PARTS` count."""
    return digests.short(digests.of_json({path: found for path, found in files.items() if path.split("/")[0] in PARTS}))


def folder_of(pipeline: str, result: str) -> Path:
    """Where the files of a result are kept."""
    return CHAMPION / pipeline / "models" / result


def decisions(pipeline: str) -> list[Decision]:
    """All decisions, in order.

    Raises:
        RecordError: a record is torn.
    """
    return [_decision(read_json(path)) for path in _records(pipeline)]


def standing(made: Iterable[Decision]) -> Standing:
    """Who is champion after these decisions, and who was it before."""
    now = Standing()
    for one in made:
        if one.kind != "refused":
            now = Standing(one.candidate, now.champion)
    return now


def record(pipeline: str, decision: Decision) -> Path:
    """Write a decision down; from then on it counts."""
    number = len(_records(pipeline)) + 1
    path = CHAMPION / pipeline / "records" / f"{number:04d}-{decision.kind}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(decision, path)
    return path


def rollback(pipeline: str) -> Decision:
    """Put the previous champion back; the present one becomes `previous`.

    Raises:
        ChampionError: there is no previous one, or its files are gone.
    """
    now = standing(decisions(pipeline))
    if now.previous is None:
        raise ChampionError(f"{CHAMPION / pipeline}: there is no champion before the present one to go back to.")
    if not folder_of(pipeline, now.previous).is_dir():
        raise ChampionError(f"{folder_of(pipeline, now.previous)} is missing. Fetch it: dvc checkout or dvc pull.")
    decision = Decision("rolled_back", now.previous, now.champion, time_now())
    record(pipeline, decision)
    return decision


def time_now() -> str:
    """The time of a decision, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _records(pipeline: str) -> list[Path]:
    return sorted((CHAMPION / pipeline / "records").glob("[0-9]*-*.json"))


def _decision(content: dict[str, Any]) -> Decision:
    return Decision(**{**content, "reasons": tuple(content["reasons"])})
