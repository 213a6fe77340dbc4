"""Stage `data`: the examples of the pipeline, as files that stay as they are."""

from pathlib import Path
from tempfile import TemporaryDirectory

from prefect import flow

from tasks import WORK, stage, tracking
from tasks.step import Manifest, publish
from twofold.programs import load_pipeline
from twofold.settings import load
from twofold.splits import write_splits


@flow(name="data", flow_run_name="data")
def prepare(params: str) -> None:
    """Write the train, dev and test examples to data/prepared."""
    settings = load(Path(params))
    with TemporaryDirectory(dir=WORK) as scratch:
        folder = Path(scratch)
        sizes = write_splits(load_pipeline(settings.pipeline), settings, folder)
        with tracking.stage_run("data", settings, Manifest.of(folder).digest) as run:
            run.log({f"examples/{split}": size for split, size in sizes.items()})
        publish(folder, Path("data/prepared"))
    print(f"data/prepared: {sizes}")


def main() -> None:
    stage.run("prepare", prepare)


if __name__ == "__main__":
    main()
