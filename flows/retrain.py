"""Flow `retrain`: from rows that arrived to a new champion, or to a reason why not.

1. What the parameters ask for is written into the settings file.
2. Rows in `retrain.incoming` are checked, and the good ones become a new version of the data, under DVC.
3. `dvc repro` makes the strategy's result again. It is a child process: its output is the run's log, and it ends with
   the run.
4. A result that was decided about before, on the same data and by the same rules, ends the run: there is nothing to do.
5. The result and the champion answer the same dev examples (`flows.challenge`, a child too), and the gate decides.
   Where the settings ask for it, a person must agree.
6. The decision is written down. From then on it counts; MLflow's aliases and Prefect's artifact say the same.

Killed anywhere, the next run does what is left. This flow runs outside of DVC, those of the stages inside of it: the
two are never in one process.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.exceptions import FlowPauseTimeout
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput
from prefect.states import Completed, State

from tasks import WORK, stage, tracking
from tasks.step import publish
from twofold import arrivals, champion, digests, evaluation, leash
from twofold.champion import Decision
from twofold.errors import RetrainError
from twofold.programs import load_pipeline
from twofold.records import read_json, write_json
from twofold.settings import Settings, change, load, steps_of

PARAMS = Path("params.yaml")
"""The settings file, as dvc.yaml names it."""
GRACE = 15.0
"""Seconds that a stage gets to end when its run does."""
PATIENCE = 24 * 3600
"""Seconds that a person has to agree."""

OUTCOMES = {"promoted": "Promoted", "refused": "Refused"}


class Approval(RunInput):
    """What a person answers in Prefect's UI."""

    promote: bool = False
    note: str = ""


@flow(name="retrain", log_prints=True)
def retrain(
    strategy: str | None = None,
    pipeline: str | None = None,
    rounds: int | None = None,
) -> State[None]:
    """Train again on what arrived, and promote the result if it is better than the champion.

    Args:
        strategy: which result is made again; empty takes `retrain.strategy` of the settings.
        pipeline: the task; empty leaves the settings as they are.
        rounds: rounds of training; empty leaves the settings as they are.
    """
    with stage.alone("retraining", "retrain", "retrain"):
        settings = configure(pipeline, rounds)
        name = strategy or settings.retrain.strategy
        steps_of(settings, name, PARAMS)
        tracking.follow(settings)
        take(settings)
        reproduce(name)
        question = _question(settings, name)
        if settled := _settled(settings, name, question):
            print(settled)
            return Completed(name="NothingToDo", message=settled)
        decision = decide(settings, name, question, challenge(name))
        return Completed(name=OUTCOMES[decision.kind], message=" ".join(decision.reasons))


def configure(pipeline: str | None, rounds: int | None) -> Settings:
    """The settings, after what the parameters ask for is written into their file."""
    settings = load(PARAMS)
    wanted = {"pipeline": (pipeline, settings.pipeline), "weights.rounds": (rounds, settings.weights.rounds)}
    changes = {name: new for name, (new, old) in wanted.items() if new is not None and new != old}
    if not changes:
        return settings
    print(f"{PARAMS}: {', '.join(f'{name} is now {value}' for name, value in changes.items())}")
    change(PARAMS, changes)
    return load(PARAMS)


@task(name="take what arrived")
def take(settings: Settings) -> None:
    """Make a version of the data of what lies in the incoming folder."""
    incoming = Path(settings.retrain.incoming)
    incoming.mkdir(parents=True, exist_ok=True)
    for one in arrivals.take(incoming, load_pipeline(settings.pipeline), settings):
        print(f"{one.folder}: {one.rows} rows taken, {one.rejected} set aside in {arrivals.REJECTED}")
    folder = arrivals.ARRIVED / settings.pipeline
    if folder.is_dir():
        run("-m", "dvc", "add", "--quiet", folder.as_posix())


@task(name="reproduce")
def reproduce(strategy: str) -> None:
    """Make the strategy's result again, as far as something has changed."""
    run("-m", "dvc", "repro", f"strategy@{strategy}")


def run(*arguments: str) -> None:
    """Run a Python command that ends with this process; each line it prints is a line of the run's log.

    Raises:
        RetrainError: it failed.
    """
    log = get_run_logger()
    keeper = leash.start(
        [sys.executable, *arguments], GRACE, _environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        for line in keeper.stdout:
            log.info(line.rstrip())
    finally:
        status = leash.stop(keeper)
    if status:
        raise RetrainError(f"`{' '.join(arguments)}` ended with {status}; the log above says why.")


def _environment() -> dict[str, str]:
    """This process's environment for a child that has flows of its own, on the same Prefect server."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT__")}
    # A stage says on its own what a person should see.
    own.pop("PREFECT_LOGGING_LEVEL", None)
    with get_client(sync_client=True) as client:
        address = str(client.api_url)
    # DVC starts `python`.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**own, "PREFECT_API_URL": address, "PATH": path, "PYTHONUNBUFFERED": "1"}


def _question(settings: Settings, strategy: str) -> str:
    """Digest of all that a decision about the strategy's result depends on, but the champion."""
    return digests.of_json(
        {
            "result": champion.id_of(stage.published(strategy).outputs),
            "data": stage.prepared_data().digest,
            "pipeline": load_pipeline(settings.pipeline).digest,
            "settings": settings.model_dump(mode="json", include={"seed", "model", "sampling", "rewards", "evaluate"}),
            "endpoints": settings.asked,
            "gate": settings.retrain.gate.model_dump(mode="json"),
        }
    )


def _settled(settings: Settings, strategy: str, question: str) -> str:
    """Why nothing is to be decided; empty when something is."""
    made = champion.decisions(settings.pipeline)
    for number, one in enumerate(made, 1):
        if one.question == question:
            return f"Nothing to do: no new data and no changed setting since decision {number:04d}."
    if champion.standing(made).champion == champion.id_of(stage.published(strategy).outputs):
        return "Nothing to do: the result is the champion."
    return ""


@task(name="challenge")
def challenge(strategy: str) -> dict[str, Any]:
    """Compare the strategy's result with the champion."""
    answer = WORK / "retrain" / "verdict.json"
    run("-m", "flows.challenge", "--params", PARAMS.as_posix(), "--strategy", strategy, "--out", answer.as_posix())
    return read_json(answer)


def decide(settings: Settings, strategy: str, question: str, found: dict[str, Any]) -> Decision:
    """Write down what follows from a comparison."""
    numbers = {name: value for name, value in found["numbers"].items() if name != "reasons"}
    kind, reasons = "promoted", found["numbers"]["reasons"]
    if reasons:
        kind = "refused"
    elif settings.retrain.approval:
        kind, reasons = _ask(numbers)
    origin = {**found["origin"], "strategy": strategy, "data": _version(settings)}
    decision = Decision(
        kind, found["candidate"], found["champion"], champion.time_now(), tuple(reasons), numbers, origin, question
    )
    if kind == "promoted":
        _keep(settings, strategy, decision.candidate)
    run("-m", "dvc", "add", "--quiet", champion.folder_of(settings.pipeline, decision.candidate).parent.as_posix())
    path = champion.record(settings.pipeline, decision)
    text = markdown(path, decision)
    print(text)
    create_markdown_artifact(text, key=f"retrain-{settings.pipeline}".lower().replace("_", "-"))
    tracking.follow(settings)
    return decision


def _keep(settings: Settings, strategy: str, candidate: str) -> None:
    """Keep the files of a candidate."""
    result, aside = Path("outputs") / strategy, WORK / "retrain" / "kept"
    shutil.rmtree(aside, ignore_errors=True)
    for name in (*champion.PARTS, "dev"):
        if (result / name).is_dir():
            publish(result / name, aside / name)
    shutil.copy(result / "metrics.json", aside)
    write_json(settings.public(), aside / "settings.json")
    publish(aside, champion.folder_of(settings.pipeline, candidate))


def _ask(numbers: Mapping[str, Any]) -> tuple[str, list[str]]:
    """What a person decides about a candidate that passed the gate."""
    asked = Approval.with_initial_data(description=f"Promote the candidate?\n\n{_sentences(numbers)}")
    try:
        answer = pause_flow_run(wait_for_input=asked, timeout=PATIENCE)
    except FlowPauseTimeout:
        return "refused", ["Nobody agreed in time."]
    note = [answer.note] if answer.note else []
    return ("promoted", note) if answer.promote else ("refused", ["A person said no.", *note])


def _version(settings: Settings) -> dict[str, Any]:
    """The version of the data: what DVC calls it, and the batches in it."""
    tracked = Path(f"{arrivals.ARRIVED / settings.pipeline}.dvc")
    return {
        "prepared": digests.short(stage.prepared_data().digest),
        "arrived": digests.short(digests.of_file(tracked)) if tracked.exists() else None,
        "batches": [batch.name for batch in arrivals.batches(settings.pipeline)],
    }


def markdown(path: Path, decision: Decision) -> str:
    """A decision as a page."""
    title = f"# {OUTCOMES[decision.kind]}: {decision.candidate}\n\n"
    head = f"Strategy `{decision.origin['strategy']}`, against the champion {decision.champion}. Record: `{path}`\n\n"
    why = "".join(f"- {reason}\n" for reason in decision.reasons)
    return title + head + _sentences(decision.numbers) + (f"\n## Why\n\n{why}" if why else "")


def _sentences(numbers: Mapping[str, Any]) -> str:
    named = {"Score": "gain", "Share that can be read": "readable", "Leakage": "leakage"}
    found = {name: numbers[key] for name, key in named.items() if numbers[key]}
    return "\n".join(f"- {evaluation.sentence(name, difference)}" for name, difference in found.items()) + "\n"


def main() -> None:
    with stage.users_errors():
        retrain()


if __name__ == "__main__":
    main()
