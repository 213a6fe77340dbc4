"""The prompt pool: each rule by hand, the files, and properties of random lives of a pool."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twofold.eps import Score, score
from twofold.errors import RecordError
from twofold.pool import (
    Answer,
    Batch,
    Change,
    Pool,
    answer,
    at_round,
    begin,
    counts,
    diff,
    draw,
    due,
    fill,
    new_pool,
    read_pool,
    refresh,
    replay,
    visit,
    write_pool,
)
from twofold.records import SCHEMA_VERSION
from twofold.settings import Eps, Pooling

ONCE = Eps(visits_before_teacher=1)
PERIODS = Pooling(refresh_every=2, reserve_every=3, recheck_every=4, max_depth=2, max_draws=4)

MIXED, HARD, SOLVED, FLAT = [0.0, 1.0], [0.0, 0.0], [1.0, 1.0], [0.5, 0.5]


def scored(rewards: list[float], eps: Eps = ONCE) -> Score:
    return score(rewards, eps, "base", "v1")


def visited(pool: Pool, round_number: int, eps: Eps = ONCE, periods: Pooling = PERIODS, **rewards) -> Pool:
    """The pool after visits to prompts, whose names have `_` for `+`."""
    scores = {name.replace("_", "+"): scored(values, eps) for name, values in rewards.items()}
    return visit(pool, round_number, scores, eps, periods)


def answered(pool: Pool, round_number: int, prompt_id: str, outcome: str = "admitted") -> Pool:
    return answer(pool, round_number, [Answer(prompt_id, outcome, "oracle", "p1", ("form: ok",))])


def moves(pool: Pool, since: int = 0) -> list[tuple]:
    return [(row.prompt_id, row.before, row.after, row.cause) for row in pool.log[since:]]


def states(pool: Pool) -> str:
    return " ".join(f"{prompt_id}:{state}" for prompt_id, state in pool.states().items())


def hinted() -> Pool:
    """`a` was too hard and has a scaffold in training; `b` is active."""
    pool = answered(visited(new_pool(["a", "b"]), 0, a=HARD), 1, "a")
    return refresh(pool, 2, PERIODS)


# Visits


@pytest.mark.parametrize(
    ("rewards", "split", "paper"),
    [
        (MIXED, "active", "active"),
        (HARD, "queued", "queued"),
        (FLAT, "queued", "queued"),
        (SOLVED, "solved", "queued"),
    ],
)
def test_where_a_visit_leads(rewards, split, paper):
    assert visited(new_pool("ab"), 0, a=rewards).states() == {"a": split, "b": "active"}
    assert visited(new_pool("ab"), 0, Eps(routing="paper", visits_before_teacher=1), a=rewards).state("a") == paper


def test_only_visits_in_a_row_that_taught_nothing_count():
    eps = Eps(visits_before_teacher=2)
    pool = new_pool("a")
    seen = []
    for round_number, rewards in enumerate([HARD, MIXED, FLAT, HARD]):
        pool = visited(pool, round_number, eps, a=rewards)
        seen.append(pool.state("a"))
    assert seen == ["active", "active", "active", "queued"]


def test_a_row_says_all_of_a_visit():
    (row,) = visited(new_pool("ab"), 7, b=[0.0, 0.0, 0.0, 1.0]).log
    assert (row.round, row.prompt_id, row.before, row.after, row.cause) == (7, "b", "active", "active", "score")
    assert (row.verdict, row.parent, row.depth, row.turns) == ("keep", "", 0, 1)
    assert row.score == scored([0.0, 0.0, 0.0, 1.0])


def test_a_visit_leaves_the_old_pool_as_it_was():
    pool = new_pool("ab")
    assert visited(pool, 0, a=HARD) != pool
    assert (states(pool), pool.log) == ("a:active b:active", ())
    assert pool == new_pool("ab")
    for own in (pool, visited(pool, 0, a=HARD)):
        with pytest.raises(ValueError, match="read-only"):
            own.table["turns"] = 3


def test_without_hints_a_prompt_that_teaches_nothing_waits_in_reserve():
    pool = visited(new_pool("a"), 0, periods=Pooling(max_depth=0), a=HARD)
    assert moves(pool) == [("a", "active", "reserve", "score")]


# Hints


def test_the_way_of_a_hint():
    pool = visited(new_pool(["a", "b"]), 0, a=HARD)
    assert states(pool) == "a:queued b:active"
    pool = answered(pool, 1, "a")
    assert states(pool) == "a:reserve b:active a+1:refresh"
    assert refresh(pool, 3, PERIODS) == pool
    pool = refresh(pool, 4, PERIODS)
    assert states(pool) == "a:reserve b:active a+1:active"
    assert moves(pool, 1) == [
        ("a", "queued", "reserve", "hint_admitted"),
        ("a+1", None, "refresh", "hint_admitted"),
        ("a+1", "refresh", "active", "merged"),
    ]
    born = pool.log[2]
    assert (born.parent, born.depth, born.teacher, born.prompt_version) == ("a", 1, "oracle", "p1")
    assert born.checks == ("form: ok",)


def test_hints_on_hints_end_at_the_depth_cap():
    pool = visited(hinted(), 2, a_1=FLAT)
    pool = refresh(answered(pool, 3, "a+1"), 4, PERIODS)
    assert states(pool) == "a:reserve b:active a+1:reserve a+1+1:active"
    assert (pool.log[-1].parent, pool.log[-1].depth) == ("a+1", 2)
    pool = visited(pool, 4, a_1_1=HARD)
    assert states(pool) == "a:reserve b:active a+1:reserve a+1+1:reserve"


def test_the_next_hint_gets_a_name_of_its_own():
    pool = visited(hinted(), 3, a=MIXED)
    pool = answered(visited(pool, 4, a=HARD), 4, "a")
    assert states(pool) == "a:reserve b:active a+1:None a+2:refresh"
    taken = answered(visited(new_pool(["a", "a+1"]), 0, a=HARD), 1, "a")
    assert states(taken) == "a:reserve a+1:active a+2:refresh"


@pytest.mark.parametrize(("rewards", "state"), [(MIXED, "active"), (SOLVED, "solved")])
def test_a_scaffold_leaves_when_its_original_leaves_reserve(rewards, state):
    pool = hinted()
    later = visited(pool, 3, a=rewards)
    assert later.states() == {"a": state, "b": "active", "a+1": None}
    assert moves(later, len(pool.log)) == [("a", "reserve", state, "score"), ("a+1", "active", None, "not_needed")]


def test_with_an_original_the_scaffolds_of_its_scaffolds_leave():
    pool = answered(visited(hinted(), 2, a_1=HARD), 3, "a+1")
    assert states(visited(pool, 3, a_1=MIXED)) == "a:reserve b:active a+1:active a+1+1:None"
    assert states(visited(pool, 3, a=MIXED)) == "a:active b:active a+1:None a+1+1:None"


def test_an_original_that_still_teaches_nothing_stays_in_reserve():
    pool = visited(hinted(), 3, a=HARD)
    assert states(pool) == "a:reserve b:active a+1:active"
    assert moves(pool)[-1] == ("a", "reserve", "reserve", "score")


def test_what_comes_late_is_logged_and_changes_nothing():
    pool = visited(hinted(), 2, a_1=HARD)
    pool = visited(visited(pool, 3, a=MIXED), 3, a=MIXED)
    late = answer(pool, 4, [Answer(name, "admitted", "oracle", "p1") for name in ("a+1", "a")])
    late = visited(late, 4, a_1=SOLVED)
    assert late.states() == pool.states()
    assert (late.table == pool.table).all()
    assert moves(late, len(pool.log)) == [
        ("a", "active", "active", "late"),
        ("a+1", None, None, "late"),
        ("a+1", None, None, "late"),
    ]
    assert [row.turns for row in late.log[len(pool.log) :]] == [1, 1, 1]


def test_a_score_is_late_when_the_original_returns_in_the_same_call():
    pool = hinted()
    later = visited(pool, 3, a_1=HARD, a=MIXED)
    assert moves(later, len(pool.log)) == [
        ("a", "reserve", "active", "score"),
        ("a+1", "active", None, "not_needed"),
        ("a+1", None, None, "late"),
    ]


# Suspects


@pytest.mark.parametrize(
    ("first", "outcome", "state"),
    [
        (HARD, "useless", "suspect"),
        (HARD, "refused", "reserve"),
        (FLAT, "useless", "reserve"),
        (FLAT, "refused", "reserve"),
    ],
)
def test_an_original_is_suspect_when_it_was_never_solved_and_hints_were_of_no_use(first, outcome, state):
    pool = answered(visited(new_pool("a"), 0, a=first), 1, "a", outcome)
    assert pool.state("a") == state
    rows = [("a", "queued", "reserve", "hint_refused"), ("a", "reserve", "suspect", "never_solved")]
    assert moves(pool, 1) == rows[: 2 if state == "suspect" else 1]


def test_an_original_is_suspect_when_its_deepest_scaffold_needs_help():
    deepest = PERIODS.model_copy(update={"max_depth": 1})
    pool = hinted()
    later = visited(pool, 2, periods=deepest, a_1=HARD)
    assert moves(later, len(pool.log)) == [
        ("a+1", "active", "reserve", "score"),
        ("a", "reserve", "suspect", "never_solved"),
        ("a+1", "reserve", None, "not_needed"),
    ]


@pytest.mark.parametrize("once", [MIXED, FLAT, SOLVED])
def test_a_scaffold_that_was_once_not_too_hard_clears_its_original(once):
    eps = Eps(visits_before_teacher=2)
    pool = visited(hinted(), 2, eps, a_1=once)
    pool = visited(pool, 3, eps, PERIODS.model_copy(update={"max_depth": 1}), a_1=HARD)
    pool = visited(pool, 4, eps, PERIODS.model_copy(update={"max_depth": 1}), a_1=HARD)
    assert states(pool) == "a:reserve b:active a+1:reserve"


@pytest.mark.parametrize(("rewards", "state"), [(MIXED, "active"), (SOLVED, "solved"), (HARD, "suspect")])
def test_a_suspect_is_cleared_by_a_score(rewards, state):
    pool = answered(visited(new_pool("a"), 0, a=HARD), 1, "a", "useless")
    assert visited(pool, 2, a=rewards).state("a") == state


# Periods


def test_reserve_is_due_every_few_rounds():
    pool = answered(visited(new_pool(["a", "b"]), 0, b=HARD), 0, "b")
    assert [due(pool, r, PERIODS, 9) for r in range(4)] == [(), (), (), ("b",)]
    pool = visited(pool, 3, b=HARD)
    assert [due(pool, r, PERIODS, 9) for r in range(3, 7)] == [("b",), (), (), ("b",)]


def test_solved_and_suspect_are_due_some_rounds_after_their_last_visit():
    pool = visited(new_pool("abc"), 1, a=SOLVED, b=HARD)
    pool = answered(pool, 2, "b", "useless")
    assert [due(pool, r, PERIODS, 9) for r in (4, 5, 6)] == [(), ("a",), ("a", "b")]
    pool = visited(pool, 6, a=SOLVED)
    assert [due(pool, r, PERIODS, 9) for r in (6, 9, 10)] == [("b",), ("b",), ("a", "b")]


def test_a_round_looks_at_a_part_of_what_is_due_and_the_rest_stays_due():
    """Five are in reserve from round 0 on, and one that was solved in round 1 is due in round 5."""
    asleep = PERIODS.model_copy(update={"max_depth": 0})
    pool = visited(new_pool("abcdef"), 0, periods=asleep, **dict.fromkeys("abcde", HARD))
    pool = visited(pool, 1, f=SOLVED)
    seen = []
    for round_number in range(2, 9):
        seen.append("".join(due(pool, round_number, asleep, 2)))
        pool = visited(pool, round_number, periods=asleep, **dict.fromkeys(seen[-1], HARD))
    # f joins the reserve in round 5, and the next look at reserve, in round 6, begins with those of round 3.
    assert seen == ["", "ab", "cd", "ef", "ab", "cd", "ef"]


@pytest.mark.parametrize(("rewards", "wait", "at_once"), [(MIXED, "active", "active"), (HARD, "active", "queued")])
def test_a_solved_prompt_that_is_solved_no_more(rewards, wait, at_once):
    pool = visited(new_pool("a"), 0, a=SOLVED)
    assert visited(pool, 4, Eps(visits_before_teacher=2), a=rewards).state("a") == wait
    assert visited(pool, 4, a=rewards).state("a") == at_once


# Draws


def test_every_active_prompt_has_a_turn_before_any_has_two():
    pool = new_pool([f"p{i}" for i in range(10)])
    drawn = []
    for round_number in range(5):
        drawn += draw(pool, round_number, PERIODS, seed=3)
        pool = visited(pool, round_number, **dict.fromkeys(drawn[-4:], MIXED))
    assert sorted(drawn[:8] + drawn[8:10]) == sorted(pool.ids)
    assert sorted(drawn[10:]) == sorted(pool.ids)
    assert drawn[:10] != drawn[10:]


def test_a_prompt_that_returns_has_no_turns_to_catch_up_on():
    pool = new_pool("abc")
    for round_number in range(4):
        pool = visited(pool, round_number, a=HARD if round_number == 0 else MIXED, b=MIXED, c=MIXED)
    assert pool.state("a") == "queued"  # three scores came late
    pool = answered(pool, 4, "a", "refused")
    pool = visited(pool, 6, a=MIXED, b=MIXED)
    # a returned when b and c had 4 turns; b has had one more since.
    assert {draw(pool, r, PERIODS, seed=0) for r in range(20)} == {("a", "c", "b"), ("c", "a", "b")}


def test_only_active_prompts_are_drawn():
    pool = visited(new_pool("abcdef"), 0, a=HARD, b=SOLVED, c=HARD, d=HARD)
    pool = answered(answered(pool, 0, "c"), 0, "d", "useless")
    assert set(pool.states().values()) == {"active", "queued", "solved", "reserve", "suspect", "refresh"}
    assert sorted(draw(pool, 1, PERIODS, seed=0)) == ["e", "f"]


def test_draws_follow_from_seed_and_round():
    pool = new_pool([f"p{i}" for i in range(100)])
    draws = {(seed, r): draw(pool, r, PERIODS, seed) for seed in (0, 1) for r in (0, 1)}
    assert len(set(draws.values())) == 4
    assert all(draw(pool, r, PERIODS, seed) == drawn for (seed, r), drawn in draws.items())


def test_each_prompt_comes_first_about_as_often():
    pool = new_pool("abcd")
    first = [draw(pool, r, PERIODS, seed=0)[0] for r in range(400)]
    # Binomial(400, 1/4): 100 expected, deviation 8.7.
    assert all(65 < first.count(prompt_id) < 135 for prompt_id in "abcd")


def test_an_empty_pool_draws_nothing():
    pool = visited(new_pool("a"), 0, a=SOLVED)
    assert draw(pool, 1, PERIODS, 0) == draw(new_pool([]), 1, PERIODS, 0) == ()


def test_a_batch_is_filled_by_as_many_visits_as_it_lacks():
    asked = []

    def keep(prompt_ids: tuple[str, ...]) -> set[str]:
        asked.append("".join(prompt_ids))
        return set(prompt_ids) & set("bdeg")

    assert fill("abcdefgh", 3, keep) == Batch(("b", "d", "e"), tuple("abcde"))
    assert asked == ["abc", "de"]


def test_a_batch_may_end_up_short_or_empty():
    assert fill("abc", 2, lambda prompt_ids: set(prompt_ids) & {"b"}) == Batch(("b",), ("a", "b", "c"))
    assert fill("abc", 2, lambda _: ()) == Batch((), ("a", "b", "c"))
    assert fill((), 2, lambda _: pytest.fail("nothing to visit")) == Batch((), ())


# History


def test_what_changed_between_two_pools():
    before = hinted()
    after = visited(before, 3, a=MIXED, b=SOLVED)
    assert diff(before, after) == [
        Change("a", "reserve", "active"),
        Change("b", "active", "solved"),
        Change("a+1", "active", None),
    ]
    assert diff(new_pool("ab"), after) == [Change("b", "active", "solved")]
    assert diff(new_pool("a"), new_pool("c")) == [Change("a", "active", None), Change("c", None, "active")]


def test_the_pool_of_an_earlier_round():
    pool = visited(hinted(), 3, a=MIXED)
    assert states(at_round(pool, 0)) == "a:queued b:active"
    assert states(at_round(pool, 1)) == "a:reserve b:active a+1:refresh"
    assert at_round(pool, 2) == hinted()
    assert at_round(pool, 9) == pool


def test_counts():
    assert counts(hinted()) == {"active": 2, "queued": 0, "refresh": 0, "reserve": 1, "solved": 0, "suspect": 0}


def test_a_training_goes_on_from_the_pool_of_another():
    pool = visited(at_round(hinted(), 1), 1, b=SOLVED)
    begun = begin(pool, "bac")
    assert states(begun) == "b:solved a:reserve c:active a+1:refresh"
    assert [row.round for row in begun.log] == [-1, 0, 0, 0]
    assert at_round(begun, 0) == begun
    assert moves(begun) == moves(pool)
    # b is looked at four rounds after it was solved, and a with the reserve.
    assert [due(begun, r, PERIODS, 9) for r in (2, 3, 4)] == [(), ("a",), ("b", "a")]
    assert states(refresh(begun, 2, PERIODS)) == "b:solved a:reserve c:active a+1:active"


def test_what_was_queued_is_visited_again_and_needs_no_second_miss():
    eps = Eps(visits_before_teacher=2)
    pool = visited(visited(new_pool("a"), 4, eps, a=HARD), 6, eps, a=HARD)
    begun = begin(pool, "a")
    assert (pool.state("a"), moves(begun, 2)) == ("queued", [("a", "queued", "active", "begun")])
    assert visited(begun, 1, eps, a=HARD).state("a") == "queued"
    assert begin(begun, "a") == begun


def test_a_new_pool_begins_as_it_is():
    assert begin(new_pool("ab"), "ab") == new_pool("ab")


def test_a_pool_of_other_examples_is_refused():
    with pytest.raises(RecordError, match="2 prompts of the pool are no training examples: b, d"):
        begin(visited(new_pool("abcd"), 0, a=HARD), "ac")


# Errors


def test_a_prompt_twice():
    with pytest.raises(ValueError, match="prompt b is there more than once"):
        new_pool("abcb")


def test_a_prompt_that_is_not_in_the_pool():
    with pytest.raises(ValueError, match="1 prompts were never in the pool, such as x"):
        visited(new_pool("a"), 0, x=MIXED, a=MIXED)
    with pytest.raises(ValueError, match="1 prompts were never in the pool, such as x"):
        answered(new_pool("a"), 0, "x")


def test_rounds_do_not_go_back():
    with pytest.raises(ValueError, match="round 1 comes after round 2"):
        visited(hinted(), 1, b=MIXED)


@pytest.mark.parametrize(
    ("row", "change"),
    [(1, {"after": "solved"}), (1, {"before": "active"}), (2, {"prompt_id": "b"}), (3, {"cause": "score"})],
)
def test_a_log_with_an_illegal_row_is_refused(row, change):
    log = list(hinted().log)
    log[row] = replace(log[row], **change)
    with pytest.raises(ValueError, match="cannot go from"):
        replay("ab", log)


def test_a_log_out_of_order_is_refused():
    log = list(hinted().log)
    log[1] = replace(log[1], round=2)
    with pytest.raises(ValueError, match="round 1 comes after round 2"):
        replay("ab", log)


# Files


def test_files_come_back_and_equal_pools_are_equal_bytes(tmp_path):
    pool = visited(hinted(), 3, a=MIXED, b=SOLVED)
    for name in ("x", "y"):
        write_pool(at_round(pool, 9), tmp_path / name)
    assert read_pool(tmp_path / "x") == pool
    write_pool(read_pool(tmp_path / "x"), tmp_path / "z")
    for file in ("prompts.parquet", "transitions.parquet"):
        assert len({(tmp_path / name / file).read_bytes() for name in "xyz"}) == 1


def test_the_files_can_be_read_without_twofold(tmp_path):
    write_pool(visited(hinted(), 3, a=MIXED), tmp_path)
    prompts = pq.read_table(tmp_path / "prompts.parquet").to_pydict()
    assert prompts["prompt_id"] == ["a", "b", "a+1"]
    assert prompts["state"] == ["active", "active", None]
    assert (prompts["parent"], prompts["depth"]) == ([-1, -1, 0], [0, 0, 1])
    rows = pq.read_table(tmp_path / "transitions.parquet").to_pylist()
    assert [row["score"] and row["score"]["mean"] for row in rows] == [0.0, None, None, None, 0.5, None]


@pytest.mark.parametrize("file", ["prompts.parquet", "transitions.parquet"])
def test_files_that_cannot_be_trusted_are_refused(tmp_path, file):
    write_pool(hinted(), tmp_path)
    whole = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RecordError, match="torn"):
        read_pool(tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(RecordError, match=r"missing"):
        read_pool(tmp_path)
    newer = {"twofold_schema": json.dumps(SCHEMA_VERSION + 1)}
    pq.write_table(pa.table({"later": [1]}).replace_schema_metadata(newer), tmp_path / file)
    with pytest.raises(RecordError, match="Update Twofold"):
        read_pool(tmp_path)


# Properties

LEGAL = {
    # visits
    *(("active", after) for after in ("active", "queued", "reserve", "solved")),
    *(("solved", after) for after in ("active", "queued", "reserve", "solved")),
    *(("reserve", after) for after in ("active", "reserve", "solved", "suspect")),
    *(("suspect", after) for after in ("active", "solved", "suspect")),
    # teacher and refresh
    ("queued", "reserve"),
    (None, "refresh"),
    ("refresh", "active"),
    # leaving
    *((before, None) for before in ("active", "queued", "refresh", "reserve", "solved")),
}

periods = st.builds(
    Pooling,
    refresh_every=st.integers(1, 2),
    reserve_every=st.integers(1, 3),
    recheck_every=st.integers(1, 3),
    max_depth=st.integers(0, 3),
    max_draws=st.integers(1, 4),
)
rules = st.builds(Eps, visits_before_teacher=st.integers(1, 2), routing=st.sampled_from(["split", "split", "paper"]))
outcomes = st.sampled_from(["admitted", "admitted", "refused", "useless"])
rewards = st.sampled_from([MIXED, HARD, HARD, HARD, SOLVED, FLAT])


@st.composite
def lives(draws) -> tuple[list[Pool], Pooling]:
    """The pools of some rounds, the first one new, and their settings."""
    eps, own = draws(rules), draws(periods)
    pools, most = [new_pool([f"e{i}" for i in range(draws(st.integers(1, 4)))])], draws(st.integers(1, 9))
    for round_number in range(draws(st.integers(1, 12))):
        pool = refresh(pools[-1], round_number, own)
        chosen = draw(pool, round_number, own, seed=0) + due(pool, round_number, own, most)
        pool = visit(pool, round_number, {name: scored(draws(rewards), eps) for name in chosen}, eps, own)
        waiting = [name for name, state in pool.states().items() if state == "queued"]
        asked = draws(st.lists(st.sampled_from(waiting), unique=True)) if waiting else []
        asked += draws(st.lists(st.sampled_from(pool.ids), max_size=1))  # perhaps late
        pools.append(answer(pool, round_number, [Answer(name, draws(outcomes), "t", "p") for name in asked]))
    return pools, own


@given(lives())
def test_no_prompt_is_lost(life):
    pools, _ = life
    originals = pools[0].ids
    for before, after in pairwise(pools):
        assert after.ids[: len(before.ids)] == before.ids
        assert all(after.state(name) for name in originals)
        assert sum(counts(after).values()) == sum(state is not None for state in after.states().values())
        born = {row.prompt_id for row in after.log if row.before is None and row.cause == "hint_admitted"}
        left = {row.prompt_id for row in after.log if row.cause == "not_needed"}
        assert set(after.ids) - set(originals) == born
        assert {name for name, state in after.states().items() if state is None} == left


@given(lives())
def test_every_change_is_logged_and_legal(life):
    pools, _ = life
    now = dict(pools[0].states())
    for row in pools[-1].log:
        assert now.get(row.prompt_id) == row.before
        now[row.prompt_id] = row.after
        assert (row.before, row.after) in LEGAL or (row.cause == "late" and row.before == row.after)
        assert (row.score is not None) == (row.verdict is not None)
        assert row.score is not None or row.cause != "score"
    assert now == pools[-1].states()
    rounds = [row.round for row in pools[-1].log]
    assert rounds == sorted(rounds)


@given(lives())
def test_the_log_gives_the_pool_of_every_round(life):
    pools, _ = life
    for round_number, pool in enumerate(pools[1:]):
        assert replay(pools[0].ids, pool.log) == pool
        assert at_round(pools[-1], round_number) == pool


@given(lives())
def test_of_a_family_all_but_the_deepest_are_in_reserve(life):
    pools, own = life
    for pool in pools:
        families: dict[str, list[str]] = {}
        for name, state in pool.states().items():
            if state:
                families.setdefault(name.split("+")[0], []).append(name)
        for family in families.values():
            by_depth = sorted(family, key=lambda name: name.count("+"))
            assert [name.count("+") for name in by_depth] == list(range(len(family)))
            assert len(family) <= 1 + own.max_depth
            assert all(pool.state(name) == "reserve" for name in by_depth[:-1])


@given(lives())
def test_no_prompt_becomes_suspect_that_was_once_not_too_hard(life):
    pools, _ = life
    log = pools[-1].log
    for at, row in enumerate(log):
        if row.cause == "never_solved":
            visits = [
                past for past in log[:at] if past.prompt_id.split("+")[0] == row.prompt_id and past.cause == "score"
            ]
            assert {past.verdict for past in visits} == {"too_hard"}


@given(lives(), st.integers(0, 20), st.randoms())
def test_the_order_in_which_things_come_in_changes_nothing(life, round_number, random):
    pools, own = life
    pool, round_number = pools[-1], len(pools) + round_number
    names = random.sample(pool.ids, len(pool.ids))
    scores = {name: scored([HARD, MIXED, SOLVED][at % 3]) for at, name in enumerate(pool.ids)}
    ordered = visit(pool, round_number, scores, ONCE, own)
    assert visit(pool, round_number, {name: scores[name] for name in names}, ONCE, own) == ordered
    answers = [Answer(name, "admitted", name, "p") for name in ordered.ids]
    shuffled = random.sample(answers, len(answers))
    assert answer(ordered, round_number, shuffled) == answer(ordered, round_number, answers)


@given(lives(), st.integers(0, 50), st.integers(0, 2**40))
def test_draws_are_distinct_active_prompts_with_the_fewest_turns_first(life, round_number, seed):
    pools, own = life
    pool = pools[-1]
    drawn = draw(pool, round_number, own, seed)
    assert drawn == draw(replay(pools[0].ids, pool.log), round_number, own, seed)
    active = [name for name, state in pool.states().items() if state == "active"]
    assert len(drawn) == len(set(drawn)) == min(len(active), own.max_draws)
    assert set(drawn) <= set(active)
    turns = dict.fromkeys(pool.ids, 0) | {row.prompt_id: row.turns for row in pool.log}
    assert [turns[name] for name in drawn] == sorted(turns[name] for name in active)[: len(drawn)]


@given(lives())
@settings(max_examples=25)
def test_any_pool_comes_back_from_its_files(tmp_path_factory, life):
    folder: Path = tmp_path_factory.mktemp("pool")
    pool = life[0][-1]
    write_pool(pool, folder)
    assert read_pool(folder) == pool


@given(
    st.text("abcdef", max_size=12).map(lambda text: "".join(dict.fromkeys(text))), st.sets(st.sampled_from("abcdef"))
)
def test_a_batch_holds_the_first_that_are_kept(drawn, keeps):
    for size in range(1, 4):
        batch = fill(drawn, size, lambda prompt_ids: keeps.intersection(prompt_ids))
        assert batch.kept == tuple(name for name in drawn if name in keeps)[:size]
        assert batch.drawn == tuple(drawn[: len(batch.drawn)])
        assert len(batch.kept) == size or batch.drawn == tuple(drawn)
