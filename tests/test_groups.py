"""Groups and advantages: cases worked out by hand, the defects of other implementations, and properties."""

import dataclasses
import itertools
import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twofold.groups import account, make_groups
from twofold.records import FAILURES, Call, Group, Rollout
from twofold.settings import Grouping, Rewards

REWARDS = Rewards(failure=0.0, format_failure=-1.0)


def rollout(
    rollout_id: str, modules: str, reward: float = 0.0, example_id: str = "e", bad: dict[int, float] | None = None, **kw
) -> Rollout:
    """A rollout that called `modules` (one letter each) in this order; `bad` maps an order to the share that parsed."""
    seen: dict[str, int] = defaultdict(int)
    calls = []
    for order, module in enumerate(modules):
        share = (bad or {}).get(order, 1.0)
        calls.append(call(rollout_id, module, seen[module], order, share))
        seen[module] += 1
    return Rollout(rollout_id, example_id, 0, "student", tuple(calls), {}, reward, **kw)


def call(rollout_id: str, module: str, index: int, order: int, parsed_share: float) -> Call:
    return Call(
        rollout_id=rollout_id,
        module=module,
        index=index,
        order=order,
        prompt_ids=(1,),
        completion_ids=(2,),
        logprobs=(-0.5,),
        text="",
        finish_reason="stop",
        policy="base",
        temperature=1.0,
        seed=0,
        parsed=parsed_share == 1,
        parsed_share=parsed_share,
    )


def batch(modules: list[str], rewards: list[float] | None = None, example_id: str = "e") -> list[Rollout]:
    """Rollouts r0, r1, … of one example; rewards fall from the first to the last unless given."""
    rewards = rewards or [float(len(modules) - i) for i in range(len(modules))]
    rows = zip(modules, rewards, strict=True)
    return [rollout(f"r{i}", called, reward, example_id) for i, (called, reward) in enumerate(rows)]


def grouped(rollouts: list[Rollout], seed: int = 0, **settings) -> dict[str, Group]:
    found = make_groups(rollouts, Grouping(**settings), REWARDS, seed)
    assert len({group.group_id for group in found}) == len(found)
    return {group.group_id: group for group in found}


def ids(group: Group) -> list[str]:
    return [member.rollout_id for member in group.members]


def rewards_of(group: Group) -> list[float]:
    return [member.reward for member in group.members]


def advantages(group: Group) -> list[float]:
    return [member.advantage for member in group.members]


# Keys


def test_groups_are_keyed_by_example_module_and_index_and_keep_first_appearance():
    mixed = [
        rollout("y0", "ba", 1, "y"),
        rollout("x0", "aba", 1, "x"),
        rollout("y1", "ab", 0, "y"),
        rollout("x1", "aab", 0, "x"),
    ]
    groups = grouped(mixed, size=2)
    assert list(groups) == ["y/b/0", "y/a/0", "x/a/0", "x/a/1", "x/b/0"]
    assert ids(groups["y/b/0"]) == ["y0", "y1"]
    assert (groups["x/a/1"].example_id, groups["x/a/1"].module, groups["x/a/1"].index) == ("x", "a", 1)
    assert [member.call_index for member in groups["x/a/1"].members] == [1, 1]


def test_modules_appear_in_the_order_of_any_rollouts_calls():
    assert list(grouped(batch(["b", "ab", "cab", "c"]), size=2)) == ["e/b/0", "e/a/0", "e/c/0"]


def test_index_is_the_recorded_one_whatever_the_order_of_the_calls():
    shuffled = rollout("r0", "aa", 1)
    shuffled = dataclasses.replace(shuffled, calls=shuffled.calls[::-1])
    groups = grouped([shuffled, rollout("r1", "aaa", 0)], size=2, fill="last")
    assert [member.call_index for member in groups["e/a/2"].members] == [1, 2]


# Padding, with the counts of the paper's code: [3, 2, 2, 1] and [1, 1, 1, 0]


UNEVEN = ["aaa", "aa", "aa", "a"]


def test_fill_last_repeats_the_last_call():
    groups = grouped(batch(UNEVEN), pad="fill", fill="last", size=4)
    used = {name: [(m.call_index, m.filled) for m in group.members] for name, group in groups.items()}
    assert used == {
        "e/a/0": [(0, False), (0, False), (0, False), (0, False)],
        "e/a/1": [(1, False), (1, False), (1, False), (0, True)],
        "e/a/2": [(2, False), (1, True), (1, True), (0, True)],
    }


def test_fill_randint_draws_from_the_rollouts_own_calls():
    groups = grouped(batch(UNEVEN), pad="fill", fill="randint", size=4)
    assert [ids(group) for group in groups.values()] == [["r0", "r1", "r2", "r3"]] * 3
    third = groups["e/a/2"].members
    assert third[0].call_index == 2
    assert {third[1].call_index, third[2].call_index} <= {0, 1}
    assert third[3].call_index == 0
    assert [member.filled for member in third] == [False, True, True, True]


def test_fill_randint_draws_every_call_equally_often_and_by_seed():
    rollouts = batch(["aaaa", "aaa"])
    drawn = [grouped(rollouts, seed, size=2)["e/a/3"].members[1].call_index for seed in range(600)]
    for index in range(3):
        # 200 expected; 60 is more than five standard deviations (11.5) away.
        assert abs(drawn.count(index) - 200) < 60


def test_a_fill_depends_on_seed_and_names_alone():
    groups = grouped(batch(["a" * 12, "aaaa"]), seed=7, size=2)
    drawn = [groups[f"e/a/{k}"].members[1].call_index for k in range(4, 12)]
    assert drawn == [1, 0, 2, 3, 2, 3, 0, 0]  # written down once: the same on every machine
    others = [rollout("new", "a", 9.0), rollout("r1", "aaaa", 1.0), rollout("r0", "a" * 12, 2.0)]
    groups = grouped(others, seed=7, size=3)
    assert [groups[f"e/a/{k}"].members[2].call_index for k in range(4, 12)] == drawn


def test_fill_draws_anew_for_each_missing_index():
    groups = grouped(batch(["a" * 40, "aaaa"]), size=2)
    drawn = [groups[f"e/a/{k}"].members[1].call_index for k in range(4, 40)]
    assert set(drawn) == {0, 1, 2, 3}


def test_truncate_keeps_what_every_caller_reached():
    assert list(grouped(batch(UNEVEN), pad="truncate", size=4)) == ["e/a/0"]
    assert list(grouped(batch(["aaa", "aa", "", "aa"]), pad="truncate", size=4)) == ["e/a/0", "e/a/1"]


def test_ragged_groups_hold_who_reached_the_index():
    groups = grouped(batch(UNEVEN), pad="ragged", size=4)
    assert {name: ids(group) for name, group in groups.items()} == {
        "e/a/0": ["r0", "r1", "r2", "r3"],
        "e/a/1": ["r0", "r1", "r2"],  # smaller than `size`: no copies
    }  # a/2 was reached by one rollout
    assert not any(member.filled for group in groups.values() for member in group.members)


@pytest.mark.parametrize("pad", ["fill", "truncate", "ragged"])
def test_a_rollout_that_never_calls_the_module_leaves_the_others_their_group(pad):
    groups = grouped(batch(["ab", "ab", "ab", "a"]), pad=pad, size=3)
    assert ids(groups["e/b/0"]) == ["r0", "r1", "r2"]
    assert ids(groups["e/a/0"]) == ["r0", "r2", "r3"]  # ranks round([0, 1.5, 3]) = 0, 2, 3


@pytest.mark.parametrize("pad", ["fill", "truncate", "ragged"])
def test_fewer_than_two_rollouts_form_no_group(pad):
    assert list(grouped(batch(["aab", "a"]), pad=pad, size=4)) == (
        ["e/a/0", "e/a/1"] if pad == "fill" else ["e/a/0"]
    )  # b was called by one rollout only
    assert not grouped(batch(["aaa"]), pad=pad)
    assert not grouped(batch(["", ""]), pad=pad)
    assert not grouped([], pad=pad)


def test_two_modules_with_one_signature_are_two_modules():
    # Their paths differ, and nothing else of a predictor is looked at.
    assert list(grouped(batch(["ab", "ab"]), size=2)) == ["e/a/0", "e/b/0"]


def test_student_and_teacher_rollouts_share_groups_however_they_are_split():
    rollouts = batch(["a", "a", "a"])
    rollouts[2] = dataclasses.replace(rollouts[2], source="teacher")
    assert ids(grouped(rollouts, size=3)["e/a/0"]) == ["r0", "r1", "r2"]


# Rewards of members


def test_a_call_that_did_not_parse_gets_the_format_reward_in_a_rollout_that_survived():
    rollouts = [rollout("r0", "ab", 1.0, bad={0: 0.25}), rollout("r1", "ab", 0.5)]
    groups = grouped(rollouts, size=2)
    assert ids(groups["e/a/0"]) == ["r1", "r0"]
    assert rewards_of(groups["e/a/0"]) == [0.5, -0.75]  # -1 + 0.25 * (0 - -1)
    assert rewards_of(groups["e/b/0"]) == [1.0, 0.5]


def test_a_format_reward_of_zero_stays_zero():
    rollouts = [rollout("r0", "a", 0.7, bad={0: 0.0}), rollout("r1", "a", 0.5)]
    found = make_groups(rollouts, Grouping(size=2), Rewards(failure=0.7, format_failure=0.0), 0)
    assert rewards_of(found[0]) == [0.5, 0.0]


def test_a_filled_member_carries_the_reward_of_the_call_that_stands_in():
    rollouts = [rollout("r0", "aa", 0.5), rollout("r1", "a", 1.0, bad={0: 0.5})]
    assert rewards_of(grouped(rollouts, size=2)["e/a/1"]) == [0.5, -0.5]


@pytest.mark.parametrize("status", FAILURES)
def test_calls_before_a_failure_still_count(status):
    failed = rollout("r1", "a", -0.3, status=status)
    groups = grouped([rollout("r0", "ab", 1.0), failed, rollout("r2", "ab", 0.0)], size=3)
    assert ids(groups["e/a/0"]) == ["r0", "r2", "r1"]
    assert rewards_of(groups["e/a/0"])[-1] == -0.3
    assert set(ids(groups["e/b/0"])) == {"r0", "r2"}


def test_a_rollout_that_failed_at_its_first_call_leaves_the_others_their_groups():
    rollouts = [*batch(["a", "a", "a"]), rollout("r3", "", 0.0, status="lm_error")]
    assert ids(grouped(rollouts, size=3)["e/a/0"]) == ["r0", "r1", "r2"]


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_by_name(reward):
    with pytest.raises(ValueError, match=f"rollout r1 of example e has reward {reward}"):
        grouped([rollout("r0", "a"), rollout("r1", "", reward)])


def test_a_rollout_given_twice_is_refused_by_name():
    with pytest.raises(ValueError, match="rollout r1 is there 2 times"):
        grouped([rollout("r0", "a"), rollout("r1", "a"), rollout("r1", "a")])


# Selection


@pytest.mark.parametrize(
    ("count", "size", "ranks"),
    [
        (4, 4, [0, 1, 2, 3]),
        (8, 3, [0, 4, 7]),  # 0, 3.5, 7: halves go to the even rank
        (12, 4, [0, 4, 7, 11]),  # 0, 3.67, 7.33, 11
        (5, 2, [0, 4]),
        (2, 5, [0, 0, 0, 1, 1]),  # 0, .25, .5, .75, 1
        (3, 4, [0, 1, 1, 2]),  # 0, .67, 1.33, 2
        (2, 4, [0, 0, 1, 1]),
    ],
)
def test_selection_takes_evenly_spaced_ranks(count, size, ranks):
    group = grouped(batch(["a"] * count), size=size)["e/a/0"]
    assert ids(group) == [f"r{rank}" for rank in ranks]


def test_selection_ranks_by_reward_and_ties_by_rollout_order():
    group = grouped(batch(["a"] * 5, [0.0, 1.0, 0.0, 1.0, 0.5]), size=5)["e/a/0"]
    assert ids(group) == ["r1", "r3", "r4", "r0", "r2"]


# Weights and advantages


def test_copies_of_a_rollout_share_its_weight():
    group = grouped(batch(["a", "a"], [1.0, 0.0]), size=5)["e/a/0"]
    assert [m.weight for m in group.members] == [1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2]
    # As for the two rollouts alone: mean 1/2, variance (1/4 + 1/4) / (2 - 1).
    assert group.mean == pytest.approx(0.5)
    assert group.std == pytest.approx(math.sqrt(0.5))
    up = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert advantages(group) == pytest.approx([up, up, up, -up, -up])


def test_paper_counts_every_copy():
    group = grouped(batch(["a", "a"], [1.0, 0.0]), size=5, duplicates="paper")["e/a/0"]
    assert [m.weight for m in group.members] == [1.0] * 5
    # Rewards 1, 1, 1, 0, 0: mean 0.6, variance (3 * 0.16 + 2 * 0.36) / 4 = 0.3.
    assert group.mean == pytest.approx(0.6)
    assert group.std == pytest.approx(math.sqrt(0.3))
    assert advantages(group) == pytest.approx([x / (math.sqrt(0.3) + 1e-4) for x in (0.4, 0.4, 0.4, -0.6, -0.6)])


def test_each_rollout_of_a_filled_group_counts_once():
    for group in grouped(batch(UNEVEN), size=4).values():
        assert [m.weight for m in group.members] == [1.0] * 4
        assert group.mean == pytest.approx(2.5)


def test_without_scaling_the_advantage_is_the_distance_from_the_mean():
    group = grouped(batch(["a"] * 4, [1.0, 0.0, 0.0, 0.0]), size=4, scale="none")["e/a/0"]
    assert advantages(group) == [0.75, -0.25, -0.25, -0.25]


def test_batch_scaling_divides_by_the_deviation_of_all_rewards():
    rollouts = [rollout(f"{e}{i}", "a", r, e) for e, rs in (("x", (1, 0)), ("y", (3, 3))) for i, r in enumerate(rs)]
    groups = grouped(rollouts, size=2, scale="batch")
    # Rewards 1, 0, 3, 3: mean 1.75, variance (0.5625 + 3.0625 + 2 * 1.5625) / 3 = 2.25, deviation 1.5.
    assert advantages(groups["x/a/0"]) == pytest.approx([0.5 / 1.5001, -0.5 / 1.5001])
    assert advantages(groups["y/a/0"]) == [0.0, 0.0]


def test_equal_rewards_have_advantages_of_exactly_zero():
    group = grouped(batch(["a"] * 3, [0.1] * 3), size=3)["e/a/0"]
    assert group.all_equal
    assert advantages(group) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("difference", "equal"), [(0.0, True), (0.125, True), (0.1875, False)])
def test_rewards_within_the_tolerance_are_equal(difference, equal):
    group = grouped(batch(["a", "a"], [0.5 + difference, 0.5]), size=2, tolerance=0.125)["e/a/0"]
    assert group.all_equal == equal
    assert (advantages(group) == [0.0, 0.0]) == equal


def test_binary_advantages_of_four_and_four():
    group = grouped(batch(["a"] * 8, [1.0] * 4 + [0.0] * 4), size=8)["e/a/0"]
    # Deviation sqrt(8 * 0.25 / 7) = 0.53452.
    assert advantages(group) == pytest.approx([0.9352393] * 4 + [-0.9352393] * 4, abs=1e-6)


def trl_advantages(rewards: list[list[float]], scale: str) -> torch.Tensor:
    """TRL 1.16's GRPOTrainer for complete groups (`sum_then_normalize`), in float64."""
    table = torch.tensor(rewards, dtype=torch.float64)
    centred = table - table.mean(dim=1, keepdim=True)
    if scale == "none":
        return centred
    deviation = table.std() if scale == "batch" else table.std(dim=1, keepdim=True)
    return centred / (deviation + 1e-4)


tables = st.integers(2, 6).flatmap(
    lambda size: st.lists(
        st.lists(st.floats(-5, 5, allow_subnormal=False), min_size=size, max_size=size), min_size=1, max_size=5
    )
)


@given(tables, st.sampled_from(["group", "none", "batch"]), st.sampled_from(["weighted", "paper"]))
def test_one_module_without_padding_is_grpo(table, scale, duplicates):
    rollouts = [
        rollout(f"{e}-{i}", "a", reward, f"{e}") for e, rewards in enumerate(table) for i, reward in enumerate(rewards)
    ]
    groups = grouped(rollouts, size=len(table[0]), scale=scale, duplicates=duplicates, tolerance=0)
    ours = {m.rollout_id: m.advantage for group in groups.values() for m in group.members}
    theirs = trl_advantages(table, scale).flatten().tolist()
    assert [ours[r.rollout_id] for r in rollouts] == pytest.approx(theirs, abs=1e-9)


# Groups of whole rollouts


def test_trajectory_groups_hold_whole_rollouts():
    rollouts = [
        rollout("r0", "ab", 1.0, bad={0: 0.5}),
        rollout("r1", "aaab", 0.0),
        rollout("r2", "", 0.0, status="lm_error"),
        rollout("s0", "a", 1.0, "lone"),
    ]
    groups = grouped(rollouts, grouping="trajectory", size=2)
    assert list(groups) == ["e/*"]
    group = groups["e/*"]
    assert (group.module, group.index) == ("", -1)
    assert [(m.rollout_id, m.call_index, m.reward, m.filled) for m in group.members] == [
        ("r0", -1, 1.0, False),
        ("r1", -1, 0.0, False),
    ]
    assert advantages(group) == pytest.approx([0.5 / (math.sqrt(0.5) + 1e-4), -0.5 / (math.sqrt(0.5) + 1e-4)])


def test_trajectory_groups_are_selected_and_weighted_alike():
    assert ids(grouped(batch(["a"] * 8), grouping="trajectory", size=3)["e/*"]) == ["r0", "r4", "r7"]
    few = grouped(batch(["a"] * 2), grouping="trajectory", size=4)["e/*"]
    assert [(m.rollout_id, m.weight) for m in few.members] == [("r0", 0.5), ("r0", 0.5), ("r1", 0.5), ("r1", 0.5)]
    assert ids(grouped(batch(["a"] * 2), grouping="trajectory", pad="ragged", size=4)["e/*"]) == ["r0", "r1"]


# Accounts


def test_account_of_module_groups():
    rollouts = [
        rollout("x0", "aab", 1.0, "x"),
        rollout("x1", "ab", 0.5, "x"),
        rollout("x2", "ab", 0.0, "x"),
        rollout("x3", "", 0.0, "x", status="lm_error"),
        rollout("y0", "a", 1.0, "y"),
        rollout("y1", "a", 1.0, "y"),
        rollout("z0", "ab", 1.0, "z", status="timeout"),
    ]
    groups = make_groups(rollouts, Grouping(size=2), REWARDS, 0)
    # x/a/0, x/a/1 (x2 fills in), x/b/0 with x0 and x2 each; y/a/0, all equal. z's a/0 and b/0 have one rollout.
    assert account(rollouts, groups) == {
        "groups": 4,
        "groups_all_equal": 1,
        "groups_all_equal_share": 0.25,
        "members": 8,
        "members_filled": 1,
        "dropped/one_rollout": 2,
        "dropped/truncated": 0,
        "calls": 11,
        "calls_grouped": 7,
        "calls_not_selected": 2,  # x1's
        "calls_no_group": 2,  # z0's
        "rollouts": 7,
        "rollouts_grouped": 4,
        "rollouts_grouped_share": pytest.approx(4 / 7),
        "rollouts_usable": 2,
        "rollouts_usable_share": pytest.approx(2 / 7),
        "not_grouped/no_calls": 1,
        "not_grouped/too_few_members": 1,
        "not_grouped/not_selected": 1,
        "status/ok": 5,
        "status/parse_error": 0,
        "status/lm_error": 1,
        "status/context_overflow": 0,
        "status/timeout": 1,
        "status/program_error": 0,
    }


def test_account_of_truncated_and_ragged_groups():
    rollouts = batch(["aaaa", "aaa", "aa", "a"])
    truncated = account(rollouts, make_groups(rollouts, Grouping(size=4, pad="truncate"), REWARDS, 0))
    assert (truncated["dropped/truncated"], truncated["dropped/one_rollout"]) == (2, 1)
    assert (truncated["calls_grouped"], truncated["calls_no_group"]) == (4, 6)
    ragged = account(rollouts, make_groups(rollouts, Grouping(size=4, pad="ragged"), REWARDS, 0))
    assert (ragged["dropped/truncated"], ragged["dropped/one_rollout"]) == (0, 1)
    assert (ragged["calls_grouped"], ragged["calls_no_group"]) == (9, 1)


def test_account_of_trajectory_groups():
    rollouts = [*batch(["aab", "ab", "a"]), rollout("r3", "", 0.0), rollout("s0", "ab", 1.0, "lone")]
    counts = account(rollouts, make_groups(rollouts, Grouping(grouping="trajectory", size=2), REWARDS, 0))
    assert (counts["groups"], counts["members"], counts["rollouts_usable"]) == (1, 2, 2)
    assert (counts["calls_grouped"], counts["calls_not_selected"], counts["calls_no_group"]) == (4, 2, 2)
    reasons = ("no_calls", "too_few_members", "not_selected")
    assert [counts[f"not_grouped/{reason}"] for reason in reasons] == [1, 1, 1]


def test_account_of_nothing():
    assert set(account([], []).values()) == {0}


# Properties


calls_of_a_rollout = st.text("abc", max_size=6)
some_rewards = st.sampled_from([-1.0, 0.0, 0.1, 0.3, 0.5, 1.0]) | st.floats(-10, 10, allow_subnormal=False)


@st.composite
def batches(draw) -> list[Rollout]:
    """Rollouts of a few examples, mixed, some of whose calls did not parse."""
    rollouts = []
    for example in range(draw(st.integers(0, 4))):
        for i in range(draw(st.integers(1, 6))):
            modules = draw(calls_of_a_rollout)
            shares = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.0, 1.0]), min_size=6, max_size=6))
            name = f"{example}-{i}"
            rollouts.append(rollout(name, modules, draw(some_rewards), f"x{example}", bad=dict(enumerate(shares))))
    return draw(st.permutations(rollouts))


groupings = st.builds(
    Grouping,
    grouping=st.sampled_from(["module", "module", "trajectory"]),
    pad=st.sampled_from(["fill", "truncate", "ragged"]),
    fill=st.sampled_from(["randint", "last"]),
    size=st.integers(2, 9),
    duplicates=st.sampled_from(["weighted", "paper"]),
    scale=st.sampled_from(["group", "none", "batch"]),
)


def reward_at(rollouts: list[Rollout], group: Group) -> dict[str, float]:
    """The reward of each rollout that made a call at the group's own place."""
    found = {}
    for r in rollouts:
        if r.example_id == group.example_id and group.module == "" and r.calls:
            found[r.rollout_id] = r.reward
        for c in r.calls:
            if (r.example_id, c.module, c.index) == (group.example_id, group.module, group.index):
                found[r.rollout_id] = r.reward if c.parsed else -1 + c.parsed_share
    return found


@given(batches(), groupings, st.integers(0, 2**40))
def test_members_are_calls_of_the_groups_own_example_and_module(rollouts, settings, seed):
    owner = {r.rollout_id: r for r in rollouts}
    for group in make_groups(rollouts, settings, REWARDS, seed):
        assert len(set(ids(group))) >= 2
        for member in group.members:
            made_by = owner[member.rollout_id]
            assert made_by.example_id == group.example_id
            if settings.grouping == "module":
                used = [c for c in made_by.calls if (c.module, c.index) == (group.module, member.call_index)]
                assert len(used) == 1
                assert member.filled == (member.call_index != group.index)
                assert not member.filled or settings.pad == "fill"


@given(batches(), groupings, st.integers(0, 2**40))
def test_size_weights_and_advantages_add_up(rollouts, settings, seed):
    for group in make_groups(rollouts, settings, REWARDS, seed):
        weights: dict[str, float] = defaultdict(float)
        for member in group.members:
            weights[member.rollout_id] += member.weight
        if settings.duplicates == "weighted":
            assert list(weights.values()) == pytest.approx([1.0] * len(weights))
        else:
            assert all(member.weight == 1 for member in group.members)
        assert len(group.members) == settings.size or (settings.pad == "ragged" and len(weights) < settings.size)
        assert sum(m.weight * m.advantage for m in group.members) == pytest.approx(0, abs=1e-6)
        assert all(m.advantage == 0 for m in group.members) or not group.all_equal


@given(batches(), groupings, st.integers(0, 2**40))
def test_best_and_worst_reward_stay(rollouts, settings, seed):
    for group in make_groups(rollouts, settings, REWARDS, seed):
        reached = reward_at(rollouts, group).values()
        assert max(rewards_of(group)) >= max(reached)
        assert min(rewards_of(group)) <= min(reached)
        if settings.pad != "fill" or settings.grouping == "trajectory":
            assert {max(reached), min(reached)} <= set(rewards_of(group)) <= set(reached)
        assert rewards_of(group) == sorted(rewards_of(group), reverse=True)


@given(batches(), groupings, st.integers(0, 2**40), st.randoms())
def test_the_order_of_examples_changes_no_group(rollouts, settings, seed, random):
    examples = sorted({r.example_id for r in rollouts})
    random.shuffle(examples)
    regrouped = [r for example in examples for r in rollouts if r.example_id == example]
    before = {group.group_id: group for group in make_groups(rollouts, settings, REWARDS, seed)}
    after = {group.group_id: group for group in make_groups(regrouped, settings, REWARDS, seed)}
    assert before == after


@given(batches(), groupings, st.integers(0, 2**40))
def test_an_example_is_grouped_alike_alone_and_among_others(rollouts, settings, seed):
    settings = settings.model_copy(update={"scale": "group"})
    together = make_groups(rollouts, settings, REWARDS, seed)
    for example, groups in itertools.groupby(together, key=lambda group: group.example_id):
        alone = [r for r in rollouts if r.example_id == example]
        assert make_groups(alone, settings, REWARDS, seed) == list(groups)


@given(batches(), groupings, st.integers(0, 2**40))
def test_account_loses_nothing(rollouts, settings, seed):
    groups = make_groups(rollouts, settings, REWARDS, seed)
    counts = account(rollouts, groups)
    out = sum(value for name, value in counts.items() if name.startswith("not_grouped/"))
    assert counts["rollouts_grouped"] + out == counts["rollouts"] == len(rollouts)
    assert sum(value for name, value in counts.items() if name.startswith("status/")) == len(rollouts)
    fates = counts["calls_grouped"] + counts["calls_not_selected"] + counts["calls_no_group"]
    assert fates == counts["calls"] == sum(len(r.calls) for r in rollouts)
    assert counts["rollouts_usable"] <= counts["rollouts_grouped"]


@given(batches(), groupings, st.integers(0, 2**40))
def test_grouping_is_deterministic(rollouts, settings, seed):
    assert make_groups(rollouts, settings, REWARDS, seed) == make_groups(rollouts, settings, REWARDS, seed)
