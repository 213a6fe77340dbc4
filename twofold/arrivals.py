"""Rows that arrive after a task's data were made: checked one by one, and kept as a new version of the data.

1. A file `*.jsonl` in the incoming folder is a batch: a row per line, the fields of one example. It is known by the
   digest of its bytes.
2. A row must have the fields of the pipeline's training examples, with values of the same kind, and such as the
   program's signatures allow. An id, or inputs, that some example already has are refused: a row of dev or test must
   not be trained on.
3. The file as it came, its good rows, and its bad rows with their reasons are written aside, and take their place
   `data/arrived/PIPELINE/NUMBER-DIGEST` in one rename. Only then is the incoming file removed.
4. A batch whose digest is there has been taken. So a process that is killed anywhere loses no row and takes none twice.
5. Training reads the rows of all batches, in their order, after the pipeline's own examples.
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dspy
from pydantic import TypeAdapter, ValidationError

from twofold import digests
from twofold.examples import example_id
from twofold.programs import Pipeline, modules
from twofold.settings import Settings

ARRIVED = Path("data/arrived")
ORIGINAL, ROWS, REJECTED = "original.jsonl", "rows.jsonl", "rejected.jsonl"

_KINDS = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of one batch."""

    folder: Path
    rows: int
    rejected: int


def batches(pipeline: str) -> list[Path]:
    """The folders of all batches, in the order they came."""
    return sorted((ARRIVED / pipeline).glob("[0-9]*-*"))


def arrived(pipeline: str, inputs: Sequence[str]) -> list[dspy.Example]:
    """The good rows of all batches, in order.

    Args:
        inputs: names of the examples' input fields.
    """
    lines = [line for batch in batches(pipeline) for line in _lines((batch / ROWS).read_bytes())]
    return [dspy.Example(**json.loads(line)).with_inputs(*inputs) for line in lines]


def take(incoming: Path, pipeline: Pipeline, settings: Settings) -> list[Taken]:
    """Take all files that lie in `incoming`; returns what became of those that were new."""
    for aside in (ARRIVED / pipeline.name).glob(".*.part"):
        shutil.rmtree(aside)
    checks = Checks(pipeline, settings)
    taken = []
    for file in sorted(incoming.glob("[!.]*.jsonl")):
        content = file.read_bytes()
        digest = digests.short(digests.of_bytes(content))
        there = batches(pipeline.name)
        if not any(batch.name.endswith(f"-{digest}") for batch in there):
            number = int(there[-1].name.split("-")[0]) + 1 if there else 1
            taken.append(_keep(content, ARRIVED / pipeline.name / f"{number:04d}-{digest}", checks))
        # Whoever is still writing it has another batch for the next time.
        if file.read_bytes() == content:
            file.unlink()
    return taken


class Checks:
    """What a row must be to join the training examples. A row that passes counts as known from then on."""

    def __init__(self, pipeline: Pipeline, settings: Settings):
        splits = dict(zip(("train", "dev", "test"), pipeline.load(settings), strict=True))
        train = splits["train"]
        self.inputs = sorted(train[0].inputs().keys())
        self.required = set.intersection(*(set(example.keys()) for example in train)) - {"id"}
        self.kinds: dict[str, set[str]] = defaultdict(set)
        self.blank: set[str] = set()
        for name, value in (pair for example in train for pair in example.items()):
            self.kinds[name].add(_kind(value))
            if value == "":
                self.blank.add(name)
        self.allowed = _annotations(pipeline.program(), set(self.kinds))
        self.known: dict[str, str] = {}
        for split, examples in splits.items():
            for example in examples:
                self._remember(example, split)
        for example in arrived(pipeline.name, self.inputs):
            self._remember(example, "what arrived before")

    def problem(self, line: bytes) -> str:
        """What is wrong with a row; empty when nothing is."""
        try:
            row = json.loads(line)
            # Python reads more than can be written: NaN, and halves of characters such as "\ud800".
            _written(row)
        except (ValueError, RecursionError) as error:
            return f"It is not JSON: {error}."
        if not isinstance(row, dict):
            return "It is not a JSON object."
        found = next(self._problems(row), "")
        if not found:
            self._remember(dspy.Example(**row).with_inputs(*self.inputs), "this batch")
        return found

    def _problems(self, row: dict[str, Any]) -> Iterator[str]:
        if lacking := sorted(self.required - row.keys()):
            yield f"It lacks {', '.join(lacking)}."
        if strange := sorted(row.keys() - self.kinds.keys() - {"id"}):
            yield f"No example has {', '.join(strange)}."
        for name, value in row.items():
            yield from self._wrong(name, value)
        for key in _keys(dspy.Example(**row).with_inputs(*self.inputs)):
            if key in self.known:
                yield f"{self.known[key]} has it already."

    def _wrong(self, name: str, value: Any) -> Iterator[str]:
        kinds = self.kinds.get(name, {"text"})
        if _kind(value) not in kinds:
            yield f"`{name}` must be {' or '.join(sorted(kinds))}, not {_kind(value)}."
        if isinstance(value, str) and not value.strip() and name not in self.blank:
            yield f"`{name}` is empty."
        for allowed in self.allowed[name]:
            try:
                allowed.validate_python(value)
            except ValidationError as error:
                yield f"`{name}`: {error.errors()[0]['msg']}."

    def _remember(self, example: dspy.Example, place: str) -> None:
        for key in _keys(example):
            self.known.setdefault(key, f"Example {example_id(example)} of {place}")


def _keys(example: dspy.Example) -> tuple[str, str]:
    """What two examples must not have in common: the id, and all inputs."""
    return f"id {example_id(example)}", f"inputs {digests.of_json(example.inputs().toDict())}"


def _annotations(program: dspy.Module, names: set[str]) -> dict[str, list[TypeAdapter[Any]]]:
    """For each field of the examples, the types that the program's signatures give a field of that name."""
    found: dict[str, list[TypeAdapter[Any]]] = defaultdict(list)
    for predictor in modules(program).values():
        for name, field in predictor.signature.fields.items():
            if name in names:
                found[name].append(TypeAdapter(field.annotation))
    return found


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "null")


def _lines(content: bytes) -> list[bytes]:
    """Not at the line ends that are legal inside of JSON texts, such as U+2028."""
    return [line for line in content.split(b"\n") if line.strip()]


def _written(row: Any) -> bytes:
    return json.dumps(row, sort_keys=True, ensure_ascii=False, allow_nan=False).encode()


def _keep(content: bytes, folder: Path, checks: Checks) -> Taken:
    good, bad = [], []
    for line in _lines(content):
        reason = checks.problem(line)
        if reason:
            bad.append({"reason": reason, "row": line.decode("utf-8", "backslashreplace")})
        else:
            good.append(json.loads(line))
    aside = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    (aside / ORIGINAL).write_bytes(content)
    for name, rows in ((ROWS, good), (REJECTED, bad)):
        (aside / name).write_bytes(b"".join(_written(row) + b"\n" for row in rows))
    aside.rename(folder)
    return Taken(folder, len(good), len(bad))
