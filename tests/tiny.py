"""A model, a pipeline and a checkout so small that a whole run takes seconds."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from twofold.models import fetch, folder_of
from twofold.programs import load_pipeline
from twofold.settings import load
from twofold.splits import write_splits

ROOT = Path(__file__).parent.parent

PATIENCE = 600
"""Seconds that a Prefect server may take to start, on a machine that does other things too."""

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

PIPELINE = '''"""Two modules; the reward is the share of the answer that is the letter e."""

import json
from pathlib import Path

import dspy


class Restate(dspy.Signature):
    """Say it again."""

    text: str = dspy.InputField()
    short: str = dspy.OutputField()


class Answer(dspy.Signature):
    """Answer."""

    short: str = dspy.InputField()
    answer: str = dspy.OutputField()


class Tiny(dspy.Module):
    def __init__(self):
        super().__init__()
        self.restate = dspy.Predict(Restate)
        self.answer = dspy.Predict(Answer)

    def forward(self, text):
        return self.answer(short=self.restate(text=text).short)


def program():
    return Tiny()


def metric(example, prediction, trace=None):
    return prediction.answer.count("e") / max(1, len(prediction.answer))


def load(settings):
    path = Path("data/tiny/examples.jsonl")
    examples = [dspy.Example(**json.loads(line)).with_inputs("text") for line in path.read_text().splitlines()]
    return examples[:6], examples[6:10], examples[10:14]
'''

SETTINGS = {
    "pipeline": "tiny",
    "seed": 0,
    "data": {"train": None},
    "model": {"source": "./base", "device": "cpu", "dtype": "float32"},
    "sampling": {"context": 256, "max_tokens": 6, "shard_size": 8, "batch_size": 8},
    "rewards": {"failure": 0.0},
    "evaluate": {"every": 2, "resamples": 200, "draw": {"temperature": 0.7}},
    "prompts": {
        "trials": 2,
        "demo_sets": 3,
        "instructions": 2,
        "labeled_demos": 0,
        "minibatch": 2,
        "full_every": 2,
        "validation_share": 0.5,
        "proposal_tokens": 12,
    },
    "scaffold": None,
    "endpoints": {},
    "hosted": {},
    "strategies": {"vanilla": [], "prompts": ["p"], "weights": ["w"], "together": ["p", "w"]},
    "weights": {
        "rounds": 3,
        "examples_per_round": 3,
        "rollouts_per_example": 4,
        "draw": {"temperature": 1.0},
        "groups": {"size": 4},
        "lora": {"r": 4, "alpha": 8},
        "optimizer": {"learning_rate": 0.01},
        "micro_batch": 8,
        "context": 256,
    },
}


def make_model(folder: Path) -> Path:
    """A Llama of two layers with random weights, and a byte-level tokenizer with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["say it again and answer the text in short"] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[1], pad_token=special[1])
    fast.chat_template = CHAT
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def make_checkout(folder: Path, server: str | None = None) -> Path:
    """A checkout with the tiny pipeline, its data, model and settings; for `server` see `copy_project`."""
    copy_project(folder, server)
    make_model(folder / "base")
    (folder / "pipelines").mkdir()
    (folder / "pipelines" / "tiny.py").write_text(PIPELINE)
    (folder / "data" / "tiny").mkdir()
    lines = [f'{{"id": "e{k}", "text": "text number {k}"}}\n' for k in range(14)]
    (folder / "data" / "tiny" / "examples.jsonl").write_text("".join(lines))
    (folder / "params.yaml").write_text(yaml.safe_dump(SETTINGS))
    commit(folder)
    return folder


def copy_project(folder: Path, server: str | None = None) -> None:
    """Copy what every checkout has: the code but for the pipelines, and what DVC and git go by.

    Args:
        server: address of a Prefect server for its stages; else each starts one, which takes longer than its work.
    """
    for name in ("twofold", "tasks", "flows"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    ignored = (
        *(".gitignore", ".dvc/.gitignore", "data/.gitignore"),
        *("data/arrived/.gitignore", "outputs/.gitignore", "champion/.gitignore", "given/.gitkeep"),
    )
    for name in ("dvc.yaml", ".dvcignore", ".dvc/config", *ignored):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    if server:
        (folder / "prefect.toml").write_text(f'[api]\nurl = "{server}"\n')


def commit(folder: Path) -> None:
    """Make it a git repository with everything in it."""
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "tiny"],
    ):
        subprocess.run(["git", *command], cwd=folder, check=True)


def fill(folder: Path) -> None:
    """Put data and model into a checkout, as its stages `data` and `model` do, without their processes."""
    with contextlib.chdir(folder):
        settings = load(Path("params.yaml"))
        write_splits(load_pipeline(settings.pipeline), settings, Path("data/prepared"))
        fetch(settings.model.source, folder_of(settings.model.source))


def environment(**more: str) -> dict[str, str]:
    """The environment for commands in a checkout: this Python first on the path, and nothing of a surrounding run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT", "MLFLOW", "DVC"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    patience = {"PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": str(PATIENCE)}
    return {**kept, **patience, "PATH": path, "PYTHONPATH": "", "OMP_NUM_THREADS": "1", **more}
