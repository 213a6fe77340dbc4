"""Tests leave the user's Prefect home and this checkout's work folder alone."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports Prefect.
os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="twofold-prefect-")
for name in ("PREFECT_API_URL", "MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI"):
    os.environ.pop(name, None)

import tasks  # noqa: E402, F401  the rest of Prefect's settings


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A real temporary Prefect server, one for all tests."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect_server: None) -> Iterator[Path]:
    """An empty folder to run steps in, with results of its own."""
    from prefect.settings import PREFECT_LOCAL_STORAGE_PATH, temporary_settings

    monkeypatch.chdir(tmp_path)
    (tmp_path / ".work").mkdir()
    with temporary_settings({PREFECT_LOCAL_STORAGE_PATH: tmp_path / "results"}):
        yield tmp_path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real embedded model, fetched once and kept for the next time."""
    from tests.tiny import ROOT
    from twofold.models import EMBEDDED, fetch, folder_of

    folder = folder_of(EMBEDDED.name, ROOT / ".work" / "test-models")
    fetch(EMBEDDED.name, folder)
    return folder
