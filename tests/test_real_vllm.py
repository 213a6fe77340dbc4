"""The default task on a real vLLM server, which is killed on the way. Needs `make vllm`."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.tiny import ROOT
from twofold.groups import make_groups
from twofold.policy import adapters_in
from twofold.programs import load_pipeline
from twofold.records import BASE_POLICY, policy_of
from twofold.rollouts import plan, run
from twofold.sampling.vllm import VLLMEngine
from twofold.settings import Settings, load
from twofold.trainer import Trainer

PYTHON = ROOT / ".venv-vllm/bin/python"

ROUNDS, EXAMPLES, EACH = 3, 8, 4


def settings() -> Settings:
    values = load(ROOT / "params.yaml").model_dump()
    values["model"] |= {"device": "cpu", "dtype": "float32"}
    values["sampling"] |= {"engine": "vllm", "timeout": 1800}
    values["vllm"] = {"start": 1, "python": str(PYTHON), "adapters": 2, "arguments": ["--enforce-eager"]}
    values["weights"] |= {"correction": {"mode": "truncate"}, "examples_per_round": EXAMPLES}
    return Settings.model_validate(values)


def kill_when_busy(engine: VLLMEngine, told: dict[str, float]) -> None:
    """Kill the server while it works on a batch."""
    [own] = engine.fleet.servers
    while own.queue == 0:
        time.sleep(0.01)
    time.sleep(1)
    served = Path(f"/proc/{own.process.pid}/task/{own.process.pid}/children").read_text().split()[0]
    told["queue"] = own.queue
    os.kill(int(served), signal.SIGKILL)
    begin = time.monotonic()
    while own.state != "starting":
        time.sleep(0.01)
    while own.state == "starting":
        time.sleep(0.01)
    told["seconds"] = time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not PYTHON.is_file(), reason="there is no vLLM in .venv-vllm: make vllm")
def test_the_default_task_is_trained_on_vllm(smollm2, tmp_path):
    """Every round samples from the adapter before it, close to the trainer's own numbers, also after a kill."""
    wanted, pipeline = settings(), load_pipeline("helpdesk")
    examples = pipeline.load(wanted)[0]
    begin = time.monotonic()
    engine, trainer = VLLMEngine(smollm2, wanted), Trainer(smollm2, wanted)
    policies, told = {}, {}
    for number in range(ROUNDS):
        chosen = examples[number * EXAMPLES : (number + 1) * EXAMPLES]
        jobs = plan(chosen, EACH, wanted.seed, "round", number)
        if number == ROUNDS - 1:
            killer = threading.Thread(target=kill_when_busy, args=(engine, told), daemon=True)
            killer.start()
        rollouts = run(pipeline.program(), jobs, pipeline.metric, engine, wanted, wanted.weights.draw, policies)
        sampled = time.monotonic()
        assert {rollout.status for rollout in rollouts} <= {"ok", "parse_error"}
        answered = {call.policy for rollout in rollouts for call in rollout.calls}
        assert answered == {policy_of("route", policies)}
        groups = make_groups(rollouts, wanted.weights.groups, wanted.rewards, seed=number)
        metrics = trainer.update(rollouts, groups, number)
        assert metrics["updated"] > 0
        assert metrics["sampler_gap"] < 0.1
        assert 0.9 < metrics["correction/weight"] < 1.1
        figures = {k: v for k, v in metrics.items() if k.startswith(("sampler", "correction", "tokens", "rows"))}
        calls = sum(len(rollout.calls) for rollout in rollouts)
        print(f"round {number}: {answered}, {len(rollouts)} rollouts, {calls} calls, {figures}")
        print(f"  sampled by {sampled - begin:.0f} s, trained by {time.monotonic() - begin:.0f} s", flush=True)
        policies = trainer.save(tmp_path / str(number))
        for folder in adapters_in(tmp_path / str(number)).values():
            engine.load(folder)
    killer.join()
    lost = engine.fleet.losses
    print(f"killed with {told['queue']:.0f} samples on their way: {lost} requests lost, up in {told['seconds']:.0f} s")
    assert lost > 0
    [own] = engine.fleet.servers
    with own.holding(BASE_POLICY, {}):
        assert len(own._names()) <= 1 + wanted.vllm.adapters
    engine.fleet.close()
