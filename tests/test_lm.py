import asyncio
import base64
import copy
import hashlib
import threading

import dspy
import pytest
from dspy import lm15
from dspy.utils.exceptions import (
    AdapterParseError,
    ContextWindowExceededError,
    LMServerError,
    LMTimeoutError,
    LMUnexpectedError,
    LMUnsupportedFeatureError,
)

from twofold.adapters import make_adapter
from twofold.lm import ModuleEngine, Recorder, module_lm, recording
from twofold.sampling import Refusal
from twofold.sampling.scripted import EOS, ScriptedEngine, decode
from twofold.settings import Draw

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def setup(answer, draw=None, max_tokens=50, **lm):
    """An engine, a recorder that asks it directly, and an LM for module `m`."""
    engine = ScriptedEngine(answer)
    recorder = Recorder("r", 1, lambda request: engine.sample([request])[0])
    return engine, recorder, module_lm("m", engine, draw or Draw(), max_tokens, **lm)


def predictor(lm, signature="q -> a", **config):
    predict = dspy.Predict(signature, **config)
    predict.lm = lm
    return predict


def test_a_call_is_recorded_as_it_was_sampled():
    engine, recorder, lm = setup(lambda prompt, _: "yes", Draw(temperature=0.9, top_p=0.8, top_k=7), policy="abc")
    with recording(recorder, make_adapter("plain")):
        assert predictor(lm)(q="Is it?").a == "yes"
    (call,) = recorder.calls
    (request,) = engine.requests
    assert lm.model == "twofold/m@abc"
    assert decode(call.prompt_ids).endswith("[user]\nQ: Is it?\nA:\n[assistant]\n")
    assert call.prompt_ids == request.prompt_ids
    assert call.completion_ids == (*b"yes", EOS)
    assert call.logprobs == (-0.5,) * 4
    assert (call.rollout_id, call.module, call.index, call.order) == ("r", "m", 0, 0)
    assert (call.text, call.finish_reason, call.policy, call.temperature) == ("yes", "stop", "abc", 0.9)
    assert (call.seed, call.parsed, call.parsed_share, call.images) == (request.seed, True, 1.0, ())
    assert (request.top_p, request.top_k, request.max_tokens) == (0.8, 7, 50)
    assert (request.policy, request.family) == ("abc", "m")


def test_a_module_keeps_the_temperature_and_length_it_sets():
    engine, recorder, lm = setup(lambda prompt, _: "yes")
    with recording(recorder, make_adapter("plain")):
        predictor(lm, temperature=0.0, max_tokens=2)(q="x")
    assert (engine.requests[0].temperature, engine.requests[0].max_tokens) == (0.0, 2)
    assert recorder.calls[0].temperature == 0.0
    assert recorder.calls[0].finish_reason == "length"


def test_several_generations_are_several_calls_and_each_is_marked_by_its_own_answer():
    answers = iter(["1", "2", "three"])
    _, recorder, lm = setup(lambda prompt, _: next(answers))
    with recording(recorder, make_adapter("plain")), pytest.raises(AdapterParseError):
        predictor(lm, "q -> a: int", n=3)(q="x")
    assert [(call.index, call.text, call.parsed) for call in recorder.calls] == [
        (0, "1", True),
        (1, "2", True),
        (2, "three", False),
    ]
    assert len({call.seed for call in recorder.calls}) == 3


@pytest.mark.parametrize(
    ("adapter", "text", "share"),
    [
        ("plain", "A: x\nB: many\nC: 1", 2 / 3),
        ("plain", "no names at all", 0.0),
        ("plain", "", 0.0),
        ("chat", "[[ ## a ## ]]\nx\n[[ ## b ## ]]\nmany", 1 / 3),
        ("json", '{"a": "x", "b": "many", "c": 1}', 2 / 3),
        ("json", '{"a": "x", "b": 1}', 2 / 3),
        ("json", "[1, 2]", 0.0),
        ("xml", "<a>x</a>", 1 / 3),
        ("xml", "<a>x</b>", 0.0),
    ],
)
def test_an_answer_that_does_not_parse_is_marked_with_the_share_that_does(adapter, text, share):
    _, recorder, lm = setup(lambda prompt, _: text)
    with recording(recorder, make_adapter(adapter)), pytest.raises(AdapterParseError):
        predictor(lm, "q -> a, b: int, c: int")(q="x")
    (call,) = recorder.calls
    assert call.text == text
    assert not call.parsed
    assert call.parsed_share == pytest.approx(share)


@pytest.mark.parametrize("adapter", ["plain", "json"])
def test_a_retry_is_a_call_of_its_own_with_its_own_seed(adapter):
    good = {"plain": "7", "json": '{"a": 7}'}[adapter]
    answers = iter(["bad", "", good, "bad", "bad", "bad"])
    _, recorder, lm = setup(lambda prompt, _: next(answers))
    with recording(recorder, make_adapter(adapter, retries=2)):
        assert predictor(lm, "q -> a: int")(q="x").a == 7
        with pytest.raises(AdapterParseError):
            predictor(lm, "q -> a: int")(q="x")
    assert [call.parsed for call in recorder.calls] == [False, False, True, False, False, False]
    assert len({call.seed for call in recorder.calls}) == 6
    assert len({call.prompt_ids for call in recorder.calls}) == 1


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("context_overflow", ContextWindowExceededError),
        ("timeout", LMTimeoutError),
        ("lm_error", LMServerError),
    ],
)
def test_a_refusal_becomes_dspys_error_and_no_call(kind, error):
    engine, recorder, lm = setup(lambda prompt, _: Refusal(kind, "because of that"))
    with recording(recorder, make_adapter("plain")), pytest.raises(error, match="because of that"):
        predictor(lm)(q="x")
    assert len(engine.requests) == 1
    assert recorder.calls == ()


def test_what_an_engine_cannot_do_is_refused_and_not_ignored():
    _, recorder, lm = setup(lambda prompt, _: "yes")
    with (
        recording(recorder, make_adapter("plain")),
        pytest.raises(LMUnsupportedFeatureError, match=r"sets stop, which.*LM of its own"),
    ):
        predictor(lm, stop=["."])(q="x")


def test_a_call_outside_of_a_rollout_says_so():
    _, _, lm = setup(lambda prompt, _: "yes")
    with pytest.raises(LMUnexpectedError, match="Module 'm' was called outside of a rollout"):
        predictor(lm)(q="x")


def test_copies_share_the_engine():
    _, recorder, lm = setup(lambda prompt, _: "yes")
    program = predictor(lm)
    for one in (copy.deepcopy(program), program.deepcopy(), program.reset_copy()):
        assert one is not program
        assert one.lm is None or one.lm.engine is lm.engine
    assert copy.copy(lm.engine) is copy.deepcopy(lm.engine) is lm.engine
    assert isinstance(lm.copy(temperature=1.0).engine, ModuleEngine)
    with recording(recorder, make_adapter("plain")):
        copy.deepcopy(program)(q="x")
    assert [call.module for call in recorder.calls] == ["m"]


def test_nothing_is_cached_and_no_history_is_kept():
    engine, recorder, lm = setup(lambda prompt, _: "yes")
    program = predictor(lm)
    with recording(recorder, make_adapter("plain")):
        program(q="x")
        program(q="x")
    assert len(engine.requests) == 2
    assert lm.history == program.history == []


def test_seeds_are_named_by_module_prompt_and_repeat():
    def seeds(seed, module, questions):
        engine = ScriptedEngine(lambda prompt, _: "yes")
        recorder = Recorder("r", seed, lambda request: engine.sample([request])[0])
        with recording(recorder, make_adapter("plain")):
            for question in questions:
                predictor(module_lm(module, engine, Draw(), 9))(q=question)
        return [call.seed for call in recorder.calls]

    a1, b1, a2 = seeds(1, "m", ["a", "b", "a"])
    assert len({a1, b1, a2}) == 3
    assert seeds(1, "m", ["b", "a", "a"]) == [b1, a1, a2]
    assert seeds(2, "m", ["a"]) != [a1]
    assert seeds(1, "n", ["a"]) != [a1]


def test_calls_of_other_threads_are_numbered_independently_of_their_order():
    def numbered(questions):
        _, recorder, lm = setup(lambda prompt, _: "yes")
        program = predictor(lm)
        with recording(recorder, make_adapter("plain")):
            program(q="first")
            overrides = dspy.settings.config
            for question in questions:

                def thread(question=question):
                    with dspy.context(**overrides):
                        program(q=question)

                one = threading.Thread(target=thread)
                one.start()
                one.join()
            program(q="a last one")
        return recorder.calls

    assert numbered(["b", "c", "d"]) == numbered(["d", "b", "c"])
    asked = [decode(call.prompt_ids).split("Q: ")[1].split("\n")[0] for call in numbered("dcb")]
    assert asked == ["first", "b", "c", "d", "a last one"]


def test_awaited_modules_are_recorded_and_marked_too():
    _, recorder, lm = setup(lambda prompt, _: "7" if "good" in prompt else "bad")
    program = predictor(lm, "q -> a: int")

    async def both():
        return await asyncio.gather(program.acall(q="good"), program.acall(q="other"), return_exceptions=True)

    with recording(recorder, make_adapter("plain", retries=1)):
        good, other = asyncio.run(both())
    assert good.a == 7
    assert isinstance(other, AdapterParseError)
    assert sorted((call.text, call.parsed) for call in recorder.calls) == [("7", True), ("bad", False), ("bad", False)]


def test_images_reach_the_engine_and_their_digests_the_record():
    class Looks(ScriptedEngine):
        def encode(self, messages):
            self.content = messages[-1]["content"]
            return super().encode(messages)

    engine = Looks(lambda prompt, _: "a dot")
    recorder = Recorder("r", 1, lambda request: engine.sample([request])[0])
    url = f"data:image/png;base64,{PIXEL}"
    with recording(recorder, make_adapter("plain")):
        predictor(module_lm("m", engine, Draw(), 9), "picture: dspy.Image -> a")(picture=dspy.Image(url))
    assert recorder.calls[0].images == (hashlib.sha256(base64.b64decode(PIXEL)).hexdigest(),)
    assert [part["type"] for part in engine.content] == ["text", "image", "text"]
    assert engine.content[1]["url"] == url


def test_a_whole_chat_reaches_the_engine_as_it_was():
    engine, recorder, lm = setup(lambda prompt, _: "yes")
    with recording(recorder, make_adapter("plain")):
        predict = predictor(lm, dspy.Signature("q -> a", "Line one.\n\nLine two."))
        predict.demos = [dspy.Example(q="d", a="e")]
        predict(q=" spaced ")
        lm(lm15.Request(model=lm.model, messages=(lm15.Message.developer("Rule."), lm15.Message.user("Hi"))))
    first, second = (decode(request.prompt_ids) for request in engine.requests)
    assert first == (
        "[system]\nLine one.\n\nLine two.\n[user]\nQ: d\nA:\n[assistant]\ne\n[user]\nQ:  spaced \nA:\n[assistant]\n"
    )
    assert second == "[system]\nRule.\n[user]\nHi\n[assistant]\n"
