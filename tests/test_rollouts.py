import json
import random
import threading
import time
from typing import Any, Literal

import dspy
import pytest
from dspy import lm15
from pydantic import BaseModel

from twofold import rollouts
from twofold.errors import PipelineError, ServerError
from twofold.hints import Prompt
from twofold.records import SHARED, read_rollouts, write_rollouts
from twofold.rollouts import Progress, plan, plan_prompts
from twofold.sampling import Refusal
from twofold.sampling.scripted import ScriptedEngine, decode
from twofold.settings import Draw, Rewards, Sampling, Settings

REWARDS = Rewards(
    failure=-0.1,
    format_failure=-0.5,
    lm_error=-0.6,
    context_overflow=-0.7,
    timeout=-0.8,
    program_error=-0.9,
)


class Ask(dspy.Signature):
    """Answer."""

    q: str = dspy.InputField()
    a: str = dspy.OutputField()


def settings(**sampling):
    return Settings(sampling=Sampling(**{"context": 4096, "max_tokens": 256} | sampling), rewards=REWARDS)


def examples(*questions):
    return [dspy.Example(id=question, q=question).with_inputs("q") for question in questions]


def run(program, answer, *questions, metric=None, per_example=1, draw=None, options=None, **kwargs):
    engine = answer if isinstance(answer, ScriptedEngine) else ScriptedEngine(answer)
    jobs = plan(examples(*questions), per_example, 0, "test")
    metric = metric or (lambda example, prediction, trace: 1.0)
    return rollouts.run(program, jobs, metric, engine, options or settings(), draw or Draw(), **kwargs)


def called(rollout):
    return [(call.module, call.index) for call in rollout.calls]


def asked(call):
    """What a `q` field held in the prompt."""
    return decode(call.prompt_ids).split("Q: ")[-1].split("\n")[0]


class Program(dspy.Module):
    """Any function as a program's `forward`."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, **inputs):
        return self.function(self, **inputs)


def test_jobs_have_stable_names_and_seeds():
    jobs = plan(examples("x", "y"), 2, 5, "train", 3)
    assert [job.rollout_id for job in jobs] == ["train/3/x/0", "train/3/x/1", "train/3/y/0", "train/3/y/1"]
    assert [(job.example_id, job.number) for job in jobs] == [("x", 0), ("x", 1), ("y", 0), ("y", 1)]
    assert len({job.seed for job in jobs}) == 4
    assert plan(examples("y"), 1, 5, "train", 3)[0].seed == jobs[2].seed
    assert plan(examples("y"), 1, 6, "train", 3)[0].seed != jobs[2].seed
    assert plan(examples("y"), 1, 5, "train", 4)[0].seed != jobs[2].seed


def test_a_rollout_holds_what_happened(tmp_path):
    def forward(self, q):
        return self.second(q=self.first(q=q).a)

    def metric(example, prediction, trace):
        assert [(predictor.signature.instructions, inputs, dict(out)) for predictor, inputs, out in trace] == [
            ("Answer.", {"q": "hello"}, {"a": "HELLO"}),
            ("Answer.", {"q": "HELLO"}, {"a": "HELLO!"}),
        ]
        return prediction.a == "HELLO!"

    def answer(prompt, request):
        question = prompt.split("Q: ")[1].split("\n")[0]
        return question.upper() if request.family == "first" else question + "!"

    program = Program(forward, first=dspy.Predict(Ask), second=dspy.Predict(Ask))
    result = run(program, answer, "hello", metric=metric, policies={SHARED: "abc"})
    (rollout,) = result
    assert (rollout.rollout_id, rollout.example_id, rollout.source) == ("test/hello/0", "hello", "student")
    assert (rollout.status, rollout.error, rollout.reward) == ("ok", "", 1.0)
    assert rollout.output == {"a": "HELLO!"}
    assert rollout.channels == {"accuracy": 1.0}
    assert called(rollout) == [("first", 0), ("second", 0)]
    assert [call.order for call in rollout.calls] == [0, 1]
    assert {call.policy for call in rollout.calls} == {"abc"}
    assert {call.rollout_id for call in rollout.calls} == {rollout.rollout_id}
    assert program.first.lm is None
    write_rollouts(result, tmp_path)
    assert read_rollouts(tmp_path) == result


def loop(self, q):
    for i in range(3):
        q = self.step(q=f"{q}{i}").a
    return dspy.Prediction(a=q)


def branch(self, q):
    return self.left(q=q) if q == "l" else self.right(q=q)


def copied(self, q):
    inner = self.inner.deepcopy()
    return inner(q=q)


def parallel(self, q):
    pairs = [(self.step, {"q": f"{q}{i}"}) for i in range(5)]
    answers = dspy.Parallel(num_threads=3, disable_progress_bar=True)(pairs)
    return self.last(q="".join(answer.a for answer in answers))


def containers(self, q):
    return self.parts[1](q=self.by_name["x"](q=q).a)


def never(self, q):
    return dspy.Prediction(a=q)


shared = dspy.Predict(Ask)

PROGRAMS = {
    "predict": (dspy.Predict(Ask), ["self"]),
    "chain of thought": (dspy.ChainOfThought(Ask), ["predict"]),
    "loop": (Program(loop, step=dspy.Predict(Ask)), ["step"] * 3),
    "branch": (Program(branch, left=dspy.Predict(Ask), right=dspy.Predict(Ask)), ["right"]),
    "never": (Program(never, step=dspy.Predict(Ask)), []),
    "containers": (
        Program(containers, parts=[shared, shared], by_name={"x": dspy.Predict(Ask)}),
        ["by_name['x']", "parts[0]"],
    ),
    "deep copy": (Program(copied, inner=Program(loop, step=dspy.Predict(Ask))), ["inner.step"] * 3),
    "parallel": (Program(parallel, step=dspy.Predict(Ask), last=dspy.Predict(Ask)), ["step"] * 5 + ["last"]),
    "best of n": (
        dspy.BestOfN(dspy.Predict(Ask), N=3, reward_fn=lambda inputs, prediction: 0.5, threshold=1.0),
        ["module"] * 3,
    ),
}


@pytest.mark.parametrize(("program", "calls"), PROGRAMS.values(), ids=PROGRAMS.keys())
def test_any_program_runs_and_its_calls_are_named(program, calls):
    answer = {"predict": "Reasoning: r\nA: b"}
    for rollout in run(program, lambda prompt, request: answer.get(request.family, "b"), "x", "y", per_example=2):
        assert (rollout.status, rollout.error) == ("ok", "")
        assert [call.module for call in rollout.calls] == calls
        assert [call.index for call in rollout.calls] == [calls[:n].count(name) for n, name in enumerate(calls)]


def test_react_runs_its_tools_and_its_calls_are_named():
    def look_up(word: str) -> str:
        """Look a word up."""
        return f"{word} is a colour"

    turns = iter(["look_up", "finish"])

    def answer(prompt, request):
        if request.family == "extract.predict":
            assert "red is a colour" in prompt
            return "Reasoning: r\nA: colour"
        tool = next(turns)
        args = '{"word": "red"}' if tool == "look_up" else "{}"
        return f"Next Thought: hm\nNext Tool Name: {tool}\nNext Tool Args: {args}"

    (rollout,) = run(dspy.ReAct(Ask, tools=[look_up]), answer, "red")
    assert (rollout.status, rollout.error) == ("ok", "")
    assert called(rollout) == [("react", 0), ("react", 1), ("extract.predict", 0)]
    assert rollout.output["a"] == "colour"
    assert rollout.output["trajectory"]["observation_0"] == "red is a colour"


class Typed(dspy.Signature):
    """Judge."""

    q: str = dspy.InputField()
    why: str = dspy.OutputField()
    verdict: Literal["good", "bad"] = dspy.OutputField()


def fails(kind):
    """A program that makes one good call and then fails in its own way."""

    def forward(self, q):
        first = self.first(q=q).a
        if kind == "program_error":
            raise KeyError("a slip")
        return self.second(q=first)

    return Program(forward, first=dspy.Predict(Ask), second=dspy.Predict(Typed))


def test_what_somebody_must_mend_ends_the_run():
    """No rollout is to blame for it: a reward for the failure would be learned from."""

    def answer(prompt, request):
        if request.family == "second":
            raise ServerError("No server answers.")
        return "fine"

    with pytest.raises(ServerError, match="No server answers"):
        run(fails("lm_error"), answer, "x", "y")


@pytest.mark.parametrize(
    ("status", "second", "reward", "error"),
    [
        ("parse_error", "Why: so\nVerdict: medium", -0.5 + 0.5 * 0.4, "AdapterParseError: verdict: 'medium' is none"),
        ("parse_error", "what?", -0.5, "AdapterParseError"),
        ("parse_error", "", -0.5, "AdapterParseError"),
        ("context_overflow", Refusal("context_overflow", "9 tokens too long"), -0.7, "9 tokens too long"),
        ("lm_error", Refusal("lm_error", "no answer"), -0.6, "LMServerError: [twofold/second@base] no answer"),
        ("timeout", Refusal("timeout", "no answer"), -0.8, "LMTimeoutError"),
        ("lm_error", OSError("disk"), -0.6, "LMUnexpectedError: [twofold/second@base] disk"),
        ("program_error", None, -0.9, "KeyError: 'a slip'"),
    ],
)
def test_a_failure_keeps_its_kind_its_reward_and_the_calls_before_it(status, second, reward, error):
    def answer(prompt, request):
        if request.family == "first":
            return "fine"
        if isinstance(second, Exception):
            raise second
        return second

    (rollout,) = run(fails(status), answer, "x")
    assert rollout.status == status
    assert rollout.reward == pytest.approx(reward)
    assert error in rollout.error
    assert called(rollout)[0] == ("first", 0)
    assert rollout.calls[0].parsed
    assert len(rollout.calls) == (2 if status == "parse_error" else 1)
    assert (rollout.output, rollout.channels) == ({}, {})
    if status == "parse_error":
        assert (rollout.calls[1].parsed, rollout.calls[1].text) == (False, second)


def test_one_failure_leaves_the_other_rollouts_alone():
    def answer(prompt, _):
        return "" if "Q: x" in prompt else "fine"

    statuses = [rollout.status for rollout in run(dspy.Predict(Ask), answer, "a", "x", "b", per_example=2)]
    assert statuses == ["ok", "ok", "parse_error", "parse_error", "ok", "ok"]


def test_parse_retries_ask_again():
    def answer(prompt, request):
        return "7" if request.seed in good else "many"

    signature = dspy.Signature("q -> a: int")
    good = set()
    (first,) = run(dspy.Predict(signature), answer, "x", parse_retries=2)
    assert [call.parsed for call in first.calls] == [False] * 3
    good.add(first.calls[2].seed)
    (second,) = run(dspy.Predict(signature), answer, "x", parse_retries=2)
    assert (second.status, second.output) == ("ok", {"a": 7})
    assert [call.parsed for call in second.calls] == [False, False, True]
    (third,) = run(dspy.Predict(signature), answer, "x")
    assert len(third.calls) == 1


@pytest.mark.parametrize(
    ("metric", "reward", "channels"),
    [
        (lambda example, prediction: True, 1.0, {"accuracy": 1.0}),
        (lambda example, prediction, trace: 0.25, 0.25, {"accuracy": 0.25}),
        (lambda example, prediction, trace=None: 2, 2.0, {"accuracy": 2.0}),
        (lambda gold, pred, trace, pred_name, pred_trace: 0.5, 0.5, {"accuracy": 0.5}),
        (lambda e, p: {"score": 0.9, "accuracy": 1, "format": 0.0}, 0.9, {"accuracy": 1.0, "format": 0.0}),
        (lambda e, p: {"score": 0.9, "format": False}, 0.9, {"accuracy": 0.9, "format": 0.0}),
        (lambda e, p: {"accuracy": 0.75, "format": 1}, 0.75, {"accuracy": 0.75, "format": 1.0}),
        (lambda e, p: dspy.Prediction(score=0.3, feedback="try harder"), 0.3, {"accuracy": 0.3}),
    ],
)
def test_a_metric_may_have_any_of_dspys_forms(metric, reward, channels):
    (rollout,) = run(dspy.Predict(Ask), lambda prompt, _: "b", "x", metric=metric)
    assert (rollout.status, rollout.reward, rollout.channels) == ("ok", reward, channels)


@pytest.mark.parametrize(
    ("metric", "error"),
    [
        (lambda e, p: float("nan"), "in the metric: ValueError: The metric returned nan; it must be a finite number"),
        (lambda e, p: {"score": 1.0, "format": float("inf")}, "in the metric: ValueError"),
        (lambda e, p: {"format": 1.0}, "or a dict with `score`"),
        (lambda e, p: None, "in the metric: ValueError"),
        (lambda e, p: p.no_such_field, "in the metric: AttributeError"),
        (lambda e, p: dspy.Predict("a -> b")(a="x"), "in the metric: ValueError: No LM is loaded"),
    ],
)
def test_a_metric_that_fails_is_a_program_error_and_the_calls_are_kept(metric, error):
    (rollout,) = run(dspy.Predict(Ask), lambda prompt, _: "b", "x", metric=metric)
    assert (rollout.status, rollout.reward) == ("program_error", -0.9)
    assert error in rollout.error
    assert [call.parsed for call in rollout.calls] == [True]


def test_a_metric_of_another_form_is_refused_before_anything_runs():
    engine = ScriptedEngine(lambda prompt, _: "b")
    with pytest.raises(PipelineError, match=r"must take \(example, prediction, trace\), not \(prediction\)"):
        run(dspy.Predict(Ask), engine, "x", metric=lambda prediction: 1.0)
    assert engine.requests == []


class Item(BaseModel):
    name: str
    price: float


def test_any_output_becomes_json():
    def forward(self, q):
        values: dict[str, Any] = {"items": [Item(name="pen", price=1.5)], "nan": float("nan"), "set": {1}, "x": object}
        return dspy.Prediction(**values)

    (rollout,) = run(Program(forward), lambda prompt, _: "b", "x")
    assert rollout.output["items"] == [{"name": "pen", "price": 1.5}]
    assert (rollout.output["nan"], rollout.output["set"]) == (None, [1])
    json.dumps(rollout.output, allow_nan=False)
    (bare,) = run(Program(lambda self, q: [q]), lambda prompt, _: "b", "x")
    assert bare.output == {"output": ["x"]}


def sleepy(self, q):
    pause = random.Random().uniform
    time.sleep(pause(0, 0.01))
    if len(q) > 2:
        q = self.short(q=q).a
    pairs = [(self.step, {"q": f"{q}{i}"}) for i in range(3)]
    answers = dspy.Parallel(num_threads=3, disable_progress_bar=True)(pairs)
    time.sleep(pause(0, 0.01))
    for _ in range(len(q)):
        q = self.last(q=q + "".join(answer.a for answer in answers)).a
        time.sleep(pause(0, 0.005))
    return dspy.Prediction(a=q)


def test_equal_jobs_give_equal_rollouts_whatever_the_threads_do():
    def answer(prompt, request):
        return "" if request.seed % 20 == 0 else f"{request.seed % 97}"

    parts = {name: dspy.Predict(Ask) for name in ("short", "step", "last")}
    questions = ["a", "bb", "ccc", "dddd"]
    options = {"per_example": 4, "options": settings(shard_size=7)}
    first, second = (run(Program(sleepy, **parts), answer, *questions, **options) for _ in range(2))
    assert first == second
    # An answer that does not parse is seen by the program as None when it was asked for in `dspy.Parallel`.
    assert {rollout.status for rollout in first} == {"ok", "parse_error", "program_error"}
    # A rollout does not depend on those it shares a shard with.
    alone = run(Program(sleepy, **parts), answer, "ccc", per_example=4)
    assert alone == first[8:12]


def test_batches_depend_on_the_rollouts_alone():
    def forward(self, q):
        time.sleep(random.Random().uniform(0, 0.005))
        for _ in range(len(q)):
            q = self.step(q=q).a
        return dspy.Prediction(a=q)

    engine = ScriptedEngine(lambda prompt, _: "b")
    run(Program(forward, step=dspy.Predict(Ask)), engine, "a", "bb", "ccc", "dddd", options=settings(shard_size=3))
    # Shards of three and one: 1, 2 and 3 calls, then 4.
    assert engine.batches == [3, 2, 1, 1, 1, 1, 1]


def test_sixty_four_rollouts_at_once():
    engine = ScriptedEngine(lambda prompt, request: f"{request.seed}")
    program = Program(loop, step=dspy.Predict(Ask))
    result = run(program, engine, *map(str, range(8)), per_example=8, options=settings(shard_size=64))
    assert engine.batches == [64, 64, 64]
    assert [rollout.status for rollout in result] == ["ok"] * 64
    assert len({call.seed for rollout in result for call in rollout.calls}) == 64 * 3
    for rollout in result:
        first, second, third = rollout.calls
        assert asked(first) == f"{rollout.example_id}0"
        assert asked(second) == f"{first.seed}1"
        assert asked(third) == f"{second.seed}2"


def test_a_rollout_that_hangs_times_out_and_blocks_nobody():
    release = threading.Event()

    def forward(self, q):
        first = self.step(q=q).a
        if q == "hangs":
            release.wait(30)
        return self.step(q=first)

    start = time.monotonic()
    program = Program(forward, step=dspy.Predict(Ask))
    result = run(program, lambda prompt, _: "b", "x", "hangs", "y", options=settings(timeout=1))
    release.set()
    assert time.monotonic() - start < 10
    assert [rollout.status for rollout in result] == ["ok", "timeout", "ok"]
    hung = result[1]
    assert (hung.reward, len(hung.calls)) == (-0.8, 1)
    assert "within 1 seconds" in hung.error


def test_a_rollout_that_never_stops_calling_times_out():
    def forward(self, q):
        while True:
            self.step(q=q)

    options = settings(timeout=0.3)
    rollout, _ = run(Program(forward, step=dspy.Predict(Ask)), lambda prompt, _: "b", "x", "y", options=options)
    assert rollout.status == "timeout"
    assert rollout.calls


def test_a_metric_that_hangs_times_out_and_the_rollouts_do_not_wait_for_it():
    release = threading.Event()

    def metric(example, prediction):
        if example.q == "x":
            release.wait(30)
        return 1.0

    def forward(self, q):
        for _ in range(1 if q == "x" else 3):
            self.step(q=q)
        return dspy.Prediction(a=q)

    program = Program(forward, step=dspy.Predict(Ask))
    result = run(program, lambda prompt, _: "b", "x", "y", metric=metric, options=settings(timeout=1))
    release.set()
    assert [rollout.status for rollout in result] == ["timeout", "ok"]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_what_ends_a_process_ends_the_run(error):
    def forward(self, q):
        if q == "x":
            raise error("enough")
        return self.step(q=q)

    with pytest.raises(error, match="enough"):
        run(Program(forward, step=dspy.Predict(Ask)), lambda prompt, _: "b", "x", "y", "z")


def test_an_interrupted_run_leaves_no_thread_behind():
    def forward(self, q):
        if q != "x":
            self.step(q=q)
        return self.step(q=q)

    def interrupt(progress):
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        run(Program(forward, step=dspy.Predict(Ask)), lambda prompt, _: "b", "x", "y", "z", progress=interrupt)
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before


def test_a_predictor_with_its_own_lm_is_not_recorded():
    class Own:
        def complete(self, request):
            message = lm15.Message.assistant("mine")
            return lm15.Response(id=None, model="own", message=message, finish_reason="stop", usage=lm15.Usage())

    program = Program(
        lambda self, q: self.second(q=self.first(q=q).a), first=dspy.Predict(Ask), second=dspy.Predict(Ask)
    )
    program.first.lm = dspy.LM("own/own", engine=Own(), cache=False)
    (rollout,) = run(program, lambda prompt, _: "b", "x")
    assert rollout.status == "ok"
    assert called(rollout) == [("second", 0)]
    assert asked(rollout.calls[0]) == "mine"


def test_the_callers_dspy_settings_hold_in_every_rollout():
    def forward(self, q):
        return dspy.Prediction(a=dspy.settings.passphrase)

    with dspy.context(passphrase="swordfish"):
        result = run(Program(forward), lambda prompt, _: "b", "x", "y")
    assert [rollout.output for rollout in result] == [{"a": "swordfish"}] * 2


@pytest.mark.parametrize(
    ("adapter", "text"),
    [
        ("plain", "A: x\nB: 3"),
        ("chat", "[[ ## a ## ]]\nx\n\n[[ ## b ## ]]\n3"),
        ("json", '{"a": "x", "b": 3}'),
        ("xml", "<a>x</a><b>3</b>"),
    ],
)
def test_the_adapter_is_a_setting_and_a_failure_costs_one_call(adapter, text):
    program = dspy.Predict("q -> a, b: int")
    options = settings(adapter=adapter)
    (good,) = run(program, lambda prompt, _: text, "x", options=options)
    assert (good.status, good.output) == ("ok", {"a": "x", "b": 3})
    (bad,) = run(program, lambda prompt, _: "?", "x", options=options)
    assert (bad.status, len(bad.calls)) == ("parse_error", 1)


def test_progress_is_reported_after_each_rollout():
    seen: list[Progress] = []

    def answer(prompt, _):
        return "ok" if "Q: a" in prompt else ""

    run(dspy.Predict(Ask), answer, "a", "b", per_example=2, progress=seen.append)
    assert [progress.done for progress in seen] == [1, 2, 3, 4]
    last = seen[-1]
    assert (last.total, last.statuses) == (4, {"ok": 2, "parse_error": 2})
    # "ok" and its end are three tokens, an empty answer is its end alone.
    assert last.tokens_out == 2 * 3 + 2 * 1
    assert last.tokens_in == 4 * len("[system]\nAnswer.\n[user]\nQ: a\nA:\n[assistant]\n")
    assert last.tokens_per_second == pytest.approx(last.tokens_out / last.seconds)
    assert last.eta == 0
    assert Progress(1, 4, {}, 0, 0, seconds=2.0).eta == 6.0


def test_programs_with_progress_bars_may_run_side_by_side():
    """`dspy.Parallel` in many rollouts at once: each start empties tqdm's set of bars, those of the others too."""
    program = Program(parallel, step=dspy.Predict(Ask), last=dspy.Predict(Ask))
    rollouts = run(program, lambda prompt, request: "b", *"abcdefghijklmnop", per_example=4)
    assert {(rollout.status, rollout.error) for rollout in rollouts} == {("ok", "")}


def test_a_module_hint_is_in_the_rollouts_of_its_prompt_alone():
    def forward(self, q):
        return self.second(q=self.first(q=q).a)

    engine = ScriptedEngine(lambda prompt, request: "seen")
    prompts = [Prompt("x", *examples("x")), Prompt("x+1", *examples("x"), (("second", "Look."),))]
    jobs = plan_prompts(prompts, 2, 0, "test")
    program = Program(forward, first=dspy.Predict(Ask), second=dspy.Predict(Ask))
    made = rollouts.run(program, jobs, lambda example, prediction, trace: 1.0, engine, settings(), Draw())
    assert [rollout.example_id for rollout in made] == ["x", "x", "x+1", "x+1"]
    calls = [(one.example_id, call) for one in made for call in one.calls]
    hinted = {(name, call.module) for name, call in calls if "Hint: Look." in decode(call.prompt_ids)}
    assert hinted == {("x+1", "second")}
    assert made[2].rollout_id == "test/x+1/0"
