"""Hints for the queue of a pool: what is asked, what is kept, and how the answers join the pool.

1. Each queued prompt is a case: a request from its rollouts, score and verdict of this round, and a place for its hint.
2. The teacher is asked for all cases side by side, and the text checks of the gate judge each hint (`ask`).
3. Each of the teacher's answers is kept as soon as it is there: a run that was killed asks no finished request again.
4. The student tries what the text checks let through (`trials.py`). What it refuses is asked for again, with the
   reason, while the teacher has tries left.
5. All answers of a round join the pool at once, in the order of its prompts (`join`).

The text checks see the question without hints and all hints of the prompt together: two that each keep the answer may
give it away side by side.
"""

import dataclasses
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dspy

from twofold import digests, leaks
from twofold.endpoints import Ledger, Spent
from twofold.eps import Score
from twofold.examples import labels_of
from twofold.hints import Placed, Prompt, lineage, prompt_with
from twofold.pool import Pool, answer
from twofold.records import Rollout, read_json, write_json
from twofold.scaffolds import (
    Attempt,
    Gate,
    Hint,
    Request,
    Scaffolding,
    Teacher,
    place,
    request_for,
    scaffold,
    tally,
    told,
)
from twofold.scores import Scored, of_examples
from twofold.settings import Scaffold


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt that waits for the teacher."""

    original: dspy.Example
    hints: tuple[Placed, ...]
    """What it has already, the oldest first."""
    request: Request
    place: str
    """Where a new hint goes."""

    @property
    def prompt_id(self) -> str:
        return self.request.prompt_id

    def with_hint(self, text: str, field: str) -> Prompt:
        """The prompt with one more hint, still under its id."""
        return prompt_with(self.prompt_id, self.original, self.and_hint(text), field)

    def and_hint(self, text: str) -> tuple[Placed, ...]:
        return (*self.hints, Placed(self.prompt_id, text, self.place))


@dataclass(frozen=True, slots=True)
class Answers:
    """What a round's requests have come to so far."""

    scaffoldings: tuple[Scaffolding, ...]
    places: dict[str, str]
    """Where the hint of each prompt goes."""
    spent: Spent
    """By the teacher, from the beginning of the training."""


def cases_of(
    pool: Pool,
    hints: Mapping[str, Placed],
    examples: Mapping[str, dspy.Example],
    rollouts: Sequence[Rollout],
    rows: Sequence[Scored],
    settings: Scaffold,
    field: str,
) -> list[Case]:
    """The cases of a pool's queue, in its order.

    Args:
        examples: the originals, by id.
        rollouts, rows: of the round in which the prompts were queued, for each of them.
        field: the input that takes hints.
    """
    found = {row.example_id: row for row in of_examples(rows)}
    by_module = _by_module(rows)
    tried = defaultdict(list)
    for rollout in rollouts:
        tried[rollout.example_id].append(rollout)
    cases = []
    for prompt_id in (name for name, state in pool.states().items() if state == "queued"):
        original, own = lineage(prompt_id, hints)
        seen = prompt_with(prompt_id, examples[original], own, field).example
        score, said = found[prompt_id].score, found[prompt_id].verdict
        request = request_for(prompt_id, seen, tried[prompt_id], score, said, settings.teacher)
        cases.append(Case(examples[original], own, request, place(by_module[prompt_id])))
    return cases


def _by_module(rows: Sequence[Scored]) -> dict[str, dict[str, list[Score]]]:
    """Scores of each prompt's groups, by module; a group's id ends with its module and index."""
    found: dict[str, dict[str, list[Score]]] = defaultdict(dict)
    for row in rows:
        if row.group_id:
            _, *module, _ = row.group_id.removeprefix(row.example_id).split("/")
            found[row.example_id].setdefault("/".join(module), []).append(row.score)
    return found


def ask(
    cases: Sequence[Case], teacher: Teacher, settings: Scaffold, field: str, before: Mapping[str, Scaffolding]
) -> list[Scaffolding]:
    """Ask for each case until the text checks let a hint through or the tries are used up.

    A teacher without a server is asked for one case after the other: threads would not make it faster, and so a budget
    that is used up ends at the same case every time.

    Args:
        before: what was tried for a prompt already; it counts.
    """

    def one(case: Case) -> Scaffolding:
        tried = before[case.prompt_id].attempts if case.prompt_id in before else ()
        return scaffold(case.request, teacher, text_gate(case, settings, field), settings.teacher.retries, tried)

    endpoint = settings.teacher.endpoint
    with ThreadPoolExecutor(endpoint.concurrency if endpoint else 1) as threads:
        return list(threads.map(one, cases))


def text_gate(case: Case, settings: Scaffold, field: str) -> Gate:
    """The checks that need no rollouts; a check that fails itself refuses the hint under the rule `error`."""

    def judge(hint: str) -> tuple[leaks.Verdict, ...]:
        own = case.and_hint(hint)
        said, shown = "\n".join(one.text for one in own), case.with_hint(hint, field).example[field]
        checks = []
        for gold in golds(case.original):
            proposal = leaks.Proposal(case.original[field], gold, said, shown)
            checks += leaks.text_checks(
                proposal, settings.teacher.max_chars * len(own) + len(own), settings.gate.formula_seconds
            )[bool(checks) :]  # the form is the same for all
        try:
            return leaks.gate(checks)
        except Exception as error:
            # A hint that is garbage enough to break a parser is no hint, and no reason to end a training.
            return (leaks.Verdict("error", False, f"The hint could not be checked ({type(error).__name__})."),)

    return judge


def golds(example: dspy.Example) -> list[str]:
    """What must not be given away: each label that is a text or number, and each one in a list; one empty text for an
    example without any."""
    labels = labels_of(example).values()
    listed = [part for value in labels for part in (value if isinstance(value, list | tuple) else [value])]
    return [str(part) for part in listed if isinstance(part, str | int | float)] or [""]


class Kept:
    """A teacher whose answers are kept in a folder, where it finds them when a request is made again.

    The n-th of equal requests gets the n-th answer: a teacher that gave none may be asked the same once more.
    """

    def __init__(self, teacher: Teacher, folder: Path, settings: Scaffold):
        self.name, self.prompt_version = teacher.name, teacher.prompt_version
        self._teacher, self._folder, self._chars = teacher, folder, settings.teacher.rollout_chars
        self._times: Counter[str] = Counter()
        self._lock = threading.Lock()

    def hint(self, request: Request) -> Hint:
        path = self._path(request)
        if path.exists():
            return Hint(**read_json(path))
        hint = self._teacher.hint(request)
        write_json(hint, path)
        return hint

    def _path(self, request: Request) -> Path:
        asked = [self.name, self.prompt_version, request.prompt_id, told(request, self._chars)]
        digest = digests.short(digests.of_json(asked))
        with self._lock:
            self._times[digest] += 1
            return self._folder / f"{digest}-{self._times[digest]}.json"


def kept_ledger(folder: Path, settings: Scaffold, spent: Spent) -> Ledger:
    """The accounts of requests whose answers are kept in this folder.

    They are written before a request is sent: a kill while it was on its way does not make it free.

    Args:
        spent: before the first of these requests.
    """
    path = folder / "spent.json"
    before = Spent(**read_json(path)) if path.exists() else spent
    return Ledger(settings.teacher.budget, before, lambda now: write_json(now, path))


def join(
    pool: Pool, hints: Mapping[str, Placed], answers: Answers, round_number: int
) -> tuple[Pool, dict[str, Placed]]:
    """The pool that has taken in these answers, and the hints of all its scaffolds."""
    after = answer(pool, round_number, [one.answer for one in answers.scaffoldings])
    texts = {one.prompt_id: one.text for one in answers.scaffoldings}
    admitted = [row for row in after.log[len(pool.log) :] if row.before is None and row.after]
    made = {row.prompt_id: Placed(row.parent, texts[row.parent], answers.places[row.parent]) for row in admitted}
    return after, {**hints, **made}


def write_answers(answers: Answers, path: Path) -> None:
    """Write all attempts with their verdicts, and what was spent; equal ones as equal bytes."""
    write_json(answers, path)


def read_answers(path: Path) -> Answers:
    """Read what `write_answers` wrote; raises `RecordError` when it is missing, torn, or from a newer version."""
    content = read_json(path)
    found = [Scaffolding(row["prompt_id"], tuple(map(_attempt, row["attempts"]))) for row in content["scaffoldings"]]
    return Answers(tuple(found), content["places"], Spent(**content["spent"]))


def _attempt(row: dict[str, Any]) -> Attempt:
    return Attempt(Hint(**row["hint"]), tuple(leaks.Verdict(**check) for check in row["checks"]))


def figures(scaffoldings: Sequence[Scaffolding], spent: Spent, before: Spent) -> dict[str, float]:
    """Numbers of one round's requests under flat metric names.

    - `scaffolds/asked`, `scaffolds/admitted`: prompts; `scaffolds/END`: attempts by their end (`Attempt.end`).
    - `teacher/calls`, `teacher/tokens_in`, `teacher/tokens_out`, `teacher/money`: spent after `before`.
    """
    ends = {f"scaffolds/{end}": float(count) for end, count in tally(scaffoldings).items()}
    admitted = sum(one.outcome == "admitted" for one in scaffoldings)
    asked = {"scaffolds/asked": float(len(scaffoldings)), "scaffolds/admitted": float(admitted)}
    return {**ends, **asked, **since(spent, before)}


def since(spent: Spent, before: Spent) -> dict[str, float]:
    """What was spent after `before`, under flat metric names."""
    used = {part.name: getattr(spent, part.name) - getattr(before, part.name) for part in dataclasses.fields(Spent)}
    return {f"teacher/{name}": float(value) for name, value in used.items()}
