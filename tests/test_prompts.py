"""Prompt optimization with an engine whose answers are better the better the prompt is."""

import json
import re
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import dspy
import pytest

from tests.beside import running
from twofold import programs
from twofold.errors import SettingsError
from twofold.prompts import PROPOSER, Optimized, optimize
from twofold.records import read_rollouts
from twofold.sampling import Refusal
from twofold.sampling.scripted import ScriptedEngine, decode
from twofold.settings import Settings


class Echo(dspy.Signature):
    """Say it again."""

    q: str = dspy.InputField()
    same: str = dspy.OutputField()


class Double(dspy.Signature):
    """Double it."""

    same: str = dspy.InputField()
    a: int = dspy.OutputField()


class Two(dspy.Module):
    def __init__(self):
        super().__init__()
        self.echo = dspy.Predict(Echo)
        self.double = dspy.Predict(Double)

    def forward(self, q):
        return self.double(same=self.echo(q=q).same)


EXAMPLES = [dspy.Example(id=f"e{k}", q=f"{k}", a=2 * k).with_inputs("q") for k in range(20)]


def metric(example, prediction, trace=None):
    return float(prediction.a == example.a)


def answer(prompt, request):
    """Knows even numbers; odd ones only with a demo of `double` in the prompt."""
    if request.family == PROPOSER:
        return f"Proposal {request.seed % 1000}."
    asked = re.findall(r"^(?:Q|Same): (.+)$", prompt, flags=re.MULTILINE)[-1]
    if request.family == "echo":
        return asked
    shown = prompt.count("[assistant]") > 1
    return str(2 * int(asked)) if shown or int(asked) % 2 == 0 else "no idea"


def settings_for(**prompts) -> Settings:
    small = {
        "trials": 4,
        "demo_sets": 5,
        "instructions": 2,
        "bootstrapped_demos": 2,
        "labeled_demos": 0,
        "minibatch": 6,
        "full_every": 2,
        "program_aware": False,
        "data_aware": False,
    }
    sampling = {"context": 20_000, "max_tokens": 200}
    return Settings.model_validate({"seed": 3, "sampling": sampling, "prompts": small | prompts})


def search(work: Path, engine: ScriptedEngine | None = None, program=None, examples=EXAMPLES, **prompts) -> Optimized:
    engine = engine or ScriptedEngine(answer)
    return optimize(program or Two(), examples, metric, engine, settings_for(**prompts), {}, work)


def test_mipro_finds_demos_that_help(tmp_path):
    found = search(tmp_path)
    assert 1 <= len(found.program.double.demos) <= 2
    full = [trial for trial in found.trials if trial.full]
    assert full[0].demos == {"echo": 0, "double": 0}
    assert full[0].score < 1
    assert max(trial.score for trial in full) == 1
    assert all(trial.n == (16 if trial.full else 6) for trial in found.trials)
    assert found.program.double.lm is None
    for trial in found.trials:
        rewards = [r.reward for r in found.rollouts if r.rollout_id.startswith(f"prompts/{trial.program}/")]
        assert len(rewards) >= trial.n
    whole = [trial for trial in found.trials if trial.full and trial.demos["double"]]
    assert whole


def test_equal_searches_are_equal(tmp_path):
    one, other = (search(tmp_path / name) for name in ("one", "other"))
    assert one.trials == other.trials
    assert programs.state(one.program) == programs.state(other.program)


def test_seed_zero_is_a_seed(tmp_path):
    states = []
    for seed in (0, 1):
        settings = settings_for().model_copy(update={"seed": seed})
        found = optimize(Two(), EXAMPLES, metric, ScriptedEngine(answer), settings, {}, tmp_path / str(seed))
        states.append([trial.program for trial in found.trials])
    assert states[0] != states[1]


def test_a_killed_search_goes_on_without_running_anything_twice(tmp_path):
    whole = search(tmp_path / "whole")
    engine = ScriptedEngine(answer)
    left = 40

    def dying(prompt, request):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return answer(prompt, request)

    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "killed", ScriptedEngine(dying))
    before = [rollout.rollout_id for rollout in kept(tmp_path / "killed")]
    assert before
    resumed = search(tmp_path / "killed", engine)
    after = Counter(rollout.rollout_id for rollout in kept(tmp_path / "killed"))
    assert set(after.values()) == {1}
    assert len(after) - len(before) == resumed.spent["rollouts"]
    assert resumed.trials == whole.trials
    again = ScriptedEngine(answer)
    assert search(tmp_path / "killed", again).trials == whole.trials
    assert again.requests == []


def kept(folder: Path):
    return [one for part in sorted(folder.glob("rollouts/*/*")) for one in read_rollouts(part)]


def test_bootstrapping_samples_nothing_of_its_own(tmp_path):
    """Every call is one of a recorded rollout, but for proposals."""
    engine = ScriptedEngine(answer)
    search(tmp_path, engine)
    calls = Counter((r.family, r.prompt_ids) for r in engine.requests if r.family != PROPOSER)
    recorded = Counter((c.module, c.prompt_ids) for r in kept(tmp_path) for c in r.calls)
    assert calls == recorded


def test_no_demo_is_an_example_that_scores(tmp_path):
    engine = ScriptedEngine(answer)
    found = search(tmp_path, engine, demo_sets=8, trials=8)
    shown = {demo.same for demo in found.program.double.demos}
    validation = Counter(trial.n for trial in found.trials if trial.full)
    assert set(validation) == {16}
    for request in engine.requests:
        if request.family == "double":
            *demos, asked = [line for line in decode(request.prompt_ids).split("\n") if line.startswith("Same: ")]
            assert asked not in demos
    assert shown


def test_failures_cost_a_score_and_not_the_search(tmp_path):
    def failing(prompt, request):
        if request.family == PROPOSER:
            return Refusal("context_overflow", "too long")
        number = request.seed % 4
        if request.family == "double" and number == 0:
            return Refusal("timeout", "late")
        if request.family == "double" and number == 1:
            return Refusal("lm_error", "broken")
        return answer(prompt, request)

    class Fragile(Two):
        def forward(self, q):
            if q == "7":
                raise ZeroDivisionError
            return super().forward(q)

    found = search(tmp_path, ScriptedEngine(failing), program=Fragile())
    assert found.trials
    assert found.lost == {"proposal: ContextWindowExceededError": 4}
    statuses = {rollout.status for rollout in kept(tmp_path)}
    assert statuses >= {"ok", "parse_error", "timeout", "lm_error", "program_error"}


@pytest.mark.parametrize(("bootstrapped", "labeled", "sets"), [(0, 0, 5), (0, 2, 5), (2, 0, 1), (2, 2, 5), (1, 0, 12)])
def test_any_number_of_demos_works(tmp_path, bootstrapped, labeled, sets):
    found = search(tmp_path, bootstrapped_demos=bootstrapped, labeled_demos=labeled, demo_sets=sets)
    most = max(bootstrapped, labeled)
    assert all(count <= most for trial in found.trials for count in trial.demos.values())


def test_the_program_as_it_came_wins_a_tie(tmp_path):
    found = search(tmp_path, ScriptedEngine(lambda prompt, request: "4"))
    assert programs.state(found.program) == programs.state(Two())


def test_auto_takes_dspys_numbers(tmp_path):
    found = search(tmp_path, auto="light")
    assert sum(trial.full for trial in found.trials) > 5
    assert max(trial.score for trial in found.trials) == 1


def test_demos_of_the_program_serve_bootstrapping(tmp_path):
    """A program that is dead without its demo still gets demos out of its own rollouts."""
    program = Two()
    program.double.demos = [dspy.Example(same="100", a=200)]

    def needy(prompt, request):
        return answer(prompt, request) if request.family != "double" or "[assistant]\n" in prompt[:-12] else "?"

    found = search(tmp_path, ScriptedEngine(needy), program=program, labeled_demos=2)
    assert max(trial.score for trial in found.trials if trial.demos["double"] == 2) == 1


def test_what_a_program_came_with_may_be_combined_with_what_was_found(tmp_path):
    """`double` needs the demo it came with; `echo` says odd numbers right only with a demo of its own."""
    program = Two()
    program.double.demos = [dspy.Example(same="100", a=200)]

    def needy(prompt, request):
        if request.family == "double":
            return answer(prompt, request) if "Same: 100\n" in prompt else "?"
        asked = answer(prompt, request)
        return asked if prompt.count("[assistant]") > 1 or request.family == PROPOSER or int(asked) % 2 == 0 else "?"

    found = search(tmp_path, ScriptedEngine(needy), program=program, trials=12)
    assert max(trial.score for trial in found.trials if trial.full) == 1
    assert [demo.same for demo in found.program.double.demos] == ["100"]
    assert len(found.program.echo.demos) > 0


def test_labeled_demos(tmp_path):
    class One(dspy.Module):
        def __init__(self):
            super().__init__()
            self.double = dspy.Predict("q -> a: int")

        def forward(self, q):
            return self.double(q=q)

    found = search(tmp_path, program=One(), optimizer="labeled", labeled_demos=3)
    assert [trial.demos["double"] for trial in found.trials] == [0, 3]
    assert found.trials[1].score == 1
    assert len(found.program.double.demos) == 3


def test_gepa_rewrites_instructions(tmp_path):
    def wishing(prompt, request):
        if request.family == PROPOSER:
            return "```\nDouble it, odd numbers too.\n```"
        if request.family == "double" and "odd numbers too" in prompt:
            return str(2 * int(prompt.rsplit("Same: ", 1)[1].split("\n")[0]))
        return answer(prompt, request)

    engine = ScriptedEngine(wishing)
    found = search(tmp_path, engine, optimizer="gepa", metric_calls=120)
    assert "odd numbers too" in found.program.double.signature.instructions
    assert max(trial.score for trial in found.trials if trial.full) == 1
    calls = Counter((r.family, r.prompt_ids) for r in engine.requests if r.family != PROPOSER)
    assert calls == Counter((c.module, c.prompt_ids) for r in kept(tmp_path) for c in r.calls)


def test_trained_weights_answer(tmp_path):
    engine = ScriptedEngine(answer)
    optimize(Two(), EXAMPLES, metric, engine, settings_for(), {"echo": "aaa", "double": "bbb"}, tmp_path)
    asked = {(request.family, request.policy) for request in engine.requests}
    assert asked == {("echo", "aaa"), ("double", "bbb"), (PROPOSER, "base")}


def test_too_few_examples_are_refused(tmp_path):
    with pytest.raises(SettingsError, match="validation_share"):
        search(tmp_path, examples=EXAMPLES[:1])


def test_a_missing_key_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(SettingsError, match="NO_SUCH_KEY"):
        search(tmp_path, proposer={"model": "m", "base_url": "http://127.0.0.1:9", "key": "NO_SUCH_KEY"})


def test_dspys_lines_stay_out_of_the_output(tmp_path, capfd):
    search(tmp_path)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
    assert json.loads((tmp_path / "proposals.json").read_text())


def test_an_endpoint_may_propose_and_is_paid(tmp_path, monkeypatch):
    """A real HTTP server that speaks OpenAI's chat completions."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(
                (
                    self.path,
                    self.headers["Authorization"],
                    json.loads(self.rfile.read(int(self.headers["Content-Length"]))),
                )
            )
            choice = {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "Double it well."},
            }
            usage = {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100}
            answer = {
                "id": "1",
                "object": "chat.completion",
                "created": 1,
                "model": "m",
                "choices": [choice],
                "usage": usage,
            }
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    monkeypatch.setenv("TEST_KEY", "geheim")
    engine = ScriptedEngine(answer)
    with running(HTTPServer(("127.0.0.1", 0), Handler)) as server:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        endpoint = {"model": "m", "base_url": url, "key": "TEST_KEY", "price_in": 2.0, "price_out": 10.0}
        found = search(tmp_path, engine, proposer=endpoint)
    # Two instructions for each of two modules; a call costs 1000 * 2 + 100 * 10 millionths.
    assert len(asked) == 4
    assert {(path, key) for path, key, _ in asked} == {("/v1/chat/completions", "Bearer geheim")}
    assert found.spent["money"] == pytest.approx(4 * 0.003)
    assert not [request for request in engine.requests if request.family == PROPOSER]
    assert {trial.instructions["double"] for trial in found.trials} <= {"Double it.", "Double it well."}
