"""The plan of a run: which examples a round trains on, and how much work the settings ask for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import dspy

from twofold.programs import modules
from twofold.seeds import derive
from twofold.settings import Settings


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


def work(settings: Settings, sizes: dict[str, int], predictors: int, prompt_tokens: int) -> list[Work]:
    """The work of each stage that samples.

    Args:
        sizes: examples of each split.
        predictors: how many the program has.
        prompt_tokens: tokens of a typical prompt.
    """
    weights = settings.weights
    per_step = min(weights.examples_per_step, sizes["train"])
    evaluations = -(-weights.rounds // settings.evaluate.every)
    trained = weights.rounds * per_step * weights.rollouts_per_example
    planned = [
        ("vanilla", "dev", sizes["dev"]),
        ("weights", f"{weights.rounds} rounds: {per_step} x {weights.rollouts_per_example}", trained),
        ("weights", f"{evaluations} x dev", evaluations * sizes["dev"]),
        ("compare", "2 x test", 2 * sizes["test"]),
    ]
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
