"""The engine in this process: a transformers model on the CPU, a CUDA GPU or Apple's MPS.

How a list of requests is answered:

1. A request that would not fit the context is refused; the others are put in buckets of equal policy, family and draw,
   and cut into batches, in the order they came.
2. The beginning a batch shares runs once; prompts that are equal run once (see `prefix`).
3. Tokens are drawn by inverting the cumulative distribution at a uniform number from the request's own generator, so
   an answer never depends on the seeds of its neighbours. Rows that are done leave the batch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from twofold import policy, prefix
from twofold.records import BASE_POLICY
from twofold.sampling import Completion, Refusal, SampleRequest
from twofold.sampling.tokens import TokenizedEngine
from twofold.settings import Settings


@dataclass
class _Answer:
    """A completion while it grows."""

    uniforms: np.ndarray
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class LocalEngine(TokenizedEngine):
    """Meets `twofold.sampling.Engine` with a model of its own."""

    def __init__(self, model_dir: Path, settings: Settings):
        self.settings = settings.sampling
        self.model = policy.load_base(model_dir, settings.model).requires_grad_(False)
        super().__init__(model_dir, self.model.generation_config, settings.sampling.context)
        self._weights = dict(self.model.named_parameters())
        self._base: dict[str, Tensor] = {}
        self._policy = BASE_POLICY

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion | Refusal]:
        answers: dict[int, Completion | Refusal] = {}
        buckets: dict[tuple, list[int]] = {}
        for k, request in enumerate(requests):
            if refusal := self._refused(request):
                answers[k] = refusal
            else:
                buckets.setdefault(_bucket(request), []).append(k)
        for bucket in buckets.values():
            for batch in _chunks(bucket, self.settings.batch_size):
                answers.update(zip(batch, self._answer([requests[k] for k in batch]), strict=True))
        return [answers[k] for k in range(len(requests))]

    def _use(self, name: str) -> None:
        """Let the model's weights be those of the policy `name`."""
        if name == self._policy:
            return
        with torch.no_grad():
            for weight, value in self._base.items():
                self._weights[weight].copy_(value)
            if name != BASE_POLICY:
                for weight, value in policy.folded(self._weights, self._adapters[name]).items():
                    self._base.setdefault(weight, self._weights[weight].detach().clone())
                    self._weights[weight].copy_(value)
        self._policy = name

    @torch.inference_mode()
    def _answer(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Answers to one batch: requests of equal policy, family and draw."""
        self._use(requests[0].policy)
        draw = _Draw(requests[0])
        answers = [_Answer(_uniforms(request)) for request in requests]
        decoding, hidden, positions = self._prefill(
            [request.prompt_ids for request in requests], room=max(request.max_tokens for request in requests)
        )
        live = list(range(len(requests)))
        while True:
            step = [answers[k].uniforms[len(answers[k].ids)] for k in live]
            tokens, logprobs = draw(self.model.lm_head(hidden), step)
            for k, token, logprob in zip(live, tokens.tolist(), logprobs.tolist(), strict=True):
                answers[k].ids.append(token)
                answers[k].logprobs.append(logprob)
            going = [row for row, k in enumerate(live) if not self._done(answers[k], requests[k])]
            if not going:
                break
            if len(going) < len(live):
                rows = torch.tensor(going, device=self.model.device)
                decoding.select(rows)
                tokens, positions, live = tokens[rows], positions[rows], [live[row] for row in going]
            positions = positions + 1
            hidden = prefix.run_step(self.model, tokens[:, None], positions[:, None], decoding)[:, -1]
        return [self._completion(answer, request) for answer, request in zip(answers, requests, strict=True)]

    def _prefill(self, prompts: list[tuple[int, ...]], room: int) -> tuple[prefix.Decoding, Tensor, Tensor]:
        """Run the prompts. Returns the decoding, each row's last hidden state (B, hidden) and last position (B,)."""
        unique = list(dict.fromkeys(prompts))
        shared = prefix.shared_length(unique)
        beginning = prefix.run_beginning(self.model, unique[0][:shared])
        ids, mask = _left_padded([prompt[shared:] for prompt in unique], self.model.device)
        decoding = prefix.Decoding(beginning, mask, room)
        positions = prefix.positions_after(beginning, mask)
        hidden = prefix.run_step(self.model, ids, positions, decoding)[:, -1]
        place = {prompt: row for row, prompt in enumerate(unique)}
        rows = torch.tensor([place[prompt] for prompt in prompts], device=self.model.device)
        decoding.select(rows)
        return decoding, hidden[rows], positions[rows, -1]

    def _done(self, answer: _Answer, request: SampleRequest) -> bool:
        return answer.ids[-1] in self.eos or len(answer.ids) == request.max_tokens

    def _completion(self, answer: _Answer, request: SampleRequest) -> Completion:
        text, finish_reason = self._decode(answer.ids)
        return Completion(
            token_ids=tuple(answer.ids),
            logprobs=tuple(answer.logprobs),
            text=text,
            finish_reason=finish_reason,
            policy=request.policy,
        )


class _Draw:
    """Draws one token per row from the distribution a request asks for."""

    def __init__(self, request: SampleRequest):
        self.greedy = request.temperature == 0
        self.warpers = LogitsProcessorList()
        if not self.greedy:
            self.warpers.append(TemperatureLogitsWarper(float(request.temperature)))
        if request.top_k:
            self.warpers.append(TopKLogitsWarper(request.top_k))
        if request.top_p < 1:
            self.warpers.append(TopPLogitsWarper(request.top_p))

    def __call__(self, logits: Tensor, uniforms: list[float]) -> tuple[Tensor, Tensor]:
        """Tokens and their log-probabilities, (B,) each, from logits (B, vocabulary) and one uniform number a row."""
        scores = logits.float()
        if self.greedy:
            tokens = scores.argmax(-1)
            return tokens, torch.zeros_like(tokens, dtype=torch.float32)
        logprobs = torch.log_softmax(self.warpers(None, scores), dim=-1)
        # float32 everywhere, for MPS has no float64; scaled by its own last value, so that rounding leaves no gap.
        cumulative = logprobs.exp().cumsum(-1)
        goal = torch.tensor(uniforms, dtype=torch.float32, device=logits.device) * cumulative[:, -1]
        tokens = torch.searchsorted(cumulative, goal[:, None], right=True).clamp(max=logits.shape[-1] - 1)
        return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


def _bucket(request: SampleRequest) -> tuple:
    # The first token is part of it: rows of one batch must share at least that much.
    draw = (request.temperature, request.top_p, request.top_k)
    return request.policy, request.family, *draw, request.prompt_ids[0]


def _chunks(items: list[int], size: int) -> Iterable[list[int]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _uniforms(request: SampleRequest) -> np.ndarray:
    """One number in [0, 1) for each token the request may draw."""
    return np.random.Generator(np.random.Philox(request.seed)).random(request.max_tokens)


def _left_padded(rows: list[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and mask, (B, S) each."""
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for k, row in enumerate(rows):
        ids[k, width - len(row) :] = torch.tensor(row)
        mask[k, width - len(row) :] = True
    return ids.to(device), mask.to(device)
