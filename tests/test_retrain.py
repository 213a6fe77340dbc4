"""Retraining from end to end: a drop, DVC, the gate, and the champion that comes of it."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from flows.cli import main
from tests.tiny import PIPELINE, SETTINGS, make_checkout
from twofold.champion import Standing, decisions, folder_of, standing
from twofold.settings import NamedEndpoint, load

ASKED = PIPELINE.replace('count("e")', "count(example.letter)").replace(
    "examples[:6], examples[6:10], examples[10:14]", "examples[:6], examples[6:30], examples[30:]"
)
"""The reward is the share of the answer that is the letter that the example asks for."""


def rows(id: str, text: str, numbers: range, **changes: str) -> list[dict[str, str]]:
    return [{"id": f"{id}{k}", "text": f"{text} {k}", "letter": "e", **changes} for k in numbers]


def settle(**changes: object) -> None:
    quick = {
        **SETTINGS,
        "strategies": {"weights": ["w"]},
        "weights": {**SETTINGS["weights"], "rounds": 6, "examples_per_round": 6, "optimizer": {"learning_rate": 0.02}},
        "evaluate": {**SETTINGS["evaluate"], "every": 3},
        "retrain": {"strategy": "weights", **changes},
    }
    Path("params.yaml").write_text(yaml.safe_dump(quick))


def write(path: Path, content: list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in content))


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = make_checkout(tmp_path / "checkout")
    monkeypatch.chdir(folder)
    Path(".work").mkdir()
    Path("pipelines/tiny.py").write_text(ASKED)
    write(Path("data/tiny/examples.jsonl"), rows("e", "text number", range(34)))
    settle(gate={"bound": -1.0})
    return folder


def aliases() -> dict[str, str]:
    """The result that each alias of the registered model names."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{Path('.work/mlflow.db').absolute()}")
    found = {name: client.get_model_version_by_alias("tiny", name) for name in ("champion", "previous")}
    return {name: version.tags["result"] for name, version in found.items()}


def changed() -> set[str]:
    """What git would add."""
    command = ["git", "status", "--porcelain", "--untracked-files=all"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {line[3:] for line in done.stdout.splitlines()}


def test_a_decision_depends_on_the_servers_that_are_asked_and_not_on_their_patience(checkout: Path) -> None:
    from flows.retrain import _question

    write(Path("outputs/weights/metrics.json"), [])
    write(Path("data/prepared/train.jsonl"), [])
    settings = load(Path("params.yaml"))

    def question(**changes: object) -> str:
        far = NamedEndpoint.model_validate({"model": "small", "base_url": "http://127.0.0.1:1", **changes})
        return _question(settings.model_copy(update={"endpoints": {"far": far}}), "weights")

    assert question() == question(retries=9)
    assert question() != question(model="large")


@pytest.mark.slow
def test_a_drop_is_trained_on_and_judged(checkout: Path, prefect_server: str) -> None:
    from flows.retrain import retrain

    bad = [*rows("x", "bad", range(1), letter=""), *rows("e", "text number", range(7, 8))]
    write(Path("data/incoming/drop.jsonl"), [*rows("n", "new text", range(6)), *bad])
    assert retrain(return_state=True).name == "Promoted"

    first, promoted = decisions("tiny")
    assert (first.kind, promoted.kind, promoted.champion) == ("first", "promoted", first.candidate)
    assert promoted.numbers["gain"]["n"] == 24
    assert promoted.numbers["gain"]["difference"] > 0
    (batch,) = promoted.origin["data"]["batches"]
    rejected = (Path("data/arrived/tiny") / batch / "rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["reason"] for line in rejected] == [
        "`letter` is empty.",
        "Example e7 of dev has it already.",
    ]
    train = Path("data/prepared/train.jsonl").read_text().splitlines()
    assert [json.loads(line)["example_id"] for line in train[6:]] == [f"n{k}" for k in range(6)]
    kept = {path.name for path in folder_of("tiny", promoted.candidate).iterdir()}
    assert kept == {"program", "checkpoint", "dev", "metrics.json", "settings.json"}
    assert aliases() == {"champion": promoted.candidate, "previous": first.candidate}
    assert {path for path in changed() if path.startswith(("data/arrived", "champion"))} == {
        *("data/arrived/tiny.dvc", "champion/tiny/models.dvc"),
        *(f"champion/tiny/records/{name}.json" for name in ("0001-first", "0002-promoted")),
    }

    made = Path("outputs/weights").stat().st_mtime_ns
    again = retrain(return_state=True)
    assert (again.name, again.message) == (
        "NothingToDo",
        "Nothing to do: no new data and no changed setting since decision 0002.",
    )
    assert Path("outputs/weights").stat().st_mtime_ns == made

    assert main(["champion", "rollback"]) == 0
    assert aliases() == {"champion": first.candidate, "previous": promoted.candidate}
    assert standing(decisions("tiny")) == Standing(first.candidate, promoted.candidate)

    settle(gate={"bound": 2.0})
    state = retrain(return_state=True)
    assert state.name == "Refused"
    assert state.message.startswith("Its gain may be chance: ")
    assert [one.kind for one in decisions("tiny")] == ["first", "promoted", "rolled_back", "refused"]
    assert standing(decisions("tiny")).champion == first.candidate
