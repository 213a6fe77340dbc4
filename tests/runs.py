"""The published outputs of a run that never ran: real records, written by the real writers, in a second."""

import csv
import random
from pathlib import Path
from typing import Any

from twofold import bands
from twofold.attempts import ATTEMPTS, Tried, write_attempts
from twofold.examples import write_examples
from twofold.groups import account, make_groups
from twofold.hints import Placed, write_hints
from twofold.records import Call, Rollout, write_groups, write_json, write_rollouts
from twofold.scores import score_visit, write_scores
from twofold.settings import Settings

PIPELINE = '''"""Two modules in a row."""

import dspy

HINT_FIELD = "text"


class Restate(dspy.Signature):
    text: str = dspy.InputField()
    short: str = dspy.OutputField()


class Answer(dspy.Signature):
    short: str = dspy.InputField()
    answer: str = dspy.OutputField()


class Tiny(dspy.Module):
    def __init__(self):
        super().__init__()
        self.restate = dspy.Predict(Restate)
        self.answer = dspy.Predict(Answer)


def program():
    return Tiny()


def metric(example, prediction, trace=None):
    return 0.0


def load(settings):
    return [], [], []
'''

SETTINGS = {
    "pipeline": "tiny",
    "strategies": {"vanilla": [], "weights": ["w"]},
    "evaluate": {"resamples": 100},
    "weights": {"groups": {"size": 4}},
    "scaffold": {"arm": "whole"},
}


def decode(ids: Any) -> str:
    """A token is a character."""
    return "".join(map(chr, ids))


def call(rollout_id: str, module: str, order: int, prompt: str, answer: str, **changes: Any) -> Call:
    ids = tuple(map(ord, answer))
    told = {
        "prompt_ids": tuple(map(ord, prompt)),
        "completion_ids": ids,
        "logprobs": (-0.5,) * len(ids),
        "text": answer,
    }
    rest = {"finish_reason": "stop", "policy": "base", "temperature": 0.7, "seed": 1}
    return Call(rollout_id, module, 0, order, **{**told, **rest, **changes})


def rollout(rollout_id: str, example: str, text: str, reward: float, answer: str = "blue", **changes: Any) -> Rollout:
    """A run of both modules; one that failed made the first call alone."""
    calls = (
        call(rollout_id, "restate", 0, f"Say it again.\nText: {text}\n", f"short of {text}"),
        call(rollout_id, "answer", 1, f"Answer.\nShort: short of {text}\n", answer),
    )
    made = calls if changes.get("status", "ok") == "ok" else calls[:1]
    found = {"output": {"answer": answer} if len(made) == 2 else {}, "channels": {"accuracy": reward}}
    return Rollout(rollout_id, example, 1, "student", made, reward=reward, **{**found, **changes})


def make_run(folder: Path, rounds: int = 3, answer: str = "blue") -> Settings:
    """Write `data/prepared`, `pipelines/tiny.py`, `outputs` and `reports/test` of a vanilla program and a training.

    In each round of the training four inputs have four rollouts each. Of input k, k of four are right in
    the first round, and one more in later ones, where `t0` has a hint. The last rollout of `t1` in round 1 times out.
    """
    import dspy

    settings = Settings.model_validate(SETTINGS)
    (folder / "pipelines").mkdir(parents=True)
    (folder / "pipelines/tiny.py").write_text(PIPELINE)
    for split, count in (("train", 6), ("dev", 4), ("test", 4)):
        examples = [
            dspy.Example(id=f"{split[0]}{k}", text=f"text {split} {k}", color="blue").with_inputs("text")
            for k in range(count)
        ]
        write_examples(examples, folder / f"data/prepared/{split}.jsonl")
    for name, right in (("vanilla", 1), ("weights", 3)):
        _evaluation(folder / "outputs" / name / "dev", "evaluate/dev", "d", right)
        _evaluation(folder / "reports/test" / name, "evaluate/test", "t", right)
    _training(folder / "outputs/weights/0-w", settings, rounds, answer)
    return settings


def report(settings: Settings) -> dict[str, Any]:
    """What compare.json would hold of this run."""
    row = {"ci_low": 0.1, "ci_high": 0.9, "n": 4, "format_rate": 1.0, "tokens_in": 900, "tokens_out": 90, "money": 0.0}
    step = {"difference": 0.5, "standard_error": 0.289, "n": 4, "kept": True}
    return {
        "strategies": {
            "vanilla": {**row, "score": 0.25, "rollouts": 4, "seconds": 9.5},
            "weights": {**row, "score": 0.75, "rollouts": 60, "seconds": 99.5},
        },
        "steps": {"vanilla": {}, "weights": {"0-w": step}},
        "differences": {"weights - vanilla": {"difference": 0.5, "ci_low": 0.0, "ci_high": 0.75, "n": 4}},
    }


def _evaluation(folder: Path, name: str, letter: str, right: int) -> None:
    made = [rollout(f"{name}/{letter}{k}/0", f"{letter}{k}", f"text {k}", float(k < right)) for k in range(4)]
    write_rollouts(made, folder)


def _training(step: Path, settings: Settings, rounds: int, answer: str) -> None:
    rows, groups, scores, history = [], [], [], []
    for number in range(1, rounds + 1):
        made = [one for k in range(4) for one in _visit(number, k, answer)]
        random.Random(number).shuffle(made)
        grouped = make_groups(made, settings.weights.groups, settings.rewards, number)
        found = score_visit(made, grouped, settings.scaffold, "base", "metric", number, number)
        rows, groups, scores = rows + made, groups + grouped, scores + found
        history.append({**_numbers(number), **account(made, grouped)})
        _evaluation(step / f"dev/round-{number:04d}", "evaluate/dev", "d", number)
    write_rollouts(rows, step / "records")
    write_rollouts([rollout("weights/0/0/0/effect/t0/0", "t0", "text", 1.0)], step / "records/trials")
    write_groups(groups, step / "records/groups.parquet")
    bands.write_bands(bands.learning(scores, {row.example_id for row in scores} - {"t0+1"}), step / bands.FILE)
    write_scores(scores, step / "records/scores.parquet")
    write_hints({"t0+1": Placed("t0", "Look twice.", "program")}, step / "pool")
    tried = (
        1,
        "t0",
        1,
        "gate/answer",
        "It is blue.",
        "it holds the answer",
        ("form",),
        "program",
        "scripted",
        "v1",
        0,
        0,
        0.0,
    )
    write_attempts([Tried(*tried)], step / "records" / ATTEMPTS)
    write_json({"steps": {}}, step.parent / "metrics.json")
    with (step / "history.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(history[0]))
        writer.writeheader()
        writer.writerows(history)


def _visit(number: int, k: int, answer: str) -> list[Rollout]:
    """Four rollouts of a training input in a round; the last of `t1` in the first round runs out of time."""
    prompt, hint = (f"t{k}+1", "\nHint: Look twice.") if k == 0 and number > 1 else (f"t{k}", "")
    right = k + (number > 1)
    made = [
        rollout(f"weights/0/{number - 1}/{prompt}/{n}", prompt, f"text train {k}{hint}", float(n < right), answer)
        for n in range(4)
    ]
    if (number, k) == (1, 1):
        made[3] = rollout(
            made[3].rollout_id, prompt, "text train 1", 0.0, status="timeout", error="LMTimeoutError: 600 s"
        )
    return made


def _numbers(number: int) -> dict[str, float]:
    dev = {"dev/score": number / 4, "dev/ci_low": 0.0, "dev/ci_high": 1.0, "dev/n": 4}
    shares = {"visited/keep": 0.75, "visited/too_hard": 0.25, "visited/solved": 0.0, "visited/flat": 0.0}
    states = {
        "pool/active": 5,
        "pool/queued": 1,
        "pool/refresh": 0,
        "pool/reserve": 0,
        "pool/solved": 0,
        "pool/suspect": 0,
    }
    return {
        "round": number,
        "reward": 0.3 + number / 10,
        "kl": 0.01 * number,
        "drawn": 4,
        "due": 0,
        **dev,
        **shares,
        **states,
    }
