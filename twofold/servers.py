"""LMs on servers: what a pipeline's program and metric ask, and what a whole program can run on.

1. `connect` makes a `dspy.LM` for each endpoint of the settings; `asking` lets programs find them, by name, in
   `dspy.settings.endpoints`.
2. A request waits for a place and for its turn. It is sent again after what may go away by itself: a busy or failing
   server, a time-out, an empty answer. Then it is an LM error of DSPy, and one rollout's.
3. A key, model or address that the server refuses, or a budget that is used up, end the run: going on would only make
   failures. What was finished until then is kept.
4. An answer is kept too, and an equal request is answered from there. So a run that was killed goes on as it would
   have gone, and an optimizer that runs a program again costs nothing more.
5. What a rollout's answers came to goes into its `Tally`. The ledger beside the kept answers knows what was sent.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dspy
from dspy import lm15

from twofold import digests
from twofold.endpoints import AnswerError, BudgetError, Chat, Ledger, Spent, money_for
from twofold.errors import SettingsError
from twofold.lm import AsyncModuleEngine, current_recorder, response
from twofold.local_lm import AsyncLocalLM, messages
from twofold.records import read_json, write_json
from twofold.sampling import Completion, SampleRequest
from twofold.settings import NamedEndpoint

_TALLY = "twofold_tally"

_OPTIONS = "max_tokens temperature top_p stop seed frequency_penalty presence_penalty response_format".split()
"""What a request may ask for; lm15 and OpenAI have the same names."""


class Tally:
    """What the answers of endpoints came to in one rollout. Thread-safe."""

    def __init__(self) -> None:
        self._used: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, answer: "Answer", money: float) -> None:
        used = {"calls": 1, "tokens_in": answer.tokens_in, "tokens_out": answer.tokens_out, "money": money}
        with self._lock:
            self._used.update({f"{name}/{part}": value for part, value in used.items()})

    @property
    def usage(self) -> dict[str, float]:
        """As in `Rollout.usage`."""
        with self._lock:
            return {name: float(value) for name, value in sorted(self._used.items())}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said, and its tokens as the server counts them."""

    text: str
    tokens_in: int
    tokens_out: int


class Server:
    """The engine of an endpoint's LM. All copies of a program share it.

    Args:
        name: of the endpoint in the settings.
        place: where it stands there, such as `endpoints.untrusted`.
        kept: folder for answers; None keeps none.
    """

    def __init__(self, name: str, endpoint: NamedEndpoint, place: str, ledger: Ledger, kept: Path | None = None):
        self.name, self.endpoint, self.place = name, endpoint, place
        self._ledger, self._kept = ledger, kept
        self._chat = Chat(endpoint, place, ledger)
        self._one_by_one: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Server":
        return self

    def complete(self, request: lm15.Request) -> lm15.Response:
        """The answer to a chat of texts.

        Raises:
            lm15.LM15Error: the request asks for what cannot be passed on, or the server gave no answer.
            SettingsError: the server refuses all requests, or the budget is used up.
        """
        if request.tools:
            raise lm15.UnsupportedFeatureError(f"{self.place}: tools cannot be passed on to an endpoint.")
        wishes = {name: getattr(request.config, name) for name in _OPTIONS}
        options = {name: wish for name, wish in wishes.items() if wish not in (None, ())}
        answer = self._answer({"messages": messages(request), **options})
        money = money_for(self.endpoint, answer.tokens_in, answer.tokens_out)
        if tally := dspy.settings.get(_TALLY):
            tally.add(self.name, answer, money)
        return response(request, answer.text, answer.tokens_in, answer.tokens_out)

    def _answer(self, asked: dict[str, Any]) -> Answer:
        """The kept answer to a request, or a new one."""
        if self._kept is None:
            return self._ask(asked)
        digest = digests.of_json([self.endpoint.model, self.endpoint.base_url, asked])
        path = self._kept / f"{digests.short(digest)}.json"
        with self._one_by_one[digest]:
            if path.exists():
                return Answer(**read_json(path))
            answer = self._ask(asked)
            write_json(asdict(answer), path)
        return answer

    def _ask(self, asked: dict[str, Any]) -> Answer:
        for _ in range(self.endpoint.retries + 1):
            answer = self._send(asked)
            if answer.text.strip():
                return answer
        raise lm15.ServerError(f"{self.place}: the server's answers were empty.")

    def _send(self, asked: dict[str, Any]) -> Answer:
        import openai  # takes most of a second

        try:
            made = self._chat.ask(**asked)
        except BudgetError as error:
            raise SettingsError(
                f"{self.place}.budget: {error} Raise it and run again; what is done is kept."
            ) from error
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            # Only the status: what a server says may repeat the request, and this error is logged.
            raise SettingsError(
                f"{self.place}: the server refused ({error.status_code}). Check its model, base_url and key."
            ) from None
        except (openai.OpenAIError, AnswerError) as error:
            raise lm15.ServerError(f"{self.place}: {type(error).__name__}: {error}") from error
        used = made.tokens_in, made.tokens_out
        self._ledger.charge(*used, money_for(self.endpoint, *used))
        return Answer(made.text or "", *used)


class HostedModule:
    """Answers the calls of one module from a server, and records each with its text and without tokens."""

    def __init__(self, module: str, server: Server):
        self.module, self.server = module, server

    def __deepcopy__(self, memo: dict[int, Any]) -> "HostedModule":
        return self

    def complete(self, request: lm15.Request) -> lm15.Response:
        return self._complete(request, threading.get_ident())

    def _complete(self, request: lm15.Request, thread: int) -> lm15.Response:
        recorder = current_recorder(self.module)
        response = self.server.complete(request)
        # It draws nothing there, but calls side by side are put in order by it.
        seed = recorder.next_seed(self.module, tuple(digests.of_json(messages(request)).encode()))
        temperature, policy = request.config.temperature or 0.0, self.server.name
        asked = SampleRequest((), seed, temperature, 1.0, 0, 0, policy, self.module)
        said = Completion((), (), response.text, "stop", policy)
        recorder.add(self.module, asked, said, (), thread)
        return response


def connect(endpoints: Mapping[str, NamedEndpoint], needed: tuple[str, ...], folder: Path) -> dict[str, dspy.LM]:
    """An LM for each endpoint.

    Args:
        needed: names that the pipeline asks for.
        folder: for answers, and for what was spent.

    Raises:
        SettingsError: a needed endpoint is not there, or a key is not in the environment.
    """
    check_named(endpoints, needed)
    lms = {}
    for name, endpoint in endpoints.items():
        kept = folder / name
        server = Server(name, endpoint, f"endpoints.{name}", _ledger(endpoint, kept), kept)
        lms[name] = _lm(server, AsyncLocalLM(server), endpoint)
    return lms


def check_named(endpoints: Mapping[str, NamedEndpoint], needed: tuple[str, ...]) -> None:
    """Raise `SettingsError` when the settings lack an endpoint that the pipeline asks."""
    missing = [name for name in needed if name not in endpoints]
    if missing:
        raise SettingsError(
            f"endpoints: the pipeline asks {', '.join(missing)}, and the settings have no endpoint of that name. Give "
            "it a model and a base_url; docs/tasks.md has examples."
        )


def hosted(name: str, endpoint: NamedEndpoint, folder: Path) -> Server:
    """A server that a whole program can run on; raises `SettingsError` like `connect`."""
    return Server(f"hosted/{name}", endpoint, f"hosted.{name}", _ledger(endpoint, folder / "hosted" / name))


def hosted_lm(module: str, server: Server) -> dspy.LM:
    """The LM of one module of a program that runs on the server."""
    answers = HostedModule(module, server)
    return _lm(answers, AsyncModuleEngine(answers), server.endpoint)


@contextmanager
def asking(endpoints: Mapping[str, dspy.LM], tally: Tally | None = None) -> Iterator[None]:
    """Let programs and metrics find these LMs in `dspy.settings.endpoints`, and count what they answer."""
    with dspy.context(**{"endpoints": endpoints, _TALLY: tally}, disable_history=True):
        yield


def _ledger(endpoint: NamedEndpoint, folder: Path) -> Ledger:
    """The accounts of all that this checkout ever sent to an endpoint of this name."""
    path = folder / "spent.json"
    before = Spent(**read_json(path)) if path.exists() else Spent()
    return Ledger(endpoint.budget, before, lambda now: write_json(now, path))


def _lm(engine: Any, async_engine: Any, endpoint: NamedEndpoint) -> dspy.LM:
    return dspy.LM(
        f"endpoint/{endpoint.model}",
        engine=engine,
        async_engine=async_engine,
        cache=False,
        num_retries=0,
        temperature=endpoint.temperature,
        max_tokens=endpoint.max_tokens,
    )
