"""Data sets on disk: DSPy examples as JSON lines, and the id each example is known by."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dspy

from twofold import digests
from twofold.errors import PipelineError


def example_id(example: dspy.Example) -> str:
    """The example's own `id` field, else a digest of its fields; the same in every run and on every machine."""
    fields = example.toDict()
    own = fields.get("id")
    return digests.short(digests.of_json(fields)) if own in (None, "") else str(own)


def labels_of(example: dspy.Example) -> dict[str, Any]:
    """The fields that a program is not given: all but its inputs and the `id`."""
    inputs = example.inputs().toDict()
    return {name: value for name, value in example.toDict().items() if name not in inputs and name != "id"}


def write_examples(examples: Sequence[dspy.Example], path: Path) -> None:
    """Write one example per line: `example_id`, `inputs` (the names of its input fields) and `fields`.

    Equal examples give equal bytes.

    Raises:
        PipelineError: there are no examples, two share an id, one has no input fields, or a value is not JSON.
    """
    lines = [_line(example, number, path) for number, example in enumerate(examples)]
    _check(examples, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())


def read_examples(path: Path) -> list[dspy.Example]:
    """Read what `write_examples` wrote, in order and with its input fields.

    Raises:
        PipelineError: the file is missing, torn or empty, or two examples share an id.
    """
    try:
        # Not `splitlines`: a text may hold other line ends, such as U+2028.
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        examples = [dspy.Example(**row["fields"]).with_inputs(*row["inputs"]) for row in rows]
    except OSError as error:
        raise PipelineError(f"{path}: cannot be read ({error.strerror}). Run the `data` stage again.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise PipelineError(f"{path}: not a file of examples ({error!r}). Run the `data` stage again.") from error
    _check(examples, path)
    return examples


def _line(example: dspy.Example, number: int, path: Path) -> str:
    try:
        row: dict[str, Any] = {
            "example_id": example_id(example),
            "inputs": sorted(example.inputs().keys()),
            "fields": example.toDict(),
        }
        return json.dumps(row, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise PipelineError(
            f"{path}: example {number} cannot be written ({error}). Its fields must be JSON values, and "
            "`with_inputs(...)` must name its input fields."
        ) from error


def _check(examples: Sequence[dspy.Example], path: Path) -> None:
    if not examples:
        raise PipelineError(f"{path}: the split has no examples.")
    counts = Counter(map(example_id, examples))
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise PipelineError(
            f"{path}: {len(twice)} ids occur more than once, such as {', '.join(twice[:3])}. Remove the duplicates, or "
            "give each example an `id` of its own."
        )
