"""An LM for DSPy on a transformers model in this process, and how a chat of DSPy becomes one for a chat template.

`twofold export` ships this file as it is, so it imports nothing of Twofold.
"""

import asyncio
import threading
from typing import Any

import dspy
from dspy import lm15
from transformers import GenerationConfig

# A model computes with one adapter at a time, whichever of its engines is asked.
_one_at_a_time = threading.Lock()


def local_lm(model: Any, tokenizer: Any, adapter: str | None = None, **draw: float) -> dspy.LM:
    """An LM whose answers come from `model`.

    Args:
        adapter: name of the model's PEFT adapter that answers; None for the model as it is.
        draw: `temperature` (0, or none, takes the likeliest token), `top_p`, `top_k` and `max_tokens`, where a module
            does not set its own. What the model's own generation settings say of these is not used.
    """
    engine = LocalLM(model, tokenizer, adapter)
    # DSPy's cache would not notice other weights.
    name = f"local/{adapter or 'model'}"
    return dspy.LM(name, engine=engine, async_engine=AsyncLocalLM(engine), cache=False, num_retries=0, **draw)


class LocalLM:
    """Answers chats one by one. A copied program shares it, and so its weights."""

    def __init__(self, model: Any, tokenizer: Any, adapter: str | None):
        self.model = model
        self.tokenizer = tokenizer
        self.adapter = adapter
        self.eos = _eos_ids(model, tokenizer)
        model.generation_config = GenerationConfig(eos_token_id=self.eos, pad_token_id=self.eos[0])

    def __deepcopy__(self, memo: dict[int, Any]) -> "LocalLM":
        return self

    def complete(self, request: lm15.Request) -> lm15.Response:
        """The answer to a chat; raises `lm15.LM15Error` when it asks for what a plain model cannot do."""
        refuse_unsupported(request)
        text = self.tokenizer.apply_chat_template(messages(request), tokenize=False, add_generation_prompt=True)
        prompt = self.tokenizer(text, add_special_tokens=False, return_tensors="pt").to(self.model.device)
        asked = prompt["input_ids"].shape[1]
        with _one_at_a_time:
            if self.adapter:
                self.model.set_adapter(self.adapter)
            answer = self.model.generate(**prompt, **_draw(request.config))[0, asked:].tolist()
        stopped = answer[-1] in self.eos
        text = self.tokenizer.decode(answer[:-1] if stopped else answer, skip_special_tokens=True)
        return lm15.Response(
            id=None,
            model=request.model,
            message=lm15.Message.assistant(text),
            finish_reason="stop" if stopped else "length",
            usage=lm15.Usage(input_tokens=asked, output_tokens=len(answer)),
        )


class AsyncLocalLM:
    """A `LocalLM` for programs that await their modules."""

    def __init__(self, engine: LocalLM):
        self.engine = engine

    def __deepcopy__(self, memo: dict[int, Any]) -> "AsyncLocalLM":
        return self

    async def complete(self, request: lm15.Request) -> lm15.Response:
        return await asyncio.to_thread(self.engine.complete, request)


def refuse_unsupported(request: lm15.Request) -> None:
    """A wish that a local model cannot meet is an error rather than overlooked."""
    names = ("stop", "seed", "response_format", "frequency_penalty", "presence_penalty")
    wishes = [name for name in names if getattr(request.config, name)] + ["tools"] * bool(request.tools)
    if wishes:
        raise lm15.UnsupportedFeatureError(
            f"This module's LM call sets {', '.join(wishes)}, which trained modules cannot have. Remove it from the "
            "predictor, or give the predictor an LM of its own."
        )


def messages(request: lm15.Request) -> list[dict[str, Any]]:
    """The request's chat as a chat template takes it: dicts with `role` and `content`."""
    system = request.system
    parts = (lm15.TextPart(system),) if isinstance(system, str) else system or ()
    first = [{"role": "system", "content": _content(parts)}] if parts else []
    roles = {"developer": "system"}
    return first + [{"role": roles.get(m.role, m.role), "content": _content(m.parts)} for m in request.messages]


def _content(parts: tuple[Any, ...]) -> str | list[dict[str, Any]]:
    if all(isinstance(part, lm15.TextPart) for part in parts):
        return "\n".join(part.text for part in parts)
    return [_block(part) for part in parts]


def _block(part: Any) -> dict[str, Any]:
    match part:
        case lm15.TextPart():
            return {"type": "text", "text": part.text}
        case lm15.ImagePart():
            return {"type": "image", "url": part.url or f"data:{part.media_type};base64,{part.data}"}
    raise lm15.UnsupportedFeatureError(f"A prompt cannot hold content of type '{part.type}', only text and images.")


def _eos_ids(model: Any, tokenizer: Any) -> list[int]:
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})


def _draw(config: lm15.Config) -> dict[str, Any]:
    """How to draw, in the words of `generate`."""
    length = {"max_new_tokens": config.max_tokens} if config.max_tokens else {}
    if not config.temperature:
        return {**length, "do_sample": False}
    top = {"top_p": 1.0 if config.top_p is None else config.top_p, "top_k": config.top_k or 0}
    return {**length, "do_sample": True, "temperature": float(config.temperature), **top}
