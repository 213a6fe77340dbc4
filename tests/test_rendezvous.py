import threading
import time

import pytest

from twofold.sampling import Refusal, SampleRequest
from twofold.sampling.rendezvous import Rendezvous, Stopwatch
from twofold.sampling.scripted import ScriptedEngine, decode


def request(text: str) -> SampleRequest:
    return SampleRequest(
        tuple(text.encode()), seed=0, temperature=1.0, top_p=1.0, top_k=0, max_tokens=99, policy="base"
    )


def meet(engine, rollouts):
    """Run functions of (order, ask), each as a rollout; give what they return."""
    meeting = Rendezvous(engine)
    results = {}
    for order in range(len(rollouts)):
        meeting.enter(order, Stopwatch(60))

    def thread(order):
        def ask(text):
            answer = meeting.sample(order, request(text))
            return answer if isinstance(answer, Refusal) else answer.text

        try:
            results[order] = rollouts[order](order, ask)
        except Exception as error:
            results[order] = error
        finally:
            meeting.leave(order)

    threads = [threading.Thread(target=thread, args=(order,), daemon=True) for order in range(len(rollouts))]
    for one in reversed(threads):
        one.start()
    for one in threads:
        one.join(timeout=20)
    assert len(results) == len(rollouts), "a rollout never came back"
    return [results[order] for order in range(len(rollouts))]


def test_requests_of_all_rollouts_form_one_batch_in_rollout_order():
    engine = ScriptedEngine(lambda prompt, _: prompt.upper())

    def two_calls(order, ask):
        time.sleep(0.002 * (5 - order))
        return ask(f"a{order}") + ask(f"b{order}")

    assert meet(engine, [two_calls] * 5) == [f"A{n}B{n}" for n in range(5)]
    assert engine.batches == [5, 5]
    asked = [decode(r.prompt_ids) for r in engine.requests]
    assert asked == ["a0", "a1", "a2", "a3", "a4", "b0", "b1", "b2", "b3", "b4"]


def test_those_that_have_ended_are_not_waited_for():
    engine = ScriptedEngine(lambda prompt, _: prompt)
    calls = [lambda _, ask, n=n: [ask(str(i)) for i in range(n)] for n in (0, 1, 3)]
    assert meet(engine, calls) == [[], ["0"], ["0", "1", "2"]]
    assert engine.batches == [2, 1, 1]


def test_one_that_dies_does_not_block_the_others():
    engine = ScriptedEngine(lambda prompt, _: prompt)

    def dies(_, ask):
        raise KeyError("gone")

    died, *others = meet(engine, [dies, lambda _, ask: ask("x"), lambda _, ask: ask("y")])
    assert isinstance(died, KeyError)
    assert others == ["x", "y"]
    assert engine.batches == [2]


def test_a_refusal_reaches_only_its_own_rollout():
    refusal = Refusal("context_overflow", "too long")
    engine = ScriptedEngine(lambda prompt, _: refusal if prompt == "1" else prompt)
    assert meet(engine, [lambda order, ask: ask(str(order))] * 3) == ["0", refusal, "2"]


def test_what_the_engine_raises_is_raised_for_everyone_and_the_next_batch_works():
    failures = [OSError("the server is gone")]

    def answer(prompt, _):
        if failures:
            raise failures.pop()
        return prompt

    def insists(_, ask):
        with pytest.raises(OSError, match="server is gone"):
            ask("first")
        return ask("second")

    engine = ScriptedEngine(answer)
    assert meet(engine, [insists] * 3) == ["second"] * 3
    assert engine.batches == [3, 3]


def test_an_engine_that_answers_too_few_is_an_error_and_no_deadlock():
    class Short(ScriptedEngine):
        def sample(self, requests):
            return super().sample(requests)[1:]

    results = meet(Short(lambda prompt, _: prompt), [lambda order, ask: ask(str(order))] * 3)
    assert [type(result) for result in results] == [ValueError] * 3


def test_several_threads_of_one_rollout_may_wait_at_once():
    engine = ScriptedEngine(lambda prompt, _: prompt)

    def fans_out(order, ask):
        answers = {}
        inner = [threading.Thread(target=lambda i=i: answers.update({i: ask(f"{order}.{i}")})) for i in range(4)]
        for thread in inner:
            thread.start()
        for thread in inner:
            thread.join()
        return [answers[i] for i in range(4)]

    assert meet(engine, [fans_out] * 3) == [[f"{n}.{i}" for i in range(4)] for n in range(3)]
    assert sum(engine.batches) == 12


def test_a_request_after_leaving_is_refused_and_leaving_frees_a_waiting_thread():
    meeting = Rendezvous(ScriptedEngine(lambda prompt, _: prompt))
    for order in (0, 1):
        meeting.enter(order, Stopwatch(60))
    answers = []
    thread = threading.Thread(target=lambda: answers.append(meeting.sample(0, request("never answered"))), daemon=True)
    thread.start()
    while not meeting._waiting:
        time.sleep(0.001)
    meeting.leave(0)
    thread.join(timeout=10)
    assert [answer.kind for answer in answers] == ["timeout"]
    assert meeting.sample(0, request("late")).kind == "timeout"
    meeting.leave(0)
    assert meeting.sample(1, request("still here")).text == "still here"


def test_a_rollout_that_is_out_of_time_is_refused():
    meeting = Rendezvous(ScriptedEngine(lambda prompt, _: prompt))
    meeting.enter(0, Stopwatch(0))
    assert meeting.sample(0, request("x")).kind == "timeout"


def test_a_stopwatch_counts_its_own_seconds_and_the_engines_but_not_the_waiting(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch = Stopwatch(10)
    now[0] += 4
    assert watch.left == 6
    watch.pause()
    now[0] += 1000
    assert watch.left == 6
    assert not watch.expired
    watch.resume(spent=2.5)
    assert watch.left == 3.5
    now[0] += 3.5
    assert watch.expired
    watch.pause()
    assert not watch.expired
