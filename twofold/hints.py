"""Hints in their places: what the student sees when a prompt of the pool is an original with hints.

1. A hint has a parent, which is an original or itself a scaffold, a text, and a place (`scaffolds.place`).
2. A prompt's hints are those on the way from its original to it, the oldest first.
3. Hints for the program end the input field that the pipeline names. Hints for a module end its instructions, in the
   rollouts of this prompt alone.

The texts lie beside the pool. Training reads them, and nothing else: an evaluation knows originals only.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import dspy

from twofold.errors import RecordError
from twofold.records import read_json, write_json
from twofold.scaffolds import PROGRAM, hinted, with_hint

HINTS = "hints.json"
"""File of the texts in the folder of a pool."""

ModuleHints = tuple[tuple[str, str], ...]
"""Module and text of each hint that goes into a module's prompt, the oldest first."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A hint that made a scaffold of a prompt."""

    parent: str
    """The prompt it was written for."""
    text: str
    place: str
    """`PROGRAM`, or the module whose prompt it goes into."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the program is run on."""

    prompt_id: str
    """Names its rollouts: an example's id, or a scaffold's in the pool."""
    example: dspy.Example
    """With the hints for the program in it."""
    module_hints: ModuleHints = ()


def lineage(prompt_id: str, hints: Mapping[str, Placed]) -> tuple[str, tuple[Placed, ...]]:
    """The original that a prompt comes from, and its hints, the oldest first."""
    found: list[Placed] = []
    while prompt_id in hints:
        found.append(hints[prompt_id])
        prompt_id = hints[prompt_id].parent
    return prompt_id, tuple(reversed(found))


def prompts(
    ids: Sequence[str], examples: Mapping[str, dspy.Example], hints: Mapping[str, Placed], field: str | None
) -> list[Prompt]:
    """The prompts with these ids, in order.

    Args:
        examples: the originals, by id.
        hints: by the scaffold that each made.
        field: the input that takes hints.

    Raises:
        RecordError: an id is neither an example's nor a scaffold's whose hint is known.
        PipelineError: `field` takes no hints.
    """
    found = []
    for prompt_id in ids:
        original, own = lineage(prompt_id, hints)
        if original not in examples:
            raise RecordError(f"prompt {prompt_id}: there is no example {original}. Run the `data` stage again.")
        found.append(prompt_with(prompt_id, examples[original], own, field))
    return found


def prompt_with(prompt_id: str, example: dspy.Example, own: Sequence[Placed], field: str | None) -> Prompt:
    """An example with hints in their places, as the prompt `prompt_id`; raises `PipelineError` like `prompts`."""
    for hint in own:
        if hint.place == PROGRAM:
            example = hinted(example, hint.text, field)
    return Prompt(prompt_id, example, tuple((hint.place, hint.text) for hint in own if hint.place != PROGRAM))


def with_hints(program: dspy.Module, module_hints: ModuleHints) -> dspy.Module:
    """The program with these hints in its modules' prompts; itself when there are none.

    Raises:
        PipelineError: the program has no such module.
    """
    for module, text in module_hints:
        program = with_hint(program, module, text)
    return program


def write_hints(hints: Mapping[str, Placed], folder: Path) -> None:
    """Write the hints of a pool, by the scaffold that each made; equal ones as equal bytes."""
    rows = {prompt_id: dataclasses.asdict(hint) for prompt_id, hint in hints.items()}
    write_json({"hints": rows}, folder / HINTS)


def read_hints(folder: Path) -> dict[str, Placed]:
    """Read what `write_hints` wrote; raises `RecordError` when it is missing, torn, or from a newer version."""
    return {prompt_id: Placed(**row) for prompt_id, row in read_json(folder / HINTS)["hints"].items()}
