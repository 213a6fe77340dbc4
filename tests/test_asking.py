"""Cases of the queue, what is kept of a teacher's answers, the student's trials, and how answers join the pool."""

from dataclasses import replace
from pathlib import Path

import dspy
import pytest

from twofold import leaks
from twofold.asking import (
    Answers,
    Case,
    Kept,
    ask,
    cases_of,
    figures,
    golds,
    join,
    kept_ledger,
    read_answers,
    text_gate,
    write_answers,
)
from twofold.endpoints import BudgetError, Spent
from twofold.eps import score
from twofold.errors import PipelineError, RecordError, SettingsError
from twofold.hints import Placed, lineage, prompts, read_hints, write_hints
from twofold.pool import new_pool, visit
from twofold.programs import load_pipeline
from twofold.records import Rollout
from twofold.scaffolds import PROGRAM, Attempt, Hint, Scaffolding, check_teacher, request_for
from twofold.scores import Scored
from twofold.settings import Eps, Pooling, Scaffold, Teacher
from twofold.trials import again, try_hints, waits

EPS = Eps(visits_before_teacher=1)
SCAFFOLD = Scaffold(arm="whole", eps=EPS, gate={"probe_rollouts": 4, "effect_rollouts": 4})
HINTS = {"a+1": Placed("a", "One.", PROGRAM), "a+1+1": Placed("a+1", "Two.", "route")}


def example(name: str, **more: object) -> dspy.Example:
    return dspy.Example(id=name, text=f"text {name}", label="blue", **more).with_inputs("text")


def scored(*rewards: float):
    return score(rewards, EPS, "base", "v1")


def rollout(name: str, reward: float, number: int = 0) -> Rollout:
    return Rollout(f"{name}/{number}", name, 0, "student", (), {}, reward)


def case(name: str = "a", hints: tuple[Placed, ...] = (), mean: tuple[float, ...] = (0.0, 0.0)) -> Case:
    request = request_for(name, example(name), [], scored(*mean), "too_hard", SCAFFOLD.teacher)
    return Case(example(name), hints, request, PROGRAM)


class Script:
    """Gives these texts one after the other, and then none."""

    name, prompt_version = "script", "v1"

    def __init__(self, *texts: str):
        self.texts = list(texts)
        self.asked = []

    def hint(self, request):
        self.asked.append(request)
        if not self.texts:
            return Hint("", "script", "v1", failure="refused", error="no more")
        return Hint(self.texts.pop(0), "script", "v1")


# Hints in their places


def test_a_prompt_has_the_hints_on_the_way_from_its_original() -> None:
    assert lineage("a+1+1", HINTS) == ("a", (HINTS["a+1"], HINTS["a+1+1"]))
    original, scaffold = prompts(["a", "a+1+1"], {"a": example("a")}, HINTS, "text")
    assert (original.example.text, original.module_hints) == ("text a", ())
    assert (scaffold.prompt_id, scaffold.example.text) == ("a+1+1", "text a\nHint: One.")
    assert scaffold.module_hints == (("route", "Two."),)
    # What a metric may look up an example by stays.
    assert scaffold.example.id == "a"
    with pytest.raises(RecordError, match="there is no example b"):
        prompts(["b"], {"a": example("a")}, HINTS, "text")


def test_hints_come_back_as_they_were_written(tmp_path: Path) -> None:
    write_hints(HINTS, tmp_path)
    assert read_hints(tmp_path) == HINTS


# Cases


def test_a_case_is_made_from_what_the_round_found() -> None:
    pool = visit(new_pool("ab"), 1, {"a": scored(0, 0), "b": scored(0, 1)}, EPS, Pooling())
    rows = [
        Scored(1, "a", None, scored(0, 0), "a", "too_hard"),
        Scored(1, "b", None, scored(0, 1), "b", "keep"),
        Scored(1, "a", "a/condense/0", scored(0, 1), None, "keep"),
        Scored(1, "a", "a/route/0", scored(0, 0), None, "too_hard"),
    ]
    tried = [rollout("a", 0), rollout("b", 1)]
    [found] = cases_of(pool, {}, {name: example(name) for name in "ab"}, tried, rows, SCAFFOLD, "text")
    assert (found.prompt_id, found.place, found.request.rollouts) == ("a", "route", (tried[0],))
    assert found.with_hint("Look.", "text").module_hints == (("route", "Look."),)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [({}, ["blue"]), ({"label": 7}, ["7"]), ({"label": ["x", "y"]}, ["x", "y"]), ({"label": {"no": "text"}}, [""])],
)
def test_every_label_must_not_be_given_away(fields, wanted) -> None:
    assert golds(dspy.Example(**{"id": "a", "text": "t", "label": "blue", **fields}).with_inputs("text")) == wanted


def test_hints_on_hints_are_judged_together() -> None:
    numbers = dspy.Example(id="a", text="How many are left?", label="12").with_inputs("text")
    first = Placed("a", "Think of 5.", PROGRAM)
    own = replace(case(), original=numbers)
    assert text_gate(own, SCAFFOLD, "text")("Think of 7.")[-1].passed
    refused = text_gate(replace(own, hints=(first,)), SCAFFOLD, "text")("Think of 7.")[-1]
    assert (refused.rule, refused.passed) == ("one_step", False)


def test_a_check_that_fails_refuses_the_hint(monkeypatch) -> None:
    def broken(checks):
        raise RuntimeError("garbage")

    monkeypatch.setattr(leaks, "gate", broken)
    assert text_gate(case(), SCAFFOLD, "text")("x")[-1].rule == "error"


# Asking


def test_what_the_student_refused_is_asked_for_again_with_the_reason() -> None:
    teacher = Script("Look once.")
    [first] = ask([case()], teacher, SCAFFOLD, "text", {})
    assert waits(first)
    [useless], _ = try_hints({"a": case()}, [first], SCAFFOLD, "text", lambda kind, ps, n: run_with(0)(kind, ps, n))
    assert (useless.outcome, waits(useless), again(useless, 2)) == ("useless", False, True)
    teacher.texts = ["Look once.", "Look twice."]
    [repeated] = ask([case()], teacher, SCAFFOLD, "text", {"a": useless})
    assert "Useless" in teacher.asked[-1].refusals[0]
    # A repeated hint is refused as before, and nobody is asked or tries again.
    assert (repeated.outcome, len(repeated.attempts)) == ("useless", 2)
    assert not waits(repeated)
    assert not again(repeated, 2)
    assert not again(useless, 0)


def test_answers_are_kept_and_equal_requests_get_the_next(tmp_path: Path) -> None:
    request, teacher = case().request, Script("One.", "Two.")
    first = Kept(teacher, tmp_path, SCAFFOLD)
    assert [first.hint(request).text for _ in range(2)] == ["One.", "Two."]
    second = Kept(teacher, tmp_path, SCAFFOLD)
    assert [second.hint(request).text for _ in range(2)] == ["One.", "Two."]
    assert second.hint(request).failure == "refused"
    assert len(teacher.asked) == 3
    assert second.hint(replace(request, refusals=("Too clear.",))).failure == "refused"
    assert len(teacher.asked) == 4


def test_the_budget_holds_for_the_process_that_goes_on(tmp_path: Path) -> None:
    scaffold = Scaffold(arm="whole", teacher={"budget": {"calls": 4}})
    ledger = kept_ledger(tmp_path, scaffold, Spent(calls=2))
    ledger.enter()
    # Killed before the answer was there: it is not free.
    again_ = kept_ledger(tmp_path, scaffold, Spent(calls=2))
    again_.enter()
    again_.charge(10, 5, 0.5)
    after = kept_ledger(tmp_path, scaffold, Spent(calls=2))
    assert after.spent == Spent(4, 10, 5, 0.5)
    with pytest.raises(BudgetError):
        after.enter()


# Trials


def run_with(*right: int, blind: int = 0, probe: int = 0):
    """A student with so many right answers with question and hint, prompt by prompt."""

    def run(kind, wanted, n):
        counts = {"blind": [blind] * len(wanted), "probe": [probe] * len(wanted), "effect": right}[kind]
        return [
            rollout(one.prompt_id, float(number < k), number)
            for one, k in zip(wanted, counts, strict=False)
            for number in range(n)
        ]

    return run


def admitted(name: str) -> Scaffolding:
    return Scaffolding(name, (Attempt(Hint("Look.", "t", "v"), (leaks.Verdict("form", True),)),))


def test_the_student_sees_blank_alone_and_whole_prompts() -> None:
    seen = {}

    def run(kind, wanted, n):
        seen[kind] = ([one.example.text for one in wanted], n)
        return run_with(2)(kind, wanted, n)

    own = case(hints=(Placed("a", "Before.", PROGRAM),))
    [judged], made = try_hints({"a": own}, [admitted("a")], SCAFFOLD, "text", run)
    assert seen == {
        "blind": ([""], 4),
        "probe": (["\nHint: Before.\nHint: Look."], 4),
        "effect": (["text a\nHint: Before.\nHint: Look."], 4),
    }
    assert [check.rule for check in judged.attempts[-1].checks] == ["form", "probe", "effect"]
    assert (judged.outcome, judged.text, len(made)) == ("admitted", "Look.", 12)


@pytest.mark.parametrize(
    ("student", "outcome", "end"),
    [
        (run_with(2), "admitted", "admitted"),
        (run_with(0), "useless", "gate/effect"),
        (run_with(4), "refused", "gate/effect"),
        (run_with(2, probe=4), "refused", "gate/probe"),
        (run_with(2, probe=4, blind=4), "admitted", "admitted"),
    ],
)
def test_what_the_student_makes_of_a_hint(student, outcome, end) -> None:
    [judged], _ = try_hints({"a": case()}, [admitted("a")], SCAFFOLD, "text", student)
    assert (judged.outcome, judged.attempts[-1].end) == (outcome, end)


def test_success_is_better_than_what_queued_the_prompt() -> None:
    def half(kind, wanted, n):
        return [rollout(one.prompt_id, 0.5, k) for one in wanted for k in range(n)]

    flat = case(mean=(0.5, 0.5))
    [judged], _ = try_hints({"a": flat}, [admitted("a")], SCAFFOLD, "text", half)
    assert judged.outcome == "useless"
    solved = case(mean=(1.0, 1.0))
    [judged], _ = try_hints({"a": solved}, [admitted("a")], SCAFFOLD, "text", run_with(2))
    assert judged.outcome == "admitted"


def test_a_scaffolding_without_a_hint_is_not_tried() -> None:
    failed = Scaffolding("a", (Attempt(Hint("", "t", "v", failure="timeout")),))
    [judged], made = try_hints({"a": case()}, [failed], SCAFFOLD, "text", run_with())
    assert (judged, made) == (failed, [])


# Joining


def test_answers_join_the_pool_with_their_texts(tmp_path: Path) -> None:
    pool = visit(new_pool("ab"), 1, {"a": scored(0, 0), "b": scored(0, 0)}, EPS, Pooling())
    failed = Scaffolding("b", (Attempt(Hint("", "t", "v", 3, 4, 0.5, "timeout")),))
    answers = Answers((admitted("a"), failed), {"a": PROGRAM, "b": "route"}, Spent(2, 3, 4, 0.5))
    write_answers(answers, tmp_path / "answers.json")
    assert read_answers(tmp_path / "answers.json") == answers
    after, hints = join(pool, {}, answers, 2)
    assert hints == {"a+1": Placed("a", "Look.", PROGRAM)}
    assert after.states() == {"a": "reserve", "b": "reserve", "a+1": "refresh"}
    assert figures(answers.scaffoldings, answers.spent, Spent(1)) == {
        "scaffolds/asked": 2, "scaffolds/admitted": 1, "scaffolds/timeout": 1,
        "teacher/calls": 1, "teacher/tokens_in": 3, "teacher/tokens_out": 4, "teacher/money": 0.5,
    }  # fmt: skip


# Before anything is trained


def test_what_a_teacher_lacks_is_said_at_the_start(monkeypatch) -> None:
    desk, examples = load_pipeline("helpdesk"), [dspy.Example(id="m1", message="Brr.").with_inputs("message")]
    check_teacher(SCAFFOLD, desk, examples)
    with pytest.raises(PipelineError, match=r"no input takes its hints\. Set HINT_FIELD"):
        check_teacher(SCAFFOLD, replace(desk, hint_field=None), examples)
    with pytest.raises(PipelineError, match=r"'subject', which is no text input of example m1"):
        check_teacher(SCAFFOLD, replace(desk, hint_field="subject"), examples)
    with pytest.raises(SettingsError, match=r"scaffold\.teacher\.kind .*`scaffold`"):
        check_teacher(SCAFFOLD, replace(desk, scaffold=None), examples)
    monkeypatch.delenv("NO_KEY", raising=False)
    endpoint = {"model": "m", "base_url": "http://127.0.0.1:9", "key": "NO_KEY"}
    served = SCAFFOLD.model_copy(update={"teacher": Teacher(kind="endpoint", endpoint=endpoint)})
    with pytest.raises(SettingsError, match="no variable NO_KEY"):
        check_teacher(served, desk, examples)
    program = SCAFFOLD.model_copy(update={"teacher": Teacher(kind="program")})
    mute = replace(desk, teacher=lambda: dspy.ChainOfThought("input -> hint"))
    with pytest.raises(SettingsError, match=r"endpoint is null, .* these modules have no LM: predict\."):
        check_teacher(program, mute, examples)
