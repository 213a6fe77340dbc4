"""A question that two pages answer: HoVer's program on a data set that brings its text, for a laptop.

100 questions of HotpotQA share 994 passages; BM25 finds three of them for each of two searches. Modules and metric
are those of `pipelines/hover.py`.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import bm25s
import dspy
import numpy as np

from pipelines.hover import MultiHop, metric
from twofold.errors import PipelineError

__all__ = ["load", "metric", "program"]

# It asks for its debugging lines by itself, and a run would show them.
logging.getLogger("bm25s").setLevel(logging.WARNING)

DATA = Path("data/hotpotqa")
HOPS, PASSAGES = 2, 6
TRAIN, DEV, TEST = 50, 20, 30

PAINTER = "In which country was the painter of The Starry Night born?"
PAINTED = "The Starry Night was painted by Vincent van Gogh."
TOWERS = "Which is older, Tower Bridge or the Eiffel Tower?"
BRIDGE = "Tower Bridge was built between 1886 and 1894."
EIFFEL = "The Eiffel Tower was built from 1887 to 1889."


class Bm25:
    """BM25 over passages in memory; a word is what it is, without stemming.

    Args:
        passages: `Title | text`, each.
    """

    def __init__(self, passages: Sequence[str]) -> None:
        self.passages = list(passages)
        self.index = bm25s.BM25()
        self.index.index(bm25s.tokenize(self.passages, show_progress=False), show_progress=False)

    def __call__(self, query: str, k: int) -> list[str]:
        """At most k passages that share a word with the query, the best first and equal ones in their order."""
        [words] = bm25s.tokenize([query], return_ids=False, show_progress=False)
        if not words:
            return []  # Nothing but stop words and punctuation, which the library cannot score.
        scores = self.index.get_scores(words)
        # A stable sort, where the library's own choice of the best leaves the order of equal ones open.
        return [self.passages[n] for n in np.argsort(-scores, kind="stable")[:k] if scores[n] > 0]


def program() -> MultiHop:
    """HoVer's program as a small model needs it: no reasoning before an answer, and two demos a module.

    Raises:
        PipelineError: the passages are missing or something else.
    """
    _index()  # Made now, and not by the first rollouts all at once.
    hops = MultiHop(_search, HOPS, PASSAGES, dspy.Predict)
    hops.generate_query.demos = [
        dspy.Example(claim=PAINTER, notes=[PAINTED], query="Vincent van Gogh country of birth"),
        dspy.Example(claim=TOWERS, notes=[BRIDGE], query="Eiffel Tower built"),
    ]
    hops.append_notes.demos = [
        dspy.Example(claim=PAINTER, notes=[], passages=[f"The Starry Night | {PAINTED}"], enough=False, note=PAINTED),
        dspy.Example(claim=TOWERS, notes=[BRIDGE], passages=[f"Eiffel Tower | {EIFFEL}"], enough=True, note=EIFFEL),
    ]
    return hops


def load(settings: object) -> tuple[list[dspy.Example], list[dspy.Example], list[dspy.Example]]:
    """The same questions in every run, in the order of their ids' sha256.

    Raises:
        PipelineError: a file is missing or something else.
    """
    rows = sorted(_read("hotpotqa_train.json", list), key=lambda row: hashlib.sha256(row["_id"].encode()).digest())
    # With the passages an answer changes; here the examples change with them, and with these all that is cached.
    corpus = hashlib.sha256("\n".join(_passages()).encode()).hexdigest()[:12]
    examples = [_example(row, corpus) for row in rows[: TRAIN + DEV + TEST]]
    return examples[:TRAIN], examples[TRAIN : TRAIN + DEV], examples[TRAIN + DEV :]


def _example(row: dict[str, Any], corpus: str) -> dspy.Example:
    titles = sorted({title for title, _ in row["supporting_facts"]})
    return dspy.Example(id=row["_id"], claim=row["question"], titles=titles, corpus=corpus).with_inputs("claim")


def _search(query: str, k: int) -> list[str]:
    return _index()(query, k)


@cache
def _index() -> Bm25:
    return Bm25(_passages())


def _passages() -> list[str]:
    return [f"{title} | {''.join(text)}" for title, text in _read("hotpotqa_train_corpus.json", dict).items()]


def _read(name: str, kind: type) -> Any:
    try:
        content = json.loads((DATA / name).read_text(encoding="utf-8"))
        if not isinstance(content, kind):
            raise ValueError(f"a {type(content).__name__} instead of a {kind.__name__}")
        return content
    except (OSError, ValueError) as error:
        raise PipelineError(
            f"{DATA / name} cannot be read ({error}). Put hotpotqa_train.json and hotpotqa_train_corpus.json into "
            f"{DATA}: they are in the data folder of HippoRAG's early versions (OSU-NLP-Group/HippoRAG on GitHub)."
        ) from error
