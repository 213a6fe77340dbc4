"""One step of a stage: cached under our own key, verified, retried.

1. A step's key is the sha256 of its name, the digest of our code, and its inputs: the settings it reads and plain
   values as JSON, files by digest, never by path.
2. The step writes into a folder beside its place and takes that place when it is complete.
3. Its result is a manifest: where its files are, the digest of each, and its metrics. Prefect keeps it as JSON.
4. A manifest found under the key is believed only when each file is there and has its digest; else the step runs again.
"""

import dataclasses
import functools
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import prefect
from prefect.serializers import JSONSerializer
from pydantic import BaseModel

import twofold
from twofold import digests
from twofold.settings import AskedEndpoint, Settings

TRANSPORT_ERRORS = (ConnectionError, TimeoutError, httpx.TransportError)
"""What may go away by itself. Anything else fails the same way again."""

Body = Callable[..., dict[str, float]]
"""Writes a step's files into the folder it is given and returns metrics."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Files that a step made, or that it starts from."""

    path: str
    """Their folder, relative to the checkout."""
    outputs: dict[str, str]
    """sha256 of each file, by its path in the folder."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers for people and for tracking, `seconds` among them; no part of the digest."""

    @classmethod
    def of(cls, folder: Path, metrics: dict[str, float] | None = None) -> "Manifest":
        """The manifest of everything in `folder` now."""
        return cls(folder.as_posix(), _outputs(folder), metrics or {})

    def part(self, name: str) -> "Manifest":
        """The manifest of one of the folders in it."""
        inside = {path.removeprefix(f"{name}/"): found for path, found in self.outputs.items()}
        kept = {path: found for path, found in inside.items() if f"{name}/{path}" in self.outputs}
        return Manifest(f"{self.path}/{name}", kept)

    @property
    def folder(self) -> Path:
        return Path(self.path)

    @property
    def digest(self) -> str:
        return digests.of_json(self.outputs)

    def intact(self) -> bool:
        """Whether the files, and no others, are there with the contents they had."""
        return self.folder.is_dir() and _outputs(self.folder) == self.outputs


class Step:
    """A function made into a step. Call it inside of a flow with the folder to make and its inputs by name."""

    def __init__(self, body: Body, reads: tuple[str, ...]):
        self.name = body.__name__
        self.reads = reads
        self.task = prefect.task(
            functools.partial(_carry_out, body),
            name=self.name,
            cache_key_fn=lambda context, parameters: parameters["key"],
            persist_result=True,
            # The default decoder imports whatever name it finds in the file.
            result_serializer=JSONSerializer(object_decoder=None),
            retries=3,
            retry_delay_seconds=[1, 5, 25],
            retry_condition_fn=_may_go_away,
        )

    def __call__(self, folder: Path, **inputs: Any) -> Manifest:
        key = self.key(**inputs)
        return self._believed(Manifest(**self.task(key, folder, inputs)), key, folder, inputs)

    def begin(self, folder: Path, **inputs: Any) -> Callable[[], Manifest]:
        """Start it beside what the flow does next. What is returned waits for the manifest; call it in the flow."""
        key = self.key(**inputs)
        future = self.task.submit(key, folder, inputs)
        return lambda: self._believed(Manifest(**future.result()), key, folder, inputs)

    def _believed(self, manifest: Manifest, key: str, folder: Path, inputs: dict[str, Any]) -> Manifest:
        """The manifest when its files are as it says, else that of another run."""
        if manifest.intact():
            return manifest
        return Manifest(**self.task.with_options(refresh_cache=True)(key, folder, inputs))

    def key(self, **inputs: Any) -> str:
        """The cache key: equal for equal work."""
        keyed = {name: _keyed(value, self.reads) for name, value in inputs.items()}
        return digests.of_json({"step": self.name, "code": code_digest(), "inputs": keyed})


def step(*, reads: tuple[str, ...] = ()) -> Callable[[Body], Step]:
    """Make a function a step.

    Args:
        reads: dotted names of the settings that can change what it writes.
    """
    return lambda body: Step(body, reads)


@functools.cache
def code_digest() -> str:
    """Digest of the sources that compute steps: the packages `twofold` and `tasks`."""
    folders = {"twofold": Path(twofold.__file__).parent, "tasks": Path(__file__).parent}
    return digests.of_json({name: digests.of_folder(folder) for name, folder in folders.items()})


def publish(source: Path, destination: Path) -> None:
    """Put a copy of a complete folder in its public place, all of it or nothing."""
    aside = destination.with_name(f".{destination.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(source, aside)
    shutil.rmtree(destination, ignore_errors=True)
    aside.rename(destination)


def _carry_out(body: Body, key: str, folder: Path, inputs: dict[str, Any]) -> dict[str, Any]:
    del key  # Prefect reads it from the parameters.
    aside = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    start = time.perf_counter()
    metrics = body(aside, **inputs)
    metrics = {**metrics, "seconds": time.perf_counter() - start}
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    return dataclasses.asdict(Manifest.of(folder, metrics))


def _outputs(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): digests.of_file(path) for path in files}


def _may_go_away(task: Any, run: Any, state: Any) -> bool:
    try:
        state.result()
    except TRANSPORT_ERRORS:
        return True
    except Exception:
        return False
    return False


def _keyed(value: Any, reads: tuple[str, ...]) -> Any:
    """What stands for an input in the key."""
    match value:
        case Manifest():
            return value.digest
        case Settings():
            return {name: _keyed(functools.reduce(getattr, name.split("."), value), reads) for name in reads}
        case AskedEndpoint():
            # How patiently it is asked changes no answer.
            return value.asked
        case BaseModel():
            return {name: _keyed(part, reads) for name, part in value}
        case list() | tuple():
            return [_keyed(part, reads) for part in value]
        case None | bool() | int() | float() | str():
            return value
    if dataclasses.is_dataclass(value):
        return {part.name: _keyed(getattr(value, part.name), reads) for part in dataclasses.fields(value)}
    raise TypeError(f"A {type(value).__name__} cannot be part of a step's key.")
