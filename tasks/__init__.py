"""Prefect tasks: how one step is cached, verified, retried and tracked.

Importing this package settles where Prefect and MLflow keep their things, before either is imported. Values that are
already in the environment win, so `PREFECT_API_URL` still sends runs to a server of your own.

Prefect's home is the work folder, not the user's: a run's history and cached results belong to the checkout they speak
of, a new clone begins with none, and a profile that points to someone's cloud account isn't used by accident.
"""

import os
from pathlib import Path

WORK = Path(".work")
"""Work in progress, caches and databases; relative to the checkout, like all paths in manifests."""


def _settle() -> None:
    # Cached results name the code that reads them, so nobody else may write here.
    WORK.mkdir(mode=0o700, exist_ok=True)
    home = WORK.absolute() / "prefect"
    home.mkdir(exist_ok=True)
    defaults = {
        "DO_NOT_TRACK": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PREFECT_HOME": str(home),
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


_settle()
