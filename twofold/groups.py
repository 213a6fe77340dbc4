"""Groups: which calls are compared with each other, and how much better each did than the rest.

GRPO compares answers to one prompt. mmGRPO (arXiv 2508.04660) compares the calls that play the same part in rollouts
of one example, though what happened before them may have made their prompts differ. For each example:

1. Each call gets its rollout's reward; a call that did not parse gets the reward for that instead.
2. Calls with the same module (dotted path) and the same index k among that module's calls are candidates of a group,
   at most one for each rollout. A rollout that never calls the module has no part in the module's groups.
3. Pad (PadGroups). `fill`: where a rollout made fewer calls than the longest, another of its calls stands in.
   `truncate`: keep the k that every rollout calling the module reached. `ragged`: leave the groups as they are.
4. Drop a group of fewer than two candidates: there is nothing to compare.
5. Select (SelectKDiverseElements): rank by reward, take the ranks round(linspace(0, n - 1, size)). Best and worst
   stay; when n < size ranks repeat, save in `ragged`, where the group stays smaller.
6. Weight: the copies of one rollout share a weight of 1, or (`paper`) each counts in full.
7. Advantage: reward less the group's mean, divided by the deviation of the group, of the batch, or not at all.

With `grouping: trajectory` a candidate is a whole rollout, each example has one group, and step 3 falls away.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np

from twofold.records import FAILURES, STUDENT, Call, Group, Member, Rollout, Status
from twofold.seeds import derive
from twofold.settings import Grouping, Rewards

EPSILON = 1e-4
"""Added to the deviation that advantages are divided by, as in TRL's `GRPOTrainer`."""

WHOLE = ("", -1)
"""Module and index of a group of whole rollouts."""

Place = tuple[str, str, int]
"""Example, module and index: where a group is."""


def make_groups(rollouts: Sequence[Rollout], settings: Grouping, rewards: Rewards, seed: int) -> list[Group]:
    """All groups of one batch of rollouts; the rollouts of several examples may come mixed.

    The order is that of the first appearance of examples, then of modules, then k; members come best first, equal
    rewards in the order of their rollouts. An example's groups depend on its own rollouts alone, except for the
    advantages under `scale: batch`. Groups without a difference in reward are among the result, marked `all_equal`.

    Args:
        seed: decides which calls fill in, together with the names of example, module and rollout.

    Raises:
        ValueError: naming a rollout whose reward is not finite, or whose id occurs twice.
    """
    _check(rollouts)
    groups = [
        _group(example_id, module, index, candidates, settings)
        for example_id, own in _by_example(rollouts).items()
        for module, index, candidates in _candidates(own, settings, rewards, seed)
        if len(candidates) >= 2
    ]
    return _with_advantages(groups, settings.scale)


def account(rollouts: Sequence[Rollout], groups: Sequence[Group]) -> dict[str, float]:
    """Where a batch's rollouts and calls went: counts and shares (0 of none is 0) under flat metric names.

    - `groups`, `groups_all_equal`, `groups_all_equal_share`; `members` (copies included), `members_filled`.
    - `dropped/one_rollout`, `dropped/truncated`: places (example, module, k) that have no group, because a single
      rollout came there, or although several did.
    - `calls`, `calls_grouped` (in a group, at their own place or filling in at another), `calls_not_selected` (there
      is a group for the call's place and the selection passed it over), `calls_no_group`.
    - `rollouts`, `rollouts_grouped` and `rollouts_grouped_share` (in at least one group), `rollouts_usable` and
      `rollouts_usable_share` (in at least one group that is not all-equal, hence in the update).
    - `not_grouped/no_calls`, `not_grouped/too_few_members`, `not_grouped/not_selected`: rollouts in no group.
    - `status/ok`, `status/timeout`, …: rollouts by the way they ended.
    """
    return {**_account_groups(groups), **_account_calls(rollouts, groups), **_account_rollouts(rollouts, groups)}


def taking_part(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts to compare: all of the student's, and those of sources that ended well.

    A source that failed says nothing of what the student should do: its rollouts are lost, and counted.
    """
    return [rollout for rollout in rollouts if rollout.source == STUDENT or rollout.status == "ok"]


def account_sources(rollouts: Sequence[Rollout], groups: Sequence[Group]) -> dict[str, float]:
    """What became of the rollouts of sources: counts and shares under flat metric names; nothing without sources.

    - Of all sources `sources/rollouts`, `sources/lost` (they failed) and `sources/usable_share`: their share of the
      rollouts that are in at least one group that is not all-equal.
    - Of each the same as `sources/NAME/rollouts` and so on; `sources/NAME/reward`, the mean of those that took part;
      and `sources/NAME/lost/timeout`, …: how they were lost.
    """
    usable = {member.rollout_id for group in groups if not group.all_equal for member in group.members}
    taught = [rollout for rollout in rollouts if rollout.source != STUDENT]
    if not taught:
        return {}
    found = _fates_of(taught, usable, "sources")
    for name in sorted({rollout.source for rollout in taught}):
        own = [rollout for rollout in taught if rollout.source == name]
        joined = [rollout.reward for rollout in taking_part(own)]
        lost = Counter(rollout.status for rollout in own)
        found |= _fates_of(own, usable, f"sources/{name}")
        found |= {f"sources/{name}/lost/{status}": lost[status] for status in FAILURES}
        found |= {f"sources/{name}/reward": math.fsum(joined) / len(joined)} if joined else {}
    return found


def _fates_of(rollouts: Sequence[Rollout], usable: set[str], place: str) -> dict[str, float]:
    own = sum(rollout.rollout_id in usable for rollout in rollouts)
    return {
        f"{place}/rollouts": len(rollouts),
        f"{place}/lost": len(rollouts) - len(taking_part(rollouts)),
        f"{place}/usable_share": _share(own, len(usable)),
    }


def _check(rollouts: Sequence[Rollout]) -> None:
    for rollout in rollouts:
        if not math.isfinite(rollout.reward):
            raise ValueError(
                f"rollout {rollout.rollout_id} of example {rollout.example_id} has reward {rollout.reward}: it cannot "
                "be compared with others. Let the metric return a finite number."
            )
    for rollout_id, times in Counter(rollout.rollout_id for rollout in rollouts).items():
        if times > 1:
            raise ValueError(
                f"rollout {rollout_id} is there {times} times and would count as often. Pass each rollout once."
            )


def _by_example(rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    examples: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        examples.setdefault(rollout.example_id, []).append(rollout)
    return examples


def _candidates(
    rollouts: list[Rollout], settings: Grouping, rewards: Rewards, seed: int
) -> Iterator[tuple[str, int, list[Member]]]:
    """Module, index and candidates of each group that one example's rollouts could form."""
    if settings.grouping == "trajectory":
        members = [Member(r.rollout_id, -1, r.reward, weight=1.0, advantage=0.0) for r in rollouts if r.calls]
        yield *WHOLE, members
        return
    for module in dict.fromkeys(call.module for rollout in rollouts for call in rollout.calls):
        for index, members in _at_each_index(module, rollouts, settings, rewards, seed):
            yield module, index, members


def _at_each_index(
    module: str, rollouts: list[Rollout], settings: Grouping, rewards: Rewards, seed: int
) -> Iterator[tuple[int, list[Member]]]:
    """The k of one module that padding leaves, ascending, each with its candidates."""
    own = [{call.index: call for call in rollout.calls if call.module == module} for rollout in rollouts]
    callers = [(rollout, calls) for rollout, calls in zip(rollouts, own, strict=True) if calls]
    length = 1 + max(max(calls) for _, calls in callers)
    if settings.pad == "fill":
        callers = [(rollout, _filled(rollout, calls, length, settings, seed)) for rollout, calls in callers]
    for k in range(length):
        reached = [_member(rollout, k, calls[k], rewards) for rollout, calls in callers if k in calls]
        if settings.pad != "truncate" or len(reached) == len(callers):
            yield k, reached


def _filled(rollout: Rollout, calls: dict[int, Call], length: int, settings: Grouping, seed: int) -> dict[int, Call]:
    """One rollout's calls to a module by index, with others of them at the indices below `length` it lacks."""
    own = [calls[k] for k in sorted(calls)]
    missing = [k for k in range(length) if k not in calls]
    if settings.fill == "last":
        return calls | dict.fromkeys(missing, own[-1])
    draw = random.Random(derive(seed, "fill", rollout.example_id, own[0].module, rollout.rollout_id))
    return calls | dict(zip(missing, draw.choices(own, k=len(missing)), strict=True))


def _member(rollout: Rollout, index: int, call: Call, rewards: Rewards) -> Member:
    # A program may survive an answer that did not parse; the call is told so all the same.
    reward = rollout.reward if call.parsed else rewards.of("parse_error", call.parsed_share)
    return Member(rollout.rollout_id, call.index, reward, weight=1.0, advantage=0.0, filled=call.index != index)


def _group(example_id: str, module: str, index: int, candidates: list[Member], settings: Grouping) -> Group:
    """A group whose advantages are still to come."""
    members = _weighted(_selected(candidates, settings), settings)
    mean, std = _mean_and_std(members)
    return Group(
        group_id=f"{example_id}/*" if (module, index) == WHOLE else f"{example_id}/{module}/{index}",
        example_id=example_id,
        module=module,
        index=index,
        members=tuple(members),
        mean=mean,
        std=std,
        all_equal=members[0].reward - members[-1].reward <= settings.tolerance,
    )


def _selected(candidates: list[Member], settings: Grouping) -> list[Member]:
    """`settings.size` candidates, best first, spread evenly over the ranks from best to worst."""
    ranked = sorted(candidates, key=lambda member: -member.reward)
    if settings.pad == "ragged" and len(ranked) < settings.size:
        return ranked
    ranks = np.linspace(0, len(ranked) - 1, settings.size).round().astype(int)
    return [ranked[rank] for rank in ranks]


def _weighted(members: list[Member], settings: Grouping) -> list[Member]:
    if settings.duplicates == "paper":
        return members
    copies = Counter(member.rollout_id for member in members)
    return [replace(member, weight=1 / copies[member.rollout_id]) for member in members]


def _mean_and_std(members: Sequence[Member]) -> tuple[float, float]:
    """Weighted mean and sample deviation of the rewards.

    With W the sum of the weights: mean = Σ w r / W, std = sqrt(Σ w (r - mean)² / (W - 1)). The weights are taken as
    frequencies: with weights of 1 this is the deviation that `torch.std` and TRL compute, and copies that share a
    weight of 1 leave it as it is without them. `fsum` makes both independent of the members' order.
    """
    total = math.fsum(m.weight for m in members)
    mean = math.fsum(m.weight * m.reward for m in members) / total
    return mean, math.sqrt(math.fsum(m.weight * (m.reward - mean) ** 2 for m in members) / (total - 1))


def _with_advantages(groups: list[Group], scale: str) -> list[Group]:
    """The groups with (reward - mean) / divisor, and with exactly 0 where all rewards are equal."""
    if scale == "batch" and groups:
        # As in TRL: the deviation of all rewards of the batch around their common mean, all-equal groups included.
        _, batch_std = _mean_and_std([member for group in groups for member in group.members])
        return [_with_divisor(group, batch_std + EPSILON) for group in groups]
    return [_with_divisor(group, group.std + EPSILON if scale == "group" else 1.0) for group in groups]


def _with_divisor(group: Group, divisor: float) -> Group:
    advantages = [0.0 if group.all_equal else (member.reward - group.mean) / divisor for member in group.members]
    members = [replace(m, advantage=advantage) for m, advantage in zip(group.members, advantages, strict=True)]
    return replace(group, members=tuple(members))


def _account_groups(groups: Sequence[Group]) -> dict[str, float]:
    all_equal = sum(group.all_equal for group in groups)
    members = [member for group in groups for member in group.members]
    return {
        "groups": len(groups),
        "groups_all_equal": all_equal,
        "groups_all_equal_share": _share(all_equal, len(groups)),
        "members": len(members),
        "members_filled": sum(member.filled for member in members),
    }


def _account_calls(rollouts: Sequence[Rollout], groups: Sequence[Group]) -> dict[str, float]:
    grouped = _places(groups)
    used = {(member.rollout_id, group.module, member.call_index) for group in groups for member in group.members}
    fates = Counter(_fate(call, rollout.example_id, grouped, used) for rollout in rollouts for call in rollout.calls)
    reached = Counter((rollout.example_id, call.module, call.index) for rollout in rollouts for call in rollout.calls)
    dropped = [times for place, times in reached.items() if not _has_group(place, grouped)]
    return {
        "dropped/one_rollout": sum(times == 1 for times in dropped),
        "dropped/truncated": sum(times > 1 for times in dropped),
        "calls": fates.total(),
        **{f"calls_{fate}": fates[fate] for fate in ("grouped", "not_selected", "no_group")},
    }


def _account_rollouts(rollouts: Sequence[Rollout], groups: Sequence[Group]) -> dict[str, float]:
    places = _places(groups)
    grouped = {member.rollout_id for group in groups for member in group.members}
    usable = {member.rollout_id for group in groups if not group.all_equal for member in group.members}
    reasons = Counter(_reason(rollout, places) for rollout in rollouts if rollout.rollout_id not in grouped)
    statuses = Counter(rollout.status for rollout in rollouts)
    return {
        "rollouts": len(rollouts),
        "rollouts_grouped": len(grouped),
        "rollouts_grouped_share": _share(len(grouped), len(rollouts)),
        "rollouts_usable": len(usable),
        "rollouts_usable_share": _share(len(usable), len(rollouts)),
        **{f"not_grouped/{reason}": reasons[reason] for reason in ("no_calls", "too_few_members", "not_selected")},
        **{f"status/{status}": statuses[status] for status in get_args(Status)},
    }


def _places(groups: Sequence[Group]) -> set[Place]:
    return {(group.example_id, group.module, group.index) for group in groups}


def _has_group(place: Place, grouped: set[Place]) -> bool:
    return place in grouped or (place[0], *WHOLE) in grouped


def _fate(call: Call, example_id: str, grouped: set[Place], used: set[tuple[str, str, int]]) -> str:
    if not used.isdisjoint({(call.rollout_id, call.module, call.index), (call.rollout_id, *WHOLE)}):
        return "grouped"
    return "not_selected" if _has_group((example_id, call.module, call.index), grouped) else "no_group"


def _reason(rollout: Rollout, grouped: set[Place]) -> str:
    if not rollout.calls:
        return "no_calls"
    if any(_has_group((rollout.example_id, call.module, call.index), grouped) for call in rollout.calls):
        return "not_selected"
    return "too_few_members"


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
