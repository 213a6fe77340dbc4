"""Stage `vanilla`: the program as it was written, on the base model. Looks at dev only; test is for `compare`."""

from pathlib import Path

from prefect import flow

from flows.sampling import evaluate_on
from tasks import stage, tracking
from tasks.candidate import STATE, Candidate
from tasks.step import Manifest, publish
from twofold.programs import load_pipeline, save_state
from twofold.records import write_json
from twofold.settings import load


@flow(name="vanilla")
def evaluate(params: str) -> None:
    """Save the program and evaluate it on dev; writes outputs/vanilla."""
    settings = load(Path(params))
    data, model = stage.prepared_data(), stage.fetched_model(settings)
    pipeline = load_pipeline(settings.pipeline)
    inputs = {"data": data.digest, "model": model.digest, "pipeline": pipeline.digest}
    work = stage.work_folder("vanilla", settings, inputs)
    save_state(pipeline.program(), work / "program" / STATE)
    candidate = Candidate(settings.pipeline, pipeline.digest, Manifest.of(work / "program"), model)
    with tracking.stage_run("vanilla", settings, data.digest) as run:
        dev = evaluate_on("dev", work / "dev", settings, candidate, data)
        run.log({f"dev/{name}": value for name, value in dev.metrics.items()})
    write_json(dev.metrics, work / "out" / "metrics.json")
    publish(candidate.program.folder, work / "out" / "program")
    publish(dev.folder, work / "out" / "dev")
    publish(work / "out", Path("outputs/vanilla"))
    print(f"vanilla on dev: {dev.metrics['score']:.3f}")


def main() -> None:
    stage.run("evaluate", evaluate)


if __name__ == "__main__":
    main()
