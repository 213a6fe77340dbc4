"""The default task with the embedded model: what is sampled is what is trained."""

from pathlib import Path

import pytest
import torch

from twofold.groups import make_groups
from twofold.policy import adapters_in, dtype_of
from twofold.programs import load_pipeline
from twofold.records import policy_of
from twofold.rollouts import plan, run
from twofold.sampling.local import LocalEngine
from twofold.settings import Model, Settings, load
from twofold.trainer import Trainer

FAST_BFLOAT16 = pytest.mark.skipif(
    dtype_of(Model(device="cpu")) != torch.bfloat16, reason="this processor would take ten minutes in bfloat16"
)


def settings_for(dtype: str) -> Settings:
    values = load(Path("params.yaml")).model_dump()
    values["model"] |= {"device": "cpu", "dtype": dtype}
    values["rewards"] |= {"format_failure": -0.1}
    return Settings.model_validate(values)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "gap"), [("float32", 1e-3), pytest.param("bfloat16", 0.1, marks=FAST_BFLOAT16)])
def test_sampler_and_trainer_agree_before_and_after_an_update(smollm2, tmp_path, dtype, gap):
    """Mean absolute difference of log-probabilities; in bfloat16 each side rounds in its own order."""
    settings = settings_for(dtype)
    pipeline = load_pipeline("helpdesk")
    engine, trainer = LocalEngine(smollm2, settings), Trainer(smollm2, settings)
    examples = pipeline.load(settings)[0][:4]
    policies = {}
    for number in range(2):
        jobs = plan(examples, 4, settings.seed, "round", number)
        rollouts = run(
            pipeline.program(), jobs, pipeline.metric, engine, settings, settings.weights.draw, policies=policies
        )
        assert {call.policy for rollout in rollouts for call in rollout.calls} == {policy_of("route", policies)}
        groups = make_groups(rollouts, settings.weights.groups, settings.rewards, seed=number)
        metrics = trainer.update(rollouts, groups, number)
        assert metrics["updated"] == 1
        assert metrics["sampler_gap"] <= gap
        policies = trainer.save(tmp_path / str(number))
        for folder in adapters_in(tmp_path / str(number)).values():
            engine.load(folder)
