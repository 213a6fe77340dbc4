"""Programs: loading a pipeline by name, naming its modules, giving each an LM, and keeping their state.

A module's name is the dotted path of its predictor in the program (`route`, `hops[0].query.predict`). Two predictors
that share a signature are two modules; one predictor called in a loop, or reachable under two paths, is one.
"""

import ast
import difflib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import dspy

from twofold import digests
from twofold.errors import PipelineError
from twofold.settings import Settings

STATE = "program.json"
"""File of a program's state in its folder."""

Splits = tuple[list[dspy.Example], list[dspy.Example], list[dspy.Example]]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What a file `pipelines/NAME.py` gives."""

    name: str
    path: Path
    program: Callable[[], dspy.Module]
    """Makes the program, untrained and without an LM."""
    metric: Callable[..., Any]
    """A DSPy metric on the final output: a number, or named channels."""
    load: Callable[[Settings], Splits]
    """Gives the train, dev and test examples."""
    scaffold: Callable[..., Any] | None
    """A scripted teacher: takes an example and its rollouts and gives a hint, when the file has one."""
    teacher: Callable[[], dspy.Module] | None
    """Makes the program of a teacher, when the file has one."""
    hint_field: str | None
    """The input field that takes hints: the file's `HINT_FIELD`."""
    accuracy: Callable[..., Any] | None
    """The metric that strategies are compared by, when it is not the reward's."""
    endpoints: tuple[str, ...]
    """Names of the endpoints that the program and the metric ask: the file's `ENDPOINTS`."""
    private: tuple[str, ...]
    """Fields of examples and predictions whose values stay in the records of this machine: the file's `private`."""
    digest: str
    """sha256 of the file, and of the pipelines it imports."""


def load_pipeline(name: str, folder: Path = Path("pipelines")) -> Pipeline:
    """Import `folder/NAME.py`.

    Raises:
        PipelineError: there is no such file, it cannot be imported, it lacks `program`, `metric` or `load`, or its
            `private` is one name.
    """
    path = folder / f"{name}.py"
    if not path.is_file():
        raise PipelineError(_missing(name, folder))
    module = _import(name, path)
    needed = [part for part in ("program", "metric", "load") if not callable(getattr(module, part, None))]
    if needed:
        raise PipelineError(f"{path} must define {', '.join(f'`{part}`' for part in needed)}, each a function.")
    return Pipeline(
        name=name,
        path=path,
        program=module.program,
        metric=module.metric,
        load=module.load,
        scaffold=getattr(module, "scaffold", None),
        teacher=getattr(module, "teacher", None),
        hint_field=getattr(module, "HINT_FIELD", None),
        accuracy=getattr(module, "accuracy", None),
        endpoints=tuple(getattr(module, "ENDPOINTS", ())),
        private=_private(module, path),
        digest=_digest(path),
    )


def modules(program: dspy.Module) -> dict[str, dspy.Predict]:
    """Each predictor of the program by its dotted path; one that is reachable under two paths appears once.

    The names are DSPy's own (`named_predictors`). DSPy leaves out predictors inside a compiled submodule or inside a
    list of lists; here they follow, under the path that leads to them, because they too need an LM to run.
    """
    found = dict(program.named_predictors())
    known = {id(predictor) for predictor in found.values()}
    for path, predictor in program.named_sub_modules(dspy.Predict):
        if id(predictor) not in known:
            found[path.removeprefix("self.")] = predictor
    return found


def bind(program: dspy.Module, lm_for: Callable[[str], dspy.LM]) -> dspy.Module:
    """A copy of the program in which every predictor without an LM has the one that `lm_for` gives for its name.

    A predictor with an LM of its own keeps it: its calls are neither recorded nor trained.
    """
    bound = program.deepcopy()
    for name, predictor in modules(bound).items():
        if predictor.lm is None:
            predictor.lm = lm_for(name)
    return bound


def state(program: dspy.Module) -> dict[str, Any]:
    """DSPy's state of the program (instructions, demos, per module), without LMs."""
    return {name: {**part, "lm": None} for name, part in _by_module(_unbound(program).dump_state()).items()}


def digest(program: dspy.Module) -> str:
    """sha256 of the program's state: equal for programs that ask the same of an LM."""
    return digests.of_json(state(program))


def save_state(program: dspy.Module, path: Path) -> None:
    """Write the program's state without its LMs, as JSON that `dspy.Module.load` reads too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.json")
    _unbound(program).save(aside)
    os.replace(aside, path)


def load_state(program: dspy.Module, path: Path) -> None:
    """Set the program's instructions and demos to those saved at `path`. LMs stay as they are.

    Raises:
        PipelineError: the file is missing, is no saved state, or was saved from a program with other modules.
    """
    lms = {name: predictor.lm for name, predictor in modules(program).items()}
    try:
        program.load(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PipelineError(
            f"{path} holds no state of this program ({error!r}). Its modules are {', '.join(lms)}; save it again."
        ) from error
    for name, predictor in modules(program).items():
        predictor.lm = lms[name]


def structure(program: dspy.Module) -> dict[str, list[str]]:
    """The labels of each module's fields, inputs before outputs."""
    return {name: _labels(part) for name, part in _by_module(_unbound(program).dump_state()).items()}


def structure_at(path: Path) -> dict[str, list[str]]:
    """`structure` of a saved state; raises `PipelineError` when the file is none."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        saved.pop("metadata")
        return {name: _labels(part) for name, part in _by_module(saved).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PipelineError(f"{path} holds no state of a program ({error!r}). Save it again.") from error


def _labels(part: dict[str, Any]) -> list[str]:
    return [field["prefix"].rstrip(": ") for field in part["signature"]["fields"]]


def instructions_at(path: Path) -> dict[str, str]:
    """The instructions of each module in a saved state, without loading a program."""
    saved = json.loads(path.read_text(encoding="utf-8"))
    saved.pop("metadata")
    return {name: part["signature"]["instructions"] for name, part in _by_module(saved).items()}


def _by_module(state: dict[str, Any]) -> dict[str, Any]:
    """DSPy's state by module, also of a program that is a single predictor, where DSPy leaves the name out."""
    return {"self": state} if isinstance(state.get("demos"), list) else state


def _unbound(program: dspy.Module) -> dspy.Module:
    copy = program.deepcopy()
    for predictor in modules(copy).values():
        predictor.lm = None
    return copy


def _import(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"twofold_pipeline_{name}", path)
    module = importlib.util.module_from_spec(spec)
    # Annotations of signatures and pydantic models are looked up in sys.modules.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise PipelineError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _private(module: ModuleType, path: Path) -> tuple[str, ...]:
    names = getattr(module, "private", ())
    if isinstance(names, str):
        raise PipelineError(f'{path}: `private` must hold names of fields. Write private = ("{names}",).')
    return tuple(names)


def _digest(path: Path) -> str:
    """Of the file and of those it takes parts from with `from pipelines.NAME import …`."""
    nodes = ast.walk(ast.parse(path.read_bytes()))
    imported = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    beside = [path.with_name(f"{name.split('.')[1]}.py") for name in imported if name.startswith("pipelines.")]
    own = digests.of_file(path)
    return digests.of_json([own, *map(_digest, beside)]) if beside else own


def _missing(name: str, folder: Path) -> str:
    there = sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))
    near = difflib.get_close_matches(name, there, n=1)
    hint = f"Did you mean '{near[0]}'? " if near else ""
    return f"There is no pipeline {folder / name}.py. {hint}Pipelines there: {', '.join(there) or 'none'}."
