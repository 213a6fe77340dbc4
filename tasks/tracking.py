"""Tracking: what MLflow shows of a run.

A full run (all stages with the same settings and data) is one parent run, found again by its tag, because each stage is
a process of its own. A stage is a child run; a checkpoint is a LoggedModel of that child, linked to the data's digest.
MLflow gets numbers, names and digests, never examples or answers; weights stay in DVC. Of a pipeline that calls fields
private it gets no optimized instructions either, for whoever wrote them has read examples.
"""

import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks import WORK
from tasks.step import Manifest
from twofold import champion, digests
from twofold.programs import STATE, Pipeline, instructions_at
from twofold.settings import Settings

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Dataset

RUN_TAG = "twofold.run"
STAGE_TAG = "twofold.stage"
DECISION_TAG = "twofold.decision"


@dataclass(frozen=True, slots=True)
class StageRun:
    """The child run of one stage."""

    client: "MlflowClient"
    stage: str
    run_id: str
    experiment_id: str
    dataset: "Dataset"
    offset: int = 0
    """Steps that came before: added to every step given."""

    def log(self, metrics: Mapping[str, float], step: int = 0, model_id: str | None = None) -> None:
        """Write numbers; those that are no numbers (NaN) are left out, MLflow cannot store them twice."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        link = {"model_id": model_id, "dataset_name": self.dataset.name, "dataset_digest": self.dataset.digest}
        batch = [
            Metric(key, value, now, self.offset + step, run_id=self.run_id, **(link if model_id else {}))
            for key, value in metrics.items()
            if math.isfinite(value)
        ]
        self.client.log_batch(self.run_id, metrics=batch)

    def log_checkpoint(self, checkpoint: Manifest, step: int, tags: Mapping[str, str]) -> str:
        """Make a LoggedModel for a checkpoint and return its id."""
        from mlflow.entities import LoggedModelOutput

        model = self.client.create_logged_model(
            self.experiment_id,
            name=f"{self.stage}-{self.offset + step}",
            source_run_id=self.run_id,
            tags={"data": self.dataset.digest, "digest": checkpoint.digest, "path": checkpoint.path, **tags},
            model_type="lora",
        )
        self.client.finalize_logged_model(model.model_id, "READY")
        self.client.log_outputs(self.run_id, [LoggedModelOutput(model.model_id, self.offset + step)])
        return model.model_id

    def log_prompts(self, pipeline: Pipeline, program: Manifest) -> None:
        """Register each module's instructions as a version of a prompt. Demos are data, and stay out of MLflow."""
        if pipeline.private:
            return
        for module, instructions in instructions_at(program.folder / STATE).items():
            name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{pipeline.name}.{self.stage}.{module}")
            known = self.client.load_prompt(name, allow_missing=True)
            if known is None or known.template != instructions:
                self.client.register_prompt(name, instructions, tags={"program": program.digest, "run": self.run_id})


@contextmanager
def stage_run(stage: str, settings: Settings, data: str) -> Iterator[StageRun]:
    """The MLflow run of a stage; it ends as finished or, with an error, as failed.

    Args:
        data: digest of the prepared data.
    """
    client = _client(settings)
    experiment = _experiment(client, settings.tracking.experiment)
    parent = _parent(client, experiment, settings, data)
    _close_killed(client, experiment, parent, stage)
    tags = {"mlflow.parentRunId": parent, STAGE_TAG: stage}
    run = client.create_run(experiment, run_name=f"stage:{stage}", tags=tags)
    # The parent has them too; here they line up in a comparison of runs.
    client.log_batch(run.info.run_id, params=_params(settings))
    found = StageRun(client, stage, run.info.run_id, experiment, _dataset(settings, data))
    _log_data(found)
    status = "FAILED"
    try:
        yield found
        status = "FINISHED"
    finally:
        client.set_terminated(found.run_id, status)
        client.set_terminated(parent, status)


def log_test(stage: str, settings: Settings, data: str, metrics: Mapping[str, float]) -> None:
    """Add numbers to the newest run of a stage that is over; to a new one, when MLflow has never seen the stage run."""
    client = _client(settings)
    experiment = _experiment(client, settings.tracking.experiment)
    parent = _parent(client, experiment, settings, data)
    query = f"tags.`mlflow.parentRunId` = '{parent}' AND tags.`{STAGE_TAG}` = '{stage}' AND status = 'FINISHED'"
    found = client.search_runs([experiment], query, max_results=1)
    if found:
        StageRun(client, stage, found[0].info.run_id, experiment, _dataset(settings, data)).log(metrics)
        return
    with stage_run(stage, settings, data) as run:
        run.log(metrics)


def follow(settings: Settings) -> None:
    """Make the registered model of the pipeline say what the decisions say: who is champion, and who was it before.

    Each of them is a version, known by its tag `result`; the run that led to the last decision is tagged with it.
    """
    from mlflow.exceptions import MlflowException

    made = champion.decisions(settings.pipeline)
    now = champion.standing(made)
    client = _client(settings)
    runs = {one.candidate: one.origin.get("mlflow_run") for one in made if one.kind in ("first", "promoted")}
    for alias, result in (("previous", now.previous), ("champion", now.champion)):
        if result:
            version = _version(client, settings.pipeline, result, runs[result])
            client.set_registered_model_alias(settings.pipeline, alias, version)
    if made and "mlflow_run" in made[-1].origin:
        # MLflow's database may be younger than the records, which are kept in git.
        with suppress(MlflowException):
            client.set_tag(made[-1].origin["mlflow_run"], DECISION_TAG, f"{made[-1].kind} {len(made):04d}")


def _version(client: "MlflowClient", name: str, result: str, run: str | None) -> str:
    """The version of the registered model that is this result; made when there is none."""
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name)
    found = [one for one in client.search_model_versions(f"name = '{name}'") if one.tags.get("result") == result]
    if found:
        return found[0].version
    source = champion.folder_of(name, result).absolute().as_uri()
    return client.create_model_version(name, source, run_id=run, tags={"result": result}).version


def _client(settings: Settings) -> "MlflowClient":
    from mlflow import MlflowClient

    return MlflowClient(settings.tracking.uri or f"sqlite:///{WORK.absolute() / 'mlflow.db'}")


def _experiment(client: "MlflowClient", name: str) -> str:
    found = client.get_experiment_by_name(name)
    # A relative artifact root would follow the working directory of whoever reads it.
    artifacts = (WORK / "mlflow-artifacts").absolute().as_uri()
    return found.experiment_id if found else client.create_experiment(name, artifact_location=artifacts)


def _parent(client: "MlflowClient", experiment: str, settings: Settings, data: str) -> str:
    """The run that all stages with these settings and this data share."""
    fingerprint = digests.short(digests.of_json({"settings": settings.of_results(), "data": data}))
    found = client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{fingerprint}'", max_results=1)
    if found:
        return found[0].info.run_id
    name = f"{settings.pipeline}-{fingerprint}"
    run_id = client.create_run(experiment, run_name=name, tags={RUN_TAG: fingerprint}).info.run_id
    client.log_batch(run_id, params=_params(settings))
    return run_id


def _close_killed(client: "MlflowClient", experiment: str, parent: str, stage: str) -> None:
    """A stage that was killed left its run open; only one stage runs at a time, so it is over."""
    query = f"tags.`mlflow.parentRunId` = '{parent}' AND tags.`{STAGE_TAG}` = '{stage}' AND status = 'RUNNING'"
    for run in client.search_runs([experiment], query):
        client.set_terminated(run.info.run_id, "KILLED")


def _params(settings: Settings) -> list[Any]:
    from mlflow.entities import Param

    return [Param(name, str(value)) for name, value in sorted(_flat(settings.public()).items())]


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {k: v for key, part in value.items() for k, v in _flat(part, f"{name}.{key}" if name else key).items()}


def _dataset(settings: Settings, data: str) -> "Dataset":
    from mlflow.entities import Dataset

    source = json.dumps({"pipeline": settings.pipeline})
    return Dataset(settings.pipeline, digests.short(data), source_type="pipeline", source=source)


def _log_data(run: StageRun) -> None:
    from mlflow.entities import DatasetInput

    run.client.log_inputs(run.run_id, datasets=[DatasetInput(run.dataset)])
