"""PAPILLON for a laptop: its program on short synthetic queries, with a rule in place of the judge.

The endpoint `untrusted` may be any server; docs/tasks.md starts one with the same small model. Signatures and leakage
are those of `pipelines/papillon.py`. Quality is the mean of two shares, which needs no judge: how far the response's
words are the data's, and how many longer words of the data's redacted query the request has kept. Without the second
the safest request would be one that asks for nothing.
"""

from collections import Counter
from pathlib import Path

import dspy

from pipelines.papillon import Papillon, leakage, private, read, words

__all__ = ["ENDPOINTS", "load", "metric", "private", "program"]

DATA = Path("data/papillon_offline")
ENDPOINTS = ("untrusted",)

QUERY = "I am Ines Okafor, 12 Mill Lane, Harwick. Write one sentence to my dentist asking for an earlier appointment."
REQUEST = "Write one sentence to a dentist asking for an earlier appointment."
ANSWER = "Dear doctor, could I please have an earlier appointment?"


def program() -> Papillon:
    """The program as a small model needs it: no reasoning before the request, and one demo a module."""
    found = Papillon(dspy.Predict)
    found.craft_redacted_request.demos = [dspy.Example(user_query=QUERY, llm_request=REQUEST)]
    found.respond_to_query.demos = [
        dspy.Example(
            related_llm_request=REQUEST,
            related_llm_response=ANSWER,
            user_query=QUERY,
            response=f"{ANSWER} Ines Okafor, 12 Mill Lane, Harwick",
        )
    ]
    return found


def metric(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> dict[str, float]:
    """`score`, and its parts: `leakage`, and `quality`, the mean of `alike` and `kept`."""
    alike = _f1(words(prediction.response), words(example.target_response))
    # Shorter words say little of what is asked.
    wanted = [word for word in words(example.redacted_query.replace("[REDACTED]", " ")) if len(word) > 3]
    kept = _shared(words(prediction.llm_request), wanted) / len(wanted)
    quality, leaked = (alike + kept) / 2, leakage(example.pii_units, prediction.llm_request)
    return {"score": (quality + 1 - leaked) / 2, "quality": quality, "leakage": leaked, "alike": alike, "kept": kept}


def load(settings: object) -> tuple[list[dspy.Example], list[dspy.Example], list[dspy.Example]]:
    return read(DATA / "train.csv"), read(DATA / "dev.csv"), read(DATA / "test.csv")


def _shared(some: list[str], others: list[str]) -> int:
    """How many words are in both, each as often as in both."""
    return (Counter(some) & Counter(others)).total()


def _f1(said: list[str], wanted: list[str]) -> float:
    return 2 * _shared(said, wanted) / (len(said) + len(wanted)) if wanted else 0.0
