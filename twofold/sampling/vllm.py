"""The engine on vLLM servers, ours or others'.

How a list of requests is answered:

1. A request that would not fit the context is refused. Those with equal prompt, policy and draw become one request for
   `n` samples, with the seed of the first; at temperature 0 one sample is the answer to all.
2. Each goes to a server (see `fleet`) as token ids, with every setting of the draw, so that none of the server's
   defaults count. The answer holds token ids and log-probabilities.
3. An answer counts only if it names the adapter that was asked for, under the name with its digest, and has the prompt
   that was sent. A request that was lost with its server is sent again, `vllm.retries` times at most.

The same requests don't promise the same bytes: vLLM batches what arrives together, and sums in another order in another
batch. The seeds make draws repeatable only where the batches are the same.
"""

import atexit
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel, ValidationError
from transformers import AutoConfig, GenerationConfig

from twofold import policy
from twofold.endpoints import key_of
from twofold.errors import ModelError, ServerError
from twofold.records import BASE_POLICY
from twofold.sampling import Completion, Refusal, SampleRequest
from twofold.sampling.fleet import Fleet
from twofold.sampling.servers import LostError, OwnServer, RefusedError, Server
from twofold.sampling.tokens import TokenizedEngine
from twofold.settings import Settings

_AT_ONCE = 256
"""Most requests that are on their way."""

_DEFAULTS = {
    # GiB for the cache; without it vLLM takes half of the memory.
    "VLLM_CPU_KVCACHE_SPACE": "2",
    # By itself vLLM binds to the first cores of the machine, whichever this process may use.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""What our environment may say otherwise; for CPUs alone."""

_ON_CPU = "--no-enable-chunked-prefill"
"""vLLM's engine dies of a request with a seed whose prompt it takes in parts: torch's CPU generators have no offset."""

_ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

Answer = Completion | Refusal


@dataclass(frozen=True, slots=True)
class _Job:
    """Samples that one request asks for."""

    request: SampleRequest
    places: tuple[int, ...]
    """Of its answers in the list of requests."""

    @property
    def samples(self) -> int:
        # vLLM refuses several greedy samples; they are the same.
        return len(self.places) if self.request.temperature else 1


class _Logprobs(BaseModel):
    token_logprobs: tuple[float, ...]


class _Choice(BaseModel):
    index: int
    finish_reason: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    logprobs: _Logprobs


class _Reply(BaseModel):
    model: str
    choices: tuple[_Choice, ...]


class VLLMEngine(TokenizedEngine):
    """Meets `twofold.sampling.Engine` with vLLM servers. Thread-safe."""

    def __init__(self, model_dir: Path, settings: Settings):
        super().__init__(model_dir, _generation(model_dir), settings.sampling.context)
        self.settings = settings
        greeting = self.encode([{"role": "user", "content": "Name any number."}])
        self.fleet = Fleet(_servers(model_dir, settings), settings.sampling.context, greeting)
        atexit.register(self.fleet.close)

    def sample(self, requests: Sequence[SampleRequest]) -> list[Answer]:
        answers: dict[int, Answer] = {}
        groups: dict[tuple, list[int]] = {}
        for k, request in enumerate(requests):
            if refusal := self._refused(request):
                answers[k] = refusal
            else:
                groups.setdefault(_group(request), []).append(k)
        jobs = [_Job(requests[places[0]], tuple(places)) for places in groups.values()]
        if jobs:
            self.fleet.revive()
            with ThreadPoolExecutor(min(len(jobs), _AT_ONCE)) as pool:
                for job, made in zip(jobs, pool.map(self._answer, jobs), strict=True):
                    answers.update(zip(job.places, made, strict=True))
        return [answers[k] for k in range(len(requests))]

    def _answer(self, job: _Job) -> list[Answer]:
        """One answer for each place of the job."""
        said = ""
        for attempt in range(self.settings.vllm.retries + 1):
            with self.fleet.taking(job.request.family, job.samples) as server:
                try:
                    made: list[Answer] = self._ask(server, job)
                    return made if job.request.temperature else made * len(job.places)
                except LostError as error:
                    said = str(error)
                    self.fleet.lost(server, error)
                except RefusedError as error:
                    return [Refusal("lm_error", str(error))] * len(job.places)
                except httpx.ReadTimeout:
                    seconds = self.settings.sampling.timeout
                    return [Refusal("timeout", f"{server.url} did not answer within {seconds:g} s")] * len(job.places)
            time.sleep(min(0.1 * 2**attempt, 5))
        raise ServerError(f"A request was lost {self.settings.vllm.retries + 1} times (vllm.retries); last: {said}")

    def _ask(self, server: Server, job: _Job) -> list[Completion]:
        request = job.request
        with server.holding(request.policy, self._adapters) as name:
            answer = server.complete(_body(request, name, job.samples, self.eos))
        try:
            reply = _Reply.model_validate(answer)
        except ValidationError as error:
            # What was answered stays out of the error: it may be private.
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise ModelError(f"{server.url} answered what is no completion with token ids: {wrong}") from None
        if reply.model != name:
            raise ModelError(f"{server.url} was asked for {name}, and {reply.model} answered.")
        choices = sorted(reply.choices, key=lambda choice: choice.index)
        _check(choices, job, server)
        return [self._completion(choice, request) for choice in choices]

    def _completion(self, choice: _Choice, request: SampleRequest) -> Completion:
        text, finish_reason = self._decode(choice.token_ids)
        logprobs = choice.logprobs.token_logprobs if request.temperature else (0.0,) * len(choice.token_ids)
        return Completion(choice.token_ids, logprobs, text, finish_reason, request.policy)


def _generation(model_dir: Path) -> GenerationConfig:
    """What the model says of generation, as transformers reads it together with the weights."""
    if (model_dir / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(model_dir, local_files_only=True)
    return GenerationConfig.from_model_config(AutoConfig.from_pretrained(model_dir, local_files_only=True))


def _group(request: SampleRequest) -> tuple:
    draw = (request.temperature, request.top_p, request.top_k, request.max_tokens)
    return request.prompt_ids, request.policy, request.family, *draw


def _body(request: SampleRequest, name: str, samples: int, eos: frozenset[int]) -> dict[str, Any]:
    """The request as vLLM's completions endpoint takes it."""
    return {
        "model": name,
        "prompt": list(request.prompt_ids),
        "n": samples,
        "seed": request.seed,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "max_tokens": request.max_tokens,
        "stop_token_ids": sorted(eos),
        # What a model's own generation settings may change.
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        # The log-probability of the drawn token, and of no other.
        "logprobs": 0,
        "return_token_ids": True,
    }


def _check(choices: Sequence[_Choice], job: _Job, server: Server) -> None:
    """Raise `LostError` for an answer that was broken off, and `ModelError` for one to something else."""
    if len(choices) != job.samples:
        raise ModelError(f"{server.url} was asked for {job.samples} samples and gave {len(choices)}.")
    for choice in choices:
        if choice.finish_reason not in ("stop", "length"):
            raise LostError(f"{server.url} ended an answer with '{choice.finish_reason}'")
        if choice.prompt_token_ids != job.request.prompt_ids:
            raise ModelError(f"{server.url} answered another prompt than it was sent.")
        if not choice.token_ids or len(choice.logprobs.token_logprobs) != len(choice.token_ids):
            raise ModelError(f"{server.url} gave an answer without one log-probability for each token.")


def _servers(model_dir: Path, settings: Settings) -> list[Server]:
    wanted, timeout = settings.vllm, settings.sampling.timeout
    if wanted.base_urls:
        key = key_of(wanted, "vllm") if wanted.key else None
        return [Server(url, wanted.adapters, timeout, key) for url in wanted.base_urls]
    if not Path(wanted.python).is_file():
        raise ModelError(f"vllm.python: there is no {wanted.python}. Make it with: make vllm")
    environment = {name: os.environ.get(name, value) for name, value in _DEFAULTS.items()} | _ENVIRONMENT
    command = _command(model_dir, settings)
    return [OwnServer(command, environment, wanted.adapters, timeout) for _ in range(wanted.start)]


def _command(model_dir: Path, settings: Settings) -> list[str]:
    """What starts a server, but for its address."""
    rank = next((rank for rank in policy.VLLM_RANKS if rank >= settings.weights.lora.r), policy.VLLM_RANKS[-1])
    options = {
        "model": model_dir.resolve(),
        "served-model-name": BASE_POLICY,
        "dtype": policy.dtype_name(settings.model),
        "max-model-len": settings.sampling.context,
        "max-lora-rank": rank,
        "max-loras": settings.vllm.adapters,
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
    }
    named = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    module = ["-m", "vllm.entrypoints.openai.api_server", "--enable-lora"]
    device = [_ON_CPU] if policy.device_of(settings.model).type == "cpu" else []
    return [settings.vllm.python, *module, *named, *device, *settings.vllm.arguments]
