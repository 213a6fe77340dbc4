"""Teacher programs: rollouts of other programs, from which the student learns too (mmGRPO, arXiv 2508.04660).

1. A source has the modules and fields of the student; its instructions, its demos and its LM may be others. A program
   that differs is refused, with the difference.
2. When one of its modules is called, the source's LM is asked with the source's prompt.
3. The text that comes back is given to the student's module of that name as if it were its own answer, and that call is
   recorded: the student's own prompt for these inputs, and the text in the student's tokens, with the end of the turn.
   It is marked `off_policy` and has no log-probabilities, for the student did not say it.
4. Its calls join the groups of the student's (`groups.py`), and have a loss of their own (`trainer.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dspy
from dspy import lm15
from dspy.utils.exceptions import AdapterParseError

from twofold.endpoints import Chat, Ledger, key_of, money_for
from twofold.errors import PipelineError
from twofold.hints import ModuleHints, with_hints
from twofold.lm import AsyncModuleEngine, ModuleEngine, Recorder, first, images_of, lm_on, response
from twofold.local_lm import messages, refuse_unsupported
from twofold.programs import bind, modules, structure, structure_at
from twofold.records import BASE_POLICY
from twofold.sampling import Completion, Engine, SampleRequest
from twofold.settings import AskedEndpoint, Draw
from twofold.settings import Source as SourceSettings

LMs = Callable[[str], dspy.LM]
"""Gives the LM of a module."""


@dataclass(frozen=True, slots=True)
class Source:
    """A program to learn from."""

    name: str
    program: dspy.Module
    lm_of: LMs
    """LMs whose engines say aloud what they answer; see `local_lms` and `endpoint_lms`."""


@dataclass(frozen=True, slots=True)
class Said:
    """An answer of a source's LM."""

    text: str
    ended: bool
    """By itself, and not by the limit of its length."""


_said: ContextVar[list[Said]] = ContextVar("twofold_said")


def check(sources: Sequence[SourceSettings], student: dspy.Module) -> None:
    """See to it that every source's program is there, and has the student's structure, and that its LM's key is known.

    Raises:
        PipelineError: naming the source and the differences.
        SettingsError: the environment lacks an endpoint's key.
    """
    for source in sources:
        if source.lm:
            key_of(source.lm, f"weights.sources.{source.name}.lm")
        if source.program is None:
            continue
        path = Path(source.program)
        if not path.is_file():
            raise PipelineError(
                f"weights.sources: {source.name}: there is no {path}. Name a saved program, such as a copy of the "
                "program.json that `dvc repro strategy@prompts` makes."
            )
        if found := differences(structure_at(path), structure(student)):
            raise PipelineError(
                f"weights.sources: {source.name}: {path} has not the student's structure: {'; '.join(found)}. A source "
                "needs the student's modules and fields; its instructions and demos may differ."
            )


def differences(source: Mapping[str, Sequence[str]], student: Mapping[str, Sequence[str]]) -> list[str]:
    """What keeps a source from answering in the student's place; both are fields by module, inputs before outputs."""
    missing = [f"module '{name}' is missing" for name in student if name not in source]
    extra = [f"the student has no module '{name}'" for name in source if name not in student]
    other = [
        f"module '{name}' has the fields {', '.join(source[name])}, the student's has {', '.join(student[name])}"
        for name in student
        if name in source and list(source[name]) != list(student[name])
    ]
    return missing + extra + other


def local_lms(engine: Engine, draw: Draw, max_tokens: int, ledger: Ledger) -> LMs:
    """LMs that are the base model, on the student's engine."""
    return lambda module: lm_on(_Asked(module, engine, draw, max_tokens, ledger))


def endpoint_lms(endpoint: AskedEndpoint, where: str, ledger: Ledger) -> LMs:
    """LMs that are a server; raises `SettingsError` when the environment lacks its key."""
    server = _Server(endpoint, where, ledger)
    name = f"endpoint/{endpoint.model}"
    lm = dspy.LM(name, engine=server, async_engine=AsyncModuleEngine(server), cache=False, num_retries=0)
    return lambda module: lm.copy()


def staged(
    source: Source,
    student: dspy.Module,
    hints: ModuleHints,
    adapter: dspy.Adapter,
    engine: Engine,
    draw: Draw,
    max_tokens: int,
) -> tuple[dspy.Module, "SourceAdapter"]:
    """The source's program, with these hints in its prompts and the student's, and the adapter that records its calls.

    Args:
        student: its modules without an LM are those that are trained.
        draw: how the student would draw.
    """
    own = bind(with_hints(student, hints), lambda module: lm_on(_Echo(module, source.name, engine, draw, max_tokens)))
    program = bind(with_hints(source.program, hints), source.lm_of)
    trained = [name for name, predictor in modules(student).items() if predictor.lm is None]
    asked, answering = modules(program), modules(own)
    return program, SourceAdapter(adapter, {asked[name].lm: answering[name] for name in trained})


class SourceAdapter:
    """Asks as a source does, and has the student's module read the answer, and record it.

    Args:
        adapter: of both programs.
        student: its predictors, by the LM of the source's predictor of that name.
    """

    def __init__(self, adapter: dspy.Adapter, student: Mapping[dspy.BaseLM, dspy.Predict]):
        self.adapter = adapter
        self.student = student

    def __call__(
        self,
        lm: dspy.BaseLM,
        lm_kwargs: dict[str, Any],
        signature: type[dspy.Signature],
        demos: list[dict[str, Any]],
        inputs: dict[str, Any],
    ) -> list[dict[str, Any]]:
        own = self.student.get(lm)
        if own is None:
            return self.adapter(lm, lm_kwargs, signature, demos, inputs)
        with _listening():
            # What cannot be read, the student's module will fail to read again, and say so.
            with suppress(AdapterParseError):
                self.adapter(lm, dict(lm_kwargs), signature, demos, inputs)
            return self.adapter(own.lm, lm_kwargs, own.signature, own.demos, inputs)

    async def acall(
        self,
        lm: dspy.BaseLM,
        lm_kwargs: dict[str, Any],
        signature: type[dspy.Signature],
        demos: list[dict[str, Any]],
        inputs: dict[str, Any],
    ) -> list[dict[str, Any]]:
        own = self.student.get(lm)
        if own is None:
            return await self.adapter.acall(lm, lm_kwargs, signature, demos, inputs)
        with _listening():
            with suppress(AdapterParseError):
                await self.adapter.acall(lm, dict(lm_kwargs), signature, demos, inputs)
            return await self.adapter.acall(own.lm, lm_kwargs, own.signature, own.demos, inputs)


@contextmanager
def _listening() -> Iterator[None]:
    token = _said.set([])
    try:
        yield
    finally:
        _said.reset(token)


class _Asked(ModuleEngine):
    """The base model in a source's place: its answers are heard, and not recorded."""

    def __init__(self, module: str, engine: Engine, draw: Draw, max_tokens: int, ledger: Ledger):
        super().__init__(module, BASE_POLICY, engine, draw, max_tokens)
        self.ledger = ledger

    def _note(
        self, request: lm15.Request, wanted: SampleRequest, answer: Completion, recorder: Recorder, thread: int
    ) -> None:
        self.ledger.charge(len(wanted.prompt_ids), len(answer.token_ids), 0.0)
        _said.get().append(Said(answer.text, answer.finish_reason == "stop"))


class _Server:
    """A server in a source's place."""

    def __init__(self, endpoint: AskedEndpoint, where: str, ledger: Ledger):
        self.endpoint = endpoint
        self.ledger = ledger
        self.chat = Chat(endpoint, where, ledger)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Server":
        return self

    def complete(self, request: lm15.Request) -> lm15.Response:
        return self._complete(request, 0)

    def _complete(self, request: lm15.Request, thread: int) -> lm15.Response:
        import openai  # takes most of a second

        refuse_unsupported(request)
        temperature = first(request.config.temperature, self.endpoint.temperature)
        max_tokens = first(request.config.max_tokens, self.endpoint.max_tokens)
        try:
            answer = self.chat.ask(messages(request), temperature=temperature, max_tokens=max_tokens)
        except openai.APITimeoutError as error:
            raise lm15.TimeoutError(str(error)) from error
        except Exception as error:
            # Whatever a server or its library does, the rollout is lost, and training goes on.
            raise lm15.ServerError(f"{type(error).__name__}: {error}") from error
        tokens = answer.tokens_in, answer.tokens_out
        self.ledger.charge(*tokens, money_for(self.endpoint, *tokens))
        text = answer.text or ""
        _said.get().append(Said(text, answer.ended))
        return response(request, text, *tokens)


class _Echo(ModuleEngine):
    """A module of the student that answers what the source said, and has that recorded as off-policy."""

    def _answer(self, wanted: SampleRequest, recorder: Recorder) -> Completion:
        said = _said.get()[-1]
        return Completion(
            token_ids=self.engine.encode_answer(said.text, said.ended),
            logprobs=(),
            text=said.text,
            finish_reason="stop" if said.ended else "length",
            policy=self.policy,
        )

    def _note(
        self, request: lm15.Request, wanted: SampleRequest, answer: Completion, recorder: Recorder, thread: int
    ) -> None:
        recorder.add(self.module, wanted, answer, images_of(request), thread, off_policy=True)
