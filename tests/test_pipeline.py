"""Whole runs of the tiny pipeline: through DVC, killed and continued, and what they leave behind."""

import contextlib
import csv
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

from flows.sampling import Made
from flows.strategy import go_on
from tasks.step import Manifest
from tests.tiny import environment, make_checkout
from twofold import policy
from twofold.examples import example_id, read_examples
from twofold.export import export
from twofold.records import Rollout, read_checkpoint, read_groups, read_rollouts, write_rollouts

SECRET = "geheim-4711"


def dvc(folder: Path, *arguments: str) -> str:
    """The output of a DVC command, which must succeed."""
    command = [sys.executable, "-m", "dvc", *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(OPENAI_API_KEY=SECRET, HF_TOKEN=SECRET),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, prefect_server: str) -> Path:
    """A checkout in which `dvc repro` has run."""
    folder = make_checkout(tmp_path_factory.mktemp("run") / "checkout", prefect_server)
    dvc(folder, "repro")
    return folder


@pytest.mark.slow
def test_run_leaves_all_it_should(checkout: Path) -> None:
    report = json.loads((checkout / "reports/compare.json").read_text())
    columns = {
        "score",
        "ci_low",
        "ci_high",
        "n",
        "format_rate",
        "rollouts",
        "tokens_in",
        "tokens_out",
        "seconds",
        "money",
    }
    strategies = ["vanilla", "prompts", "weights", "together"]
    assert {name: set(row) for name, row in report["strategies"].items()} == dict.fromkeys(strategies, columns)
    assert [row["n"] for row in report["strategies"].values()] == [4, 4, 4, 4]
    # Training: 3 rounds of 3 x 4, and dev (4 examples) after rounds 2 and 3. Each strategy: 4 test examples.
    spent = {name: row["rollouts"] for name, row in report["strategies"].items()}
    assert (spent["vanilla"], spent["weights"]) == (4, 3 * 12 + 2 * 4 + 4)
    assert spent["together"] - spent["prompts"] == 3 * 12 + 2 * 4
    assert (checkout / "reports/compare.md").read_text().count("| together |") == 1
    assert {row["strategy"] for row in csv.DictReader((checkout / "reports/rounds.csv").open())} >= {"weights"}
    for picture in ("scores", "rounds"):
        assert (checkout / f"reports/{picture}.png").read_bytes().startswith(b"\x89PNG")
    page = (checkout / "reports/index.html").read_text()
    shown = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert {one["purpose"] for one in shown["sets"]} == {"test", "dev", "training", "search"}
    calls = [call for row in shown["rollouts"] for call in row["calls"]]
    assert all("<|im_start|>" in shown["beginnings"][call["beginning"]] + call["prompt"] for call in calls)
    assert len(read_rollouts(checkout / "reports/test/weights")) == 4
    trials = json.loads((checkout / "outputs/prompts/0-p/trials.json").read_text())["trials"]
    behind = {one.rollout_id.split("/")[1] for one in read_rollouts(checkout / "outputs/prompts/0-p/records")}
    assert {trial["program"] for trial in trials} <= behind
    gain = report["differences"]["weights - vanilla"]["difference"]
    scores = {name: row["score"] for name, row in report["strategies"].items()}
    assert gain == pytest.approx(scores["weights"] - scores["vanilla"])
    weights = checkout / "outputs/weights"
    records = weights / "0-w/records"
    assert len(read_rollouts(records)) == 36
    assert {group.module for group in read_groups(records / "groups.parquet")} == {"restate", "answer"}
    chosen = read_checkpoint(weights / "checkpoint/checkpoint.json")
    assert chosen.round in (2, 3)
    assert set(chosen.digests) == {"model", "data", "program", "pipeline", "settings", "groups"}
    assert (weights / "checkpoint/all-modules/adapter/adapter_model.safetensors").is_file()
    history = (weights / "0-w/history.csv").read_text().splitlines()
    assert history[0].startswith("round,")
    assert [line.split(",")[0] for line in history[1:]] == ["1", "2", "3"]


@pytest.mark.slow
def test_a_training_leaves_the_adapters_of_its_last_round(checkout: Path) -> None:
    """Also when the strategy's result is an earlier round, or the program that the training began with."""
    step = checkout / "outputs/weights/0-w"
    asked = {call.policy for rollout in read_rollouts(step / "dev/round-0003") for call in rollout.calls}
    assert asked == {policy.digest(step / "adapters/all-modules")}


@pytest.mark.slow
def test_each_round_samples_from_the_checkpoint_before(checkout: Path) -> None:
    policies: dict[str, set[str]] = {}
    following: dict[str, set[str]] = {}
    for rollout in read_rollouts(checkout / "outputs/weights/0-w/records"):
        policies.setdefault(rollout.rollout_id.split("/")[2], set()).update(call.policy for call in rollout.calls)
    # Whichever strategy ran a step first has its files.
    for path in sorted(checkout.glob(".work/*/*/?-w/round-*/checkpoint/checkpoint.json")):
        checkpoint = read_checkpoint(path)
        if checkpoint.parents.get("all-modules", "base") in policies[str(checkpoint.round - 1)]:
            following.setdefault(str(checkpoint.round), set()).add(checkpoint.policies["all-modules"])
    assert policies["0"] == {"base"}
    assert policies["1"] <= following["1"]
    assert policies["2"] <= following["2"]


@pytest.mark.slow
def test_no_step_of_any_strategy_sees_a_test_example(checkout: Path) -> None:
    """Not in a rollout, whatever it was made for, and not in a program; `compare` alone looks at test."""
    examples = read_examples(checkout / "data/prepared/test.jsonl")
    held_out = {example_id(example) for example in examples}
    sampled: dict[bool, set[str]] = {True: set(), False: set()}
    for file in checkout.glob(".work/*/*/**/rollouts.parquet"):
        comparing = file.relative_to(checkout / ".work").parts[0] == "compare"
        sampled[comparing] |= {rollout.example_id for rollout in read_rollouts(file.parent)}
    assert sampled[True] == held_out
    assert sampled[False]
    assert not sampled[False] & held_out
    for state in checkout.glob("outputs/*/program/program.json"):
        assert not [example for example in examples if example.text in state.read_text()]


@pytest.mark.slow
def test_second_repro_runs_nothing(checkout: Path) -> None:
    assert "Running stage" not in dvc(checkout, "repro")
    status = subprocess.run(["git", "status", "--porcelain"], cwd=checkout, capture_output=True, text=True, check=True)
    assert sorted(status.stdout.split()[1::2]) == ["dvc.lock", "reports/"]


@pytest.mark.slow
def test_a_strategy_runs_again_when_a_file_that_settings_name_changes(checkout: Path) -> None:
    given = checkout / "given/program.json"
    assert "given" not in dvc(checkout, "status", "strategy@weights")
    given.write_text("{}")
    try:
        assert "modified:           given" in dvc(checkout, "status", "strategy@weights")
    finally:
        given.unlink()


@pytest.mark.slow
def test_nothing_pickled_and_no_secret_is_left(checkout: Path) -> None:
    files = [path for path in checkout.rglob("*") if path.is_file() and ".git" not in path.parts]
    assert len(files) > 100
    assert not [path for path in files if path.suffix in {".pkl", ".pickle", ".pt", ".bin"}]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


@pytest.mark.slow
def test_every_result_can_be_exported(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the stages say of a checkpoint is what an export verifies."""
    monkeypatch.chdir(checkout)
    for name in ("vanilla", "prompts", "weights", "together"):
        export(name, tmp_path / name, Path("params.yaml"))
    assert "| test |" in (tmp_path / "together/README.md").read_text()
    assert (tmp_path / "weights/adapter/adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_killed_run_goes_on_to_the_same_bytes(checkout: Path, tmp_path: Path) -> None:
    published = checkout / "outputs/weights/checkpoint"
    wanted = Manifest.of(published).outputs
    shutil.rmtree(published.parent)
    shutil.rmtree(checkout / ".work/weights")
    shutil.rmtree(checkout / ".work/prefect/storage")
    # As where nobody names a server: each start has a temporary one, which dies with it.
    (checkout / "prefect.toml").unlink()
    command = [sys.executable, "-m", "flows.strategy", "--name", "weights"]
    with (tmp_path / "log").open("w") as log:
        killed = subprocess.Popen(
            command, cwd=checkout, env=environment(), stdout=log, stderr=log, start_new_session=True
        )
        while not list(checkout.glob(".work/weights/*/0-w/round-0001/groups")):
            assert killed.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.01)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    finished = _identities(checkout, "0-w/round-0000/*/*")
    assert len(finished) >= 8
    assert not published.exists()
    subprocess.run(command, cwd=checkout, env=environment(), check=True, capture_output=True)
    assert _identities(checkout, "0-w/round-0000/*/*") == finished
    assert Manifest.of(published).outputs == wanted


def _identities(checkout: Path, pattern: str) -> dict[str, int]:
    """Inode of every file under the work folder; a step that ran again has new ones."""
    return {path.as_posix(): path.stat().st_ino for path in checkout.glob(f".work/weights/*/{pattern}")}


def refused(checkout: Path, capsys: pytest.CaptureFixture[str], stage: str, *arguments: str) -> str:
    """What a stage that ends with a user's error says, run in this process, which has the imports behind it."""
    with contextlib.chdir(checkout), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [stage, *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(f"flows.{stage}", run_name="__main__")
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.slow
def test_second_stage_at_once_is_refused(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / ".work/pipeline.owner").write_text("stage weights, process 1")
    with FileLock(checkout / ".work/pipeline.lock"):
        said = refused(checkout, capsys, "compare")
    assert "Another stage works in this checkout (stage weights, process 1)" in said


@pytest.mark.slow
def test_strategy_that_is_not_there_is_named(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(checkout, capsys, "strategy", "--name", "both")
    assert "no strategy 'both'. There are: prompts, together, vanilla, weights" in said


@pytest.mark.slow
def test_failing_step_fails_its_strategy_and_finished_ones_stay(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = yaml.safe_load((checkout / "params.yaml").read_text())
    settings["prompts"]["validation_share"] = 0.01
    (checkout / "failing.yaml").write_text(yaml.safe_dump(settings))
    before = {name: Manifest.of(checkout / "outputs" / name).outputs for name in ("prompts", "together")}
    said = refused(checkout, capsys, "strategy", "--params", "failing.yaml", "--name", "together")
    (checkout / "failing.yaml").unlink()
    assert "prompts.validation_share 0.01 leaves" in said
    assert {name: Manifest.of(checkout / "outputs" / name).outputs for name in before} == before


def test_a_step_goes_on_only_when_it_pays(tmp_path: Path) -> None:
    """Ten examples; the standard error of the mean of gains g is sqrt(sum (g - mean)^2 / 9 / 10)."""

    def candidate(name: str, *solved: int) -> tuple[str, Manifest]:
        rewards = [float(k in solved) for k in range(10)]
        rollouts = [Rollout(f"{name}/{k}", f"e{k}", 0, "student", (), {}, reward=r) for k, r in enumerate(rewards)]
        write_rollouts(rollouts, tmp_path / name)
        return name, Manifest.of(tmp_path / name, {"score": sum(rewards) / 10})

    start = candidate("start", 0, 1, 2)
    lucky = candidate("lucky", 3, 4, 5, 6)
    better, as_good = candidate("better", 0, 1, 2, 3, 4), candidate("as-good", 5, 6, 7, 8, 9)
    # Gains of -1 (three), 1 (four) and 0 (three): mean 0.1, standard error sqrt((7 - 10 * 0.01) / 90) = 0.277.
    found, gain = go_on(start, Made([lucky], {}, [], {}))
    assert found == start
    assert (gain.difference, gain.standard_error, gain.n) == (pytest.approx(0.1), pytest.approx(0.277, abs=1e-3), 10)
    # Gains of 1 (two) and 0 (eight): mean 0.2, standard error sqrt((2 - 10 * 0.04) / 90) = 0.133.
    found, gain = go_on(start, Made([lucky, better, as_good], {}, [], {}))
    assert found == better
    assert gain.standard_error == pytest.approx(0.133, abs=1e-3)
    # As good as what it began with, example by example: nothing to go on with.
    assert go_on(better, Made([better], {}, [], {}))[0] is better
    assert not go_on(better, Made([candidate("same", 0, 1, 2, 3, 4)], {}, [], {}))[1].pays
