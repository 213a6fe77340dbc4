"""A training with a teacher program, through the real flow, with a pool: joined, counted, and kept out of scores."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.test_pooled import SCAFFOLD, checkpoints_of, history, made, make, train
from tests.tiny import SETTINGS
from twofold.programs import load_pipeline, save_state
from twofold.records import read_groups, read_rollouts
from twofold.scores import of_examples, read_scores

pytestmark = pytest.mark.slow

SOURCE = {"name": "wise", "share": 0.25, "program": "wise/program.json"}
WEIGHTS = {**SETTINGS["weights"], "rounds": 2, "sources": [SOURCE]}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, prefect_server: str) -> Path:
    """A checkout in which the strategy has run with a source in other words."""
    folder = make(tmp_path_factory.mktemp("sourced") / "checkout", prefect_server, weights=WEIGHTS, scaffold=SCAFFOLD)
    program = load_pipeline("tiny", folder / "pipelines").program()
    program.answer.signature = program.answer.signature.with_instructions("Say e, and e again.")
    save_state(program, folder / "wise/program.json")
    train(folder)
    return folder


def test_one_of_four_rollouts_of_what_is_kept_is_the_sources(checkout: Path) -> None:
    records = checkout / "outputs/weights/0-w/records"
    rollouts, groups = read_rollouts(records), read_groups(records / "groups.parquet")
    scores = of_examples(read_scores(records / "scores.parquet"))
    kept = [row for row in scores if row.verdict == "keep"]
    counts = Counter(rollout.source for rollout in rollouts)
    assert counts["wise"] == len(kept) > 0
    assert counts["student"] == 3 * len(scores)
    taught = [call for rollout in rollouts if rollout.source == "wise" for call in rollout.calls]
    assert taught
    assert all(call.off_policy and call.policy == "wise" and not call.logprobs for call in taught)
    # Under the prompts of the student: the same as of its own calls on that example.
    own = {call.prompt_ids for r in rollouts if r.source == "student" for call in r.calls if call.module == "restate"}
    assert {call.prompt_ids for call in taught if call.module == "restate"} <= own
    well = {rollout.rollout_id for rollout in rollouts if rollout.source == "wise" and rollout.status == "ok"}
    members = {member.rollout_id for group in groups for member in group.members}
    assert members & well
    assert not {rollout.rollout_id for rollout in rollouts if rollout.source == "wise"} - well & members


def test_scores_are_the_students_alone(checkout: Path) -> None:
    rows = read_scores(checkout / "outputs/weights/0-w/records/scores.parquet")
    assert {row.score.n for row in of_examples(rows)} == {3}
    assert max(row.score.n for row in rows) == 3


def test_the_numbers_of_a_round_agree_with_its_records(checkout: Path) -> None:
    rollouts = read_rollouts(checkout / "outputs/weights/0-w/records")
    for number, row in enumerate(history(checkout)):
        mine = [rollout for rollout in rollouts if rollout.rollout_id.startswith(f"weights/0/{number}/")]
        taught = [rollout for rollout in mine if rollout.source == "wise"]
        assert row["sources/rollouts"] == row["sources/wise/rollouts"] == len(taught) == row["kept"]
        lost = sum(rollout.status != "ok" for rollout in taught)
        assert row["sources/lost"] == lost
        assert sum(value for name, value in row.items() if name.startswith("sources/wise/lost/")) == lost
        assert row["spent/rollouts"] == len(mine) + (4 if row["round"] == 2 else 0)
        assert 0 < row["rows_off_policy"] < row["rows"]


def test_without_its_last_round_it_goes_on_to_the_same_bytes(checkout: Path) -> None:
    wanted = made(checkout)
    shutil.rmtree(checkout / "outputs/weights")
    (second,) = checkout.glob(".work/weights/*/0-w/round-0001")
    shutil.rmtree(second)
    train(checkout)
    assert len(checkpoints_of(checkout)) == 2
    assert made(checkout) == wanted
