"""The plan of a run: which examples a round trains on, and how much work the settings ask for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import dspy

from twofold.programs import modules
from twofold.records import STUDENT
from twofold.seeds import derive
from twofold.settings import Scaffold, Settings


def examples_of_round(examples: Sequence[str], per_step: int, round_number: int, seed: int) -> list[str]:
    """The ids a round trains on: the next `per_step` of a permutation that every epoch shuffles anew.

    An epoch's last examples that fill no step wait for the next epoch, so no example is twice in one step. With fewer
    examples than `per_step`, every round trains on all.
    """
    steps = max(1, len(examples) // per_step)
    epoch, step = divmod(round_number, steps)
    order = list(examples)
    Random(derive(seed, "epoch", epoch)).shuffle(order)
    return order[step * per_step : (step + 1) * per_step]


@dataclass(frozen=True, slots=True)
class Work:
    """What one stage is going to sample."""

    stage: str
    what: str
    rollouts: int
    calls: int
    """One for each predictor and rollout; a predictor in a loop makes more."""
    tokens_in: int
    tokens_out: int
    """At most: every answer as long as `sampling.max_tokens`."""


def prompt_tokens(program: dspy.Module, examples: Sequence[dspy.Example]) -> int:
    """A guess at the tokens of one prompt, four characters each: instruction, demos and a typical input."""
    predictors = modules(program).values()
    asked = sum(len(p.signature.instructions) + sum(map(_length, p.demos)) for p in predictors) / len(predictors)
    given = sum(_length(example.inputs()) for example in examples) / len(examples)
    return round((asked + given) / 4)


def _length(example: Mapping[str, Any] | dspy.Example) -> int:
    return sum(len(f"{name}: {value}") for name, value in dict(example).items())


def _steps(settings: Settings, sizes: dict[str, int]) -> Iterator[tuple[str, str, int]]:
    """Rollouts of each step of each strategy; what a strategy begins with like an earlier one costs nothing again."""
    known: set[tuple[str, ...]] = set()
    for name, steps in settings.strategies.items():
        for place, step in enumerate(steps):
            if steps[: place + 1] not in known:
                known.add(steps[: place + 1])
                make = _prompts if step == "p" else _weights
                yield from ((name, f"{place}-{step}: {what}", count) for what, count in make(settings, sizes))


def _prompts(settings: Settings, sizes: dict[str, int]) -> Iterator[tuple[str, int]]:
    wanted = settings.prompts
    validation = round(sizes["train"] * wanted.validation_share)
    if wanted.optimizer == "mipro" and not wanted.auto:
        full = 2 + wanted.trials // wanted.full_every
        batch = min(wanted.minibatch, validation)
        yield f"{wanted.trials} trials x {batch}", wanted.trials * batch
        demos = sizes["train"] - validation
        yield f"{demos} for demos, {full} x {validation}", demos + full * validation
    elif wanted.optimizer == "gepa":
        yield "at most", wanted.metric_calls
    yield "dev", sizes["dev"]


def _weights(settings: Settings, sizes: dict[str, int]) -> Iterator[tuple[str, int]]:
    weights = settings.weights
    per_step = min(weights.examples_per_round, sizes["train"])
    evaluations = -(-weights.rounds // settings.evaluate.every)
    taught = dict(weights.rollouts_by_source)
    per_example, rounds = taught.pop(STUDENT), weights.rounds
    if settings.scaffold:
        pool = settings.scaffold.pooling
        draws = min(pool.max_draws, sizes["train"])
        looks = rounds // pool.reserve_every + (rounds - 1) // pool.recheck_every
        # An original may be in reserve together with its scaffolds.
        most = rounds * (pool.reserve_batch or weights.examples_per_round)
        due = min(most, looks * sizes["train"] * (1 + pool.max_depth))
        yield f"at most {rounds} rounds x {draws} drawn x {per_example}", rounds * draws * per_example
        if due:
            yield f"at most {due} due x {per_example}", due * per_example
        if settings.scaffold.teaches:
            yield _trials(settings.scaffold, rounds * draws + due)
    else:
        yield f"{rounds} rounds x {per_step} x {per_example}", rounds * per_step * per_example
    for name, count in taught.items():
        limit = "at most " if settings.scaffold else ""
        yield f"{limit}{rounds} rounds x {per_step} x {count} of {name}", rounds * per_step * count
    yield f"{evaluations} x dev", evaluations * sizes["dev"]


def _trials(settings: Scaffold, visits: int) -> tuple[str, int]:
    """Rollouts that try hints: as if each visit that may queue a prompt did, and every hint came to its last check."""
    prompts = visits // settings.eps.visits_before_teacher
    tries, gate = settings.teacher.retries + 1, settings.gate
    each = 2 * gate.probe_rollouts + gate.effect_rollouts
    return f"at most {prompts} x {tries} hints x {each}", prompts * tries * each


def work(settings: Settings, sizes: dict[str, int], predictors: int, prompt_tokens: int) -> list[Work]:
    """The work of each stage that samples.

    Args:
        sizes: examples of each split.
        predictors: how many the program has.
        prompt_tokens: tokens of a typical prompt.
    """
    dev = ("all", "dev, before any step", sizes["dev"])
    rows = len(settings.strategies) + len(settings.hosted)
    planned = [dev, *_steps(settings, sizes), ("compare", f"{rows} x test", rows * sizes["test"])]
    return [
        Work(
            stage,
            what,
            rollouts,
            calls := rollouts * predictors,
            calls * prompt_tokens,
            calls * settings.sampling.max_tokens,
        )
        for stage, what, rollouts in planned
    ]
