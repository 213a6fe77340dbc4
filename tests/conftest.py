"""Tests leave the user's Prefect home and this checkout's work folder alone.

`make test` runs them in two processes, each with a Prefect server of its own.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from filelock import FileLock

# Before anything imports Prefect.
os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="twofold-prefect-")
for name in ("PREFECT_API_URL", "MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI"):
    os.environ.pop(name, None)

import tasks  # noqa: E402, F401  the rest of Prefect's settings

# A neighbour's work on the same processor is no failure.
hypothesis.settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests go first: the last file to begin decides when the last process ends."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[str]:
    """A real temporary Prefect server, one for all tests; gives its address, for stages in other processes."""
    from prefect.settings import get_current_settings
    from prefect.testing.utilities import prefect_test_harness

    from tests.tiny import PATIENCE

    with prefect_test_harness(server_startup_timeout=PATIENCE):
        yield str(get_current_settings().api.url)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect_server: str) -> Iterator[Path]:
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
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / "lock"):
        fetch(EMBEDDED.name, folder)
    return folder
