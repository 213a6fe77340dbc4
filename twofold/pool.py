"""The prompt pool: which prompts are trained on, and what becomes of the others (arXiv 2609.15051).

A prompt is an original, which is an example as it is, or a scaffold: its parent with a teacher's hint. It is in one
state: `active` (may be drawn), `queued` (waits for the teacher), `refresh` (a scaffold that waits to be merged),
`reserve` (waits while a scaffold has its place, or because it got none), `solved`, or `suspect` (look at its gold
answer). A scaffold that nobody needs any more leaves the pool; an original never does. The rules:

1. A round draws active prompts, those with the fewest turns first and equal ones at random, until enough of them are
   kept or `max_draws` are drawn. A turn is a visit while active; who becomes active joins those with the fewest.
2. A visit gives a prompt a score, and `eps.route` an action. `train` makes it active and `retire` makes it solved.
   `wait` leaves it as it is, save that a solved prompt becomes active. The visits in a row that teach nothing count.
3. `scaffold` queues an active or solved prompt, or sends it to reserve when it has `max_depth` hints. A prompt that is
   in reserve or suspect stays there: the teacher has done what it could.
4. An admitted hint is a new prompt in `refresh`, one deeper than its parent; the parent goes to reserve.
5. When the teacher has given up, its prompt goes to reserve.
6. An original becomes suspect when help has failed too and no visit to it or to its scaffolds was anything but too
   hard. Help has failed when the student failed with the teacher's last hint, or a scaffold of `max_depth` needs help.
   A teacher that gave up over leaks, form, budget or errors says nothing of the gold answer.
7. Every `refresh_every` rounds all of `refresh` becomes active.
8. Every `reserve_every` rounds reserve is due for a visit; a solved or suspect prompt is `recheck_every` rounds after
   it was last visited or moved. A round visits a limited number of those due: the ones that have waited longest. The
   others stay due.
9. When a prompt leaves reserve, the scaffolds made from it, and from them, leave the pool, whatever their state. So of
   an original and its scaffolds in the pool all are in reserve, save perhaps the deepest.
10. A score or answer that comes for a prompt whose state no longer asks for one is logged as late, and changes nothing.
11. Every change is a row of the log, and the log makes the pool: replaying its rows on the originals gives the state.
    Scores and answers of one call are taken in the order of the prompts in the pool, whatever order they come in.
12. A training may begin with the pool of another. It counts rounds on from that pool's last one, which is its round 0,
    and its own examples are the originals. What was queued becomes active, for the rollouts that a teacher would be
    shown are not in the pool.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa

from twofold.eps import Action, Score, Verdict, route, verdict
from twofold.errors import RecordError
from twofold.records import read_table, write_table
from twofold.scores import SCORE_COLUMNS
from twofold.seeds import derive
from twofold.settings import Eps, Pooling

State = Literal["active", "queued", "refresh", "reserve", "solved", "suspect"]

STATES: tuple[State, ...] = get_args(State)

Cause = Literal["score", "hint_admitted", "hint_refused", "merged", "never_solved", "not_needed", "late", "begun"]
"""Why a row was logged: a visit; the teacher's answer; a refresh; rules 6, 9, 10 and 12."""

Outcome = Literal["admitted", "refused", "useless"]
"""How a request to the teacher ended: its hint passed the gate; or it gave up, and its last hint was then refused, or
passed all checks but that of effect, with which the student failed as well."""

MOVES: dict[Cause, frozenset[tuple[State | None, State | None]]] = {
    "score": frozenset(
        [
            ("active", "active"),
            ("active", "queued"),
            ("active", "reserve"),
            ("active", "solved"),
            ("reserve", "active"),
            ("reserve", "reserve"),
            ("reserve", "solved"),
            ("solved", "active"),
            ("solved", "queued"),
            ("solved", "reserve"),
            ("solved", "solved"),
            ("suspect", "active"),
            ("suspect", "solved"),
            ("suspect", "suspect"),
        ]
    ),
    "hint_admitted": frozenset([("queued", "reserve"), (None, "refresh")]),
    "hint_refused": frozenset([("queued", "reserve")]),
    "merged": frozenset([("refresh", "active")]),
    "never_solved": frozenset([("reserve", "suspect")]),
    "not_needed": frozenset((state, None) for state in STATES if state != "suspect"),
    "late": frozenset((state, state) for state in (*STATES, None)),
    "begun": frozenset([("queued", "active")]),
}
"""The legal moves of each cause; `None` is outside the pool."""

_VISITED = ("active", "reserve", "solved", "suspect")

_OUTSIDE = -1

_NAMED = 20
"""Most prompts that an error names."""

_FIELDS = np.dtype(
    [
        ("state", "i1"),  # index in STATES, or _OUTSIDE
        ("parent", "i4"),  # position in the pool, -1 for an original
        ("depth", "i2"),
        ("turns", "i4"),
        ("misses", "i4"),  # visits in a row that taught nothing
        ("since", "i4"),  # round of the last visit or move
        ("ever", "?"),  # it, or a scaffold made from it, was once anything but too hard
    ]
)


@dataclass(frozen=True, slots=True)
class Transition:
    """A row of the log: what happened to a prompt, and why."""

    round: int
    prompt_id: str
    before: State | None
    after: State | None
    """`None` before a scaffold is in the pool, and after it left."""
    cause: Cause
    parent: str
    """The prompt that a scaffold was made from; empty for an original."""
    depth: int
    """Hints on top of each other; 0 for an original."""
    turns: int
    """The prompt's turns after this row."""
    verdict: Verdict | None = None
    score: Score | None = None
    """Of a visit."""
    teacher: str = ""
    prompt_version: str = ""
    """Version of the teacher's prompt."""
    checks: tuple[str, ...] = ()
    """Verdicts of the leak gate, in order."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How the request to a teacher for one queued prompt ended."""

    prompt_id: str
    outcome: Outcome
    teacher: str
    prompt_version: str
    checks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """What a round's draws gave."""

    kept: tuple[str, ...]
    drawn: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """A prompt whose state differs between two pools; `None` is outside the pool."""

    prompt_id: str
    before: State | None
    after: State | None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Pool:
    """All prompts and their history. Immutable: each move gives a new pool, which shares what did not change."""

    ids: tuple[str, ...]
    """Originals in the order given, then scaffolds in the order they were admitted, those that left included."""
    positions: dict[str, int]
    table: np.ndarray
    """One row of `_FIELDS` for each id; read-only."""
    log: tuple[Transition, ...]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Pool)
            and self.ids == other.ids
            and np.array_equal(self.table, other.table)
            and self.log == other.log
        )

    def state(self, prompt_id: str) -> State | None:
        """The state of a prompt; `None` when it is not, or no longer, in the pool."""
        at = self.positions.get(prompt_id)
        return None if at is None else _name(self.table["state"][at])

    def states(self) -> dict[str, State | None]:
        """The state of every prompt that is or was in the pool."""
        return dict(zip(self.ids, map(_name, self.table["state"].tolist()), strict=True))


def new_pool(originals: Sequence[str]) -> Pool:
    """A pool in which every original is active, and nothing has happened.

    Raises:
        ValueError: an id occurs twice.
    """
    ids = tuple(originals)
    positions = {prompt_id: at for at, prompt_id in enumerate(ids)}
    if len(positions) < len(ids):
        twice = next(prompt_id for at, prompt_id in enumerate(ids) if positions[prompt_id] != at)
        raise ValueError(f"prompt {twice} is there more than once and would be drawn as often. Pass each prompt once.")
    table = np.zeros(len(ids), _FIELDS)
    table["state"] = STATES.index("active")
    table["parent"] = -1
    table.flags.writeable = False
    return Pool(ids, positions, table, ())


def draw(pool: Pool, round_number: int, settings: Pooling, seed: int) -> tuple[str, ...]:
    """The prompts a round may visit, in the order to visit them: `max_draws`, or all active ones if they are fewer."""
    rng = np.random.default_rng(derive(seed, "draw", round_number))
    active = np.flatnonzero(pool.table["state"] == STATES.index("active"))
    turns = pool.table["turns"][active]
    drawn: list[int] = []
    while active.size and len(drawn) < settings.max_draws:
        fewest = turns == turns.min()
        equal = active[fewest]
        drawn.extend(rng.choice(equal, min(equal.size, settings.max_draws - len(drawn)), replace=False).tolist())
        active, turns = active[~fewest], turns[~fewest]
    return tuple(pool.ids[at] for at in drawn)


def fill(drawn: Sequence[str], size: int, keep: Callable[[tuple[str, ...]], Collection[str]]) -> Batch:
    """Visit prompts in the order drawn until `size` of them are kept or none is left.

    Only as many are visited at a time as the batch lacks, so none is visited in vain. The batch may end up short, or
    empty.

    Args:
        keep: visits these prompts and returns those that are kept.
    """
    kept: list[str] = []
    visited = 0
    while len(kept) < size and visited < len(drawn):
        asked = tuple(drawn[visited : visited + size - len(kept)])
        found = keep(asked)
        kept += [prompt_id for prompt_id in asked if prompt_id in found]
        visited += len(asked)
    return Batch(tuple(kept), tuple(drawn[:visited]))


def due(pool: Pool, round_number: int, settings: Pooling, most: int) -> tuple[str, ...]:
    """The prompts to visit in this round beside those drawn, `most` at most (rule 8)."""
    state, since = pool.table["state"], pool.table["since"]
    slow = (state == STATES.index("solved")) | (state == STATES.index("suspect"))
    chosen = slow & (round_number - since >= settings.recheck_every)
    if begun := round_number - round_number % settings.reserve_every:
        left = (since < begun) | (round_number == begun)
        chosen |= left & (state == STATES.index("reserve"))
    found = np.flatnonzero(chosen)
    longest = np.argsort(since[found], kind="stable")[:most]
    return tuple(pool.ids[at] for at in np.sort(found[longest]))


def actions(pool: Pool, scores: Mapping[str, Score], eps: Eps) -> dict[str, Action]:
    """What `visit` would do with each prompt for its score; raises `ValueError` for one that was never in the pool."""
    _check_known(pool, scores)
    misses = pool.table["misses"]
    return {name: _action(score, misses[pool.positions[name]], eps) for name, score in scores.items()}


def visit(pool: Pool, round_number: int, scores: Mapping[str, Score], eps: Eps, settings: Pooling) -> Pool:
    """Take in the scores of prompts that were drawn or due, by prompt (rules 2, 3, 6, 9).

    Raises:
        ValueError: a prompt was never in the pool, or the round is before the last one logged.
    """
    _check_known(pool, scores)
    draft = _Draft(pool, round_number)
    for prompt_id in sorted(scores, key=pool.positions.__getitem__):
        _visit(draft, pool.positions[prompt_id], scores[prompt_id], eps, settings)
    return draft.done()


def answer(pool: Pool, round_number: int, answers: Sequence[Answer]) -> Pool:
    """Take in how requests to the teacher ended (rules 4, 5, 6); raises `ValueError` like `visit`."""
    _check_known(pool, [given.prompt_id for given in answers])
    draft = _Draft(pool, round_number, room=len(answers))
    for given in sorted(answers, key=lambda given: pool.positions[given.prompt_id]):
        _answer(draft, pool.positions[given.prompt_id], given)
    return draft.done()


def refresh(pool: Pool, round_number: int, settings: Pooling) -> Pool:
    """Merge what is ready, when this is a round for it (rule 7); raises `ValueError` like `visit`."""
    if round_number % settings.refresh_every:
        return pool
    draft = _Draft(pool, round_number)
    for at in np.flatnonzero(pool.table["state"] == STATES.index("refresh")):
        draft.move(int(at), "active", "merged")
    return draft.done()


def replay(originals: Sequence[str], log: Sequence[Transition]) -> Pool:
    """The pool that these rows make.

    Raises:
        ValueError: a row is no legal move, or does not begin where the one before it ended.
    """
    draft = _Draft(new_pool(originals), 0, room=len(log))
    for row in log:
        draft.apply(row)
    return draft.done()


def at_round(pool: Pool, round_number: int) -> Pool:
    """The pool as it was when this round had ended."""
    originals = [pool.ids[at] for at in np.flatnonzero(pool.table["parent"] < 0)]
    return replay(originals, [row for row in pool.log if row.round <= round_number])


def begin(pool: Pool, originals: Sequence[str]) -> Pool:
    """The pool that a training with these originals begins with, when it goes on from another's (rule 12).

    Raises:
        RecordError: the pool has originals that are not among them.
    """
    known = set(originals)
    unknown = [pool.ids[at] for at in np.flatnonzero(pool.table["parent"] < 0) if pool.ids[at] not in known]
    if unknown:
        raise RecordError(
            f"{len(unknown)} prompts of the pool are no training examples: {', '.join(unknown[:_NAMED])}. Begin with a "
            "pool of the same data."
        )
    last = pool.log[-1].round if pool.log else 0
    rows = [dataclasses.replace(row, round=row.round - last) for row in pool.log]
    draft = _Draft(replay(originals, rows), 0)
    for at in np.flatnonzero(draft.table["state"] == STATES.index("queued")):
        draft.move(int(at), "active", "begun")
    return draft.done()


def diff(a: Pool, b: Pool) -> list[Change]:
    """The prompts whose state in `b` is not what it was in `a`, in the order of `a`, then of `b`."""
    before, after = a.states(), b.states()
    return [
        Change(prompt_id, before.get(prompt_id), after.get(prompt_id))
        for prompt_id in before | after
        if before.get(prompt_id) != after.get(prompt_id)
    ]


def counts(pool: Pool) -> dict[State, int]:
    """How many prompts are in each state."""
    return {state: int(np.count_nonzero(pool.table["state"] == code)) for code, state in enumerate(STATES)}


_PROMPTS = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("state", pa.string()),
        ("parent", pa.int32()),
        ("depth", pa.int16()),
        ("turns", pa.int32()),
        ("misses", pa.int32()),
        ("since", pa.int32()),
        ("ever", pa.bool_()),
    ]
)

_LOG = pa.schema(
    [
        ("round", pa.int32()),
        ("prompt_id", pa.string()),
        ("before", pa.string()),
        ("after", pa.string()),
        ("cause", pa.string()),
        ("parent", pa.string()),
        ("depth", pa.int16()),
        ("turns", pa.int32()),
        ("verdict", pa.string()),
        ("score", pa.struct(SCORE_COLUMNS)),
        ("teacher", pa.string()),
        ("prompt_version", pa.string()),
        ("checks", pa.list_(pa.string())),
    ]
)


def write_pool(pool: Pool, folder: Path) -> None:
    """Write `prompts.parquet` (one row per prompt) and `transitions.parquet` (the log); equal pools as equal bytes.

    The column `parent` is the row of the parent, -1 for an original; `state` is null for a scaffold that left.
    """
    names = np.array([*STATES, None], dtype=object)  # _OUTSIDE is the last
    columns = {field: pool.table[field] for field in _FIELDS.names} | {
        "prompt_id": pool.ids,
        "state": names[pool.table["state"]],
    }
    write_table(pa.table(columns, schema=_PROMPTS), folder / "prompts.parquet")
    rows = [dataclasses.asdict(row) for row in pool.log]
    write_table(pa.Table.from_pylist(rows, schema=_LOG), folder / "transitions.parquet")


def read_pool(folder: Path) -> Pool:
    """Read what `write_pool` wrote.

    Raises:
        RecordError: a file is missing, torn, or from a newer version.
    """
    prompts = read_table(_PROMPTS, "prompt", folder / "prompts.parquet")
    rows = read_table(_LOG, "transition", folder / "transitions.parquet").to_pylist()
    ids = tuple(prompts["prompt_id"].to_pylist())
    table = np.empty(len(ids), _FIELDS)
    for field in _FIELDS.names[1:]:
        table[field] = prompts[field].to_numpy()
    table["state"] = [_code(state) for state in prompts["state"].to_pylist()]
    table.flags.writeable = False
    return Pool(ids, {prompt_id: at for at, prompt_id in enumerate(ids)}, table, tuple(map(_transition, rows)))


def _transition(row: dict[str, Any]) -> Transition:
    score = row["score"] and Score(**row["score"])
    return Transition(**{**row, "score": score, "checks": tuple(row["checks"])})


def _name(code: int) -> State | None:
    return None if code == _OUTSIDE else STATES[code]


def _code(state: State | None) -> int:
    return _OUTSIDE if state is None else STATES.index(state)


def _check_known(pool: Pool, prompt_ids: Collection[str]) -> None:
    unknown = [prompt_id for prompt_id in prompt_ids if prompt_id not in pool.positions]
    if unknown:
        raise ValueError(
            f"{len(unknown)} prompts were never in the pool, such as {unknown[0]}. Pass what `draw` and `due` gave."
        )


def _visit(draft: "_Draft", at: int, score: Score, eps: Eps, settings: Pooling) -> None:
    before = draft.state(at)
    said = verdict(score, eps)
    if before not in _VISITED:
        draft.move(at, before, "late", verdict=said, score=score)
        return
    action = _action(score, draft.table["misses"][at], eps)
    depth = draft.table["depth"][at]
    after = _after(before, action, may_ask=depth < settings.max_depth)
    draft.move(at, after, "score", verdict=said, score=score)
    if before == "reserve" != after:
        draft.dismiss_scaffolds(at)
    if before != "reserve" == after and depth:
        draft.doubt(at)


def _action(score: Score, misses: int, eps: Eps) -> Action:
    return route(verdict(score, eps), 1 + int(misses), eps)


def _after(before: State, action: Action, may_ask: bool) -> State:
    """The state after a visit (rules 2 and 3)."""
    if action == "train":
        return "active"
    if action == "retire":
        return "solved"
    if before in ("reserve", "suspect"):
        return before
    if action == "wait":
        return "active"
    return "queued" if may_ask else "reserve"


def _answer(draft: "_Draft", at: int, given: Answer) -> None:
    about = {"teacher": given.teacher, "prompt_version": given.prompt_version, "checks": given.checks}
    before = draft.state(at)
    if before != "queued":
        draft.move(at, before, "late", **about)
    elif given.outcome == "admitted":
        draft.move(at, "reserve", "hint_admitted", **about)
        draft.admit(at, **about)
    else:
        draft.move(at, "reserve", "hint_refused", **about)
        if given.outcome == "useless":
            draft.doubt(at)


class _Draft:
    """A copy of a pool to apply rows to. Rows are the only thing that changes it, so that the log can be replayed."""

    def __init__(self, pool: Pool, round_number: int, room: int = 0):
        """`room` is the most scaffolds that will be admitted."""
        self.pool = pool
        self.round = round_number
        self.added: dict[str, int] = {}
        self.rows: list[Transition] = []
        self.table = np.zeros(len(pool.ids) + room, _FIELDS)
        self.table[: len(pool.ids)] = pool.table
        self.last_round = pool.log[-1].round if pool.log else -math.inf
        active = pool.table["turns"][pool.table["state"] == STATES.index("active")]
        self.fewest_turns = int(active.min()) if active.size else 0

    def state(self, at: int) -> State | None:
        return _name(self.table["state"][at])

    def move(self, at: int, after: State | None, cause: Cause, **about: Any) -> None:
        """Log that the prompt at this position goes to the state `after`."""
        before, entry, ids = self.state(at), self.table[at], self.pool.ids
        turns = int(entry["turns"])
        if cause == "score" and before == "active":
            turns += 1
        elif cause != "late" and after == "active":
            turns = self.fewest_turns
        parent = ids[entry["parent"]] if entry["depth"] else ""
        row = Transition(self.round, ids[at], before, after, cause, parent, int(entry["depth"]), turns, **about)
        self.apply(row)

    def admit(self, parent: int, **about: Any) -> None:
        """Log a new scaffold of the prompt at the position `parent`."""
        name, depth = self.pool.ids[parent], int(self.table["depth"][parent]) + 1
        free = (scaffold for n in itertools.count(1) if self._position(scaffold := f"{name}+{n}") is None)
        self.apply(Transition(self.round, next(free), None, "refresh", "hint_admitted", name, depth, 0, **about))

    def dismiss_scaffolds(self, at: int) -> None:
        """Log that all scaffolds made from the prompt at this position leave, and those made from them."""
        family = np.array([at])
        while (family := np.flatnonzero(np.isin(self.table["parent"][: self._size], family))).size:
            for scaffold in family.tolist():
                if self.state(scaffold):
                    self.move(scaffold, None, "not_needed")

    def doubt(self, at: int) -> None:
        """Log that this prompt's original is suspect, unless it or a scaffold of it was once not too hard."""
        original = self._ancestors(at)[-1]
        if not self.table["ever"][original]:
            self.move(original, "suspect", "never_solved")
            self.dismiss_scaffolds(original)

    def apply(self, row: Transition) -> None:
        """Change the state as the row says, and log it."""
        self._check(row)
        if row.cause != "late":
            at = self._add(row) if row.before is None else self._position(row.prompt_id)
            self.table["state"][at] = _code(row.after)
            self.table["turns"][at] = row.turns
            self.table["since"][at] = row.round
            if row.cause == "score":
                self._learn(at, row)
        self.rows.append(row)
        self.last_round = row.round

    def done(self) -> Pool:
        table = self.table[: self._size]
        table.flags.writeable = False
        pool = self.pool
        if not self.added:
            return dataclasses.replace(pool, table=table, log=pool.log + tuple(self.rows))
        return Pool(pool.ids + tuple(self.added), pool.positions | self.added, table, pool.log + tuple(self.rows))

    @property
    def _size(self) -> int:
        return len(self.pool.ids) + len(self.added)

    def _position(self, prompt_id: str) -> int | None:
        return self.pool.positions.get(prompt_id, self.added.get(prompt_id))

    def _ancestors(self, at: int) -> list[int]:
        """The position itself, its parent's, and so on up to the original's."""
        found = [at]
        while (parent := int(self.table["parent"][found[-1]])) >= 0:
            found.append(parent)
        return found

    def _check(self, row: Transition) -> None:
        at = self._position(row.prompt_id)
        now = None if at is None else self.state(at)
        if now != row.before or (row.before, row.after) not in MOVES[row.cause]:
            raise ValueError(
                f"round {row.round}: prompt {row.prompt_id} is {now or 'not in the pool'} and cannot go from "
                f"{row.before} to {row.after} because of {row.cause}. Replay the log from its beginning, in order."
            )
        if row.round < self.last_round:
            raise ValueError(
                f"round {row.round} comes after round {self.last_round} in the log. To go back, begin with `at_round`."
            )

    def _add(self, row: Transition) -> int:
        at = self._size
        parent = self._position(row.parent)
        self.table[at] = (_OUTSIDE, parent, row.depth, 0, 0, row.round, False)
        self.added[row.prompt_id] = at
        return at

    def _learn(self, at: int, row: Transition) -> None:
        """Take a visit's verdict into account."""
        taught = row.verdict == "keep" or row.after == "solved"
        self.table["misses"][at] = 0 if taught else self.table["misses"][at] + 1
        if row.verdict != "too_hard":
            self.table["ever"][self._ancestors(at)] = True
