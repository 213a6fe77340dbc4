"""A training whose rounds draw from the pool: through the real flow, killed and continued, and when nothing is kept."""

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.step import Manifest
from tests.tiny import SETTINGS, environment, fill, make_checkout
from twofold.pool import STATES, at_round, counts, read_pool
from twofold.records import read_checkpoint, read_groups, read_rollouts
from twofold.scores import of_examples, read_scores

pytestmark = pytest.mark.slow

SCAFFOLD = {"arm": "filter_only", "eps": {"beta": 0.01}, "pool": {"reserve_every": 2, "max_draws": 5}}

COMMAND = [sys.executable, "-m", "flows.strategy", "--name", "weights"]


def make(folder: Path, server: str, **changes: Any) -> Path:
    """A checkout with a pool, whose data and model are there."""
    make_checkout(folder, server)
    change(folder, **{"scaffold": SCAFFOLD, "strategies": {"weights": ["w"]}, **changes})
    fill(folder)
    return folder


def change(folder: Path, **changes: Any) -> None:
    (folder / "params.yaml").write_text(yaml.safe_dump({**SETTINGS, **changes}))


def train(folder: Path) -> str:
    done = subprocess.run(COMMAND, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, prefect_server: str) -> Path:
    """A checkout in which the strategy has run with `filter_only`."""
    folder = make(tmp_path_factory.mktemp("pooled") / "checkout", prefect_server)
    train(folder)
    return folder


def history(checkout: Path) -> list[dict[str, float]]:
    with (checkout / "outputs/weights/0-w/history.csv").open() as file:
        return [{name: float(value or "nan") for name, value in row.items()} for row in csv.DictReader(file)]


def checkpoints_of(checkout: Path) -> list[Path]:
    return sorted(checkout.glob(".work/weights/*/0-w/round-*/checkpoint"))


def made(checkout: Path) -> list[dict[str, str]]:
    """Digests of all that the step left, but the seconds in its history; and of every checkpoint."""
    step = Manifest.of(checkout / "outputs/weights/0-w").outputs | {"history.csv": ""}
    return [step, *(Manifest.of(folder).outputs for folder in checkpoints_of(checkout))]


def test_a_round_trains_on_what_is_kept_and_nothing_else(checkout: Path) -> None:
    records = checkout / "outputs/weights/0-w/records"
    scores = of_examples(read_scores(records / "scores.parquet"))
    groups, rollouts = read_groups(records / "groups.parquet"), read_rollouts(records)
    kept = {(row.round, row.example_id) for row in scores if row.verdict == "keep"}
    round_of = {rollout.rollout_id: int(rollout.rollout_id.split("/")[2]) + 1 for rollout in rollouts}
    trained = {(round_of[group.members[0].rollout_id], group.example_id) for group in groups}
    assert trained
    assert trained <= kept
    visited = {(round_of[rollout.rollout_id], rollout.example_id) for rollout in rollouts}
    assert visited == {(row.round, row.example_id) for row in scores}
    assert len(rollouts) == 4 * len(scores)
    assert all(row.routed_by == row.example_id and row.score.n == 4 for row in scores)
    assert {row.action for row in scores if row.verdict == "keep"} == {"train"}


def test_scores_say_what_they_depend_on(checkout: Path) -> None:
    rows = read_scores(checkout / "outputs/weights/0-w/records/scores.parquet")
    checkpoints = [read_checkpoint(folder / "checkpoint.json") for folder in checkpoints_of(checkout)]
    policies = {found.round + 1: found.policies["all-modules"] for found in checkpoints} | {1: "base"}
    assert {row.round for row in rows} == {1, 2, 3}
    assert all(row.score.policy == policies[row.round] for row in rows)
    (pipeline,) = {found.digests["pipeline"] for found in checkpoints}
    assert {(row.score.metric, row.score.beta, row.score.tau) for row in rows} == {(pipeline, 0.01, 0.0)}
    modules = {row.group_id.split("/")[-2] for row in rows if row.group_id}
    assert modules == {"restate", "answer"}


def test_the_numbers_of_a_round_agree_with_its_records(checkout: Path) -> None:
    step = checkout / "outputs/weights/0-w"
    pool, scores = read_pool(step / "pool"), of_examples(read_scores(step / "records/scores.parquet"))
    rows = history(checkout)
    assert [row["round"] for row in rows] == [1, 2, 3]
    for row in rows:
        own = [one for one in scores if one.round == row["round"]]
        assert row["drawn"] + row["due"] == len(own)
        for verdict in ("keep", "too_hard", "solved", "flat"):
            share = sum(one.verdict == verdict for one in own) / len(own)
            assert row[f"visited/{verdict}"] == pytest.approx(share)
        assert {state: row[f"pool/{state}"] for state in STATES} == counts(at_round(pool, int(row["round"])))
        assert row["drawn"] <= 5
        assert row["kept"] <= 3
        assert row["spent/rollouts"] == 4 * len(own) + (4 if row["round"] > 1 else 0)
    # There is no teacher to wait for.
    assert rows[-1]["pool/queued"] == 0


def test_every_checkpoint_holds_its_pool(checkout: Path) -> None:
    last = read_pool(checkout / "outputs/weights/0-w/pool")
    checkpoints = checkpoints_of(checkout)
    assert len(checkpoints) == 3
    for folder in checkpoints:
        found = read_checkpoint(folder / "checkpoint.json")
        assert found.digests["pool"] == Manifest.of(folder / "pool").digest
        assert read_pool(folder / "pool") == at_round(last, found.round)


def test_killed_between_two_visits_it_goes_on_to_the_same_bytes(checkout: Path, tmp_path: Path) -> None:
    wanted = made(checkout)
    shutil.rmtree(checkout / "outputs/weights")
    shutil.rmtree(checkout / ".work/weights")
    shutil.rmtree(checkout / ".work/prefect/storage")
    with (tmp_path / "log").open("w") as log:
        # A session of its own, so that its children die with it.
        killed = subprocess.Popen(
            COMMAND, cwd=checkout, env=environment(), stdout=log, stderr=log, start_new_session=True
        )
        while not list(checkout.glob(".work/weights/*/0-w/round-0001/visit-0/scores")):
            assert killed.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.01)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    assert len(checkpoints_of(checkout)) == 1
    train(checkout)
    assert made(checkout) == wanted


def test_a_training_in_which_nothing_is_kept_goes_through(tmp_path: Path, prefect_server: str) -> None:
    pool = {"max_draws": 3, "reserve_every": 9}
    scaffold = {"eps": {"tau": 2.0, "visits_before_teacher": 1}, "pool": pool}
    checkout = make(tmp_path / "checkout", prefect_server, scaffold=scaffold)
    said = train(checkout)
    assert "round 1: reward" in said
    assert "kept 0 of 3 drawn" in said
    # Six examples of three a round: all are in reserve or solved after two rounds.
    assert "round 3: no input to draw" in said
    rows = history(checkout)
    assert [row["updated"] for row in rows] == [0, 0, 0]
    assert [row["drawn"] for row in rows] == [3, 3, 0]
    assert rows[-1]["pool/active"] == 0
    assert read_groups(checkout / "outputs/weights/0-w/records/groups.parquet") == []
