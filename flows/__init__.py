"""Prefect flows: which steps run, in which order. One per DVC stage: `python -m flows.NAME --params params.yaml`."""

import tasks  # noqa: F401  settles where Prefect keeps its things, so it comes before any import of Prefect
