"""The rollouts that a report shows, as its browser is given them.

A shown rollout has its input and hints, its calls with prompt, answer and tokens, the groups its calls are in, with all
members' rewards and advantages, its score and route, and its reward.

Private values are replaced before anything leaves this file.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from statistics import fmean
from typing import Any

import dspy

from twofold.examples import example_id, labels_of, read_examples
from twofold.hints import Placed, lineage
from twofold.programs import Pipeline, modules
from twofold.records import Call, Group, Rollout, read_rollouts
from twofold.report.private import MARK, Redactor
from twofold.report.sets import NOTHING, Set, Training, draw
from twofold.seeds import derive

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""

SPLITS = {"test": "test", "dev": "dev"}
"""Where the inputs of a purpose are from; all others are training inputs."""


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
    drawn = draw(sets, derive(seed, "report"))
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
