"""The DSPy side of sampling: one engine object per module, and a recorder per rollout.

1. `bind` gives each predictor a `dspy.LM` whose engine is a `ModuleEngine` that knows the module's name.
2. A rollout runs under `recording(...)`: a setting of DSPy, which DSPy hands on to the threads it starts itself.
3. A call of the LM finds the rollout's `Recorder` there, samples through it, and is recorded as a `Call`.
4. When the adapter then fails to read the answer, the recorder, a DSPy callback too, marks that call.
"""

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import dspy
from dspy import lm15
from dspy.utils.callback import BaseCallback
from dspy.utils.exceptions import AdapterParseError

from twofold import digests
from twofold.local_lm import messages, refuse_unsupported
from twofold.records import BASE_POLICY, Call
from twofold.sampling import Completion, Engine, Refusal, SampleRequest
from twofold.seeds import derive
from twofold.settings import Draw

Sample = Callable[[SampleRequest], Completion | Refusal]

_SETTING = "twofold_recorder"


class ModuleEngine:
    """Answers the LM calls of one module, and has each recorded.

    It is shared by all copies of a program: copying it gives the object itself, so that a copy keeps its weights.

    Args:
        module: dotted path of the predictor.
        policy: digest of the adapter that must answer, or `base`.
        engine: renders chats as token ids.
        draw: how tokens are drawn, where the module does not set its own temperature, top_p or top_k.
        max_tokens: length of an answer, where the module does not set its own.
    """

    def __init__(self, module: str, policy: str, engine: Engine, draw: Draw, max_tokens: int):
        self.module = module
        self.policy = policy
        self.engine = engine
        self.draw = draw
        self.max_tokens = max_tokens

    def __copy__(self) -> "ModuleEngine":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModuleEngine":
        return self

    def complete(self, request: lm15.Request) -> lm15.Response:
        """The answer to a chat.

        Raises:
            lm15.LM15Error: the request asks for what an `Engine` cannot do, or was refused. DSPy turns it into
                `ContextWindowExceededError`, `LMTimeoutError` or another `LMError`.
            RuntimeError: no rollout is being recorded.
        """
        return self._complete(request, threading.get_ident())

    def _complete(self, request: lm15.Request, thread: int) -> lm15.Response:
        recorder = current_recorder(self.module)
        refuse_unsupported(request)
        wanted = self._wanted(request, recorder)
        answer = self._answer(wanted, recorder)
        if isinstance(answer, Refusal):
            raise _error(answer)
        self._note(request, wanted, answer, recorder, thread)
        return response(request, answer.text, len(wanted.prompt_ids), len(answer.token_ids))

    def _answer(self, wanted: SampleRequest, recorder: "Recorder") -> Completion | Refusal:
        return recorder.sample(wanted)

    def _note(
        self, request: lm15.Request, wanted: SampleRequest, answer: Completion, recorder: "Recorder", thread: int
    ) -> None:
        recorder.add(self.module, wanted, answer, images_of(request), thread)

    def _wanted(self, request: lm15.Request, recorder: "Recorder") -> SampleRequest:
        config = request.config
        prompt_ids = tuple(self.engine.encode(messages(request)))
        return SampleRequest(
            prompt_ids=prompt_ids,
            seed=recorder.next_seed(self.module, prompt_ids),
            temperature=first(config.temperature, self.draw.temperature),
            top_p=first(config.top_p, self.draw.top_p),
            top_k=first(config.top_k, self.draw.top_k),
            max_tokens=first(config.max_tokens, self.max_tokens),
            policy=self.policy,
            family=self.module,
        )


class AsyncModuleEngine:
    """A `ModuleEngine` for programs that await their modules."""

    def __init__(self, engine: ModuleEngine):
        self.engine = engine

    def __deepcopy__(self, memo: dict[int, Any]) -> "AsyncModuleEngine":
        return self

    async def complete(self, request: lm15.Request) -> lm15.Response:
        return await asyncio.to_thread(self.engine._complete, request, threading.get_ident())


def module_lm(module: str, engine: Engine, draw: Draw, max_tokens: int, policy: str = BASE_POLICY) -> dspy.LM:
    """The LM of one module: its name says which policy answers, and nothing is cached or tried again."""
    return lm_on(ModuleEngine(module, policy, engine, draw, max_tokens))


def lm_on(answers: ModuleEngine) -> dspy.LM:
    """The LM of the engine's module."""
    return dspy.LM(
        f"twofold/{answers.module}@{answers.policy}",
        engine=answers,
        async_engine=AsyncModuleEngine(answers),
        cache=False,
        num_retries=0,
    )


def current_recorder(module: str) -> "Recorder":
    """The recorder of the rollout that runs here; raises `RuntimeError` when there is none."""
    recorder = dspy.settings.get(_SETTING)
    if recorder is None:
        raise RuntimeError(f"Module '{module}' was called outside of a rollout; run it under `recording(...)`.")
    return recorder


@contextmanager
def recording(recorder: "Recorder", adapter: dspy.Adapter) -> Iterator[list[tuple[Any, dict[str, Any], Any]]]:
    """Run programs under this recorder and adapter; gives DSPy's trace: (predictor, inputs, prediction) per call."""
    trace: list[tuple[Any, dict[str, Any], Any]] = []
    with dspy.context(
        **{_SETTING: recorder},
        adapter=adapter,
        callbacks=[*dspy.settings.callbacks, recorder],
        trace=trace,
        disable_history=True,
    ):
        yield trace


@dataclass(slots=True)
class _Entry:
    call: Call
    section: int
    concurrent: bool


@dataclass(slots=True)
class _Turn:
    """What one call of an LM brought and the adapter has not read yet."""

    unread: list[_Entry] = field(default_factory=list)
    depth: int = 0


_turn: ContextVar[_Turn | None] = ContextVar("twofold_turn", default=None)


class Recorder(BaseCallback):
    """The calls of one rollout. Thread-safe.

    Calls of the thread that made the recorder are numbered as they come. Calls that other threads make in between
    (those of `dspy.Parallel`) come in an order that depends on timing, so they are numbered by module and prompt.
    For the same reason a call's seed is named by its module, its prompt, and how often that module had that prompt.

    Args:
        rollout_id: goes into each call.
        seed: seed of the rollout.
        sample: answers a request; may block.
    """

    def __init__(self, rollout_id: str, seed: int, sample: Sample):
        self.rollout_id = rollout_id
        self.seed = seed
        self.sample = sample
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []
        self._section = 0
        self._prompts: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def next_seed(self, module: str, prompt_ids: tuple[int, ...]) -> int:
        with self._lock:
            times = self._prompts[module, prompt_ids]
            self._prompts[module, prompt_ids] += 1
        return derive(self.seed, module, digests.of_json(prompt_ids), times)

    def add(
        self,
        module: str,
        request: SampleRequest,
        answer: Completion,
        images: tuple[str, ...],
        thread: int,
        off_policy: bool = False,
    ) -> None:
        """Record an answer; `thread` is the one that asked."""
        call = Call(
            rollout_id=self.rollout_id,
            module=module,
            index=-1,
            order=-1,
            prompt_ids=request.prompt_ids,
            completion_ids=answer.token_ids,
            logprobs=answer.logprobs,
            text=answer.text,
            finish_reason=answer.finish_reason,
            policy=answer.policy,
            temperature=request.temperature,
            seed=request.seed,
            # DSPy rejects an empty answer before any adapter sees it.
            parsed=bool(answer.text),
            parsed_share=1.0 if answer.text else 0.0,
            images=images,
            off_policy=off_policy,
        )
        with self._lock:
            concurrent = thread != self._thread
            self._section += not concurrent
            entry = _Entry(call, self._section, concurrent)
            self._entries.append(entry)
        turn = _turn.get()
        if turn is not None:
            turn.unread.append(entry)

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls so far, numbered."""
        with self._lock:
            entries = sorted(self._entries, key=_place)
        counts: Counter[str] = Counter()
        numbered = []
        for order, call in enumerate(entry.call for entry in entries):
            numbered.append(replace(call, index=counts[call.module], order=order))
            counts[call.module] += 1
        return tuple(numbered)

    def on_lm_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        _turn.set(_Turn())

    def on_adapter_parse_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        turn = _turn.get()
        if turn is not None:
            turn.depth += 1

    def on_adapter_parse_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        turn = _turn.get()
        if turn is None:
            return
        turn.depth -= 1
        # An adapter's `parse` may call its parent's, which reports too: only the outermost counts.
        if turn.depth or not turn.unread:
            return
        entry = turn.unread.pop(0)
        if exception is not None:
            with self._lock:
                entry.call = replace(entry.call, parsed=False, parsed_share=parsed_share(exception))


def parsed_share(error: BaseException) -> float:
    """Share of the output fields that could be read although the answer as a whole could not: 0 or more, below 1."""
    if not isinstance(error, AdapterParseError) or not isinstance(error.parsed_result, dict):
        return 0.0
    wanted = error.signature.output_fields.keys()
    read = min(len(wanted & error.parsed_result.keys()), len(wanted) - 1)
    return read / len(wanted)


def _place(entry: _Entry) -> tuple[Any, ...]:
    if not entry.concurrent:
        return (entry.section, 0)
    return (entry.section, 1, entry.call.module, entry.call.prompt_ids, entry.call.seed)


def images_of(request: lm15.Request) -> tuple[str, ...]:
    """Digests of the images in a chat, in order."""
    parts = [part for message in request.messages for part in message.parts if isinstance(part, lm15.ImagePart)]
    return tuple(hashlib.sha256(part.url.encode() if part.url else part.bytes).hexdigest() for part in parts)


def _error(refusal: Refusal) -> lm15.LM15Error:
    match refusal.kind:
        case "context_overflow":
            return lm15.ContextLengthError(refusal.message)
        case "timeout":
            return lm15.TimeoutError(refusal.message)
    return lm15.ServerError(refusal.message)


def response(request: lm15.Request, text: str, tokens_in: int, tokens_out: int) -> lm15.Response:
    """An answer in the form that DSPy takes."""
    return lm15.Response(
        id=None,
        model=request.model,
        message=lm15.Message.assistant(text),
        # DSPy would log a warning for every `length`; the call's record has the true reason.
        finish_reason="stop",
        usage=lm15.Usage(input_tokens=tokens_in, output_tokens=tokens_out),
    )


def first(own: float | int | None, default: float | int) -> Any:
    """What a module sets itself, or else the default."""
    return default if own is None else own
