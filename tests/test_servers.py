"""Endpoints that a program and its metric ask, and whole programs on a server: real requests to a server here."""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import dspy
import pytest

from tests.beside import running
from twofold import rollouts
from twofold.endpoints import Spent
from twofold.errors import SettingsError
from twofold.evaluation import score
from twofold.records import money_of, read_json, read_rollouts, usage_of, write_rollouts
from twofold.rollouts import plan
from twofold.sampling.scripted import ScriptedEngine
from twofold.servers import connect, hosted
from twofold.settings import Draw, NamedEndpoint, Rewards, Sampling, Settings

OPTIONS = Settings(sampling=Sampling(context=4096, max_tokens=256), rewards=Rewards(lm_error=-0.6, program_error=-0.9))
EXAMPLES = [dspy.Example(id=name, q=name).with_inputs("q") for name in ("a", "b")]

Reply = Callable[[dict], str | int]
"""From a request's body to the answer's text, or to the status of a failure."""


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(asked)
            self.server.keys.append(self.headers["Authorization"])
            answer = self.server.reply(asked)
        failed = isinstance(answer, int)
        message = {"role": "assistant", "content": answer}
        tokens = {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100}
        body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "usage": tokens}
        body["choices"] = [{"index": 0, "finish_reason": "stop", "message": message}]
        body |= self.server.changes
        data = json.dumps({"error": {"message": "no"}} if failed else body).encode()
        self.send_response(answer if failed else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("retry-after-ms", "5")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class Served(ThreadingHTTPServer):
    def __init__(self, reply: Reply):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply, self.lock = reply, threading.Lock()
        self.asked: list[dict] = []
        self.keys: list[str] = []
        self.changes: dict = {}

    def endpoint(self, **more) -> NamedEndpoint:
        url = f"http://127.0.0.1:{self.server_port}/v1"
        given = {"model": "m", "base_url": url, "key": None, "retries": 1, "price_in": 2, "price_out": 10}
        return NamedEndpoint(**given | more)


def serving(reply: Reply) -> AbstractContextManager[Served]:
    return running(Served(reply))


def after(*failures: str | int) -> Reply:
    """Fails like this, one after the other, then answers."""
    left = list(failures)
    return lambda asked: left.pop(0) if left else "far"


class Delegate(dspy.Module):
    """A module, then the endpoint."""

    def __init__(self):
        super().__init__()
        self.ask = dspy.Predict("q -> a")

    def forward(self, q):
        mine = self.ask(q=q).a
        [far] = dspy.settings.endpoints["far"](mine)
        return dspy.Prediction(a=mine, far=far)


def run(server: Served, work: Path, metric=None, per_example=1, **endpoint) -> list[rollouts.Rollout]:
    endpoints = connect({"far": server.endpoint(**endpoint)}, ("far",), work)
    jobs = plan(EXAMPLES, per_example, 0, "test")
    engine = ScriptedEngine(lambda prompt, request: f"draft {prompt.split('Q: ')[-1][0]}")
    metric = metric or (lambda example, prediction, trace=None: 1.0)
    return rollouts.run(Delegate(), jobs, metric, engine, OPTIONS, Draw(), endpoints=endpoints)


def test_an_endpoints_calls_are_counted_and_are_not_the_students(tmp_path):
    with serving(lambda asked: "far") as server:
        found = run(server, tmp_path)
    assert [(one.status, one.output) for one in found] == [
        ("ok", {"a": "draft a", "far": "far"}),
        ("ok", {"a": "draft b", "far": "far"}),
    ]
    assert [[call.module for call in one.calls] for one in found] == [["ask"], ["ask"]]
    # 1000 tokens at 2 and 100 at 10 for a million.
    used = {"far/calls": 1.0, "far/money": 0.003, "far/tokens_in": 1000.0, "far/tokens_out": 100.0}
    assert [one.usage for one in found] == [pytest.approx(used), pytest.approx(used)]
    assert usage_of(found)["endpoints/far/calls"] == 2
    assert money_of(found) == pytest.approx(0.006)
    assert {one["messages"][0]["content"] for one in server.asked} == {"draft a", "draft b"}
    write_rollouts(found, tmp_path)
    assert read_rollouts(tmp_path) == found


def test_the_key_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("FAR_KEY", "geheim")
    with serving(lambda asked: "far") as server:
        run(server, tmp_path, key="FAR_KEY")
        monkeypatch.delenv("FAR_KEY")
        with pytest.raises(SettingsError, match=r"endpoints\.far: .*FAR_KEY"):
            run(server, tmp_path, key="FAR_KEY")
    assert set(server.keys) == {"Bearer geheim"}
    assert b"geheim" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*.json"))


@pytest.mark.parametrize("failure", [429, 500, 503, ""])
def test_what_may_go_away_is_tried_again(tmp_path, failure):
    with serving(after(failure)) as server:
        found = run(server, tmp_path)
    assert [one.status for one in found] == ["ok", "ok"]
    assert len(server.asked) == 3


@pytest.mark.parametrize("failure", [429, 500, 400, "", " "])
def test_a_failure_that_stays_is_an_lm_error_of_the_rollout(tmp_path, failure):
    with serving(lambda asked: failure if "draft a" in str(asked) else "far") as server:
        bad, good = run(server, tmp_path)
    assert (bad.status, bad.reward, [call.module for call in bad.calls]) == ("lm_error", -0.6, ["ask"])
    assert "endpoints.far" in bad.error
    assert (bad.usage, good.status) == ({}, "ok")


def test_a_server_that_is_too_slow_or_not_there_is_an_lm_error(tmp_path):
    release = threading.Event()
    with serving(lambda asked: "far" if release.wait(10) else "") as server:
        found = run(server, tmp_path / "slow", timeout=0.1, retries=0)
        release.set()
    gone = run(server, tmp_path / "gone", retries=0)
    assert [one.status for one in [*found, *gone]] == ["lm_error"] * 4


@pytest.mark.parametrize("refusal", [401, 403, 404])
def test_a_refusal_of_all_requests_ends_the_run(tmp_path, refusal):
    with serving(lambda asked: refusal) as server, pytest.raises(SettingsError, match=r"endpoints\.far.*base_url"):
        run(server, tmp_path)


def test_a_budget_ends_the_run_and_counts_what_was_spent_before(tmp_path):
    with serving(lambda asked: "far") as server:
        with pytest.raises(SettingsError, match=r"endpoints\.far\.budget.*1 calls"):
            run(server, tmp_path, concurrency=1, budget={"calls": 1})
        assert len(server.asked) == 1
        with pytest.raises(SettingsError, match="budget"):
            run(server, tmp_path, concurrency=1, budget={"calls": 1})
        found = run(server, tmp_path, budget={"calls": 2})
    assert [one.status for one in found] == ["ok", "ok"]
    # The first answer was kept.
    assert len(server.asked) == 2
    assert Spent(**read_json(tmp_path / "far" / "spent.json")) == Spent(2, 2000, 200, pytest.approx(0.006))


def test_a_server_that_does_not_count_tokens_is_charged_for_bytes(tmp_path):
    with serving(lambda asked: "far") as server:
        server.changes = {"usage": None}
        found = run(server, tmp_path)
    # "draft a" has 7 bytes, "far" 3.
    assert [(one.usage["far/tokens_in"], one.usage["far/tokens_out"]) for one in found] == [(7, 3), (7, 3)]
    assert Spent(**read_json(tmp_path / "far" / "spent.json")).tokens_in == 14


def test_an_answer_without_a_choice_is_an_lm_error(tmp_path):
    with serving(lambda asked: "far") as server:
        server.changes = {"choices": []}
        found = run(server, tmp_path)
    assert [one.status for one in found] == ["lm_error", "lm_error"]
    assert "endpoints.far" in found[0].error


def test_equal_requests_are_asked_once_and_count_for_each_rollout(tmp_path):
    counts: Counter[str] = Counter()

    def reply(asked):
        counts[str(asked)] += 1
        return f"answer {len(counts)}"

    with serving(reply) as server:
        found = run(server, tmp_path, per_example=4)
        again = run(server, tmp_path, per_example=4)
    assert len(server.asked) == 2
    assert found == again
    assert usage_of(found)["endpoints/far/calls"] == 8


def test_a_metric_may_ask_too_and_its_judges_failure_is_no_fault_of_the_program(tmp_path):
    def judged(example, prediction, trace=None):
        with dspy.context(lm=dspy.settings.endpoints["far"], adapter=dspy.ChatAdapter(use_json_adapter_fallback=False)):
            return float(dspy.Predict("answer -> good: bool")(answer=prediction.a).good)

    def reply(asked):
        text = str(asked["messages"])
        if "good" not in text:
            return "far"
        return "[[ ## good ## ]]\nTrue\n\n[[ ## completed ## ]]" if "draft a" in text else "perhaps"

    with serving(reply) as server:
        good, unclear = run(server, tmp_path, metric=judged)
    assert (good.status, good.reward, good.usage["far/calls"]) == ("ok", 1.0, 2)
    assert (unclear.status, unclear.reward, unclear.usage["far/calls"]) == ("lm_error", -0.6, 2)
    assert [call.parsed for call in unclear.calls] == [True]


def test_a_needed_endpoint_must_be_in_the_settings(tmp_path):
    with pytest.raises(SettingsError, match="judge"):
        connect({}, ("judge",), tmp_path)


def test_a_whole_program_runs_on_a_server(tmp_path):
    with serving(lambda asked: "yes") as server:
        engine = hosted("big", server.endpoint(temperature=0.3), tmp_path)
        jobs = plan(EXAMPLES, 1, 0, "test")
        found = rollouts.run(dspy.Predict("q -> a"), jobs, lambda e, p: float(p.a == "yes"), engine, OPTIONS, Draw())
    [call] = found[0].calls
    assert (call.module, call.text, call.prompt_ids, call.completion_ids) == ("self", "yes", (), ())
    assert (call.policy, call.temperature) == ("hosted/big", 0.3)
    assert usage_of(found)["endpoints/hosted/big/tokens_in"] == 2000
    assert server.asked[0]["temperature"] == 0.3
    assert (score(found, 100, 0).score, score(found, 100, 0).n) == (1.0, 2)


def test_calls_that_a_hosted_program_awaits_keep_their_order(tmp_path):
    class Awaiting(dspy.Module):
        def __init__(self):
            super().__init__()
            self.z, self.a = dspy.Predict("q -> a"), dspy.Predict("q -> a")

        async def both(self, q):
            return await self.a.acall(q=(await self.z.acall(q=q)).a)

        def forward(self, q):
            return asyncio.run(self.both(q))

    with serving(lambda asked: "yes") as server:
        engine = hosted("big", server.endpoint(), tmp_path)
        found = rollouts.run(Awaiting(), plan(EXAMPLES, 1, 0, "test"), lambda e, p: 1.0, engine, OPTIONS, Draw())
    assert [[call.module for call in one.calls] for one in found] == [["z", "a"], ["z", "a"]]


def test_calls_of_a_hosted_program_side_by_side_have_one_order(tmp_path):
    class Both(dspy.Module):
        def __init__(self):
            super().__init__()
            self.ask = dspy.Predict("q -> a")

        def forward(self, q):
            pairs = [(self.ask, {"q": f"{q} {k}"}) for k in range(4)]
            return dspy.Parallel(num_threads=4, disable_progress_bar=True)(pairs)[0]

    def texts(slow):
        def reply(asked):
            [number] = [k for k in range(4) if f"a {k}" in str(asked["messages"])]
            time.sleep(0.2 * (number in slow))
            return f"said {number}"

        with serving(reply) as server:
            # Not the server's lock: answers must overtake each other.
            server.lock = nullcontext()
            engine = hosted("big", server.endpoint(), tmp_path)
            [one] = rollouts.run(Both(), plan(EXAMPLES[:1], 1, 0, "test"), lambda e, p: 1.0, engine, OPTIONS, Draw())
        return [call.text for call in one.calls]

    assert texts({0, 1}) == texts({2, 3})
