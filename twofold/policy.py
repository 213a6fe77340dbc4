"""Base weights and the adapters on top of them.

A policy is the base model, or the base model with one LoRA adapter. Adapters are folders with safetensors and JSON;
the digest of such a folder is the policy's name, and never stands for two different weights.
"""

import json
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from twofold import digests, prefix
from twofold.errors import ModelError
from twofold.settings import Lora, Model

TENSORS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"

_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")
"""PyTorch's names of processors' instructions for bfloat16: Intel's and AMD's, and Arm's."""

VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as --max-lora-rank."""

ADAPTER = "adapter"
"""Folder of an adapter in its part of a checkpoint."""


def device_of(settings: Model) -> torch.device:
    if settings.device != "auto":
        return torch.device(settings.device)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def dtype_of(settings: Model) -> torch.dtype:
    """A processor without instructions for bfloat16 computes about ten times slower with it than with float32."""
    if settings.dtype != "auto":
        return getattr(torch, settings.dtype)
    return torch.bfloat16 if _has_bfloat16(device_of(settings)) else torch.float32


def dtype_name(settings: Model) -> str:
    """As transformers and vLLM take it, such as `float32`."""
    return str(dtype_of(settings)).removeprefix("torch.")


def _has_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and any(torch.cpu.get_capabilities().get(name) for name in _BFLOAT16)


def load_base(folder: Path, settings: Model) -> PreTrainedModel:
    """The base model in evaluation mode on its device, attending through `prefix`; raises like `load_plain`."""
    model = load_plain(folder, settings)
    prefix.install(model)
    return model.to(device_of(settings)).eval()


def load_plain(folder: Path, settings: Model) -> PreTrainedModel:
    """The base model as transformers loads it.

    Raises:
        ModelError: the folder holds no model that can be used.
    """
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype_of(settings),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: no usable model ({error}). Run the `model` stage: dvc repro model") from error


def lora_config(settings: Lora) -> LoraConfig:
    return LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(settings.target_modules),
        task_type="CAUSAL_LM",
    )


def save_adapter(model: PeftModel, folder: Path, peft_name: str = "default") -> str:
    """Write one of the model's adapters as PEFT reads it and return its digest.

    The same weights give the same bytes: PEFT's own `save_pretrained` writes sets in no fixed order, and paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = get_peft_model_state_dict(model, adapter_name=peft_name)
    save_file({name: tensors[name].contiguous() for name in sorted(tensors)}, folder / TENSORS)
    config = model.peft_config[peft_name].to_dict()
    config |= {"target_modules": sorted(config["target_modules"]), "base_model_name_or_path": None}
    config |= {"inference_mode": True}
    text = json.dumps(config, indent=2, sort_keys=True, default=_plain) + "\n"
    (folder / CONFIG).write_bytes(text.encode())
    return digest(folder)


def load_adapter(model: PeftModel, folder: Path, peft_name: str = "default") -> None:
    """Put the adapter's weights into the model, which must have an adapter of the same shape."""
    result = set_peft_model_state_dict(model, load_file(folder / TENSORS), adapter_name=peft_name)
    if result.unexpected_keys:
        raise ModelError(
            f"{folder}: the adapter has weights the model lacks, such as {result.unexpected_keys[0]}. "
            "It was trained with other `weights.lora` settings or another model."
        )


def adapters_in(checkpoint: Path) -> dict[str, Path]:
    """The adapters of a checkpoint, by the name of their module, or `SHARED`."""
    return {folder.parent.name: folder for folder in sorted(checkpoint.glob(f"*/{ADAPTER}"))}


def digest(folder: Path) -> str:
    """The policy's name: the digest of the adapter's two files."""
    files = {name: digests.of_file(folder / name) for name in (TENSORS, CONFIG)}
    return digests.short(digests.of_json(files))


def folded(base: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The base weights with the adapter added: W + (alpha / r) B A for every adapted W (LoRA, arXiv 2106.09685, eq. 3).

    Computed in float32 from the base each time, then rounded once to the base's dtype: merging and unmerging in place
    would let bfloat16 weights drift.
    """
    config = json.loads((folder / CONFIG).read_bytes())
    if config["use_dora"] or config["use_rslora"]:
        raise ModelError(f"{folder}: only plain LoRA adapters can be sampled from; this one uses DoRA or rsLoRA.")
    scale = config["lora_alpha"] / config["r"]
    tensors = load_file(folder / TENSORS)
    weights = {}
    for key in (key for key in tensors if key.endswith(".lora_A.weight")):
        stem = key.removesuffix(".lora_A.weight")
        name = stem.removeprefix("base_model.model.") + ".weight"
        weight = base[name]
        a, b = (tensors[f"{stem}.lora_{side}.weight"].to(weight.device).float() for side in "AB")
        weights[name] = (weight.float() + scale * (b @ a)).to(weight.dtype)
    return weights


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, set) else str(value)
