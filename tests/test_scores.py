"""Scores of a visit: by hand, dealt out at random, and on disk."""

import dataclasses
from collections import Counter

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.eps import score
from twofold.errors import RecordError
from twofold.records import Group, Member, Rollout
from twofold.scores import Scored, deal, deciding_scores, of_examples, read_scores, score_visit, write_scores
from twofold.settings import Eps, Scaffold

REWARDS = {"mixed": [0.0, 1.0], "hard": [0.0, 0.0], "solved": [1.0, 1.0], "flat": [0.5, 0.5]}


def rollouts(rewards: dict[str, list[float]]) -> list[Rollout]:
    return [
        Rollout(f"{example}/{k}", example, 0, "student", (), {}, reward)
        for example, own in rewards.items()
        for k, reward in enumerate(own)
    ]


def visited(rewards: dict[str, list[float]], arm: str = "filter_only", groups: tuple[Group, ...] = ()) -> list[Scored]:
    return score_visit(rollouts(rewards), groups, Scaffold(arm=arm), "abc", "v1", 3, seed=5)


def test_each_example_is_routed_by_its_own_score():
    rows = visited(REWARDS)
    assert [row.verdict for row in rows] == ["keep", "too_hard", "solved", "flat"]
    assert all(row.routed_by == row.example_id and row.action is None and row.group_id is None for row in rows)
    assert rows[0].score == score([0.0, 1.0], Eps(), "abc", "v1")
    assert {row.round for row in rows} == {3}


def test_groups_are_scored_beside_their_example():
    members = (Member("mixed/0", 0, 0.0, 1.0, 0.0), Member("mixed/1", 0, 0.0, 1.0, 0.0))
    group = Group("g", "mixed", "answer", 0, members, 0.0, 0.0, True)
    example, own = visited({"mixed": [0.0, 1.0]}, groups=(group,))
    assert (example.group_id, example.verdict) == (None, "keep")
    assert (own.example_id, own.group_id, own.verdict, own.routed_by) == ("mixed", "g", "too_hard", None)
    assert of_examples([example, own]) == [example]
    assert deciding_scores([example, own]) == {"mixed": example.score}


@given(st.dictionaries(st.text("abcde", min_size=1), st.sampled_from(list(REWARDS.values())), min_size=1))
def test_random_routing_keeps_as_many_and_tells_the_true_scores(rewards):
    own, dealt = visited(rewards), visited(rewards, "random_routing")
    assert [row.score for row in dealt] == [row.score for row in own]
    assert Counter(row.verdict for row in dealt) == Counter(row.verdict for row in own)
    assert sorted(row.routed_by for row in dealt) == sorted(rewards)
    by = {row.example_id: row.verdict for row in own}
    assert [row.verdict for row in dealt] == [by[row.routed_by] for row in dealt]
    assert visited(rewards, "random_routing") == dealt


def test_dealing_follows_from_the_seed_and_every_example_can_be_dealt_to_any():
    examples = ["a", "b", "c", "d"]
    assert deal(examples, 1) == deal(examples, 1)
    assert {deal(examples, seed)["a"] for seed in range(100)} == set(examples)
    assert deal([], 1) == {}


def test_files_come_back_and_equal_scores_are_equal_bytes(tmp_path):
    members = (Member("mixed/0", 0, 0.0, 1.0, 0.0), Member("mixed/1", 0, 0.5, 1.0, 0.0))
    rows = visited(REWARDS, groups=(Group("g", "mixed", "answer", 0, members, 0.0, 0.0, False),))
    rows[0] = dataclasses.replace(rows[0], action="train")
    for name in ("a", "b"):
        write_scores(rows, tmp_path / name)
        assert read_scores(tmp_path / name) == rows
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    table = pq.read_table(tmp_path / "a").to_pylist()
    assert (table[0]["value"], table[0]["n"], table[0]["policy"], table[0]["action"]) == (0.5, 2, "abc", "train")
    assert (table[-1]["group_id"], table[-1]["p_low"], table[-1]["action"]) == ("g", None, None)


def test_no_scores_are_a_table_as_well(tmp_path):
    write_scores([], tmp_path / "none")
    assert read_scores(tmp_path / "none") == []


def test_a_missing_table_is_said(tmp_path):
    with pytest.raises(RecordError, match="is missing"):
        read_scores(tmp_path / "scores.parquet")
