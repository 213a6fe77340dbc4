"""OpenAI-compatible servers: the key, the pace of requests, and what they cost.

1. The key comes from the environment, and a missing one is found before anything is asked.
2. Requests start at even distances, so that no minute sees more of them than allowed; retries wait for their turn too.
3. A ledger counts every request before it is sent, and tokens and money when the answer is there. When the budget is
   used up nothing more is sent. Answers that are on their way then still arrive: tokens and money may end above the
   budget by what these cost, calls never.
4. A chat's answer comes with its tokens, as the server counts them; one that does not is charged for every byte.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import dspy

from twofold.errors import SettingsError
from twofold.settings import VLLM, AskedEndpoint, Budget, Endpoint

if TYPE_CHECKING:
    import openai


@dataclass(frozen=True, slots=True)
class Spent:
    """What was used of a budget."""

    calls: int = 0
    """Requests that were sent, retries included."""
    tokens_in: int = 0
    tokens_out: int = 0
    money: float = 0.0
    """At the settings' prices, in their currency."""


class BudgetError(Exception):
    """The budget allows no further request."""


class AnswerError(ValueError):
    """A server's answer is not in the form that it was asked for."""


class Ledger:
    """The accounts of one budget. Thread-safe.

    Args:
        budget: the most that may be spent.
        spent: what was spent before, by a process that ended.
        keep: writes down what is spent at every change, a request before it is sent.
    """

    def __init__(self, budget: Budget, spent: Spent | None = None, keep: Callable[[Spent], None] = lambda spent: None):
        self.budget = budget
        self._keep = keep
        self._spent = spent or Spent()
        self._lock = threading.Lock()

    @property
    def spent(self) -> Spent:
        with self._lock:
            return self._spent

    def enter(self) -> None:
        """Count a request that is about to be sent.

        Raises:
            BudgetError: it must not be sent.
        """
        with self._lock:
            if used := self._used_up():
                raise BudgetError(f"The budget of {used} is used up.")
            self._spent = replace(self._spent, calls=self._spent.calls + 1)
            self._keep(self._spent)

    def charge(self, tokens_in: int, tokens_out: int, money: float) -> None:
        """Take in what an answer cost."""
        with self._lock:
            self._spent = replace(
                self._spent,
                tokens_in=self._spent.tokens_in + tokens_in,
                tokens_out=self._spent.tokens_out + tokens_out,
                money=self._spent.money + money,
            )
            self._keep(self._spent)

    def used(self) -> dict[str, float]:
        """Tokens and money, under flat metric names."""
        spent = self.spent
        return {"tokens_in": float(spent.tokens_in), "tokens_out": float(spent.tokens_out), "money": spent.money}

    def _used_up(self) -> str:
        """The first part of the budget that is used up, in words; empty when there is some of each left."""
        spent, budget = self._spent, self.budget
        parts = [
            (spent.calls, budget.calls, "calls"),
            (spent.tokens_in + spent.tokens_out, budget.tokens, "tokens"),
            (spent.money, budget.money, "money"),
        ]
        return next((f"{most:g} {name}" for used, most, name in parts if most is not None and used >= most), "")


class Pace:
    """Lets at most `per_minute` requests begin in a minute, at even distances; `None` lets all begin. Thread-safe."""

    def __init__(self, per_minute: int | None):
        self._gap = 60 / per_minute if per_minute else 0.0
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._next)
            self._next = begin + self._gap
        time.sleep(begin - now)


def key_of(endpoint: Endpoint | VLLM, place: str) -> str:
    """The endpoint's key; a word that is none, where it needs none.

    Args:
        place: where the endpoint stands in the settings, such as `prompts.proposer`.

    Raises:
        SettingsError: the environment has no such variable.
    """
    if endpoint.key is None:
        return "none"
    key = os.environ.get(endpoint.key)
    if not key:
        raise SettingsError(
            f"{place}: the environment has no variable {endpoint.key} with the endpoint's key. "
            f"Set it, or name another one in {place}.key."
        )
    return key


def money_for(endpoint: Endpoint | None, tokens_in: int, tokens_out: int) -> float:
    """What tokens cost at the endpoint's prices; nothing without an endpoint."""
    if endpoint is None:
        return 0.0
    return (tokens_in * endpoint.price_in + tokens_out * endpoint.price_out) / 1e6


def client(endpoint: Endpoint, place: str, pace: Pace, ledger: Ledger) -> "openai.OpenAI":
    """A client that tries again after time-outs, dropped connections, and answers 408, 409, 429 and 5xx.

    It waits twice as long each time, or as long as the server says. Every request, retries too, waits for the pace and
    is entered into the ledger; so a request may raise `BudgetError`. Raises `SettingsError` like `key_of`.
    """
    import openai  # takes most of a second

    def before(request: Any) -> None:
        pace.wait()
        ledger.enter()

    return openai.OpenAI(
        api_key=key_of(endpoint, place),
        base_url=endpoint.base_url,
        timeout=endpoint.timeout,
        max_retries=endpoint.retries,
        http_client=openai.DefaultHttpxClient(event_hooks={"request": [before]}),
    )


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server answered to a chat."""

    text: str | None
    """None when the model refused, or a filter did."""
    ended: bool
    """By itself, and not by the limit of its length."""
    tokens_in: int
    tokens_out: int


class Chat:
    """A server that is asked chats, as many at once as its settings allow. Thread-safe.

    Args:
        place: where the endpoint stands in the settings.
        ledger: counts the requests; what answers cost is charged by whoever asks.

    Raises:
        SettingsError: like `key_of`.
    """

    def __init__(self, endpoint: AskedEndpoint, place: str, ledger: Ledger):
        self._model = endpoint.model
        self._client = client(endpoint, place, Pace(endpoint.requests_per_minute), ledger)
        self._places = threading.BoundedSemaphore(endpoint.concurrency)

    def ask(self, messages: list[dict[str, Any]], **options: Any) -> Reply:
        """The answer to a chat; `options` are OpenAI's.

        Raises:
            openai.OpenAIError: there is none.
            BudgetError: nothing was sent.
            AnswerError: it is no chat completion.
        """
        with self._places:
            answer = self._client.chat.completions.create(model=self._model, messages=messages, **options)
        text = _text_of(answer)
        return Reply(text, answer.choices[0].finish_reason == "stop", *_usage_of(answer, messages, text))


def lm_of(endpoint: Endpoint, place: str, max_tokens: int, temperature: float) -> dspy.LM:
    """The endpoint as an LM for DSPy programs; raises `SettingsError` like `key_of`."""
    return dspy.LM(
        f"openai/{endpoint.model}",
        api_base=endpoint.base_url,
        api_key=key_of(endpoint, place),
        max_tokens=max_tokens,
        temperature=temperature,
        num_retries=endpoint.retries,
        timeout=endpoint.timeout,
        cache=False,
    )


def _text_of(answer: Any) -> str | None:
    """The text of a server's answer; None when the model refused, or a filter did.

    Raises:
        AnswerError: the answer is no chat completion.
    """
    try:
        choice = answer.choices[0]
        refused = choice.finish_reason == "content_filter" or choice.message.refusal
        return None if refused else choice.message.content or ""
    except (AttributeError, TypeError, IndexError) as error:
        raise AnswerError("The server's answer is no chat completion with a choice.") from error


def _usage_of(answer: Any, messages: list[dict[str, Any]], text: str | None) -> tuple[int, int]:
    """Tokens in and out. A server that does not say is charged one for each byte: more than it can be."""
    if answer.usage:
        return answer.usage.prompt_tokens or 0, answer.usage.completion_tokens or 0
    asked = sum(len(str(message["content"]).encode()) for message in messages)
    return asked, len((text or "").encode())
