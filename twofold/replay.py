"""Rollouts that are made once: kept on disk as records, and replayed to whoever runs the same program again.

1. `RolloutCache` runs a program on examples and writes the rollouts down, under the digest of the program's state. What
   is there already is read, not run: after a kill, only the batch that was under way is made again.
2. `Replay` answers single LM calls from recorded ones, so that an optimizer that runs a program itself, one example
   after the other, costs no sampling where its rollouts were made before, in batches.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import dspy

from twofold import digests, programs
from twofold.examples import example_id
from twofold.records import Rollout, read_rollouts, write_rollouts
from twofold.sampling import Completion, Engine, Refusal, SampleRequest

Run = Callable[[dspy.Module, Sequence[dspy.Example]], list[Rollout]]


class RolloutCache:
    """Rollouts by program and example, one of each.

    Args:
        folder: where they are kept. Weights, draw, metric and seed are no part of a rollout's name: another one of
            these needs another folder.
        run: makes one rollout for each example.
    """

    def __init__(self, folder: Path, run: Run):
        self.folder = folder
        self.run = run
        self.made: list[Rollout] = []
        """Rollouts that were run, not read."""

    def __call__(self, program: dspy.Module, examples: Sequence[dspy.Example]) -> list[Rollout]:
        """One rollout for each example, in their order."""
        place = self.folder / digests.short(programs.digest(program))
        parts = _parts(place)
        known = {rollout.example_id: rollout for part in parts for rollout in read_rollouts(part)}
        missing = {example_id(example): example for example in examples if example_id(example) not in known}
        if missing:
            made = self.run(program, list(missing.values()))
            self.made += made
            aside = place / f".{len(parts):04d}.part"
            write_rollouts(made, aside)
            aside.rename(place / f"{len(parts):04d}")
            known |= {rollout.example_id: rollout for rollout in made}
        return [known[example_id(example)] for example in examples]

    def kept(self) -> list[Rollout]:
        """All rollouts there are, by program."""
        return [one for place in sorted(self.folder.iterdir()) for part in _parts(place) for one in read_rollouts(part)]


def _parts(place: Path) -> list[Path]:
    """The batches of one program that are complete, in the order they were made."""
    return sorted(path for path in place.glob("*") if not path.name.startswith("."))


class Replay:
    """Answers a call as it was answered before, or else by the engine."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._known: dict[tuple[str, tuple[int, ...]], Completion] = {}

    def learn(self, rollouts: Iterable[Rollout]) -> None:
        """Remember the first answer to each prompt of each module."""
        for call in (call for rollout in rollouts for call in rollout.calls):
            answer = Completion(call.completion_ids, call.logprobs, call.text, call.finish_reason, call.policy)
            self._known.setdefault((call.module, call.prompt_ids), answer)

    def sample(self, request: SampleRequest) -> Completion | Refusal:
        known = self._known.get((request.family, request.prompt_ids))
        return known or self.engine.sample([request])[0]
