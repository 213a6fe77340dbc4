"""What every engine does with a model's tokenizer."""

import copy
from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from twofold.sampling import Refusal, SampleRequest


def encode(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    """Token ids of a chat, ready for the assistant's answer."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


class AnswerEncoder:
    """Token ids of an answer that no engine sampled; a text that spells a special token is no special token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        # To split special tokens is a state of the tokenizer, not of a call: `encode` must never meet it in a thread.
        self._tokenizer = copy.deepcopy(tokenizer)

    def __call__(self, text: str, ended: bool) -> tuple[int, ...]:
        ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return (*ids, self._tokenizer.eos_token_id) if ended else tuple(ids)


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], eos: frozenset[int]) -> tuple[str, str]:
    """Text and finish reason of an answer; a token that ends it is no part of the text."""
    stopped = ids[-1] in eos
    text = tokenizer.decode(list(ids[:-1] if stopped else ids), skip_special_tokens=True)
    return text, "stop" if stopped else "length"


def eos_ids(generation: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end an answer."""
    configured = generation.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)


def refuse(request: SampleRequest, context: int) -> Refusal | None:
    """Why no engine can answer this request, if so."""
    length = len(request.prompt_ids)
    if length + request.max_tokens > context:
        return Refusal(
            "context_overflow",
            f"prompt of {length} tokens and {request.max_tokens} to be sampled exceed sampling.context ({context})",
        )
    return Refusal("lm_error", "a prompt needs at least two tokens") if length < 2 else None
