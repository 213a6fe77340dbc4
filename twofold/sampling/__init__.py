"""Where completions come from.

An `Engine` turns token ids into token ids. It knows nothing of DSPy, of rollouts or of rewards: the same protocol
is met by a model in this process and by a server far away.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One completion that is wanted."""

    prompt_ids: tuple[int, ...]
    seed: int
    """The draw depends on this seed and the prompt alone, not on which requests share the batch."""
    temperature: float
    """0 takes the likeliest token."""
    top_p: float
    top_k: int
    """0 switches it off."""
    max_tokens: int
    policy: str
    """Digest of the adapter that must answer, or `base`."""
    family: str = ""
    """Requests of one family (one module of a program) tend to begin alike; an engine may run that part once."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A sampled answer."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log-probability of each token under the distribution it was drawn from (temperature, top-p and top-k
    applied); 0 for every token when the temperature is 0."""
    text: str
    finish_reason: str
    policy: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that was not answered."""

    kind: str
    """`context_overflow`, `lm_error` or `timeout`: a failure status of a rollout."""
    message: str


class Engine(Protocol):
    """Answers requests, many at once."""

    def encode(self, messages: Sequence[dict[str, Any]]) -> tuple[int, ...]:
        """Token ids of a chat, ready for the assistant's answer."""
        ...

    def encode_answer(self, text: str, ended: bool) -> tuple[int, ...]:
        """Token ids of an assistant's answer that this engine did not sample, with the end of the turn if it ended."""
        ...

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion | Refusal]:
        """One answer per request, in order. A request that cannot be answered never spoils the others."""
        ...

    def load(self, adapter: Path) -> str:
        """Make the adapter in this folder available and return its digest, its name as a policy."""
        ...
