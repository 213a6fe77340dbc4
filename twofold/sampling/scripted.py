"""An engine for unit tests: a function writes the answers. It is no model; never use it outside tests."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from twofold import digests
from twofold.sampling import Completion, Refusal, SampleRequest

EOS = 256
"""The end-of-sequence token; the tokens below it are the bytes of UTF-8 text."""

LOGPROB = -0.5
"""Log-probability of every token drawn at a temperature above 0."""

Answer = Callable[[str, SampleRequest], str | Refusal]


class ScriptedEngine:
    """Meets the `Engine` protocol with answers from a function, for unit tests only.

    Tokens are bytes, so that text and tokens turn into each other without loss. A chat is rendered as
    `[role]\\ncontent\\n` per message and ends with `[assistant]\\n`.

    Args:
        answer: gets the rendered chat and the request, and returns the answer's text or a `Refusal`. What it raises
            leaves `sample`, as an engine's own failure would.
    """

    def __init__(self, answer: Answer):
        self.answer = answer
        self.requests: list[SampleRequest] = []
        """Every request, in the order of arrival."""
        self.batches: list[int] = []
        """How many requests each call of `sample` brought."""

    def encode(self, messages: Sequence[dict[str, Any]]) -> tuple[int, ...]:
        turns = [f"[{message['role']}]\n{_text(message['content'])}\n" for message in messages]
        return tuple("".join([*turns, "[assistant]\n"]).encode())

    def encode_answer(self, text: str, ended: bool) -> tuple[int, ...]:
        return (*text.encode(), EOS) if ended else tuple(text.encode())

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion | Refusal]:
        self.requests.extend(requests)
        self.batches.append(len(requests))
        return [self._complete(request) for request in requests]

    def load(self, adapter: Path) -> str:
        return digests.of_folder(adapter)

    def _complete(self, request: SampleRequest) -> Completion | Refusal:
        answer = self.answer(decode(request.prompt_ids), request)
        if isinstance(answer, Refusal):
            return answer
        token_ids = (*answer.encode(), EOS)[: request.max_tokens]
        return Completion(
            token_ids=token_ids,
            logprobs=(LOGPROB if request.temperature else 0.0,) * len(token_ids),
            text=decode(token_ids),
            finish_reason="stop" if token_ids[-1] == EOS else "length",
            policy=request.policy,
        )


def decode(token_ids: Sequence[int]) -> str:
    """The text of these tokens, without the end-of-sequence token."""
    return bytes(token for token in token_ids if token != EOS).decode(errors="replace")


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", f"<{part['type']}>") for part in content)
