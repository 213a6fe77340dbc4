"""How a signature becomes a prompt, and an answer becomes fields.

`PlainAdapter` is for small models, which do not follow DSPy's field markers: the task is the system message, demos are
earlier turns of the chat, and the answer is the bare value. DSPy's own adapters are there by name, set so that every
answer that does not parse is seen as such, and never hidden by a second request in another format.

`twofold export` ships this file as it is, so it imports nothing of Twofold.
"""

import re
from typing import Any, Literal, get_args, get_origin

import dspy
from dspy.adapters.utils import (
    annotation_allows_none,
    apply_output_field_defaults,
    format_field_value,
    parse_value,
)
from dspy.utils.exceptions import AdapterParseError
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

Signature = type[dspy.Signature]
AdapterName = Literal["plain", "chat", "json", "xml"]


class PlainAdapter(dspy.Adapter):
    """A signature as a plain chat.

    The system message holds the signature's instructions, and a line `Name: description` for every field that was
    given one. Inputs are `Name: value` lines. When there is one output field, the line `Name:` follows, and the answer
    is the bare value that completes it: without that cue a small model replies to the input instead. When there are
    several, the answer is `Name: value` lines. A value may run over many lines. Demos and history are turns in the
    same form, each with the fields it has.

    Answers are read with some tolerance: white space around a value, and for other fields than text a full stop after
    it; for a `Literal` also its case. An empty value is no value.
    """

    def format_system_message(self, signature: Signature) -> str:
        described = [
            f"{_name(field)}: {field.json_schema_extra['desc']}"
            for name, field in signature.fields.items()
            if field.json_schema_extra["desc"] != f"${{{name}}}"
        ]
        return "\n".join([signature.instructions.strip(), *described])

    def format_user_message_content(
        self,
        signature: Signature,
        inputs: dict[str, Any],
        prefix: str = "",
        suffix: str = "",
        main_request: bool = False,
    ) -> str:
        lines = [f"{_name(field)}: {_shown(field, inputs[name])}" for name, field in _given(signature, inputs)]
        outputs = list(signature.output_fields.values())
        cue = [f"{_name(outputs[0])}:"] if len(outputs) == 1 and lines else []
        return "\n".join(line for line in [prefix, *lines, *cue, suffix] if line)

    def format_assistant_message_content(
        self, signature: Signature, outputs: dict[str, Any], missing_field_message: str | None = None
    ) -> str:
        fields = signature.output_fields
        values = {
            name: _shown(field, outputs[name]).strip()
            for name, field in fields.items()
            if outputs.get(name) is not None
        }
        if len(fields) == 1:
            return next(iter(values.values()), "")
        return "\n".join(f"{_name(fields[name])}: {value}" for name, value in values.items())

    def format_demos(self, signature: Signature, demos: list[dict[str, Any]]) -> list[dict[str, Any]]:
        turns = []
        for demo in map(dict, demos):
            question = self.format_user_message_content(signature, demo)
            answer = self.format_assistant_message_content(signature, demo)
            if question and answer:
                turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return turns

    def parse(self, signature: Signature, completion: str) -> dict[str, Any]:
        """The output fields of `completion`.

        Raises:
            AdapterParseError: a field is missing or has no valid value; `parsed_result` holds those that do.
        """
        read, problems = {}, {}
        for name, text in _split(signature, completion).items():
            try:
                read[name] = _read(text, signature.output_fields[name].annotation)
            except ValueError as error:
                problems[name] = f"{name}: {error}"
        completed = apply_output_field_defaults(signature, read)
        fields = {name: value for name, value in completed.items() if name not in problems}
        if fields.keys() != signature.output_fields.keys():
            raise AdapterParseError("PlainAdapter", signature, completion, "\n".join(problems.values()), fields)
        return fields


class _Tries:
    """Asks again, up to `retries` times, after an answer that does not parse."""

    retries: int = 0

    def __call__(
        self,
        lm: dspy.BaseLM,
        lm_kwargs: dict[str, Any],
        signature: Signature,
        demos: list[dict[str, Any]],
        inputs: dict[str, Any],
    ) -> list[dict[str, Any]]:
        for _ in range(self.retries):
            try:
                return super().__call__(lm, dict(lm_kwargs), signature, demos, inputs)
            except AdapterParseError:
                continue
        return super().__call__(lm, lm_kwargs, signature, demos, inputs)

    async def acall(
        self,
        lm: dspy.BaseLM,
        lm_kwargs: dict[str, Any],
        signature: Signature,
        demos: list[dict[str, Any]],
        inputs: dict[str, Any],
    ) -> list[dict[str, Any]]:
        for _ in range(self.retries):
            try:
                return await super().acall(lm, dict(lm_kwargs), signature, demos, inputs)
            except AdapterParseError:
                continue
        return await super().acall(lm, lm_kwargs, signature, demos, inputs)


class _Partial:
    """Says which fields of an answer are good, where DSPy's adapters stop at the first bad one."""

    def parse(self, signature: Signature, completion: str) -> dict[str, Any]:
        try:
            return super().parse(signature, completion)
        except AdapterParseError as error:
            error.parsed_result = {}
            for name in signature.output_fields:
                error.parsed_result |= self._alone(name, signature, completion)
            raise

    def _alone(self, name: str, signature: Signature, completion: str) -> dict[str, Any]:
        """Field `name` read as if it were the only one asked for; empty when it is not there or not valid."""
        for other in signature.output_fields:
            if other != name:
                signature = signature.delete(other)
        try:
            return super().parse(signature, completion)
        except AdapterParseError:
            return {}


class _Plain(_Tries, PlainAdapter): ...


class _Chat(_Tries, _Partial, dspy.ChatAdapter): ...


class _Json(_Tries, _Partial, dspy.JSONAdapter): ...


class _Xml(_Tries, _Partial, dspy.XMLAdapter): ...


def make_adapter(name: AdapterName, retries: int = 0) -> dspy.Adapter:
    """The adapter of this name, without native tool calls and without a fallback to another format.

    Args:
        retries: how often a module asks again after an answer that does not parse. Each try is a call of its own,
            drawn with a seed of its own; at temperature 0 it gives the same answer again.
    """
    match name:
        case "plain":
            adapter = _Plain()
        case "chat":
            adapter = _Chat(use_json_adapter_fallback=False)
        case "json":
            # A JSONAdapter never falls back, and asks for a response format only where the LM says it has one.
            adapter = _Json(use_native_function_calling=False)
        case "xml":
            adapter = _Xml(use_json_adapter_fallback=False)
    adapter.retries = retries
    return adapter


def _name(field: FieldInfo) -> str:
    return field.json_schema_extra["prefix"].rstrip(": ")


def _given(signature: Signature, inputs: dict[str, Any]) -> list[tuple[str, FieldInfo]]:
    return [(name, field) for name, field in signature.input_fields.items() if inputs.get(name) is not None]


def _shown(field: FieldInfo, value: Any) -> str:
    return format_field_value(field, value)


def _split(signature: Signature, completion: str) -> dict[str, str]:
    """The text of each output field: all of it for the only field, else what follows `Name:` at a line's beginning."""
    fields = signature.output_fields
    if len(fields) == 1:
        return dict.fromkeys(fields, completion.strip())
    by_label = {_name(field).casefold(): name for name, field in fields.items()}
    label = "|".join(map(re.escape, sorted(by_label, key=len, reverse=True)))
    _, *parts = re.split(rf"^[ \t]*({label})[ \t]*:", completion, flags=re.MULTILINE | re.IGNORECASE)
    texts: dict[str, str] = {}
    for found, text in zip(parts[::2], parts[1::2], strict=True):
        texts.setdefault(by_label[found.casefold()], text.strip())
    return texts


def _read(text: str, annotation: Any) -> Any:
    """The value of type `annotation` that `text` spells; raises `ValueError` when it spells none."""
    if annotation_allows_none(annotation) and text.rstrip(".").casefold() in ("", "none", "null"):
        return None
    if not text:
        raise ValueError("empty")
    if annotation is str:
        return text
    if get_origin(annotation) is Literal:
        return _option(text, get_args(annotation))
    if annotation in (int, float, bool):
        return TypeAdapter(annotation).validate_python(text.rstrip("."))
    if (
        annotation_allows_none(annotation)
        and len(kinds := [k for k in get_args(annotation) if k is not type(None)]) == 1
    ):
        return _read(text, kinds[0])
    return parse_value(text, annotation)


def _option(text: str, options: tuple[Any, ...]) -> Any:
    spelled = {str(option): option for option in options}
    folded = {name.casefold(): option for name, option in reversed(spelled.items())}
    for candidate in (text, text.rstrip(".").rstrip()):
        if candidate in spelled:
            return spelled[candidate]
        if candidate.casefold() in folded:
            return folded[candidate.casefold()]
    raise ValueError(f"'{text}' is none of {', '.join(spelled)}")
