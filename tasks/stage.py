"""A stage: the frame that every flow runs in.

Only one stage works in a checkout at a time. What it makes on the way lies in `.work/STAGE/FINGERPRINT/`, where a later
start with the same settings, inputs and code finds it; DVC knows only what the stage publishes when it is complete.
"""

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tasks import WORK
from tasks.step import Manifest, code_digest
from twofold import digests
from twofold.errors import TwofoldError
from twofold.models import MANIFEST, folder_of
from twofold.models import digest as model_digest
from twofold.settings import Settings, load


def run(
    name: str, flow: Callable[..., Any], arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
) -> None:
    """Parse the command line, and run the flow with it while no other stage runs. A user's error ends it with 2.

    Args:
        arguments: adds what the flow takes beside `--params`.
    """
    parser = argparse.ArgumentParser(prog=f"python -m flows.{name}", description=flow.__doc__)
    parser.add_argument("--params", default="params.yaml", help="settings file (default: %(default)s)")
    arguments(parser)
    parsed = vars(parser.parse_args())
    # Libraries telling each other what their next version renames.
    warnings.filterwarnings("ignore", category=FutureWarning)
    with users_errors():
        load(Path(parsed["params"]))
        with _terminable(), alone("stage", name, "pipeline"):
            flow(**parsed)


@contextmanager
def users_errors() -> Iterator[None]:
    """An error that the user can mend is a line, and ends the process with 2."""
    try:
        yield
    except TwofoldError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def work_folder(stage: str, settings: Settings, inputs: Mapping[str, str]) -> Path:
    """Where this stage with these settings, inputs (digests by name) and code keeps its work."""
    parts = {"settings": settings.of_results(), "inputs": dict(inputs), "code": code_digest()}
    return WORK / stage / digests.short(digests.of_json(parts))


def prepared_data() -> Manifest:
    """The output of the stage `data`."""
    return _published(Path("data/prepared"), "data")


def fetched_model(settings: Settings) -> Manifest:
    """The output of the stage `model`."""
    folder = folder_of(settings.model.source)
    return Manifest(folder.as_posix(), {MANIFEST: model_digest(folder)})


def published(stage: str) -> Manifest:
    """The output of another stage."""
    return _published(Path("outputs") / stage, stage)


def _published(folder: Path, stage: str) -> Manifest:
    if not folder.is_dir():
        raise TwofoldError(f"{folder} is missing. Run the stage that makes it: dvc repro {stage}")
    return Manifest.of(folder)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the block like an exception, so that Prefect's temporary server ends too; then exit with 143."""
    received = []

    def end(number: int, _: object) -> None:
        received.append(number)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    except Exception:
        # Inside of Prefect our exit may come out as another error.
        if received:
            sys.exit(128 + received[0])
        raise


@contextmanager
def alone(kind: str, name: str, lock: str) -> Iterator[None]:
    """Keep others out of the block while it runs; raises `TwofoldError` when one of them is in it."""
    owner = WORK / f"{lock}.owner"
    try:
        with FileLock(WORK / f"{lock}.lock", timeout=0):
            owner.write_text(f"{kind} {name}, process {os.getpid()}")
            yield
    except Timeout as error:
        raise TwofoldError(
            f"Another {kind} works in this checkout ({owner.read_text()}). Wait for it or end it, then try again."
        ) from error
