"""Private values out of texts that people are shown.

1. A pipeline names private fields: inputs, or outputs of its program or of a module.
2. Where a value has its own place it is replaced whole, and so is every answer of a module that gives a private output.
3. In other text (prompts, answers, hints) each occurrence of a value is replaced, and each run of `RUN` words of one,
   in any case and with any spaces or marks between them: models repeat, shorten and cut off what they are given.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

MARK = "[private]"

RUN = 4
"""Words in a row that give a longer value away; of a shorter value, all."""

_WORD = re.compile(r"(?!(?<=\\)[nrt])\w+")
"""Line ends and tabs that JSON has written as `\\n`, `\\r` and `\\t` are no part of a word."""


class Redactor:
    """Replaces private values. Without any, texts come back as they are."""

    def __init__(self, fields: Collection[str], values: Iterable[Any]):
        """`values`: all that was in a private field anywhere, JSON values."""
        self.names = frozenset(fields)
        plain = {text for value in values for text in _texts(value)}
        # Some adapters have prompts and answers in JSON.
        texts = plain | {json.dumps(text)[1:-1] for text in plain}
        # Longest first: a value that is part of another must not break it up.
        self.whole = sorted(texts, key=lambda text: (-len(text), text))
        self.runs = {run for text in texts for run in _runs(_words(text))}
        self.lengths = sorted({len(run) for run in self.runs})

    def text(self, text: str) -> str:
        for value in self.whole:
            text = text.replace(value, MARK)
        return self._without_runs(text) if self.runs else text

    def fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Fields by name, private ones replaced whole."""
        return {name: MARK if name in self.names else self.value(value) for name, value in fields.items()}

    def value(self, value: Any) -> Any:
        """A JSON value with every text in it redacted."""
        match value:
            case str():
                return self.text(value)
            case list() | tuple():
                return [self.value(part) for part in value]
            case dict():
                return {self.text(name): self.value(part) for name, part in self.fields(value).items()}
        return value

    def _without_runs(self, text: str) -> str:
        words = list(_WORD.finditer(text))
        folded = [word.group().casefold() for word in words]
        hidden = {
            at + offset
            for length in self.lengths
            for at in range(len(words) - length + 1)
            if tuple(folded[at : at + length]) in self.runs
            for offset in range(length)
        }
        parts, end = [], 0
        for at in sorted(hidden):
            if at - 1 not in hidden:
                parts += [text[end : words[at].start()], MARK]
            end = words[at].end()
        return "".join(parts) + text[end:]


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value; numbers count as they are written."""
    match value:
        case str() if value.strip():
            yield value.strip()
        case list() | tuple():
            for part in value:
                yield from _texts(part)
        case dict():
            yield from _texts(list(value.values()))
        case int() | float():
            yield str(value)


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]


def _runs(words: list[str]) -> Iterator[tuple[str, ...]]:
    length = min(RUN, len(words))
    if length:
        yield from (tuple(words[at : at + length]) for at in range(len(words) - length + 1))
