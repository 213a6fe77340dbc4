"""The rollouts that a report shows, from a run's published records.

1. A set is the rollouts that were made for one purpose: those of one round of a training, of one evaluation, of a
   teacher's trials, of a search for prompts.
2. The sets take turns, those outside of rounds first and then the rounds in random order: each time an input is drawn
   at random, and all its rollouts are shown, so that a group can be seen side by side. It ends when another input would
   make more than `LIMIT` rollouts, or about `TEXT` characters.
3. A shown rollout has its input and hints, its calls with prompt, answer and tokens, the groups its calls are in, with
   all members' rewards and advantages, its score and route, and its reward.

Private values are replaced before anything leaves this file.
"""

import math
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from statistics import fmean
from typing import Any

import dspy

from twofold.attempts import ATTEMPTS, Tried, read_attempts
from twofold.bands import Band, learning
from twofold.examples import example_id, labels_of, read_examples
from twofold.hints import Placed, lineage, read_hints
from twofold.programs import Pipeline, modules
from twofold.records import Call, Group, Rollout, read_groups, read_outcomes, read_rollouts
from twofold.report.private import MARK, Redactor
from twofold.scores import Scored, of_examples, read_scores
from twofold.seeds import derive

LIMIT = 600
"""Most rollouts in a page."""

TEXT = 3_000_000
"""Most characters of prompts and answers in a page, about; one input is shown however long it is."""

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""

SPLITS = {"test": "test", "dev": "dev"}
"""Where the inputs of a purpose are from; all others are training inputs."""


@dataclass(frozen=True, slots=True)
class Set:
    """Rollouts that were made for one purpose."""

    strategy: str
    step: str
    """Such as `0-w`; empty for what is no part of a step."""
    purpose: str
    """`test`, `dev`, `training`, `trials` or `search`."""
    round: int | None
    """As in `history.csv`, from 1; None outside of rounds."""
    folder: Path
    outcomes: tuple[Rollout, ...]
    """All of them, without their calls."""


@dataclass(frozen=True, slots=True)
class Training:
    """What a step left beside its rollouts."""

    groups: Mapping[tuple[str, str, int], Sequence[Group]]
    """By rollout, module and index of the call."""
    scores: Mapping[tuple[int, str], Scored]
    """By round and prompt."""
    hints: Mapping[str, Placed]
    attempts: Sequence[Tried]

    @property
    def learned(self) -> list[Band]:
        """By band of the score, from the visits to inputs without a hint."""
        return learning(list(self.scores.values()), {prompt for _, prompt in self.scores} - self.hints.keys())


NOTHING = Training({}, {}, {}, ())


def sets_of(strategy: str, folder: Path, test: Path) -> list[Set]:
    """All sets of a strategy.

    Args:
        folder: what the strategy published.
        test: its rollouts on test.
    """
    found = [_set(strategy, "", "test", None, test)]
    steps = sorted(path for path in folder.iterdir() if re.fullmatch(r"\d+-[pw]", path.name))
    if not steps:
        found.append(_set(strategy, "", "dev", None, folder / "dev"))
    for step in steps:
        found += _sets_of_prompts(strategy, step) if step.name.endswith("p") else _sets_of_weights(strategy, step)
    return found


def training_of(step: Path) -> Training:
    """What a step left beside its rollouts; empty where it leaves none."""
    records, pool = step / "records", step / "pool"
    groups: dict[tuple[str, str, int], list[Group]] = defaultdict(list)
    for group in _there(read_groups, records / "groups.parquet"):
        for place in dict.fromkeys((member.rollout_id, group.module, member.call_index) for member in group.members):
            groups[place].append(group)
    rows = of_examples(_there(read_scores, records / "scores.parquet"))
    return Training(
        groups,
        {(row.round, row.example_id): row for row in rows},
        read_hints(pool) if pool.is_dir() else {},
        _there(read_attempts, records / ATTEMPTS),
    )


def _there(read: Callable[[Path], list[Any]], path: Path) -> list[Any]:
    """What is in a file that only some trainings leave."""
    return read(path) if path.exists() else []


def _set(strategy: str, step: str, purpose: str, round_number: int | None, folder: Path) -> Set:
    return Set(strategy, step, purpose, round_number, folder, tuple(read_outcomes(folder)))


def _sets_of_prompts(strategy: str, step: Path) -> list[Set]:
    return [
        _set(strategy, step.name, "search", None, step / "records"),
        _set(strategy, step.name, "dev", None, step / "dev"),
    ]


def _sets_of_weights(strategy: str, step: Path) -> Iterator[Set]:
    yield from _by_round(strategy, step.name, "training", step / "records")
    for dev in sorted((step / "dev").glob("round-*")):
        yield _set(strategy, step.name, "dev", int(dev.name.removeprefix("round-")), dev)
    if (step / "records" / "trials").is_dir():
        yield from _by_round(strategy, step.name, "trials", step / "records" / "trials")


def _by_round(strategy: str, step: str, purpose: str, folder: Path) -> Iterator[Set]:
    """A set for each round; the third part of a rollout's id is its round, counted from 0."""
    rounds: dict[int, list[Rollout]] = defaultdict(list)
    for one in read_outcomes(folder):
        rounds[int(one.rollout_id.split("/")[2]) + 1].append(one)
    for number, own in sorted(rounds.items()):
        yield Set(strategy, step, purpose, number, folder, tuple(own))


def shown(
    sets: Sequence[Set],
    trainings: Mapping[tuple[str, str], Training],
    data: Path,
    pipeline: Pipeline,
    decode: Decode,
    seed: int,
) -> dict[str, Any]:
    """What the browser of rollouts is given, as JSON values: rollouts, and what several of them share, once.

    Args:
        trainings: by strategy and step.
        data: folder of the prepared examples.
        seed: of the draw.
    """
    examples = {
        split: {example_id(one): one for one in read_examples(data / f"{split}.jsonl")}
        for split in ("train", "dev", "test")
    }
    drawn = _draw(sets, derive(seed, "report"))
    redactor = redactor_of(pipeline, sets, examples.values())
    writer = _Writer(examples, trainings, pipeline, redactor, decode)
    for number, rollouts in enumerate(_read(sets, drawn)):
        writer.add(number, sets[number], rollouts)
    return writer.page(sets)


def _read(sets: Sequence[Set], drawn: Sequence[Sequence[str]]) -> Iterator[list[Rollout]]:
    """The drawn rollouts of each set with their calls; every file is read once."""
    wanted: dict[Path, list[str]] = defaultdict(list)
    for one, ids in zip(sets, drawn, strict=True):
        wanted[one.folder] += ids
    read = {folder: {one.rollout_id: one for one in read_rollouts(folder, ids)} for folder, ids in wanted.items()}
    for one, ids in zip(sets, drawn, strict=True):
        yield [read[one.folder][name] for name in ids]


def redactor_of(pipeline: Pipeline, sets: Sequence[Set], splits: Iterable[Mapping[str, dspy.Example]]) -> Redactor:
    """Knows every value that was in a private field of an example, an output or an answer of the run."""
    if not pipeline.private:
        return Redactor((), ())
    examples = [example.toDict() for split in splits for example in split.values()]
    folders = dict.fromkeys(one.folder for one in sets)
    rollouts = [rollout for folder in folders for rollout in read_rollouts(folder)]
    fields = [*examples, *(rollout.output for rollout in rollouts)]
    values = [row[name] for row in fields for name in pipeline.private if name in row]
    secret = _private_modules(pipeline)
    answers = [call.text for rollout in rollouts for call in rollout.calls if call.module in secret]
    return Redactor(pipeline.private, [*values, *answers])


def _private_modules(pipeline: Pipeline) -> set[str]:
    """Modules that give a private output."""
    predictors = modules(pipeline.program())
    return {
        name for name, one in predictors.items() if not one.signature.output_fields.keys().isdisjoint(pipeline.private)
    }


def _draw(sets: Sequence[Set], seed: int) -> list[list[str]]:
    """Ids of the rollouts to show, for each set in the order of its inputs' draw."""
    waiting = [_inputs(one, random.Random(derive(seed, *_named(one)))) for one in sets]
    sizes = _characters(sets)
    turns = list(range(len(sets)))
    random.Random(derive(seed, "turns")).shuffle(turns)
    turns.sort(key=lambda number: sets[number].round is not None)
    drawn: list[list[str]] = [[] for _ in sets]
    rollouts, text = 0, 0.0
    while any(waiting):
        for number in turns:
            if not waiting[number]:
                continue
            own = waiting[number].pop()
            more, longer = rollouts + len(own), text + len(own) * sizes[sets[number].folder]
            if rollouts and (more > LIMIT or longer > TEXT):
                waiting[number].clear()
                continue
            drawn[number] += own
            rollouts, text = more, longer
    return drawn


def _named(one: Set) -> tuple[str | int, ...]:
    return (one.strategy, one.step, one.purpose, one.round or 0)


def _inputs(one: Set, draw: random.Random) -> list[list[str]]:
    """The set's rollouts by input, the inputs in random order."""
    by_input: dict[str, list[str]] = defaultdict(list)
    for rollout in one.outcomes:
        by_input[rollout.example_id].append(rollout.rollout_id)
    found = list(by_input.values())
    draw.shuffle(found)
    return found


def _characters(sets: Sequence[Set]) -> dict[Path, float]:
    """About how many characters a rollout in each folder has: four for each token of its calls, from a few of them."""
    some: dict[Path, list[str]] = {}
    for one in sets:
        some.setdefault(one.folder, [rollout.rollout_id for rollout in one.outcomes[:8]])
    return {folder: _length(read_rollouts(folder, ids)) for folder, ids in some.items()}


def _length(rollouts: Sequence[Rollout]) -> float:
    tokens = [len(call.prompt_ids) + len(call.completion_ids) for rollout in rollouts for call in rollout.calls]
    return 4 * sum(tokens) / max(1, len(rollouts))


class _Writer:
    """Turns rollouts into what the page reads, one set at a time."""

    def __init__(
        self,
        examples: Mapping[str, Mapping[str, dspy.Example]],
        trainings: Mapping[tuple[str, str], Training],
        pipeline: Pipeline,
        redactor: Redactor,
        decode: Decode,
    ):
        self.examples = examples
        self.trainings = trainings
        self.redactor = redactor
        self.decode = decode
        self.hidden = _private_modules(pipeline)
        self.rollouts: list[dict[str, Any]] = []
        self.groups: list[dict[str, Any]] = []
        self.numbers: dict[tuple[str, str, int | None, str], int] = {}

    def add(self, number: int, one: Set, rollouts: Iterable[Rollout]) -> None:
        own = self.trainings.get((one.strategy, one.step), NOTHING)
        # An evaluation in the same step has rollouts of the same name, and neither groups nor scores.
        training = own if one.purpose == "training" else NOTHING
        split = self.examples[SPLITS.get(one.purpose, "train")]
        for rollout in rollouts:
            original, hints = lineage(rollout.example_id, own.hints)
            row = {"set": number, **self._rollout(rollout, one, training), **self._input(original, split)}
            self.rollouts.append({**row, **self._hints(hints, training, rollout.example_id)})

    def page(self, sets: Sequence[Set]) -> dict[str, Any]:
        return {
            "sets": [
                {
                    "strategy": one.strategy,
                    "step": one.step,
                    "purpose": one.purpose,
                    "round": one.round,
                    "rollouts": len(one.outcomes),
                }
                for one in sets
            ],
            "rollouts": self.rollouts,
            "groups": self.groups,
            "beginnings": _cut_beginnings(self.rollouts),
            "private": sorted(self.redactor.names),
            "total": sum(len(one.outcomes) for one in sets),
        }

    def _rollout(self, rollout: Rollout, one: Set, training: Training) -> dict[str, Any]:
        score = training.scores.get((one.round or 0, rollout.example_id))
        return {
            "id": rollout.rollout_id,
            "prompt": rollout.example_id,
            "source": rollout.source,
            "status": rollout.status,
            "error": self.redactor.text(rollout.error),
            "reward": rollout.reward,
            "channels": rollout.channels,
            "output": self.redactor.fields(rollout.output),
            "score": score and {"value": score.score.value, "n": score.score.n, "mean": score.score.mean},
            "verdict": score and score.verdict,
            "action": score and score.action,
            "groups": self._groups_of(rollout.rollout_id, "", -1, one, training),
            "calls": [self._call(call, one, training) for call in rollout.calls],
        }

    def _call(self, call: Call, one: Set, training: Training) -> dict[str, Any]:
        hidden = call.module in self.hidden
        pieces = self._pieces(call)
        return {
            "module": call.module,
            "index": call.index,
            "prompt": self.redactor.text(self.decode(call.prompt_ids)),
            "answer": MARK if hidden else self.redactor.text(call.text),
            "pieces": pieces,
            "logprobs": [_finite(value) for value in call.logprobs] if pieces else [],
            "logprob": _finite(fmean(call.logprobs)) if call.logprobs else None,
            "tokens_in": len(call.prompt_ids),
            "tokens_out": len(call.completion_ids),
            "images": len(call.images),
            "finish": call.finish_reason,
            "parsed": call.parsed,
            "policy": call.policy,
            "temperature": call.temperature,
            "groups": self._groups_of(call.rollout_id, call.module, call.index, one, training),
        }

    def _pieces(self, call: Call) -> list[str]:
        """The answer token by token; none where a private value could stand in it, or where tokens are no text."""
        pieces = [self.decode([token]) for token in call.completion_ids]
        whole = not self.redactor.names and call.text in "".join(pieces)
        return pieces if whole else []

    def _groups_of(self, rollout_id: str, module: str, index: int, one: Set, training: Training) -> list[int]:
        """Numbers of the groups that the call, or the whole rollout, is a member of."""
        numbers = []
        for group in training.groups.get((rollout_id, module, index), ()):
            key = (one.strategy, one.step, one.round, group.group_id)
            if key not in self.numbers:
                self.numbers[key] = len(self.groups)
                self.groups.append(_group(group))
            numbers.append(self.numbers[key])
        return numbers

    def _input(self, original: str, split: Mapping[str, dspy.Example]) -> dict[str, Any]:
        example = split[original]
        return {
            "example": original,
            "inputs": self.redactor.fields(example.inputs().toDict()),
            "labels": self.redactor.fields(labels_of(example)),
        }

    def _hints(self, own: Sequence[Placed], training: Training, prompt_id: str) -> dict[str, Any]:
        """The hints in the prompt, and what a teacher tried for it and for those it comes from."""
        family = {prompt_id, *(hint.parent for hint in own)}
        return {
            "hints": [
                {"parent": hint.parent, "place": hint.place, "text": self.redactor.text(hint.text)} for hint in own
            ],
            "attempts": [
                {
                    "round": tried.round,
                    "prompt": tried.prompt_id,
                    "number": tried.number,
                    "end": tried.end,
                    "text": self.redactor.text(tried.text),
                    "reason": self.redactor.text(tried.reason),
                    "teacher": tried.teacher,
                }
                for tried in training.attempts
                if tried.prompt_id in family
            ],
        }


def _finite(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None


def _group(group: Group) -> dict[str, Any]:
    return {
        "module": group.module,
        "index": group.index,
        "mean": group.mean,
        "std": group.std,
        "all_equal": group.all_equal,
        "members": [
            {
                "id": member.rollout_id,
                "index": member.call_index,
                "reward": member.reward,
                "advantage": member.advantage,
                "weight": member.weight,
                "filled": member.filled,
            }
            for member in group.members
        ],
    }


def _cut_beginnings(rollouts: Sequence[dict[str, Any]]) -> list[str]:
    """Take from the calls' prompts what all prompts of a module in a set begin with; it is kept once."""
    calls: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for rollout in rollouts:
        for call in rollout["calls"]:
            calls[rollout["set"], call["module"]].append(call)
    beginnings: dict[str, int] = {}
    for own in calls.values():
        prompts = {call["prompt"] for call in own}
        shared = commonprefix(list(prompts)) if len(prompts) > 1 else ""  # noqa: RUF071  letter by letter is right here
        # A beginning ends where a line does.
        shared = shared[: shared.rfind("\n") + 1]
        number = beginnings.setdefault(shared, len(beginnings))
        for call in own:
            call["prompt"] = call["prompt"][len(shared) :]
            call["beginning"] = number
    return list(beginnings)
