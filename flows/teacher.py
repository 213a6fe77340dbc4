"""The teacher's part in a round of `w`.

1. When the pool has routed the round's inputs, ask for hints for its queue. The round's training goes on meanwhile.
2. When both are done, the student tries the hints under the new weights.
3. What it refused is asked for again, until the teacher has no tries left.
4. The answers join the pool at the beginning of the next round, however long they took: a slow teacher makes a run
   longer, and never different. The refresh decides when they are trained on.

The last round asks for nothing, for no round would train on it.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tasks.candidate import Candidate
from tasks.pool import ANSWERS
from tasks.scaffold import ask, trial
from tasks.step import Manifest
from twofold.asking import figures, read_answers
from twofold.endpoints import Spent
from twofold.settings import Settings


@dataclass(frozen=True, slots=True)
class Taught:
    """What the teacher made in a round."""

    answers: Manifest | None
    """Of this round, for the next; None when nothing was asked."""
    spent: Spent
    """By the teacher, from the beginning of the training."""
    made: tuple[Manifest, ...] = ()
    """All steps on the way."""

    def metrics(self, before: Spent, gain: float) -> dict[str, float]:
        """Numbers of the round.

        Args:
            before: what was spent in the rounds before.
            gain: what the round's scaffolds scored together.
        """
        answers = read_answers(self.answers.folder / ANSWERS) if self.answers else None
        found = figures(answers.scaffoldings if answers else (), self.spent, before)
        return {**found, "teacher/gain_per_call": gain / before.calls if before.calls else 0.0}


def teach_beside(
    training: Callable[[], Manifest],
    folder: Path,
    settings: Settings,
    candidate: Candidate,
    data: Manifest,
    grouped: Manifest,
    before: Taught,
    names: list[str | int],
) -> tuple[Manifest, Taught]:
    """The checkpoint that the training makes of the candidate, and what the teacher makes of the queue meanwhile.

    Args:
        grouped: the round's rollouts, scores and pool.
        before: what the teacher made in the round before.
        names: begin the ids of the student's trials.
    """
    inputs = {"settings": settings, "data": data, "grouped": grouped}
    if not grouped.metrics["pool/queued"]:
        return training(), Taught(None, before.spent)
    asked = ask.begin(folder / "0" / "ask", **inputs, candidate=candidate, tried=None, spent=before.spent)
    checkpoint = training()
    student = replace(candidate, checkpoint=checkpoint)
    made = [asked()]
    for attempt in itertools.count():
        named = [*names, attempt]
        made.append(trial(folder / f"{attempt}" / "trial", **inputs, candidate=student, asked=made[-1], names=named))
        if not made[-1].metrics["again"]:
            break
        place, tried = folder / f"{attempt + 1}" / "ask", made[-1]
        made.append(ask(place, **inputs, candidate=student, tried=tried, spent=_spent(tried)))
    return checkpoint, Taught(made[-1], _spent(made[-1]), tuple(made))


def _spent(answers: Manifest) -> Spent:
    return read_answers(answers.folder / ANSWERS).spent
