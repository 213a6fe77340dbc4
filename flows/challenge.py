"""Flow `challenge`: a strategy's result and the champion on the same dev examples. A child process of `retrain`.

Without a champion, the program as it was written becomes the first one: a result must be better than no training.
"""

import argparse
import dataclasses
from pathlib import Path
from tempfile import TemporaryDirectory

from prefect import flow

from flows.sampling import evaluate_on, on_dev
from tasks import WORK, stage, tracking
from tasks.candidate import Candidate
from tasks.step import Manifest, publish
from twofold import champion, gate
from twofold.champion import Decision
from twofold.errors import ChampionError
from twofold.programs import STATE, load_pipeline, save_state
from twofold.records import read_rollouts, write_json
from twofold.seeds import derive
from twofold.settings import Settings, load


@flow(name="challenge", flow_run_name="{strategy}")
def challenge(params: str, strategy: str, out: str) -> None:
    """Compare a strategy's result with the champion; writes the verdict to OUT."""
    settings = load(Path(params))
    data, model = stage.prepared_data(), stage.fetched_model(settings)
    result = stage.published(strategy)
    standing = _standing(settings, model)
    folder = champion.folder_of(settings.pipeline, standing)
    work = stage.work_folder("challenge", settings, {"data": data.digest, "result": result.digest})
    with tracking.stage_run("challenge", settings, data.digest) as run:
        sides = {
            name: evaluate_on("dev", work / name, settings, _candidate(settings, model, side), data)
            for name, side in (("candidate", result), ("champion", Manifest.of(folder)))
        }
        rollouts = {name: read_rollouts(side.folder) for name, side in sides.items()}
        seed = derive(settings.seed, "bootstrap")
        verdict = gate.compare(
            **rollouts, settings=settings.retrain.gate, resamples=settings.evaluate.resamples, seed=seed
        )
        run.log({**on_dev(sides["candidate"]), **_numbers(verdict)})
        run.log({f"champion/{name}": value for name, value in on_dev(sides["champion"]).items()})
    found = {
        "candidate": champion.id_of(result.outputs),
        "champion": standing,
        "numbers": {**dataclasses.asdict(verdict), **{f"{name}_dev": side.metrics for name, side in sides.items()}},
        "origin": {"model": model.digest, "mlflow_run": run.run_id},
    }
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    write_json(found, Path(out))


def _standing(settings: Settings, model: Manifest) -> str:
    """The id of the champion."""
    made = champion.decisions(settings.pipeline)
    now = champion.standing(made).champion
    if now is None:
        return _first(settings, model)
    if not champion.folder_of(settings.pipeline, now).is_dir():
        raise ChampionError(
            f"{champion.folder_of(settings.pipeline, now)} is missing: the champion's files. Fetch them: dvc checkout, "
            "or dvc pull."
        )
    base = next(one.origin["model"] for one in reversed(made) if one.candidate == now and "model" in one.origin)
    if base != model.digest:
        raise ChampionError(
            f"The champion {now} was trained on another base model, so the two cannot be compared. Set model.source "
            f"back, or begin anew: move {champion.CHAMPION / settings.pipeline} away."
        )
    return now


def _first(settings: Settings, model: Manifest) -> str:
    """Make the program as it was written, on the base model, the first champion."""
    with TemporaryDirectory(dir=WORK) as scratch:
        folder = Path(scratch)
        save_state(load_pipeline(settings.pipeline).program(), folder / "program" / STATE)
        found = champion.id_of(Manifest.of(folder).outputs)
        publish(folder, champion.folder_of(settings.pipeline, found))
    first = Decision("first", found, None, champion.time_now(), origin={"model": model.digest})
    champion.record(settings.pipeline, first)
    return found


def _candidate(settings: Settings, model: Manifest, result: Manifest) -> Candidate:
    program, checkpoint = result.part("program"), result.part("checkpoint")
    digest = load_pipeline(settings.pipeline).digest
    return Candidate(settings.pipeline, digest, program, model, checkpoint if checkpoint.outputs else None)


def _numbers(verdict: gate.Verdict) -> dict[str, float]:
    """For MLflow."""
    found = {"gain": verdict.gain, "readable": verdict.readable, "leakage": verdict.leakage}
    return {
        f"gate/{name}{suffix}": value
        for name, one in found.items()
        if one
        for suffix, value in (("", one.difference), ("_low", one.ci_low), ("_high", one.ci_high))
    }


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strategy", required=True, help="strategy of the settings file that has run")
    parser.add_argument("--out", required=True, help="file to write")


def main() -> None:
    stage.run("challenge", challenge, _arguments)


if __name__ == "__main__":
    main()
