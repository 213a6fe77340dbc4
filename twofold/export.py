"""Export: a strategy's result as a folder that works with DSPy and transformers alone.

1. The result is read, and what its checkpoint says of itself is verified: adapters, model, data, pipeline, settings.
2. Everything is written aside: the program's state, the adapters as PEFT reads them, and the sources that a plain DSPy
   user lacks: the pipeline, the adapter that makes the prompts, and an LM on transformers.
3. A Python without Twofold loads the program from there. Then the folder takes its place.
"""

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dspy
import yaml

from twofold import adapters, card, digests, local_lm, models, policy
from twofold.errors import ExportError
from twofold.examples import read_examples
from twofold.programs import STATE, Pipeline, load_pipeline, load_state, modules, save_state
from twofold.records import Checkpoint, read_checkpoint, read_json, write_json
from twofold.settings import Settings, load, steps_of
from twofold.splits import SPLITS

OUTPUTS = Path("outputs")
DATA = Path("data/prepared")
REPORT = Path("reports/compare.json")

_ALONE = """
import sys
sys.modules.update(dict.fromkeys(("twofold", "tasks", "flows", "pipelines")))
import pipeline
pipeline.program().load("program.json")
"""


@dataclass(frozen=True, slots=True)
class Result:
    """What a strategy made, verified."""

    strategy: str
    settings: Settings
    pipeline: Pipeline
    program: dspy.Module
    base: Path
    """Folder of the base model."""
    checkpoint: Checkpoint | None
    """None when the base model is the result."""
    adapters: dict[str, Path]
    """By module, or one by `all-modules`; those of modules with an LM of their own have no use and are left out."""
    own_lms: tuple[str, ...]
    """Modules with an LM of their own."""


def export(strategy: str, out: Path, params: Path, merged: bool = False) -> str:
    """Write the strategy's result to `out`; returns the command that serves it with vLLM.

    Args:
        merged: also write whole weights, the base model's with the adapter added.

    Raises:
        TwofoldError: there is no such result, it does not fit its checkpoint's manifest, `out` is taken, the pipeline
            needs this checkout, or merged weights are wanted of several adapters.
    """
    _check_free(out)
    result = open_result(strategy, params)
    if merged and len(result.adapters) > 1:
        raise ExportError(
            f"{OUTPUTS / strategy}: {len(result.adapters)} modules have adapters of their own, so merged there would "
            "be as many whole models. Leave out --merged: one base model serves all adapters."
        )
    place = out.resolve()
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent) as scratch:
        folder = Path(scratch) / "out"
        _write(result, folder, merged)
        _check_alone(folder, result.pipeline.path)
        folder.replace(place)
    base = out / "model" if merged else result.base
    return card.serve(result, base.as_posix(), out, merged)


def open_result(strategy: str, params: Path) -> Result:
    """The result of a strategy that has run.

    Raises:
        TwofoldError: there is none, or it does not fit its checkpoint's manifest.
    """
    settings = load(params)
    steps_of(settings, strategy, params)
    folder = OUTPUTS / strategy
    if not (folder / "metrics.json").is_file():
        raise ExportError(f"{folder} is missing. Run the strategy first: dvc repro strategy@{strategy}")
    pipeline = load_pipeline(settings.pipeline)
    base = models.folder_of(settings.model.source)
    checkpoint = None
    if (folder / "checkpoint").is_dir():
        checkpoint = read_checkpoint(folder / "checkpoint" / "checkpoint.json")
        _verify(folder / "checkpoint", checkpoint, _found(folder / "checkpoint", settings, pipeline, base))
    program = pipeline.program()
    own_lms = tuple(name for name, predictor in modules(program).items() if predictor.lm is not None)
    load_state(program, folder / "program" / STATE)
    kept = {name: path for name, path in policy.adapters_in(folder / "checkpoint").items() if name not in own_lms}
    return Result(strategy, settings, pipeline, program, base, checkpoint, kept, own_lms)


def _found(checkpoint: Path, settings: Settings, pipeline: Pipeline, base: Path) -> dict[str, str]:
    """Digests of what there is now, under the names that a checkpoint's manifest has for them."""
    whole = {name: path for name, path in policy.adapters_in(checkpoint).items() if _is_whole(path)}
    return {
        **{f"adapter {name}": policy.digest(path) for name, path in whole.items()},
        "model": digests.of_json({models.MANIFEST: models.digest(base)}),
        "data": digests.of_folder(DATA),
        "pipeline": pipeline.digest,
        "settings": digests.of_json(settings.weights.model_dump(mode="json")),
    }


def _is_whole(adapter: Path) -> bool:
    return all((adapter / name).is_file() for name in (policy.TENSORS, policy.CONFIG))


def _verify(folder: Path, checkpoint: Checkpoint, found: dict[str, str]) -> None:
    """Refuse a checkpoint that was not made of what there is now."""
    wanted = {f"adapter {name}": digest for name, digest in checkpoint.policies.items()}
    wanted |= {name: checkpoint.digests[name] for name in ("model", "data", "pipeline", "settings")}
    odd = [name for name in sorted(wanted.keys() | found.keys()) if wanted.get(name) != found.get(name)]
    if odd:
        raise ExportError(
            f"{folder} does not fit its manifest checkpoint.json. What it was made of has changed since, or is gone: "
            f"{', '.join(odd)} (settings means the section `weights`). Bring it back, or make the result anew: "
            f"dvc repro strategy@{folder.parent.name}"
        )


def _check_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ExportError(f"{out} is there already, and not an empty folder. Name another one, or move it away.")


def _write(result: Result, folder: Path, merged: bool) -> None:
    folder.mkdir()
    shutil.copyfile(result.pipeline.path, folder / "pipeline.py")
    for module in (adapters, local_lm):
        shutil.copyfile(module.__file__, folder / f"{module.__name__.rpartition('.')[2]}.py")
    save_state(_bare(result.program), folder / STATE)
    for name, path in result.adapters.items():
        _copy_adapter(path, folder / card.place(name))
    if merged:
        _write_merged(result, folder / "model")
    settings = yaml.safe_dump(_public(result.settings), sort_keys=False, allow_unicode=True)
    (folder / "settings.yaml").write_text(settings, encoding="utf-8")
    results = _results(result)
    write_json(results, folder / "results.json")
    card.model_card(result, results, merged).save(folder / "README.md")


def _bare(program: dspy.Module) -> dspy.Module:
    """The program without what no prompt shows: what optimizers noted, and fields of demos that no signature has."""
    bare = program.deepcopy()
    for predictor in modules(bare).values():
        shown = predictor.signature.fields
        demos = [{name: demo[name] for name in shown if name in demo} for demo in map(dict, predictor.demos)]
        predictor.demos = [dspy.Example(**demo) for demo in demos]
        predictor.traces, predictor.train = [], []
    return bare


def _copy_adapter(source: Path, destination: Path) -> None:
    destination.mkdir(parents=True)
    for name in (policy.TENSORS, policy.CONFIG):
        shutil.copyfile(source / name, destination / name)


def _write_merged(result: Result, folder: Path) -> None:
    """The weights that sampling used, with all else of the base model: tokenizer, chat template, licence."""
    model = policy.load_plain(result.base, result.settings.model)
    weights = dict(model.named_parameters())
    for path in result.adapters.values():
        for name, value in policy.folded(weights, path).items():
            weights[name].data.copy_(value)
    model.save_pretrained(folder)
    for path in sorted(result.base.iterdir()):
        if path.name != models.MANIFEST and ".safetensors" not in path.name and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)


def _public(settings: Settings) -> dict[str, Any]:
    """The settings without what is private; of a local model only the folder's name."""
    public = settings.public()
    public["model"]["source"] = card.source_of(settings)
    return public


def _results(result: Result) -> dict[str, Any]:
    """Where the result comes from, and its figures; those on test when the stage `compare` has looked at it."""
    report = read_json(REPORT) if REPORT.is_file() else {"strategies": {}, "differences": {}}
    made = read_json(OUTPUTS / result.strategy / "metrics.json")
    origin = {name: value for name, value in read_json(result.base / models.MANIFEST).items() if name != "files"}
    splits = {split: DATA / f"{split}.jsonl" for split in SPLITS}
    examples = {split: read_examples(path) for split, path in splits.items()}
    return {
        "strategy": result.strategy,
        "steps": made["steps"],
        "pipeline": {"name": result.pipeline.name, "sha256": result.pipeline.digest},
        "model": {**origin, "source": card.source_of(result.settings), "digest": models.digest(result.base)},
        "policies": result.checkpoint.policies if result.checkpoint else {},
        "rounds": result.checkpoint.round if result.checkpoint else 0,
        "inputs": sorted(examples["train"][0].inputs().keys()),
        "data": {
            split: {"examples": len(examples[split]), "sha256": digests.of_file(path)} for split, path in splits.items()
        },
        "dev": _figures(made["dev"]),
        "test": _figures(report["strategies"].get(result.strategy)),
        "differences": {
            name: row for name, row in report["differences"].items() if result.strategy in name.split(" - ")
        },
    }


def _figures(score: dict[str, float] | None) -> dict[str, float] | None:
    return score and {name: score[name] for name in ("score", "ci_low", "ci_high", "n", "format_rate")}


def _check_alone(folder: Path, pipeline: Path) -> None:
    """Refuse a folder that only works in this checkout."""
    command = [sys.executable, "-B", "-c", _ALONE]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ExportError(
            f"{pipeline} cannot be loaded outside of this checkout: {done.stderr.strip().splitlines()[-1]}. It may "
            "import packages only, and read files only inside of `load` and `metric`, which an export does not call."
        )
