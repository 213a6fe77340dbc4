"""A training with a teacher, through the real flow: hints are asked for, tried, joined and trained on."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from tests.test_pooled import COMMAND, change, history, made, train
from tests.test_scaffolds import completion, hint_of, serving
from tests.tiny import SETTINGS, environment, fill, make_checkout
from twofold import bands
from twofold.asking import read_answers
from twofold.attempts import ATTEMPTS, read_attempts
from twofold.hints import read_hints
from twofold.pool import read_pool
from twofold.records import read_groups, read_rollouts
from twofold.scores import of_examples, read_scores

pytestmark = pytest.mark.slow

PIPELINE = '''"""Half of the answers are right; those on odd messages only when question and hint are there."""

import json
import time
from pathlib import Path

import dspy

HINT_FIELD = "text"


class Answer(dspy.Signature):
    """Answer."""

    text: str = dspy.InputField()
    answer: str = dspy.OutputField()


class Tiny(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict(Answer)

    def forward(self, text):
        return dspy.Prediction(answer=self.answer(text=text).answer, text=text)


def program():
    return Tiny()


def metric(example, prediction, trace=None):
    lucky = sum(map(ord, prediction.answer)) % 2
    if "magic" in prediction.text:
        return 1
    if "nothing" in prediction.text or "number" not in prediction.text:
        return 0
    return lucky if int(example.id[1:]) % 2 == 0 or "Hint: Look" in prediction.text else 0


def scaffold(example, rollouts):
    with Path("asked.log").open("a") as log:
        log.write(example.text.replace("\\n", " ") + "\\n")
    time.sleep(0.5)  # time enough to be killed between two answers
    number = int(example.text.split("\\n")[0].split()[-1])
    return {1: "Look twice.", 3: "It is magic.", 5: "Read nothing."}.get(number, "The label is blue.")


def load(settings):
    path = Path("data/tiny/examples.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    examples = [dspy.Example(label="blue", **row).with_inputs("text") for row in rows]
    return examples[:6], examples[6:10], examples[10:14]
'''

SCAFFOLD = {
    "arm": "whole",
    "eps": {"visits_before_teacher": 1},
    "pool": {"refresh_every": 1, "reserve_every": 3, "max_draws": 6, "max_depth": 1},
    "gate": {"probe_rollouts": 4, "effect_rollouts": 8},
}


def make(folder: Path, server: str | None, pipeline: str = PIPELINE, **changes: Any) -> Path:
    make_checkout(folder, server)
    (folder / "pipelines/tiny.py").write_text(pipeline)
    # Six rollouts of which each is right by even chance rarely tie.
    weights = {**SETTINGS["weights"], "examples_per_round": 4, "rollouts_per_example": 6, "groups": {"size": 6}}
    change(folder, **{"scaffold": SCAFFOLD, "strategies": {"weights": ["w"]}, "weights": weights, **changes})
    fill(folder)
    return folder


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, prefect_server: str) -> Path:
    """A checkout in which the strategy has run with a scripted teacher."""
    folder = make(tmp_path_factory.mktemp("taught") / "checkout", prefect_server)
    train(folder)
    return folder


@pytest.fixture(scope="module")
def compared(checkout: Path) -> Path:
    """The same checkout, with the report."""
    subprocess.run([*COMMAND[:2], "flows.compare"], cwd=checkout, env=environment(), check=True, capture_output=True)
    return checkout


def prompts_of(checkout: Path, pattern: str) -> list[str]:
    """All prompts that were sampled from in these folders."""
    tokenizer = AutoTokenizer.from_pretrained(checkout / "base")
    folders = [path.parent for path in checkout.glob(f".work/**/{pattern}/rollouts.parquet")]
    calls = [call for folder in folders for rollout in read_rollouts(folder) for call in rollout.calls]
    return [tokenizer.decode(call.prompt_ids) for call in calls]


def test_hints_are_asked_for_tried_and_trained_on(checkout: Path) -> None:
    step = checkout / "outputs/weights/0-w"
    pool, hints = read_pool(step / "pool"), read_hints(step / "pool")
    assert {name: (hint.parent, hint.text) for name, hint in hints.items()} == {"e1+1": ("e1", "Look twice.")}
    causes = {(row.prompt_id, row.cause, row.after) for row in pool.log}
    assert {("e1", "hint_admitted", "reserve"), ("e1+1", "hint_admitted", "refresh")} <= causes
    assert {("e1+1", "merged", "active"), ("e3", "hint_refused", "reserve")} <= causes
    # Nobody ever solved it, and the teacher's hint did not help.
    assert ("e5", "never_solved", "suspect") in causes
    rows = of_examples(read_scores(step / "records/scores.parquet"))
    kept = {row.round for row in rows if row.example_id == "e1+1" and row.verdict == "keep"}
    groups = read_groups(step / "records/groups.parquet")
    assert kept
    assert {int(g.members[0].rollout_id.split("/")[2]) + 1 for g in groups if g.example_id == "e1+1"} <= kept
    for group in groups:
        assert {one.rollout_id.split("/")[3] for one in group.members} == {group.example_id}


def test_answers_join_one_round_after_they_were_asked_for(checkout: Path) -> None:
    pool = read_pool(checkout / "outputs/weights/0-w/pool")
    queued = {row.prompt_id: row.round for row in pool.log if row.after == "queued"}
    answered = {row.prompt_id: row.round for row in pool.log if row.cause in ("hint_admitted", "hint_refused")}
    assert {name: answered.get(name) for name, k in queued.items()} == {
        name: k + 1 if k < 3 else None for name, k in queued.items()
    }


def test_the_numbers_of_a_round_agree_with_what_was_asked(checkout: Path) -> None:
    rows = history(checkout)
    asked = (checkout / "asked.log").read_text().splitlines()
    assert sum(row["teacher/calls"] for row in rows) == len(asked)
    assert rows[0]["scaffolds/admitted"] == 1
    assert rows[0]["scaffolds/gate/probe"] == rows[0]["scaffolds/gate/effect"] == 2
    assert rows[1]["scaffolds/drawn"] == 1
    for number, row in enumerate(rows):
        tried = checkout.glob(f".work/weights/*/0-w/round-{number:04d}/hints/*/trial/rollouts.parquet")
        trials = sum(len(read_rollouts(path.parent)) for path in tried)
        dev = 4 if row["round"] > 1 else 0
        assert row["spent/rollouts"] == 6 * (row["drawn"] + row["due"]) + trials + dev
    assert read_rollouts(checkout / "outputs/weights/0-w/records/trials")
    attempts = read_attempts(checkout / "outputs/weights/0-w/records" / ATTEMPTS)
    assert {(row.prompt_id, row.number, row.end) for row in attempts if row.prompt_id in ("e1", "e3", "e5")} == {
        ("e1", 1, "admitted"),
        ("e3", 1, "gate/probe"),
        ("e3", 2, "gate/probe"),
        ("e5", 1, "gate/effect"),
        ("e5", 2, "gate/effect"),
    }


def test_no_evaluation_and_no_program_has_a_hint(compared: Path) -> None:
    assert any("Hint: " in prompt for prompt in prompts_of(compared, "visit-*/rollouts-*"))
    evaluated = prompts_of(compared, "dev/rollouts-*")
    evaluated += prompts_of(compared, "compare/*/*/rollouts-*")
    assert len(evaluated) == 2 * 4 + 4
    assert not [prompt for prompt in evaluated if "Hint: " in prompt]
    program = (compared / "outputs/weights/program/program.json").read_text()
    assert "Hint: " not in program
    assert "hint" not in (compared / "reports/compare.json").read_text().lower()


def test_what_was_learned_by_band_is_published_and_reported(compared: Path) -> None:
    step = compared / "outputs/weights/0-w"
    rows = read_scores(step / "records/scores.parquet")
    hints = read_hints(step / "pool")
    found = bands.learning(rows, {row.example_id for row in rows} - hints.keys())
    assert found
    assert bands.read_bands(step / bands.FILE) == found
    report = (compared / "reports/compare.md").read_text()
    assert all(f"| weights 0-w | {band.band} | {band.n} | {band.pairs} |" in report for band in found)


def test_killed_between_answers_it_asks_none_again_and_ends_the_same(checkout: Path, tmp_path: Path) -> None:
    wanted, asked = made(checkout), (checkout / "asked.log").read_text()
    shutil.rmtree(checkout / "outputs/weights")
    shutil.rmtree(checkout / ".work/weights")
    shutil.rmtree(checkout / ".work/prefect/storage")
    (checkout / "asked.log").unlink()
    with (tmp_path / "log").open("w") as log:
        # A session of its own, so that its children die with it.
        killed = subprocess.Popen(
            COMMAND, cwd=checkout, env=environment(), stdout=log, stderr=log, start_new_session=True
        )
        while not list(checkout.glob(".work/weights/*/0-w/round-0000/hints/0/answers/*-1.json")):
            assert killed.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.01)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    assert not list(checkout.glob(".work/weights/*/0-w/round-0000/hints/0/ask"))
    train(checkout)
    assert made(checkout) == wanted
    assert (checkout / "asked.log").read_text() == asked


def test_whatever_a_server_does_the_rounds_are_as_many(tmp_path: Path, prefect_server: str) -> None:
    """Every kind of failure at once; each is counted, and so is what it cost."""
    answers = [
        429,
        500,
        500,
        completion("garbage"),
        completion(""),
        3.0,
        3.0,
        hint_of("The label is blue."),
        hint_of("Look twice."),
    ]
    checkout = make(tmp_path / "checkout", prefect_server)
    with serving(*answers) as server:
        endpoint = server.settings(timeout=2.0, concurrency=1)
        teacher = {"kind": "endpoint", "endpoint": endpoint, "budget": {"calls": 14}}
        settings = yaml.safe_load((checkout / "params.yaml").read_text())
        settings["scaffold"]["teacher"] = teacher
        (checkout / "params.yaml").write_text(yaml.safe_dump(settings))
        done = subprocess.run(
            COMMAND, cwd=checkout, env=environment(TEST_KEY="geheim"), capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    rows = history(checkout)
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert len(server.asked) <= 14
    assert sum(row["teacher/calls"] for row in rows) == len(server.asked)
    files = sorted(checkout.glob(".work/weights/*/0-w/round-*/hints/*/trial/answers.json"))
    ends = {attempt.end for file in files for one in read_answers(file).scaffoldings for attempt in one.attempts}
    assert {"server_error", "malformed", "empty", "timeout", "gate/answer"} <= ends
