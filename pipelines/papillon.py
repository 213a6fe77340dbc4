"""A private question for a stronger model that nobody trusts: redact it, ask, then answer (PAPILLON, on PUPA).

`craft_redacted_request` writes a request without what is private; the endpoint `untrusted` answers it, and sees nothing
else; `respond_to_query` answers the user from that. The reward is (quality + 1 - leakage) / 2:

1. Leakage is the share of the query's pieces of private information that are in the request.
2. Quality is 0 or 1: the endpoint `judge` compares the response with the data's, in both orders.

Paper: Li et al., PAPILLON, arXiv 2410.17127; with this reward in the mmGRPO paper.
"""

import csv
import hashlib
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import dspy

from twofold.errors import PipelineError

DATA = Path("data/papillon")
FILE = "PUPA_New.csv"
TRAIN, DEV, TEST = 111, 221, 221
"""Queries of each split; train and dev as in the paper."""

COLUMNS = {"user_query", "target_response", "pii_units", "redacted_query"}

ENDPOINTS = ("untrusted", "judge")

private = ("user_query", "target_response", "pii_units", "llm_request", "llm_response", "response")


class CraftRedactedRequest(dspy.Signature):
    """Write a request to another assistant that gets help with the user's query and tells nothing private of it:
    no names of people or places, no addresses, numbers or dates that say who the user is."""

    user_query: str = dspy.InputField()
    llm_request: str = dspy.OutputField()


class RespondToQuery(dspy.Signature):
    """Answer the user's query, with the help of what another assistant answered to a related request."""

    related_llm_request: str = dspy.InputField()
    related_llm_response: str = dspy.InputField()
    user_query: str = dspy.InputField()
    response: str = dspy.OutputField()


class Papillon(dspy.Module):
    """The program; `predictor` makes its first module from the signature."""

    def __init__(self, predictor: type[dspy.Module] = dspy.ChainOfThought) -> None:
        super().__init__()
        self.craft_redacted_request = predictor(CraftRedactedRequest)
        self.respond_to_query = dspy.Predict(RespondToQuery)

    def forward(self, user_query: str) -> dspy.Prediction:
        """Returns the `llm_request`, the `llm_response` to it, and the `response` to the user."""
        request = self.craft_redacted_request(user_query=user_query).llm_request
        [answer] = dspy.settings.endpoints["untrusted"](request)
        response = self.respond_to_query(
            related_llm_request=request, related_llm_response=answer, user_query=user_query
        ).response
        return dspy.Prediction(llm_request=request, llm_response=answer, response=response)


class Compare(dspy.Signature):
    """Two responses to a user's query. Is response A at least as good as response B?"""

    user_query: str = dspy.InputField()
    response_a: str = dspy.InputField()
    response_b: str = dspy.InputField()
    at_least_as_good: bool = dspy.OutputField()


def program() -> Papillon:
    return Papillon()


def metric(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> dict[str, float]:
    """`score`, its parts `quality` and `leakage`, and `order_dependent`: whether the judge said the same both times.

    As in PAPILLON's code, the response is only worse when the judge says so in both orders. So a judge that always
    prefers what it reads first, or last, finds nothing worse; `order_dependent` shows how often that, or a tie, was so.
    """
    judge = dspy.ChainOfThought(Compare)
    ours, theirs = prediction.response, example.target_response
    with dspy.context(lm=dspy.settings.endpoints["judge"], adapter=dspy.ChatAdapter(use_json_adapter_fallback=False)):
        good = judge(user_query=example.user_query, response_a=ours, response_b=theirs).at_least_as_good
        bad = judge(user_query=example.user_query, response_a=theirs, response_b=ours).at_least_as_good
    quality, leaked = float(good or not bad), leakage(example.pii_units, prediction.llm_request)
    score = (quality + 1 - leaked) / 2
    return {"score": score, "quality": quality, "leakage": leaked, "order_dependent": float(good == bad)}


def leakage(units: Sequence[str], text: str) -> float:
    """Share of the units that are in the text; 0 when there are none.

    A unit is there when all its words are, whole and in its order, with at most one other word between two of them:
    case, punctuation and the form of Unicode characters make no difference.
    """
    told = words(text)
    asked = [words(unit) for unit in units if words(unit)]
    return sum(_in_order(unit, told) for unit in asked) / len(asked) if asked else 0.0


def words(text: str) -> list[str]:
    """The words and numbers of a text, in their plainest form; in scripts without spaces, the characters."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def load(settings: object) -> tuple[list[dspy.Example], list[dspy.Example], list[dspy.Example]]:
    """The same queries in every run: those with a response and private information, in the order of their sha256.

    Raises:
        PipelineError: the file is missing or holds something else.
    """
    found = sorted(
        (example for example in read(DATA / FILE) if example.target_response and example.pii_units),
        key=lambda example: example.id,
    )
    return found[:TRAIN], found[TRAIN : TRAIN + DEV], found[TRAIN + DEV : TRAIN + DEV + TEST]


def read(path: Path) -> list[dspy.Example]:
    """The distinct queries of a file in PUPA's format, each known by its sha256: a conversation may have several.

    Raises:
        PipelineError: it is missing or holds something else.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise PipelineError(f"{path} cannot be read ({error}). {_WANTED}") from error
    if not rows or not rows[0].keys() >= COLUMNS:
        raise PipelineError(f"{path} lacks one of the columns {', '.join(sorted(COLUMNS))}. {_WANTED}")
    return list({row["user_query"]: _example(row) for row in rows}.values())


_UNSPACED = r"\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")

_WANTED = (
    "PUPA's files have the columns conversation_hash, predicted_category, user_query, target_response, pii_units and "
    f"redacted_query; put {FILE} from pupa in Columbia-NLP-Lab/PAPILLON on GitHub into {DATA}."
)


def _example(row: dict[str, str]) -> dspy.Example:
    units = [unit.strip() for unit in row["pii_units"].split("||")]
    return dspy.Example(
        id=hashlib.sha256(row["user_query"].encode()).hexdigest()[:16],
        user_query=row["user_query"],
        target_response=row["target_response"],
        pii_units=sorted({unit for unit in units if unit}),
        redacted_query=row["redacted_query"],
    ).with_inputs("user_query")


def _in_order(unit: list[str], told: list[str]) -> bool:
    """Whether the unit's words are in the text, each at most one word after the one before."""
    ends = {place for place, word in enumerate(told) if word == unit[0]}
    for wanted in unit[1:]:
        after = {place + step for place in ends for step in (1, 2)}
        ends = {place for place in after if place < len(told) and told[place] == wanted}
    return bool(ends)
