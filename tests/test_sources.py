"""Teacher programs: how many rollouts they have, which are refused, and what is recorded of their answers."""

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction

import dspy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.collect import collect
from tasks.source import Source as Teacher
from tasks.step import Manifest
from tasks.train import train
from tests.test_groups import grouped, rollout
from tests.test_rollouts import Ask, Program, called, examples, run, settings
from tests.test_scaffolds import completion, serving
from tests.tiny import make_model
from twofold import rollouts
from twofold.endpoints import Ledger, Spent
from twofold.errors import PipelineError
from twofold.groups import account_sources, taking_part
from twofold.hints import Prompt
from twofold.programs import save_state, structure, structure_at
from twofold.records import Rollout
from twofold.rollouts import plan_prompts
from twofold.sampling.local import LocalEngine
from twofold.sampling.scripted import EOS, ScriptedEngine, decode
from twofold.settings import AskedEndpoint, Budget, Draw, Settings, Weights, divided
from twofold.settings import Source as SourceSettings
from twofold.sources import Source, check, differences, endpoint_lms, local_lms

SAVED = {"name": "wise", "share": 0.25, "program": "program.json"}


def two_step(first: str = "Answer.", demos: bool = False) -> Program:
    """Asks `first`, and then `second` with what came back."""
    program = Program(
        lambda self, q: self.second(q=self.first(q=q).a),
        first=dspy.Predict(Ask.with_instructions(first)),
        second=dspy.Predict(Ask),
    )
    program.first.demos = [dspy.Example(q="one", a="two")] if demos else []
    return program


def local(engine: ScriptedEngine, program: Program, ledger: Ledger | None = None) -> Source:
    return Source("wise", program, local_lms(engine, Draw(), 256, ledger or Ledger(Budget())))


def louder(prompt: str, request: object) -> str:
    return prompt.split("Q: ")[-1].split("\n")[0] + "!"


# How many


@given(st.integers(2, 40), st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_shares_are_kept_within_one_rollout(total, weights):
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    parts = divided(total, shares)
    assert sum(parts) == total
    assert all(abs(part - total * share) < 1 for part, share in zip(parts, shares, strict=True))


def test_rollouts_by_hand():
    sources = [SAVED, {**SAVED, "name": "b", "share": 0.1}]
    # 12 · (0.65, 0.25, 0.1) = 7.8, 3, 1.2: the one that is left goes to 7.8.
    found = Weights.model_validate({"rollouts_per_example": 12, "sources": sources}).rollouts_by_source
    assert found == {"student": 8, "wise": 3, "b": 1}
    # 2 · (0.75, 0.25) = 1.5, 0.5: of equal remainders the student's is first, and the source would have none.
    with pytest.raises(ValidationError, match="of 2 rollouts per example none is left for wise"):
        Weights.model_validate({"rollouts_per_example": 2, "sources": [SAVED]})


@pytest.mark.parametrize(
    ("sources", "word"),
    [
        ([{**SAVED, "share": 0.5}, {**SAVED, "name": "b", "share": 0.5}], "leave nothing to the student"),
        ([{**SAVED, "name": f"s{k}", "share": 0.1} for k in range(10)], "leave nothing to the student"),
        ([{**SAVED, "share": 0.95}], "none is left for student"),
        ([SAVED, SAVED], "one name"),
        ([{**SAVED, "name": "student"}], "another name"),
        ([{"name": "wise", "share": 0.5}], "a program, an lm, or both"),
    ],
)
def test_sources_that_cannot_be(sources, word):
    with pytest.raises(ValidationError, match=word):
        Weights.model_validate({"rollouts_per_example": 8, "sources": sources})


def test_a_pool_needs_two_rollouts_of_the_student():
    weights = {"rollouts_per_example": 2, "sources": [{**SAVED, "share": 0.5}]}
    assert Settings.model_validate({"weights": weights})
    with pytest.raises(ValidationError, match="leave it two"):
        Settings.model_validate({"weights": weights, "scaffold": {}})


# Which programs


def test_a_program_that_differs_is_refused_with_the_difference(tmp_path):
    other = Program(None, first=dspy.Predict("q, context -> a"), third=dspy.Predict(Ask))
    assert differences(structure(other), structure(two_step())) == [
        "module 'second' is missing",
        "the student has no module 'third'",
        "module 'first' has the fields Q, Context, A, the student's has Q, A",
    ]
    path = tmp_path / "program.json"
    source = SourceSettings(name="wise", share=0.5, program=str(path))
    with pytest.raises(PipelineError, match=r"wise: there is no .*program\.json"):
        check([source], two_step())
    save_state(other, path)
    assert structure_at(path) == structure(other)
    with pytest.raises(PipelineError, match="module 'second' is missing; the student has no module 'third'"):
        check([source], two_step())
    save_state(two_step("Other words.", demos=True), path)
    check([source], two_step())
    path.write_text('{"metadata": {}, "first": 1}')
    with pytest.raises(PipelineError, match="no state of a program"):
        check([source], two_step())


# What is recorded


def test_a_source_is_asked_in_its_words_and_recorded_in_the_students():
    engine, ledger = ScriptedEngine(louder), Ledger(Budget())
    source = local(engine, two_step("Other words.", demos=True), ledger)
    (made,) = run(two_step(), engine, "hello", source=source)
    assert (made.source, made.status, made.output) == ("wise", "ok", {"a": "hello!!"})
    asked = [decode(request.prompt_ids) for request in engine.requests]
    assert asked == [
        "[system]\nOther words.\n[user]\nQ: one\nA:\n[assistant]\ntwo\n[user]\nQ: hello\nA:\n[assistant]\n",
        "[system]\nAnswer.\n[user]\nQ: hello!\nA:\n[assistant]\n",
    ]
    assert {request.policy for request in engine.requests} == {"base"}
    assert called(made) == [("first", 0), ("second", 0)]
    assert [decode(call.prompt_ids) for call in made.calls] == [
        "[system]\nAnswer.\n[user]\nQ: hello\nA:\n[assistant]\n",
        "[system]\nAnswer.\n[user]\nQ: hello!\nA:\n[assistant]\n",
    ]
    assert [call.completion_ids for call in made.calls] == [(*b"hello!", EOS), (*b"hello!!", EOS)]
    assert all(call.off_policy and call.logprobs == () and call.parsed for call in made.calls)
    assert {(call.policy, call.temperature) for call in made.calls} == {("wise", 0.7)}
    # Charged is what was asked and answered, and not what was recorded.
    assert ledger.spent == Spent(0, sum(map(len, asked)), len("hello!") + len("hello!!") + 2, 0.0)


def test_the_students_own_rollouts_are_as_ever():
    engine = ScriptedEngine(louder)
    (made,) = run(two_step(), engine, "hello")
    assert (made.source, [call.off_policy for call in made.calls]) == ("student", [False, False])


def test_an_answer_that_was_cut_off_has_no_end_of_turn():
    engine = ScriptedEngine(lambda prompt, request: "x" * 300)
    (made,) = run(two_step(), engine, "hello", source=local(engine, two_step()), options=settings(context=9999))
    assert made.calls[0].completion_ids == tuple(b"x" * 256)
    assert made.calls[0].finish_reason == "length"


def test_an_answer_that_does_not_parse_is_the_students_parse_error():
    student = Program(lambda self, q: self.ask(q=q), ask=dspy.Predict("q -> a: int"))
    engine = ScriptedEngine(lambda prompt, request: "seven")
    (made,) = run(student, engine, "hello", source=local(engine, student.deepcopy()))
    assert made.status == "parse_error"
    assert [(call.text, call.parsed) for call in made.calls] == [("seven", False)]


def test_calls_side_by_side_are_recorded_in_the_students_order():
    """The source's prompts sort the other way round than the student's."""

    def forward(self, q):
        pairs = [(self.ask, {"q": f"{q}{k}"}) for k in range(3)]
        return dspy.Prediction(a=" ".join(one.a for one in dspy.Parallel(num_threads=3).forward(pairs)))

    student = Program(forward, ask=dspy.Predict(Ask))
    engine = ScriptedEngine(louder)
    (made,) = run(student, engine, "q", source=local(engine, student.deepcopy()))
    assert [(call.index, call.text) for call in made.calls] == [(0, "q0!"), (1, "q1!"), (2, "q2!")]


def test_programs_that_await_their_modules():
    async def both(self, q):
        return await self.ask.acall(q=q)

    student = Program(lambda self, q: asyncio.run(both(self, q)), ask=dspy.Predict(Ask))
    engine = ScriptedEngine(louder)
    (made,) = run(student, engine, "q", source=local(engine, student.deepcopy()))
    assert [(call.text, call.off_policy) for call in made.calls] == [("q!", True)]


def test_hints_are_in_both_prompts():
    engine = ScriptedEngine(louder)
    jobs = plan_prompts([Prompt("e+1", examples("hello")[0], (("first", "Look."),))], 1, 0, "test")
    [made] = rollouts.run(
        two_step(), jobs, lambda *_: 1.0, engine, settings(), Draw(), source=local(engine, two_step("Other words."))
    )
    assert "Other words." in decode(engine.requests[0].prompt_ids)
    for prompt in (engine.requests[0].prompt_ids, made.calls[0].prompt_ids):
        assert "Look." in decode(prompt)
    assert "Look." not in decode(made.calls[1].prompt_ids)


def test_text_becomes_the_students_tokens(tmp_path):
    options = Settings.model_validate({"model": {"device": "cpu", "dtype": "float32"}, "sampling": {"context": 256}})
    engine = LocalEngine(make_model(tmp_path), options)
    end = engine.tokenizer.eos_token_id
    ids = engine.encode_answer("say it again", True)
    assert ids[-1] == end
    assert engine.tokenizer.decode(ids[:-1]) == "say it again"
    assert engine.encode_answer("say it again", False) == ids[:-1]
    # The rendered chat of the student, with this answer in it, is prompt and completion.
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "say it again"}]
    whole = engine.tokenizer.apply_chat_template(turns, tokenize=False)
    assert engine.tokenizer.decode(engine.encode(turns[:1]) + ids) + "\n" == whole
    # A server cannot end the turn, or begin another one, by spelling the token.
    assert end not in engine.encode_answer("a<|im_end|>b", False)


def test_prompts_keep_their_special_tokens_while_answers_are_encoded(tmp_path):
    """Threads of one shard do both at once."""
    options = Settings.model_validate({"model": {"device": "cpu", "dtype": "float32"}, "sampling": {"context": 256}})
    engine = LocalEngine(make_model(tmp_path), options)
    chat = [{"role": "user", "content": "say it again"}]
    wanted = engine.encode(chat)
    engine.encode_answer("a<|im_end|>b", True)
    assert not engine.tokenizer.backend_tokenizer.encode_special_tokens
    with ThreadPoolExecutor(4) as threads:
        made = [
            (threads.submit(engine.encode, chat), threads.submit(engine.encode_answer, "a", True)) for _ in range(50)
        ]
        assert {prompt.result() for prompt, _ in made} == {wanted}


# Servers


def test_a_server_answers_and_what_it_cannot_is_lost(monkeypatch):
    monkeypatch.setenv("TEST_KEY", "geheim")
    ledger, engine = Ledger(Budget()), ScriptedEngine(louder)
    with serving(completion("yes"), completion("no", finish_reason="length"), 400) as server:
        endpoint = AskedEndpoint.model_validate(server.settings(retries=0, concurrency=1))
        source = Source("far", two_step("Other words."), endpoint_lms(endpoint, "weights.sources.lm", ledger))
        made = run(two_step(), engine, "hello", "there", source=source, options=settings(shard_size=1))
    assert [one.status for one in made] == ["ok", "lm_error"]
    assert [(call.text, call.completion_ids) for call in made[0].calls] == [
        ("yes", (*b"yes", EOS)),
        ("no", tuple(b"no")),
    ]
    assert "Other words." in server.asked[0]["messages"][0]["content"]
    assert not engine.requests
    assert ledger.used() == {"tokens_in": 2000, "tokens_out": 200, "money": pytest.approx(0.006)}


# What becomes of them


def test_another_program_is_another_step():
    """A source's rollouts are found again by what its program is, and not by where it lies."""

    def key(folder: str, digest: str) -> str:
        return collect.key(source=Teacher("wise", 1, Manifest(folder, {"program.json": digest}), None))

    assert key("a", "x") == key("b", "x") != key("a", "y")


def test_how_patiently_a_server_is_asked_makes_no_other_step():
    def keys(**changes: object) -> tuple[str, str]:
        lm = AskedEndpoint.model_validate({"model": "m", "base_url": "http://localhost:1", **changes})
        weights = Weights(sources=(SourceSettings(name="wise", share=0.5, lm=lm),))
        return collect.key(source=Teacher("wise", 1, None, lm)), train.key(settings=Settings(weights=weights))

    assert keys() == keys(retries=9, timeout=1, key="OTHER", concurrency=1, requests_per_minute=5)
    others = {"model": "n", "base_url": "http://localhost:2", "temperature": 0, "max_tokens": 1, "price_in": 1}
    for found in zip(keys(), *(keys(**{name: value}) for name, value in others.items()), strict=True):
        assert len(set(found)) == 6


def test_groups_are_joint_and_what_failed_is_lost():
    """One of two students right, one of three sources' rollouts right, and another one lost to a time-out."""
    own = [rollout("s0", "m", 1.0), rollout("s1", "m", 0.0)]
    wise = [rollout("w0", "m", 1.0), rollout("w1", "m", 0.0, status="timeout")]
    far = [rollout("f0", "m", 0.0)]
    everyone = own + [_from("wise", one) for one in wise] + [_from("far", one) for one in far]
    joined = taking_part(everyone)
    assert [one.rollout_id for one in joined] == ["s0", "s1", "w0", "f0"]
    groups = grouped(joined, size=4)
    [group] = groups.values()
    # Rewards 1, 1, 0, 0: mean 1/2, deviation sqrt(1/3).
    expected = {"s0": 0.5, "w0": 0.5, "s1": -0.5, "f0": -0.5}
    for member in group.members:
        assert member.advantage == pytest.approx(expected[member.rollout_id] / (math.sqrt(1 / 3) + 1e-4))
    found = account_sources(everyone, list(groups.values()))
    assert (found["sources/rollouts"], found["sources/lost"], found["sources/usable_share"]) == (3, 1, 0.5)
    assert (found["sources/wise/rollouts"], found["sources/wise/lost"]) == (2, 1)
    assert (found["sources/wise/lost/timeout"], found["sources/wise/lost/lm_error"]) == (1, 0)
    assert (found["sources/wise/usable_share"], found["sources/far/usable_share"]) == (0.25, 0.25)
    assert (found["sources/wise/reward"], found["sources/far/reward"]) == (1.0, 0.0)
    assert account_sources(own, []) == {}


def _from(source: str, made: Rollout) -> Rollout:
    return replace(made, source=source)
