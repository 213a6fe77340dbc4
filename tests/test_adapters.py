import enum
from typing import Literal

import dspy
import pytest
from dspy.utils.exceptions import AdapterParseError
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from twofold.adapters import PlainAdapter, make_adapter

Team = Literal["Billing", "Tech support", "sales"]


class Order(BaseModel):
    item: str
    count: int


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


def one(annotation):
    return dspy.Signature({"text": (str, dspy.InputField()), "value": (annotation, dspy.OutputField())}, "Do it.")


def several(**outputs):
    fields = {"text": (str, dspy.InputField())}
    return dspy.Signature(fields | {name: (kind, dspy.OutputField()) for name, kind in outputs.items()}, "Do it.")


def chat(signature, demos=(), adapter=None, **inputs):
    return [(m["role"], m["content"]) for m in (adapter or PlainAdapter()).format(signature, list(demos), inputs)]


def test_a_chat_of_instruction_demos_and_input():
    class Route(dspy.Signature):
        """Pick the team for a customer's problem."""

        problem: str = dspy.InputField()
        team: Team = dspy.OutputField()

    demos = [dspy.Example(problem="card declined", team="Billing"), {"problem": "app crashes", "team": "Tech support"}]
    assert chat(Route, demos, problem="late\nparcel") == [
        ("system", "Pick the team for a customer's problem."),
        ("user", "Problem: card declined\nTeam:"),
        ("assistant", "Billing"),
        ("user", "Problem: app crashes\nTeam:"),
        ("assistant", "Tech support"),
        ("user", "Problem: late\nparcel\nTeam:"),
    ]


def test_described_fields_are_described_and_several_outputs_are_named():
    class Answer(dspy.Signature):
        """Answer."""

        long_question: str = dspy.InputField(desc="what the customer wants to know")
        context: list[str] = dspy.InputField()
        reasons: list[str] = dspy.OutputField()
        answer: str = dspy.OutputField(desc="one word")

    demo = {"long_question": "q", "context": ["c"], "reasons": ["a", "b"], "answer": "yes"}
    assert chat(Answer, [demo], long_question="why", context=["x", "y"]) == [
        ("system", "Answer.\nLong Question: what the customer wants to know\nAnswer: one word"),
        ("user", 'Long Question: q\nContext: ["c"]'),
        ("assistant", 'Reasons: ["a", "b"]\nAnswer: yes'),
        ("user", 'Long Question: why\nContext: ["x", "y"]'),
    ]


def test_a_demo_shows_the_fields_it_has_and_is_left_out_without_an_answer():
    demos = [{"text": "t", "label": "l"}, {"text": "no answer"}, {"label": "no question"}]
    assert chat(several(reasoning=str, label=str), demos, text="x")[1:] == [
        ("user", "Text: t"),
        ("assistant", "Label: l"),
        ("user", "Text: x"),
    ]


def test_history_becomes_turns():
    class Talk(dspy.Signature):
        """Talk."""

        question: str = dspy.InputField()
        history: dspy.History = dspy.InputField()
        answer: str = dspy.OutputField()

    history = dspy.History(messages=[{"question": "one?", "answer": "1"}, {"question": "two?", "answer": "2"}])
    assert chat(Talk, question="three?", history=history) == [
        ("system", "Talk."),
        ("user", "Question: one?\nAnswer:"),
        ("assistant", "1"),
        ("user", "Question: two?\nAnswer:"),
        ("assistant", "2"),
        ("user", "Question: three?\nAnswer:"),
    ]


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (str, "  two\nlines. ", "two\nlines."),
        (Team, "Billing", "Billing"),
        (Team, " billing.\n", "Billing"),
        (Team, "TECH SUPPORT", "Tech support"),
        (Literal["a", "A"], "A", "A"),
        (Literal[1, 2], "2.", 2),
        (int, "42", 42),
        (int, " 42. ", 42),
        (float, "-2.5", -2.5),
        (bool, "True", True),
        (bool, "no.", False),
        (list[int], "[1, 2]", [1, 2]),
        (list[str], "['a', 'b']", ["a", "b"]),
        (dict[str, int], '{"a": 1}', {"a": 1}),
        (int | None, "7", 7),
        (int | None, "None", None),
        (str | None, "text", "text"),
        (Team | None, "sales.", "sales"),
        (Order, '{"item": "pen", "count": 2}', Order(item="pen", count=2)),
        (Size, "large", Size.LARGE),
    ],
)
def test_a_typed_value_is_read(annotation, text, value):
    assert PlainAdapter().parse(one(annotation), text) == {"value": value}


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (str, " \n"),
        (Team, "Bill"),
        (Team, "Billing because of the card"),
        (Literal[1, 2], "3"),
        (int, "about 42"),
        (int, "2.5"),
        (float, "much"),
        (bool, "maybe"),
        (list[int], "[1, x]"),
        (dict[str, int], "none of it"),
        (int | None, "seven"),
        (Order, '{"item": "pen"}'),
        (Size, "medium"),
    ],
)
def test_what_is_no_value_of_the_type_is_a_parse_error(annotation, text):
    with pytest.raises(AdapterParseError) as caught:
        PlainAdapter().parse(one(annotation), text)
    assert caught.value.parsed_result == {}


def test_several_fields_over_several_lines_in_any_order():
    signature = several(reasoning=str, label=Team, score=int)
    text = "label: billing\nReasoning: first,\nthe label: is obvious\nSCORE : 3\nReasoning: again"
    assert PlainAdapter().parse(signature, text) == {
        "reasoning": "first,\nthe label: is obvious",
        "label": "Billing",
        "score": 3,
    }


def test_a_parse_error_holds_the_fields_that_did_parse():
    signature = several(reasoning=str, label=Team, score=int)
    with pytest.raises(AdapterParseError, match="score: ") as caught:
        PlainAdapter().parse(signature, "Reasoning: since\nScore: many")
    assert caught.value.parsed_result == {"reasoning": "since"}


def test_a_missing_optional_field_takes_its_default():
    assert PlainAdapter().parse(several(a=str, b=int | None), "A: x") == {"a": "x", "b": None}


names = st.text("abcxyz", min_size=1, max_size=8)
values = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1).filter(lambda text: ":" not in text)


@given(st.dictionaries(names, values, min_size=2, max_size=4))
def test_what_is_written_is_read_back(fields):
    signature = several(**dict.fromkeys(fields, str))
    text = PlainAdapter().format_assistant_message_content(signature, fields)
    assert PlainAdapter().parse(signature, text) == fields


PARTLY = {
    "plain": "A: x\nB: many",
    "chat": "[[ ## a ## ]]\nx\n\n[[ ## b ## ]]\nmany\n\n[[ ## completed ## ]]",
    "json": '{"b": "many", "a": "x"}',
    "xml": "<a>x</a><b>many</b>",
}


@pytest.mark.parametrize("name", PARTLY)
def test_each_adapter_says_which_fields_are_good(name):
    adapter = make_adapter(name)
    signature = several(a=str, b=int)
    assert adapter.parse(signature, PARTLY[name].replace("many", "5")) == {"a": "x", "b": 5}
    with pytest.raises(AdapterParseError) as caught:
        adapter.parse(signature, PARTLY[name])
    assert caught.value.parsed_result == {"a": "x"}
    with pytest.raises(AdapterParseError) as caught:
        adapter.parse(signature, "nothing of the kind")
    assert caught.value.parsed_result == {}


@pytest.mark.parametrize("name", PARTLY)
def test_what_an_adapter_writes_it_reads(name):
    adapter = make_adapter(name)
    signature = several(a=str, b=list[int])
    text = adapter.format_assistant_message_content(signature, {"a": "x", "b": [1, 2]})
    assert adapter.parse(signature, text) == {"a": "x", "b": [1, 2]}
