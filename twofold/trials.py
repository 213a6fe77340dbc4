"""The student tries a hint: the checks of the leak gate that need rollouts (`leaks.probe`, `leaks.effect`).

1. Blind: the program runs on the example with its question emptied, without any hint.
2. Probe: the same with the prompt's hints in their places. Doing better than blind is a leak.
3. Effect: for what passed, the question is there as well. Some rollouts must succeed, and not all.

A rollout succeeds when its accuracy is above the mean accuracy that queued the prompt: for one that nobody solved, when
it is right at all. Of a prompt that everybody solved (`routing: paper`) it is when it is right.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from twofold import leaks
from twofold.asking import Case
from twofold.eps import PASSED, accuracy
from twofold.hints import Prompt, prompt_with
from twofold.records import Rollout
from twofold.scaffolds import Attempt, Scaffolding
from twofold.settings import Scaffold

Trial = Literal["blind", "probe", "effect"]

Run = Callable[[Trial, Sequence[Prompt], int], list[Rollout]]
"""Makes so many rollouts of each prompt for a trial."""


def waits(tried: Scaffolding) -> bool:
    """Whether the text checks let its last hint through and the student has not tried it."""
    last = tried.attempts[-1]
    return last.end == "admitted" and last.checks[-1].rule != "effect"


def again(tried: Scaffolding, retries: int) -> bool:
    """Whether the teacher should try once more: the student refused its last hint, which is new, and tries are left."""
    last = tried.attempts[-1]
    texts = [attempt.hint.text for attempt in tried.attempts]
    refused = last.end in ("gate/probe", "gate/effect")
    return refused and texts.count(last.hint.text) == 1 and len(tried.attempts) <= retries


def try_hints(
    cases: Mapping[str, Case], scaffoldings: Sequence[Scaffolding], settings: Scaffold, field: str, run: Run
) -> tuple[list[Scaffolding], list[Rollout]]:
    """The scaffoldings with what the student made of those hints that wait for it, and its rollouts.

    Args:
        cases: of these scaffoldings, by prompt.
        field: the input that holds the question and takes hints.
        run: makes rollouts with the student's newest weights.
    """
    tried = {one.prompt_id: one.attempts[-1].hint.text for one in scaffoldings if waits(one)}
    own = {name: cases[name] for name in tried}
    blank = {name: case.original.copy(**{field: ""}) for name, case in own.items()}
    alone = [prompt_with(name, blank[name], case.and_hint(tried[name]), field) for name, case in own.items()]
    n = settings.gate.probe_rollouts
    blind = run("blind", [Prompt(name, example) for name, example in blank.items()], n)
    probed = run("probe", alone, n)
    chances = [_counts(rollouts, own, settings) for rollouts in (probed, blind)]
    verdicts = {name: (leaks.probe(*(k[name] for k in chances), settings.gate.probe_threshold),) for name in own}

    passed = [name for name in own if verdicts[name][0].passed]
    whole = [own[name].with_hint(tried[name], field) for name in passed]
    hinted = run("effect", whole, settings.gate.effect_rollouts)
    for name, count in _counts(hinted, own, settings).items():
        verdicts[name] += (leaks.effect(count),)
    return [_judged(one, verdicts.get(one.prompt_id, ())) for one in scaffoldings], [*blind, *probed, *hinted]


def _counts(rollouts: Sequence[Rollout], cases: Mapping[str, Case], settings: Scaffold) -> dict[str, leaks.Count]:
    """Successes by prompt."""
    succeeded: dict[str, list[bool]] = {}
    for rollout in rollouts:
        bar = _bar(cases[rollout.example_id], settings.eps.tolerance)
        succeeded.setdefault(rollout.example_id, []).append(accuracy(rollout) > bar)
    return {name: leaks.Count(sum(found), len(found)) for name, found in succeeded.items()}


def _bar(case: Case, tolerance: float) -> float:
    return min(case.request.score.mean + tolerance, PASSED - tolerance)


def _judged(one: Scaffolding, verdicts: tuple[leaks.Verdict, ...]) -> Scaffolding:
    """With these verdicts added to those on its last hint."""
    if not verdicts:
        return one
    last = one.attempts[-1]
    return replace(one, attempts=(*one.attempts[:-1], Attempt(last.hint, (*last.checks, *verdicts))))
