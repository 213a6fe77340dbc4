"""What every engine with a model's tokenizer does alike."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from twofold import policy
from twofold.errors import ModelError
from twofold.records import BASE_POLICY
from twofold.sampling import Refusal, SampleRequest


class TokenizedEngine:
    """The part of `twofold.sampling.Engine` that depends on the model's folder alone.

    Args:
        generation: the model's own settings, for the tokens that end an answer.
        context: most tokens of a prompt and its answer.
    """

    def __init__(self, model_dir: Path, generation: GenerationConfig, context: int):
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        self.eos = _eos_ids(generation, self.tokenizer)
        self.context = context
        self._answers = _AnswerEncoder(self.tokenizer)
        self._adapters: dict[str, Path] = {}

    def encode(self, messages: Sequence[dict[str, Any]]) -> tuple[int, ...]:
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_answer(self, text: str, ended: bool) -> tuple[int, ...]:
        return self._answers(text, ended)

    def load(self, adapter: Path) -> str:
        name = policy.digest(adapter)
        self._adapters[name] = adapter
        return name

    def _refused(self, request: SampleRequest) -> Refusal | None:
        """Why no engine can answer this request, if so; raises `ModelError` when its policy was never loaded."""
        if request.policy != BASE_POLICY and request.policy not in self._adapters:
            raise ModelError(f"policy {request.policy} was never loaded into this engine. Load its adapter first.")
        length = len(request.prompt_ids)
        if length + request.max_tokens > self.context:
            return Refusal(
                "context_overflow",
                f"prompt of {length} tokens and {request.max_tokens} to be sampled exceed sampling.context "
                f"({self.context})",
            )
        return Refusal("lm_error", "a prompt needs at least two tokens") if length < 2 else None

    def _decode(self, ids: Sequence[int]) -> tuple[str, str]:
        """Text and finish reason of an answer; a token that ends it is no part of the text."""
        stopped = ids[-1] in self.eos
        text = self.tokenizer.decode(list(ids[:-1] if stopped else ids), skip_special_tokens=True)
        return text, "stop" if stopped else "length"


class _AnswerEncoder:
    """Token ids of an answer that no engine sampled; a text that spells a special token is no special token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        # To split special tokens is a state of the tokenizer, not of a call: `encode` must never meet it in a thread.
        self._tokenizer = copy.deepcopy(tokenizer)

    def __call__(self, text: str, ended: bool) -> tuple[int, ...]:
        ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return (*ids, self._tokenizer.eos_token_id) if ended else tuple(ids)


def _eos_ids(generation: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end an answer."""
    configured = generation.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)
