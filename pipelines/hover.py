"""A claim that four Wikipedia pages decide: find all of them, one search after the other (HoVer, 4 hops).

Two modules take turns: `generate_query` writes a search query from the claim and the notes so far, and `append_notes`
adds to the notes what the passages say and tells whether enough is found. The reward is the recall of the pages.

HoVer holds claims and titles but no text of Wikipedia, so passages come from a server; see `Server`.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import dspy
from dspy.evaluate.metrics import normalize_text

from twofold.errors import PipelineError

DATA = Path("data/hover")
SERVER = "TWOFOLD_RETRIEVER"
"""Environment variable with the address of the retrieval server, such as http://127.0.0.1:8893/api/search."""

HOPS, PASSAGES = 4, 100
TRAIN, DEV, TEST = 500, 250, 500
"""Claims of each split; train and test as in the paper, and dev, like train, from the training file."""

Search = Callable[[str, int], list[str]]
"""A retriever: takes a query and k, and gives at most k passages `Title | text`, the best first."""


class GenerateQuery(dspy.Signature):
    """Write a search query for a page that the claim depends on and that the notes do not cover yet."""

    claim: str = dspy.InputField()
    notes: list[str] = dspy.InputField()
    query: str = dspy.OutputField()


class AppendNotes(dspy.Signature):
    """Note what the passages add to what is known of the claim, with the names of pages to look for next."""

    claim: str = dspy.InputField()
    notes: list[str] = dspy.InputField()
    passages: list[str] = dspy.InputField()
    # Before the note, which may be so long that nothing after it is answered.
    enough: bool = dspy.OutputField(desc="true when every page that the claim depends on is found, else false")
    note: str = dspy.OutputField()


class MultiHop(dspy.Module):
    """At most `hops` searches, which together find at most `passages` passages.

    Args:
        predictor: makes each of the two modules from its signature.
    """

    def __init__(
        self,
        search: Search,
        hops: int = HOPS,
        passages: int = PASSAGES,
        predictor: type[dspy.Module] = dspy.ChainOfThought,
    ) -> None:
        super().__init__()
        self.generate_query = predictor(GenerateQuery)
        self.append_notes = predictor(AppendNotes)
        self.search, self.hops, self.per_hop = search, hops, passages // hops

    def forward(self, claim: str) -> dspy.Prediction:
        """Returns the `titles` that were found, each once and in the order of the searches, and the `notes`."""
        notes, passages = [], []
        for hop in range(self.hops):
            query = self.generate_query(claim=claim, notes=notes).query
            found = self.search(query, self.per_hop)
            passages += found
            if hop == self.hops - 1:
                break  # No search is left that notes could help.
            step = self.append_notes(claim=claim, notes=notes, passages=found)
            notes = [*notes, step.note]
            if step.enough:
                break
        return dspy.Prediction(titles=list(dict.fromkeys(map(title_of, passages))), notes=notes)


class Server:
    """A retrieval server that speaks ColBERT's JSON.

    `GET url?query=…&k=…` must answer `{"topk": [{"text": "Title | text"}, …]}`, the best first.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self, query: str, k: int) -> list[str]:
        """At most k passages.

        Raises:
            PipelineError: there is no server, or it answers something else.
        """
        try:
            with urlopen(f"{self.url}?{urlencode({'query': query, 'k': k})}", timeout=60) as answer:
                return [passage["text"] for passage in json.load(answer)["topk"][:k]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PipelineError(
                f"{self.url} gave no passages ({error!r}). Start the retrieval server, or set {SERVER} to its address."
            ) from error


def title_of(passage: str) -> str:
    return passage.split(" | ")[0]


def program() -> MultiHop:
    """The program of the paper, searching on the server that the environment names.

    Raises:
        PipelineError: it names none.
    """
    if not os.environ.get(SERVER):
        raise PipelineError(
            f"HoVer needs a server that searches Wikipedia's abstracts of 2017. Set {SERVER} to its address, such as "
            "http://127.0.0.1:8893/api/search; docs/tasks.md says what it must answer."
        )
    return MultiHop(Server(os.environ[SERVER]))


def metric(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> dict[str, float]:
    """`score`: share of the example's titles that were found; `all_found`: whether none is missing."""
    gold, found = (set(map(normalize_text, titles)) for titles in (example.titles, prediction.titles))
    return {"score": len(gold & found) / len(gold), "all_found": float(gold <= found)}


def load(settings: object) -> tuple[list[dspy.Example], list[dspy.Example], list[dspy.Example]]:
    """The same claims of four hops in every run: each file in the order of its ids' sha256, from the beginning.

    Claims were made in variants of one question; dev has no question of train.

    Raises:
        PipelineError: a file is missing or holds something else.
    """
    known, test = _claims("train"), _claims("dev")
    train = known[:TRAIN]
    questions = {claim["hpqa_id"] for claim in train}
    dev = [claim for claim in known[TRAIN:] if claim["hpqa_id"] not in questions]
    return _examples(train), _examples(dev[:DEV]), _examples(test[:TEST])


def _claims(split: str) -> list[dict[str, Any]]:
    path = DATA / f"hover_{split}_release_v1.1.json"
    try:
        claims = [claim for claim in json.loads(path.read_text(encoding="utf-8")) if claim["num_hops"] == HOPS]
        return sorted(claims, key=lambda claim: hashlib.sha256(claim["uid"].encode()).digest())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PipelineError(
            f"{path} cannot be read ({error!r}). Put hover_train_release_v1.1.json and hover_dev_release_v1.1.json "
            f"into {DATA}: they are in data/hover of hover-nlp/hover on GitHub."
        ) from error


def _examples(claims: list[dict[str, Any]]) -> list[dspy.Example]:
    return [
        dspy.Example(
            id=claim["uid"], claim=claim["claim"], titles=sorted({title for title, _ in claim["supporting_facts"]})
        ).with_inputs("claim")
        for claim in claims
    ]
