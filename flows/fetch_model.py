"""Stage `model`: the base model, fetched and converted once."""

from pathlib import Path
from tempfile import TemporaryDirectory

from prefect import flow

from tasks import WORK, stage, tracking
from tasks.step import Manifest
from twofold import models
from twofold.programs import load_pipeline
from twofold.settings import load
from twofold.splits import write_splits


@flow(name="model", flow_run_name="model")
def fetch_model(params: str) -> None:
    """Put the model of the settings into data/models."""
    settings = load(Path(params))
    with TemporaryDirectory(dir=WORK) as scratch:
        write_splits(load_pipeline(settings.pipeline), settings, Path(scratch))
        data = Manifest.of(Path(scratch)).digest
    folder = models.folder_of(settings.model.source)
    with tracking.stage_run("model", settings, data) as run:
        digest = models.fetch(settings.model.source, folder)
        run.client.set_tag(run.run_id, "model", digest)
    print(f"{folder}: {digest}")


def main() -> None:
    stage.run("fetch_model", fetch_model)


if __name__ == "__main__":
    main()
