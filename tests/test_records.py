"""Records survive the disk unchanged, and what cannot be trusted is refused."""

import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold import digests
from twofold.errors import RecordError
from twofold.records import (
    SCHEMA_VERSION,
    Call,
    Checkpoint,
    Group,
    Member,
    Rollout,
    read_checkpoint,
    read_groups,
    read_json,
    read_outcomes,
    read_rollouts,
    write_groups,
    write_json,
    write_rollouts,
)
from twofold.seeds import derive

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)


def call(rollout_id: str, order: int, **changes: object) -> Call:
    values = {
        "rollout_id": rollout_id,
        "module": "hops[0].query",
        "index": order,
        "order": order,
        "prompt_ids": (1, 2, 3),
        "completion_ids": (4, 5),
        "logprobs": (-0.5, -1e-9),
        "text": "größer 漢",
        "finish_reason": "stop",
        "policy": "base",
        "temperature": 0.7,
        "seed": 2**63 - 1,
    }
    return Call(**{**values, **changes})


def rollout(rollout_id: str = "r/0", calls: int = 2, **changes: object) -> Rollout:
    values = {
        "rollout_id": rollout_id,
        "example_id": "e",
        "seed": 7,
        "source": "student",
        "calls": tuple(call(rollout_id, k) for k in range(calls)),
        "output": {"answer": ["a", None, 1.5]},
        "reward": 0.25,
        "channels": {"accuracy": 0.25, "format": 1.0},
    }
    return Rollout(**{**values, **changes})


def test_rollouts_come_back_as_they_were(tmp_path):
    failed = rollout("r/1", calls=0, status="lm_error", error="ServerError: gone", output={}, channels={}, reward=0.0)
    seen = rollout("r/2", calls=1)
    pictures = call("r/3", 0, images=("a" * 64, "b" * 64), policy="0123456789ab", parsed=False, parsed_share=0.5)
    written = [rollout(), failed, seen, replace(rollout("r/3", status="parse_error"), calls=(pictures,))]
    write_rollouts(written, tmp_path)
    assert read_rollouts(tmp_path) == written


def test_some_rollouts_can_be_read_and_all_without_their_calls(tmp_path):
    written = [rollout("r/0"), rollout("r/1", calls=0), rollout("r/2", calls=1)]
    write_rollouts(written, tmp_path)
    assert read_rollouts(tmp_path, ["r/2", "r/0", "r/9"]) == [written[0], written[2]]
    assert read_rollouts(tmp_path, []) == []
    assert read_outcomes(tmp_path) == [replace(one, calls=()) for one in written]


@given(st.lists(st.tuples(TEXT, IDS, st.lists(NUMBER, max_size=5).map(tuple)), max_size=4), TEXT, NUMBER)
def test_any_call_comes_back(tmp_path_factory, calls, text, reward):
    folder = tmp_path_factory.mktemp("r")
    made = [call("x", k, text=t, prompt_ids=ids, logprobs=logps) for k, (t, ids, logps) in enumerate(calls)]
    written = [replace(rollout("x", output={"text": text}, reward=reward), calls=tuple(made))]
    write_rollouts(written, folder)
    assert read_rollouts(folder) == written


def test_groups_and_checkpoints_come_back(tmp_path):
    members = (Member("r/0", 1, 1.0, 0.5, 0.7, filled=True), Member("r/1", -1, 0.0, 1.0, -0.7))
    groups = [Group("e/m/0", "e", "m", 0, members, 0.5, 0.7, False), Group("e/*", "e", "", -1, (), 0.0, 0.0, True)]
    write_groups(groups, tmp_path / "groups.parquet")
    assert read_groups(tmp_path / "groups.parquet") == groups
    checkpoint = Checkpoint(".", {"m": "0123456789ab"}, 3, {}, {"model": "d"}, {"loss": 0.5})
    write_json(checkpoint, tmp_path / "checkpoint.json")
    assert read_checkpoint(tmp_path / "checkpoint.json") == checkpoint


def test_equal_records_are_equal_bytes(tmp_path):
    for name in ("a", "b"):
        write_rollouts([rollout()], tmp_path / name)
        write_json({"z": 1, "a": 2}, tmp_path / name / "m.json")
    for name in ("rollouts.parquet", "calls.parquet", "m.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_records_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        rollout().reward = 1.0


@pytest.mark.parametrize("name", ["rollouts.parquet", "calls.parquet"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_torn_table_is_refused(tmp_path, name, share):
    write_rollouts([rollout()], tmp_path)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(RecordError, match=rf"{name}.*torn"):
        read_rollouts(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RecordError, match=r"groups\.parquet is missing"):
        read_groups(tmp_path / "groups.parquet")
    with pytest.raises(RecordError, match=r"m\.json is missing"):
        read_json(tmp_path / "m.json")


def test_a_newer_file_is_refused(tmp_path):
    write_groups([], tmp_path / "g.parquet")
    table = pq.read_table(tmp_path / "g.parquet")
    newer = {b"twofold_schema": str(SCHEMA_VERSION + 1).encode()}
    pq.write_table(table.replace_schema_metadata(newer), tmp_path / "g.parquet")
    with pytest.raises(RecordError, match="Update Twofold"):
        read_groups(tmp_path / "g.parquet")
    (tmp_path / "m.json").write_text(json.dumps({"schema_version": SCHEMA_VERSION + 1}))
    with pytest.raises(RecordError, match="Update Twofold"):
        read_json(tmp_path / "m.json")


def test_calls_of_version_1_are_on_policy(tmp_path):
    write_rollouts([rollout()], tmp_path)
    path = tmp_path / "calls.parquet"
    old = pq.read_table(path).drop_columns("off_policy").replace_schema_metadata({"twofold_schema": "1"})
    pq.write_table(old, path)
    assert read_rollouts(tmp_path) == [rollout()]
    pq.write_table(old.replace_schema_metadata({"twofold_schema": "2"}), path)
    with pytest.raises(RecordError, match="not a file of Call records"):
        read_rollouts(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}'])
def test_json_that_is_no_manifest_is_refused(tmp_path, content):
    (tmp_path / "m.json").write_text(content)
    with pytest.raises(RecordError, match="torn"):
        read_json(tmp_path / "m.json")


def test_another_table_is_refused(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "groups.parquet")
    with pytest.raises(RecordError, match="torn or is no record file"):
        read_groups(tmp_path / "groups.parquet")
    write_rollouts([rollout()], tmp_path)
    with pytest.raises(RecordError, match="not a file of Group records"):
        read_groups(tmp_path / "calls.parquet")


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    write_json({"a": 1}, tmp_path / "m.json")
    with pytest.raises(TypeError):
        write_json({"a": object()}, tmp_path / "m.json")
    assert read_json(tmp_path / "m.json") == {"a": 1}
    write_groups([], tmp_path / "g.parquet")
    with pytest.raises(pa.ArrowInvalid):
        write_groups([Group("g", "e", "m", "no number", (), 0.0, 0.0, False)], tmp_path / "g.parquet")
    assert read_groups(tmp_path / "g.parquet") == []
    assert {path.name for path in tmp_path.iterdir()} == {"m.json", "g.parquet"}


def test_a_folders_digest_is_that_of_names_and_contents(tmp_path):
    def folder(name: str, files: dict[str, str]) -> Path:
        for file, text in files.items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(text)
        return tmp_path / name

    base = digests.of_folder(folder("a", {"x": "1", "sub/y": "2"}))
    assert digests.of_folder(folder("b", {"sub/y": "2", "x": "1"})) == base
    assert digests.of_folder(folder("c", {"x": "1", "sub/z": "2"})) != base
    assert digests.of_folder(folder("d", {"x": "1", "sub/y": "3"})) != base


def test_seeds_have_names():
    # sha256("0\x1fa"), its first eight bytes, without the sign bit.
    assert derive(0, "a") == int(digests.of_bytes(b"0\x1fa")[:16], 16) >> 1
    assert derive(0, "a", 1) == derive(0, "a", 1)
    seeds = {derive(0, "a", 1), derive(1, "a", 1), derive(0, "a1"), derive(0, 1, "a"), derive(0, "a")}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
