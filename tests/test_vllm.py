"""The engine on vLLM servers, against a scripted server over real HTTP; the real one is in `test_real_vllm.py`."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fake_vllm import EOS, LOGPROB, FakeVLLM
from tests.tiny import ROOT, make_model
from twofold import policy
from twofold.errors import ModelError, ServerError, SettingsError
from twofold.sampling import Completion, Refusal, SampleRequest, servers
from twofold.sampling.fleet import Fleet
from twofold.sampling.local import LocalEngine
from twofold.sampling.servers import OwnServer, Server
from twofold.sampling.vllm import VLLMEngine
from twofold.settings import Settings

FAKE = "tests.fake_vllm"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server():
    with FakeVLLM().serving() as running:
        yield running


@contextmanager
def engine_on(folder: Path, *servers: FakeVLLM, timeout: float = 20, **vllm: object):
    vllm = {"base_urls": [one.url for one in servers], **vllm} if servers else vllm
    sampling = {"engine": "vllm", "context": 256, "max_tokens": 8, "timeout": timeout}
    engine = VLLMEngine(folder, Settings.model_validate({"sampling": sampling, "vllm": vllm}))
    try:
        yield engine
    finally:
        engine.fleet.close()


def ask(*prompt: int, seed: int = 7, **changes: object) -> SampleRequest:
    asked = SampleRequest((3, *prompt), seed, 0.7, 1.0, 0, max_tokens=8, policy="base", family="m")
    return replace(asked, **changes)


def adapter(folder: Path, name: str) -> Path:
    """A folder that has a digest of its own."""
    made = folder / name
    made.mkdir()
    for file in (policy.TENSORS, policy.CONFIG):
        (made / file).write_text(name)
    return made


# What is asked, and what an answer must be


def test_samples_of_one_prompt_are_one_request(folder, server):
    with engine_on(folder, server) as engine:
        answers = engine.sample([ask(10, seed=5), ask(20), ask(10, seed=6), ask(10, seed=8, max_tokens=1)])
    # The scripted server's tokens: the prompt's last token, plus the sample's number, plus 2.
    assert [answer.token_ids for answer in answers] == [(12, EOS), (22, EOS), (13, EOS), (12,)]
    assert [answer.finish_reason for answer in answers] == ["stop", "stop", "stop", "length"]
    assert {answer.logprobs[0] for answer in answers} == {LOGPROB}
    bodies = {(body["prompt"][-1], body["max_tokens"]): body for body in server.asked}
    assert len(server.asked) == 3
    body = bodies[10, 8]
    assert (body["prompt"], body["n"], body["seed"]) == ([3, 10], 2, 5)
    wanted = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "logprobs": 0}
    assert body.items() >= wanted.items()
    assert body["return_token_ids"]
    assert set(body["stop_token_ids"]) == engine.eos


def test_greedy_samples_of_one_prompt_are_one_sample(folder, server):
    with engine_on(folder, server) as engine:
        answers = engine.sample([ask(10, seed=k, temperature=0.0) for k in range(3)])
    assert [body["n"] for body in server.asked] == [1]
    assert {(answer.token_ids, answer.logprobs) for answer in answers} == {((12, EOS), (0.0, 0.0))}


def test_answers_end_as_the_local_engines_do(folder, server, tmp_path):
    """Also where the model has no settings for generation of its own."""
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "generation_config.json").unlink()
    for model in (folder, bare):
        with engine_on(model, server) as engine:
            assert engine.eos == LocalEngine(model, Settings.model_validate({"model": {"device": "cpu"}})).eos == {EOS}


def test_what_exceeds_the_context_is_never_asked(folder, server):
    with engine_on(folder, server) as engine:
        refused, answered = engine.sample([ask(*range(2, 252)), ask(10)])
    assert (refused.kind, type(answered)) == ("context_overflow", Completion)
    assert len(server.asked) == 1


def test_a_request_that_is_refused_spoils_nothing(folder, server):
    server.say = [400]
    with engine_on(folder, server) as engine:
        [refused] = engine.sample([ask(10)])
        [answered] = engine.sample([ask(10)])
    assert refused == Refusal("lm_error", f"{server.url}: 400: scripted")
    assert isinstance(answered, Completion)
    assert engine.fleet.losses == 0


def test_an_answer_that_takes_too_long_is_a_timeout(folder, server):
    with engine_on(folder, server, timeout=1) as engine:
        engine.sample([ask(10)])
        server.seconds = 2
        [late] = engine.sample([ask(10)])
    assert late.kind == "timeout"


# Adapters


def test_adapters_come_under_their_digest_and_old_ones_go(folder, server, tmp_path):
    server.adapters = ["somebody-elses"]
    with engine_on(folder, server, adapters=2) as engine:
        names = [engine.load(adapter(tmp_path, name)) for name in "abc"]
        for name in (*names[:2], names[0], names[2], "base"):
            [answer] = engine.sample([ask(10, policy=name)])
            assert answer.policy == name
        a, b, c = (f"twofold-{name}" for name in names)
        assert [body["model"] for body in server.asked] == [a, b, a, c, "base"]
        # The longest unused one; each was loaded once.
        assert server.withdrawn == [b]
        assert server.seen["/v1/load_lora_adapter"] == 3
    assert server.adapters == ["somebody-elses"]


def test_an_adapter_that_somebody_else_loaded_stays(folder, server, tmp_path):
    made = adapter(tmp_path, "a")
    server.adapters = [f"twofold-{policy.digest(made)}"]
    with engine_on(folder, server, adapters=1) as engine:
        for name in (engine.load(made), engine.load(adapter(tmp_path, "b"))):
            engine.sample([ask(10, policy=name)])
    assert server.adapters == [f"twofold-{policy.digest(made)}"]
    assert server.seen["/v1/load_lora_adapter"] == 1


def test_an_answer_of_another_model_is_an_error(folder, server, tmp_path):
    server.answers_as = "base"
    with engine_on(folder, server) as engine:
        name = engine.load(adapter(tmp_path, "a"))
        with pytest.raises(ModelError, match=f"asked for twofold-{name}, and base answered"):
            engine.sample([ask(10, policy=name)])
        assert engine.sample([ask(10)])[0].policy == "base"


def test_an_error_does_not_repeat_what_was_answered(folder, server):
    with engine_on(folder, server) as engine:
        engine.sample([ask(10)])
        server.changes = {"token_ids": "geheim"}
        with pytest.raises(ModelError, match=r"choices\.0\.token_ids") as raised:
            engine.sample([ask(10)])
    assert "geheim" not in "".join(traceback.format_exception(raised.value))


def test_an_adapter_that_is_gone_is_loaded_again(folder, server, tmp_path):
    with engine_on(folder, server) as engine:
        name = engine.load(adapter(tmp_path, "a"))
        engine.sample([ask(10, policy=name)])
        server.adapters.clear()
        assert engine.sample([ask(10, policy=name)])[0].policy == name
    assert server.seen["/v1/load_lora_adapter"] == 2
    assert engine.fleet.losses == 1


def test_an_adapter_that_cannot_be_loaded_is_named(folder, server, tmp_path):
    with engine_on(folder, server) as engine:
        made = adapter(tmp_path, "a")
        name = engine.load(made)
        made.rename(tmp_path / "away")
        with pytest.raises(
            ModelError, match=rf"cannot load the adapter {made}: 400: no such adapter\. .*--enable-lora"
        ):
            engine.sample([ask(10, policy=name)])
        with pytest.raises(ModelError, match="never loaded"):
            engine.sample([ask(10, policy="0123456789ab")])


# Servers that cannot be used as they are


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"processed": False}, "--logprobs-mode processed_logprobs"),
        ({"context": 255}, "--max-model-len 256"),
        ({"context": None}, "does not answer as a vLLM server does"),
        ({"refuses": True}, "400: no completions"),
    ],
)
def test_a_server_that_was_started_otherwise_is_an_error(folder, server, wrong, message):
    vars(server).update(wrong)
    with engine_on(folder, server) as engine, pytest.raises(ModelError, match=message):
        engine.sample([ask(10)])


def test_the_key_comes_from_the_environment(folder, server, monkeypatch):
    server.key = "geheim"
    monkeypatch.setenv("RIGHT", "geheim")
    monkeypatch.delenv("MISSING", raising=False)
    with engine_on(folder, server, key="RIGHT") as engine:
        assert engine.sample([ask(10)])[0].token_ids
    with engine_on(folder, server) as engine, pytest.raises(SettingsError, match=r"vllm\.key"):
        engine.sample([ask(10)])
    with pytest.raises(SettingsError, match="no variable MISSING"), engine_on(folder, server, key="MISSING"):
        pass


# Several servers, and lost requests


def greet(fleet: Fleet) -> None:
    """Wait until all of its servers are up."""
    deadline = time.monotonic() + 60
    while any(one.state == "starting" for one in fleet.servers):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_family_has_a_server_until_its_queue_is_too_long(server):
    with FakeVLLM().serving() as other:
        fleet = Fleet([Server(one.url, 4, 20) for one in (server, other)], 256, (3, 4))
        with ExitStack() as stack:
            greet(fleet)
            first = stack.enter_context(fleet.taking("a", 4))
            assert stack.enter_context(fleet.taking("b", 4)) is not first
            # 4 + 8 against 4: no more than 8 longer. Then 13 against 4.
            assert stack.enter_context(fleet.taking("a", 8)) is first
            assert stack.enter_context(fleet.taking("a", 1)) is first
            assert stack.enter_context(fleet.taking("a", 1)) is not first
        assert [one.queue for one in fleet.servers] == [0, 0]
        with fleet.taking("a", 1) as again:
            assert again is first


def test_what_a_dead_server_lost_another_one_answers(folder, server):
    with FakeVLLM().serving() as other, engine_on(folder, server, other) as engine:
        greet(engine.fleet)
        engine.sample([ask(10)])
        # The family's server, which all of its requests go to.
        dying, living = (server, other) if server.asked else (other, server)
        dying.dead = True
        answers = engine.sample([ask(k) for k in range(2, 8)])
        assert [answer.token_ids[0] for answer in answers] == [k + 2 for k in range(2, 8)]
        assert len(living.asked) == 6
        assert 1 <= engine.fleet.losses == len(dying.asked) - 1


def test_a_server_that_is_away_is_left_alone_until_it_answers(folder, server):
    away = FakeVLLM()
    away.server_close()
    with engine_on(folder, server, away) as engine:
        assert engine.sample([ask(10)])[0].token_ids
        with FakeVLLM(away.server_port).serving() as back:
            deadline = time.monotonic() + 20
            while not back.asked and time.monotonic() < deadline:
                engine.sample([ask(k, family=str(k)) for k in range(2, 8)])
            assert back.asked


def test_no_server_at_all_is_an_error_that_names_them(folder):
    one, two = FakeVLLM(), FakeVLLM()
    for away in (one, two):
        away.server_close()
    with engine_on(folder, one, two) as engine:
        with pytest.raises(ServerError, match=rf"No vLLM server answers .*{one.url}.*{two.url}.*vllm\.base_urls"):
            engine.sample([ask(10)])
        with FakeVLLM(two.server_port).serving():
            assert engine.sample([ask(10)])[0].token_ids


def test_a_busy_server_is_asked_again_but_not_for_ever(folder, server):
    with engine_on(folder, server, retries=2) as engine:
        server.say = [503, 429]
        assert engine.sample([ask(10)])[0].token_ids
        server.say = [503, 503, 503]
        with pytest.raises(ServerError, match=r"lost 3 times \(vllm\.retries\); last: .*503: scripted"):
            engine.sample([ask(10)])


# Servers of our own


def stand_in(folder: Path, *options: str) -> str:
    """A Python that runs the scripted server whatever module it is asked for."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nshift 2\ncd {ROOT}\nexec {sys.executable} -m {FAKE} "$@" {" ".join(options)}\n')
    path.chmod(0o755)
    return str(path)


def server_of(leash: subprocess.Popen) -> int:
    """The process id of the server that hangs on this leash."""
    return int(Path(f"/proc/{leash.pid}/task/{leash.pid}/children").read_text().split()[0])


def gone(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def wait_for(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks into /proc")


@linux
def test_a_killed_server_is_started_again_and_nothing_is_lost(folder, tmp_path, caplog):
    with engine_on(folder, start=1, python=stand_in(tmp_path, "--seconds", "1")) as engine:
        name = engine.load(adapter(tmp_path, "a"))
        assert engine.sample([ask(10, policy=name)])[0].policy == name
        [own] = engine.fleet.servers
        first, killed = own.url, server_of(own.process)
        killer = threading.Thread(target=lambda: (wait_for(lambda: own.queue == 6), os.kill(killed, signal.SIGKILL)))
        killer.start()
        answers = engine.sample([ask(k, policy=name) for k in range(2, 8)])
        assert [answer.token_ids[0] for answer in answers] == [k + 2 for k in range(2, 8)]
        assert {answer.policy for answer in answers} == {name}
        assert 1 <= engine.fleet.losses <= 6
        assert own.url != first
        assert "--no-enable-chunked-prefill" in own.command
        # Its own words may tell why it was lost.
        assert f"{first} is started again; it said last:\nNobody knows" in caplog.text
        second = server_of(own.process)
    wait_for(lambda: gone(killed) and gone(second))


def test_a_server_that_does_not_start_says_why(folder, tmp_path):
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\necho no room for a model\nexit 3\n")
    path.chmod(0o755)
    with engine_on(folder, start=1, python=str(path)) as engine, pytest.raises(ModelError, match="no room for a model"):
        engine.sample([ask(10)])
    with (
        pytest.raises(ModelError, match=r"no nowhere\. Make it with: make vllm"),
        engine_on(folder, start=1, python="nowhere"),
    ):
        pass


@linux
def test_a_server_ends_with_whoever_started_it(tmp_path):
    script = f"""
import sys, time
from twofold.sampling.servers import OwnServer
own = OwnServer([sys.executable, "-m", {FAKE!r}], {{}}, 4, 20)
own.open()
print(own.process.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        leash = int(holder.stdout.readline())
        served = int(Path(f"/proc/{leash}/task/{leash}/children").read_text().split()[0])
        assert not gone(served)
        holder.kill()
    wait_for(lambda: gone(served) and gone(leash))


def test_a_server_that_does_not_get_ready_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_START", 3.0)
    own = OwnServer([sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(600)"], {}, 4, 20)
    with pytest.raises(ModelError, match=r"was not ready after 3 s; it said last:\nloading"):
        own.open()
    assert own.process.poll() is not None
