"""The update, against independent formulas and against stock TRL."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import dspy
import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tests.tiny import make_model
from twofold import policy
from twofold.adapters import make_adapter
from twofold.correction import warning
from twofold.errors import ModelError, RecordError
from twofold.groups import make_groups
from twofold.records import SHARED, Call, Group, Rollout, policy_of
from twofold.rollouts import plan, run
from twofold.sampling import SampleRequest
from twofold.sampling.local import LocalEngine
from twofold.settings import Rewards, Sampling, Settings
from twofold.trainer import Row, Trainer, micro_batches, normalizer, parts_of, rows_of, token_weight

TEXTS = ("blue", "the parcel is late", "red or green")
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def settings_for(**weights: object) -> Settings:
    groups = {"size": 4, **weights.pop("groups", {})}
    lora = {"r": 4, "alpha": 8, **weights.pop("lora", {})}
    optimizer = {"learning_rate": 1e-2, **weights.pop("optimizer", {})}
    return Settings.model_validate(
        {
            "model": {"device": "cpu", "dtype": "float32"},
            "sampling": {"context": 256, "max_tokens": 8},
            "weights": {"rounds": 10, "groups": groups, "lora": lora, "optimizer": optimizer, **weights},
        }
    )


def sampled(
    folder: Path,
    settings: Settings,
    modules: tuple[str, ...] = ("m",),
    per_example: int = 4,
    adapter: Path | None = None,
) -> list[Rollout]:
    """Real samples of the model: each rollout asks every module once, and is rewarded by a made-up number."""
    engine = LocalEngine(folder, settings)
    name = engine.load(adapter) if adapter else "base"
    rollouts = []
    for number, (text, k) in enumerate((text, k) for text in TEXTS for k in range(per_example)):
        calls = []
        for order, module in enumerate(modules):
            prompt = engine.encode([{"role": "system", "content": module}, {"role": "user", "content": text}])
            request = SampleRequest(prompt, 100 * number + order, 0.7, 1.0, 0, 8, name, module)
            [answer] = engine.sample([request])
            calls.append(call_of(f"{text}/{k}", module, order, request, answer))
        rollouts.append(Rollout(f"{text}/{k}", text, 0, "student", tuple(calls), {}, reward=float(number * 7 % 5)))
    return rollouts


def call_of(rollout_id: str, module: str, order: int, request: SampleRequest, answer: object) -> Call:
    return Call(
        rollout_id=rollout_id,
        module=module,
        index=0,
        order=order,
        prompt_ids=request.prompt_ids,
        completion_ids=answer.token_ids,
        logprobs=answer.logprobs,
        text=answer.text,
        finish_reason=answer.finish_reason,
        policy=answer.policy,
        temperature=request.temperature,
        seed=request.seed,
    )


def grouped(rollouts: list[Rollout], settings: Settings) -> list[Group]:
    return make_groups(rollouts, settings.weights.groups, Rewards(), seed=0)


def nudge(rollouts: list[Rollout]) -> list[Rollout]:
    """Old log-probabilities as if another policy had sampled, some of them far enough to be clipped."""
    shift = lambda call: tuple(value + 0.3 * math.sin(5 * k) for k, value in enumerate(call.logprobs))  # noqa: E731
    return [replace(r, calls=tuple(replace(call, logprobs=shift(call)) for call in r.calls)) for r in rollouts]


def gradients(trainer: Trainer, rows: list[Row]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of one update, before its step."""
    settings = trainer.settings
    total = normalizer(rows, settings.weights.loss, settings.sampling.max_tokens)
    trainer.model.train()
    parts = [trainer._backward(batch, total) for batch in micro_batches(rows, settings.weights.micro_batch)]
    [learner] = trainer.learners.values()
    found = {name: p.grad.clone() for name, p in learner.trained()}
    learner.optimizer.zero_grad()
    return sum(part["loss"] for part in parts), found


def shake(model: PeftModel) -> None:
    """Make the adapter differ from zero."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))


def plain_model(folder: Path, trainer: Trainer) -> PeftModel:
    """The policy as PEFT and transformers alone would run it."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(base, policy.lora_config(trainer.settings.weights.lora))
    state = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in state.items():
            own[name].copy_(value)
    return model


def plain_logps(model: torch.nn.Module, call: Call) -> torch.Tensor:
    """Log-probabilities of one call's tokens from a forward of its whole, unpadded sequence."""
    ids = torch.tensor([call.prompt_ids + call.completion_ids])
    logits = model(ids).logits[0, len(call.prompt_ids) - 1 : -1] / call.temperature
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(call.completion_ids)[:, None])[:, 0]


def hand_loss(model: PeftModel, rows: list[Row], settings: Settings) -> torch.Tensor:
    """Method §1, written down once more: clip(ratio) * advantage - beta * KL, averaged as the loss's name says."""
    loss = settings.weights.loss
    losses = []
    for row in rows:
        logps = plain_logps(model, row.call)
        ratio = torch.exp(logps - torch.tensor(row.call.logprobs))
        if loss.type == "cispo":
            value = -ratio.clamp(max=loss.epsilon_high).detach() * row.advantage * logps
        else:
            clipped = ratio.clamp(1 - loss.epsilon_low, 1 + loss.epsilon_high)
            value = -torch.minimum(ratio * row.advantage, clipped * row.advantage)
        if loss.beta:
            with torch.no_grad(), model.disable_adapter():
                reference = plain_logps(model, row.call)
            kl = torch.exp(reference - logps) - (reference - logps) - 1
            value = value + loss.beta * kl * ratio
        losses.append(value)
    tokens = sum(map(len, losses))
    weights = [row.member_weight for row in rows]
    match loss.type:
        case "grpo":
            return sum(w * x.mean() for w, x in zip(weights, losses, strict=True)) / sum(weights)
        case "dr_grpo":
            return sum(w * x.sum() for w, x in zip(weights, losses, strict=True)) / (
                sum(weights) * settings.sampling.max_tokens
            )
    assert set(weights) == {1.0}
    return sum(x.sum() for x in losses) / tokens


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_loss_and_gradient_equal_the_formula(folder, kind, beta):
    high = 1.2 if kind == "cispo" else 0.2
    settings = settings_for(loss={"type": kind, "beta": beta, "epsilon_high": high}, micro_batch=5)
    rollouts = nudge(sampled(folder, settings, ("m", "a longer name")))
    rows, dropped = rows_of(rollouts, grouped(rollouts, settings), settings.weights)
    assert len(rows) > 15
    assert not dropped["bad_logprobs"]
    trainer = Trainer(folder, settings)
    shake(trainer.model)
    model = plain_model(folder, trainer)
    value, found = gradients(trainer, rows)
    expected = hand_loss(model, rows, settings)
    assert value == pytest.approx(expected.item(), abs=1e-5)
    expected.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-3)


def corrected_loss(before: PeftModel, after: PeftModel, rows: list[Row], settings: Settings) -> torch.Tensor:
    """What `hand_loss` is for grpo, with the clipped ratio against the trainer's own start, and weights by hand."""
    loss, wanted = settings.weights.loss, settings.weights.correction
    total = 0.0
    for row in rows:
        start, logps = plain_logps(before, row.call).detach(), plain_logps(after, row.call)
        off = [math.exp(p - q) for p, q in zip(start.tolist(), row.call.logprobs, strict=True)]
        if wanted.level == "sequence":
            off = [math.prod(off)] * len(off)
        weights = [r if r <= wanted.cap else {"truncate": wanted.cap, "mask": 0.0}[wanted.mode] for r in off]
        ratio = torch.exp(logps - start)
        clipped = ratio.clamp(1 - loss.epsilon_low, 1 + loss.epsilon_high)
        value = -torch.minimum(ratio * row.advantage, clipped * row.advantage) * torch.tensor(weights)
        with torch.no_grad(), after.disable_adapter():
            reference = plain_logps(after, row.call)
        kl = torch.exp(reference - logps) - (reference - logps) - 1
        total = total + row.member_weight * (value + loss.beta * kl * ratio).mean()
    return total / sum(row.member_weight for row in rows)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_corrected_loss_and_gradient_equal_the_formula(folder, mode, level):
    """In a round's second step: scored at the round's start, and updated after the weights have moved."""
    correction = {"mode": mode, "level": level, "cap": 1.1}
    settings = settings_for(loss={"beta": 0.04}, correction=correction, micro_batch=5)
    rollouts = sampled(folder, settings, ("m", "a longer name"))
    rollouts[::2] = nudge(rollouts[::2])
    rows, _ = rows_of(rollouts, grouped(rollouts, settings), settings.weights)
    trainer = Trainer(folder, settings)
    before = plain_model(folder, trainer)
    rows = trainer._scored(rows)
    ratios = [ratio for row in rows for ratio in row.ratios]
    assert min(ratios) < 1.1 < max(ratios)
    shake(trainer.model)
    after = plain_model(folder, trainer)
    value, found = gradients(trainer, rows)
    expected = corrected_loss(before, after, rows, settings)
    assert value == pytest.approx(expected.item(), abs=1e-5)
    expected.backward()
    for name, parameter in after.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(
    ("mode", "weight"),
    # Ratios of 4 for every other token, 1/2 for the rest.
    [("truncate", (2 + 0.5) / 2), ("mask", (0 + 0.5) / 2)],
)
def test_what_a_correction_did_is_reported(folder, mode, weight):
    settings = settings_for(correction={"mode": mode, "cap": 2.0})
    rollouts = [r for r in sampled(folder, settings) if len(r.calls[0].completion_ids) % 2 == 0]
    moved = []
    for rollout in rollouts:
        [call] = rollout.calls
        away = [math.log((4, 0.5)[k % 2]) for k in range(len(call.logprobs))]
        shifted = tuple(value - gap for value, gap in zip(call.logprobs, away, strict=True))
        moved.append(replace(rollout, calls=(replace(call, logprobs=shifted),)))
    metrics = Trainer(folder, settings).update(moved, grouped(moved, settings), 0)
    assert metrics["correction/weight"] == pytest.approx(weight, abs=1e-3)
    assert metrics["correction/capped"] == 0.5
    assert metrics["sampler_gap"] == pytest.approx((math.log(4) + math.log(2)) / 2, abs=1e-3)
    said = warning(metrics, settings.weights.correction)
    assert f"differ by 1.040 in the mean (n = {metrics['tokens']:.0f} tokens)" in said
    assert not warning(metrics, settings.weights.correction.model_copy(update={"warn_gap": 1.05}))


def test_without_a_gap_a_correction_changes_nothing(folder, tmp_path):
    """Also for the second step and with two adapters: what was sampled here has the trainer's own probabilities."""
    digests = []
    for mode in ("none", "truncate"):
        settings = settings_for(correction={"mode": mode}, steps_per_round=2)
        rollouts = sampled(folder, settings, ("m", "n"))
        trainer = Trainer(folder, settings, ("m", "n"))
        trainer.update(rollouts, grouped(rollouts, settings), 0)
        trainer.save(tmp_path / mode)
        digests.append(load_file(tmp_path / mode / "n" / "adapter" / policy.TENSORS))
    for name, tensor in digests[0].items():
        torch.testing.assert_close(tensor, digests[1][name], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_one_module_is_stock_grpo(folder, beta, tmp_path):
    """Loss and gradient of TRL's own GRPOTrainer, which pads, scores and computes the advantages itself."""
    settings = settings_for(loss={"beta": beta}, micro_batch=12)
    trainer = Trainer(folder, settings)
    shake(trainer.model)
    trainer.save(tmp_path / "start")
    rollouts = sampled(folder, settings, adapter=tmp_path / "start" / SHARED / "adapter")
    groups = grouped(rollouts, settings)
    assert not any(group.all_equal for group in groups)
    rows, _ = rows_of(rollouts, groups, settings.weights)
    expected, wanted = stock_grpo(plain_model(folder, trainer), folder, rollouts, beta, tmp_path)
    value, found = gradients(trainer, rows)
    assert value == pytest.approx(expected, abs=1e-5)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], atol=1e-5, rtol=1e-4)


def stock_grpo(
    start: PeftModel, folder: Path, rollouts: list[Rollout], beta: float, tmp_path: Path
) -> tuple[float, dict[str, torch.Tensor]]:
    """One backward pass of a GRPOTrainer that is given the rollouts' tokens and rewards, and nothing of ours."""
    calls = {rollout.calls[0].seed: rollout for rollout in rollouts}
    order = sorted(calls)

    def replay(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        found = [calls[order[k]].calls[0] for k in range(len(prompts))]
        return {
            "prompt_ids": [list(call.prompt_ids) for call in found],
            "completion_ids": [list(call.completion_ids) for call in found],
            "logprobs": None,
            "reward": [calls[order[k]].reward for k in range(len(prompts))],
        }

    stock = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=GRPOConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            report_to="none",
            per_device_train_batch_size=len(rollouts),
            num_generations=4,
            temperature=0.7,
            beta=beta,
            loss_type="grpo",
            max_completion_length=8,
            gradient_checkpointing=False,
        ),
        reward_funcs=lambda reward, **_: reward,
        train_dataset=Dataset.from_dict({"prompt": list(TEXTS)}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=policy.lora_config(settings_for().weights.lora),
        rollout_func=replay,
    )
    own = dict(stock.model.named_parameters())
    with torch.no_grad():
        for name, parameter in start.named_parameters():
            if parameter.requires_grad:
                own[name].copy_(parameter)
    stock.model.train()
    stock.current_gradient_accumulation_steps = 1
    inputs = stock._generate_and_score_completions([{"prompt": text} for text in TEXTS for _ in range(4)])
    loss = stock.compute_loss(stock.model, inputs)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in stock.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", LOSSES)
def test_micro_batches_do_not_change_the_update(folder, kind):
    found = []
    for size in (3, 50):
        settings = settings_for(loss={"type": kind}, micro_batch=size)
        rollouts = nudge(sampled(folder, settings, ("m", "n")))
        rows, _ = rows_of(rollouts, grouped(rollouts, settings), settings.weights)
        trainer = Trainer(folder, settings)
        shake(trainer.model)
        found.append(gradients(trainer, rows))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name], atol=1e-6, rtol=1e-4)


def test_trajectory_rows_share_their_rollouts_length(folder):
    settings = settings_for(groups={"grouping": "trajectory"})
    rollouts = sampled(folder, settings, ("m", "n"))
    rows, _ = rows_of(rollouts, grouped(rollouts, settings), settings.weights)
    lengths = {r.rollout_id: sum(len(call.completion_ids) for call in r.calls) for r in rollouts}
    assert {row.call.module for row in rows} == {"m", "n"}
    assert all(row.length == lengths[row.call.rollout_id] for row in rows)
    loss = settings.weights.loss
    # One unit of weight for each rollout, spread over all its tokens.
    assert normalizer(rows, loss, 8) == pytest.approx(len({row.call.rollout_id for row in rows}))
    assert token_weight(rows[0], loss) == pytest.approx(1 / rows[0].length)


def test_log_probabilities_equal_the_engines(folder):
    settings = settings_for()
    rollouts = sampled(folder, settings, ("m", "n"))
    metrics = Trainer(folder, settings).update(rollouts, grouped(rollouts, settings), 0)
    assert metrics["sampler_gap"] <= 1e-4


def test_a_sampled_adapter_equals_the_trained_one(folder, tmp_path):
    """Folding the adapter into the base gives the policy that was trained."""
    settings = settings_for()
    trainer = Trainer(folder, settings)
    shake(trainer.model)
    name = trainer.save(tmp_path)[SHARED]
    engine = LocalEngine(folder, settings)
    assert engine.load(tmp_path / SHARED / "adapter") == name
    prompt = engine.encode([{"role": "user", "content": "blue"}])
    request = SampleRequest(prompt, 1, 0.7, 1.0, 0, 8, name, "m")
    [answer, base] = engine.sample([request, replace(request, policy="base")])
    assert (answer.policy, base.policy) == (name, "base")
    model = plain_model(folder, trainer).eval()
    call = call_of("r", "m", 0, request, answer)
    np.testing.assert_allclose(answer.logprobs, plain_logps(model, call).detach(), atol=1e-4)
    with model.disable_adapter():
        np.testing.assert_allclose(
            base.logprobs, plain_logps(model, call_of("r", "m", 0, request, base)).detach(), atol=1e-4
        )


def test_updates_raise_the_probability_of_what_was_rewarded(folder):
    settings = settings_for()
    rollouts = sampled(folder, settings)
    groups = grouped(rollouts, settings)
    trainer = Trainer(folder, settings)
    advantages = {m.rollout_id: m.advantage for group in groups for m in group.members}

    def gain() -> float:
        model = plain_model(folder, trainer).eval()
        return sum(advantages[r.rollout_id] * plain_logps(model, r.calls[0]).mean().item() for r in rollouts)

    before = gain()
    assert trainer.update(rollouts, groups, 0)["updated"] == 1
    assert gain() > before + 0.01


def test_a_round_of_several_steps_is_as_many_rounds_of_one(folder, tmp_path):
    """Three examples in two steps: the first and the third example, then the second, scored by the moved weights."""
    two = settings_for(steps_per_round=2, optimizer={"schedule": "cosine", "warmup_steps": 1})
    one = settings_for(rounds=20, optimizer={"schedule": "cosine", "warmup_steps": 1})
    rollouts = sampled(folder, two, ("m", "n"))
    groups = grouped(rollouts, two)
    together, apart = Trainer(folder, two), Trainer(folder, one)
    metrics = together.update(rollouts, groups, 0)
    split = [
        apart.update(rollouts, [group for group in groups if group.example_id in texts], 0)
        for texts in ([TEXTS[0], TEXTS[2]], [TEXTS[1]])
    ]
    assert together.save(tmp_path / "together") == apart.save(tmp_path / "apart")
    assert metrics["rows"] == sum(part["rows"] for part in split) == 24
    assert metrics["tokens"] == sum(part["tokens"] for part in split)
    assert (metrics["updated"], metrics["sampler_gap"]) == (1, split[0]["sampler_gap"])
    shares = [part["tokens"] / metrics["tokens"] for part in split]
    for name in ("loss", "entropy", "grad_norm"):
        assert metrics[name] == pytest.approx(
            sum(share * part[name] for share, part in zip(shares, split, strict=True))
        )


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 5))
def test_parts_keep_examples_together_and_are_even(examples, count):
    rows = [
        Row(call=number, example_id=str(k), advantage=1, member_weight=1, length=1) for number, k in enumerate(examples)
    ]
    parts = parts_of(rows, count)
    assert sorted(row.call for part in parts for row in part) == list(range(len(rows)))
    sizes = [len({row.example_id for row in part}) for part in parts]
    assert sum(sizes) == len(set(examples))
    assert len(parts) == min(count, len(set(examples)))
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_steps_that_a_round_had_nothing_for_count_as_not_taken(folder):
    settings = settings_for(steps_per_round=4)
    rollouts = sampled(folder, settings)
    assert Trainer(folder, settings).update(rollouts, grouped(rollouts, settings), 0)["updated"] == 3 / 4


def test_going_on_from_a_checkpoint_gives_the_same_bytes(folder, tmp_path):
    settings = settings_for(
        optimizer={"schedule": "cosine", "warmup_steps": 1, "weight_decay": 0.01}, lora={"dropout": 0.1}
    )
    rollouts = sampled(folder, settings, ("m", "n"))
    groups = grouped(rollouts, settings)
    straight = Trainer(folder, settings)
    for number in range(3):
        straight.update(rollouts, groups, number)
        straight.save(tmp_path / f"straight-{number}")
    resumed = Trainer(folder, settings)
    resumed.open(tmp_path / "straight-1")
    resumed.update(rollouts, groups, 2)
    resumed.save(tmp_path / "resumed")
    for file in sorted(path for path in (tmp_path / "resumed").rglob("*") if path.is_file()):
        original = tmp_path / "straight-2" / file.relative_to(tmp_path / "resumed")
        assert file.read_bytes() == original.read_bytes(), file.name


def test_opening_nothing_begins_anew(folder, tmp_path):
    settings = settings_for()
    rollouts = sampled(folder, settings)
    groups = grouped(rollouts, settings)
    trainer = Trainer(folder, settings)
    trainer.update(rollouts, groups, 0)
    first = trainer.save(tmp_path / "a")
    trainer.update(rollouts, groups, 1)
    assert trainer.save(tmp_path / "b") != first
    trainer.open(None)
    trainer.update(rollouts, groups, 0)
    assert trainer.save(tmp_path / "c") == first


def test_checkpoints_hold_safetensors_and_json_only(folder, tmp_path):
    trainer = Trainer(folder, settings_for())
    rollouts = sampled(folder, trainer.settings)
    trainer.update(rollouts, grouped(rollouts, trainer.settings), 0)
    trainer.save(tmp_path)
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".safetensors", ".json"}
    assert str(folder) not in (tmp_path / SHARED / "adapter" / "adapter_config.json").read_text()


def test_peft_reads_the_adapter(folder, tmp_path):
    trainer = Trainer(folder, settings_for())
    shake(trainer.model)
    trainer.save(tmp_path)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / SHARED / "adapter")
    ids = torch.tensor([[1, 5, 6, 7]])
    torch.testing.assert_close(loaded(ids).logits, plain_model(folder, trainer).eval()(ids).logits)


def test_a_checkpoint_that_does_not_fit_is_refused(folder, tmp_path):
    trainer = Trainer(folder, settings_for())
    with pytest.raises(RecordError, match="missing"):
        trainer.open(tmp_path)
    other = Trainer(folder, settings_for(lora={"target_modules": ["q_proj"]}))
    trainer.save(tmp_path)
    with pytest.raises(ModelError, match="lora"):
        other.open(tmp_path)


def test_members_that_cannot_be_learned_from_are_counted(folder):
    settings = settings_for(context=64)
    rollouts = sampled(folder, settings)
    calls = [rollout.calls[0] for rollout in rollouts]
    calls[0] = replace(calls[0], completion_ids=(), logprobs=())
    calls[1] = replace(calls[1], logprobs=(*calls[1].logprobs[:-1], math.nan))
    calls[2] = replace(calls[2], logprobs=calls[2].logprobs[1:])
    calls[3] = replace(calls[3], temperature=0.0)
    calls[4] = replace(calls[4], prompt_ids=calls[4].prompt_ids * 10)
    broken = [replace(rollout, calls=(call,)) for rollout, call in zip(rollouts, calls, strict=True)]
    flat = [replace(r, reward=1.0) if r.example_id == TEXTS[2] else r for r in broken]
    metrics = Trainer(folder, settings).update(flat, grouped(flat, settings), 0)
    reasons = {name.removeprefix("dropped/"): n for name, n in metrics.items() if name.startswith("dropped/")}
    assert reasons == {"empty": 1, "bad_logprobs": 2, "greedy": 1, "too_long": 1, "all_equal": 4}
    assert metrics["rows"] == 3
    assert metrics["updated"] == 1
    assert math.isfinite(metrics["loss"])


def test_nothing_to_learn_from_changes_nothing(folder, tmp_path):
    settings = settings_for()
    trainer = Trainer(folder, settings)
    before = trainer.save(tmp_path / "before")
    equal = [replace(rollout, reward=1.0) for rollout in sampled(folder, settings)]
    for rollouts in (equal, []):
        metrics = trainer.update(rollouts, grouped(rollouts, settings), 0)
        assert (metrics["rows"], metrics["updated"]) == (0, 0)
    assert trainer.save(tmp_path / "after") == before
    assert trainer.learners[SHARED].updates == 0


def test_a_gradient_that_is_not_finite_is_not_applied(folder, tmp_path):
    settings = settings_for()
    trainer = Trainer(folder, settings)
    before = trainer.save(tmp_path / "before")
    rollouts = sampled(folder, settings)
    groups = grouped(rollouts, settings)
    member = replace(groups[0].members[0], advantage=math.inf)
    groups[0] = replace(groups[0], members=(member, *groups[0].members[1:]))
    metrics = trainer.update(rollouts, groups, 0)
    assert metrics["updated"] == 0
    assert not math.isfinite(metrics["grad_norm"])
    assert trainer.save(tmp_path / "after") == before


def test_each_temperature_is_scored_at_its_own(folder):
    settings = settings_for()
    rollouts = sampled(folder, settings)
    engine = LocalEngine(folder, settings)
    warm = []
    for k, rollout in enumerate(rollouts):
        call = rollout.calls[0]
        request = SampleRequest(call.prompt_ids, k, (0.7, 1.3)[k % 2], 1.0, 0, 8, "base", "m")
        warm.append(
            replace(rollout, calls=(call_of(rollout.rollout_id, "m", 0, request, engine.sample([request])[0]),))
        )
    metrics = Trainer(folder, settings).update(warm, grouped(warm, settings), 0)
    assert metrics["sampler_gap"] <= 1e-4


def test_a_copy_counts_as_often_as_its_weight_says(folder):
    """Two members that are copies of one rollout move the policy as much as that rollout alone would."""
    settings = settings_for()
    rollouts = sampled(folder, settings)[:3]
    rows, _ = rows_of(rollouts, grouped(rollouts, settings), settings.weights)
    assert len(rows) == 4
    assert sum(row.member_weight for row in rows) == pytest.approx(3)
    single = list({row.call.rollout_id: replace(row, member_weight=1.0) for row in rows}.values())
    trainer = Trainer(folder, settings)
    shake(trainer.model)
    value, found = gradients(trainer, rows)
    expected, wanted = gradients(trainer, single)
    assert value == pytest.approx(expected, abs=1e-6)
    for name in found:
        torch.testing.assert_close(found[name], wanted[name], atol=1e-6, rtol=1e-4)


def test_folding_is_exact_each_time(folder, tmp_path):
    """Switching policies back and forth leaves no trace in the base weights."""
    settings = settings_for()
    trainer = Trainer(folder, settings)
    shake(trainer.model)
    name = trainer.save(tmp_path)[SHARED]
    engine = LocalEngine(folder, settings)
    engine.load(tmp_path / SHARED / "adapter")
    base = copy.deepcopy(engine.model.state_dict())
    for used in (name, "base", name, "base"):
        engine._use(used)
    assert all(torch.equal(value, base[key]) for key, value in engine.model.state_dict().items())
    tensors = load_file(tmp_path / SHARED / "adapter" / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.mlp.up_proj"
    expected = base["model.layers.0.mlp.up_proj.weight"] + 2.0 * (
        tensors[f"{key}.lora_B.weight"] @ tensors[f"{key}.lora_A.weight"]
    )
    engine._use(name)
    torch.testing.assert_close(engine.model.state_dict()["model.layers.0.mlp.up_proj.weight"], expected)


def test_an_adapter_for_each_module_trains_as_if_it_were_alone(folder, tmp_path):
    """Two modules with two adapters move as in two trainings of one module each: loss, norm, and the step."""
    settings = settings_for()
    rollouts = sampled(folder, settings, ("m", "n"))
    both = Trainer(folder, settings, ("m", "n"))
    both.save(tmp_path / "start")
    both.update(rollouts, grouped(rollouts, settings), 0)
    both.save(tmp_path / "both")
    for number, module in enumerate(("m", "n")):
        own = [replace(r, calls=(replace(r.calls[number], index=0, order=0),)) for r in rollouts]
        alone = Trainer(folder, settings)
        alone.learners[SHARED].open(tmp_path / "start" / module)
        alone.update(own, grouped(own, settings), 0)
        alone.save(tmp_path / module)
        wanted = load_file(tmp_path / module / SHARED / "adapter" / policy.TENSORS)
        for name, tensor in load_file(tmp_path / "both" / module / "adapter" / policy.TENSORS).items():
            torch.testing.assert_close(tensor, wanted[name], atol=1e-6, rtol=1e-4)


def test_adapters_of_modules_go_on_to_the_same_bytes(folder, tmp_path):
    settings = settings_for(optimizer={"schedule": "cosine"})
    rollouts = sampled(folder, settings, ("m", "n"))
    groups = grouped(rollouts, settings)
    straight, resumed = (Trainer(folder, settings, ("m", "n")) for _ in range(2))
    straight.update(rollouts, groups, 0)
    straight.save(tmp_path / "first")
    straight.update(rollouts, groups, 1)
    names = straight.save(tmp_path / "straight")
    assert names.keys() == {"m", "n"}
    assert names["m"] != names["n"]
    resumed.open(tmp_path / "first")
    resumed.update(rollouts, groups, 1)
    assert resumed.save(tmp_path / "resumed") == names
    files = [path.relative_to(tmp_path / "straight") for path in (tmp_path / "straight").rglob("*") if path.is_file()]
    assert len(files) == 2 * 4
    for file in files:
        assert (tmp_path / "resumed" / file).read_bytes() == (tmp_path / "straight" / file).read_bytes(), file


def test_a_module_without_rows_keeps_its_adapter(folder, tmp_path):
    settings = settings_for()
    rollouts = sampled(folder, settings, ("m",))
    trainer = Trainer(folder, settings, ("m", "n"))
    before = trainer.save(tmp_path / "before")
    metrics = trainer.update(rollouts, grouped(rollouts, settings), 0)
    after = trainer.save(tmp_path / "after")
    assert metrics["updated"] == 0.5
    assert before["m"] != after["m"]
    assert before["n"] == after["n"]


def test_each_module_is_sampled_from_its_own_adapter(folder, tmp_path):
    assert policy_of("m", {}) == "base"
    assert policy_of("m", {"m": "a", "n": "b"}) == "a"
    assert policy_of("other", {SHARED: "c"}) == "c"
    trainer = Trainer(folder, settings_for(), ("hops[0].query", "n"))
    names = trainer.save(tmp_path)
    found = policy.adapters_in(tmp_path)
    assert {name: policy.digest(path) for name, path in found.items()} == names


def test_a_program_with_demos_is_trained_on_the_prompts_it_was_sampled_from(folder):
    """On-policy across the seam between prompt optimization and training: instructions and demos included."""
    settings = settings_for(context=2048).model_copy(update={"sampling": Sampling(context=2048, max_tokens=8)})
    program = dspy.Predict(dspy.Signature("text -> short", "An instruction that was proposed."))
    program.demos = [dspy.Example(text="a demo", short="shown"), dspy.Example(text="another", short="shown too")]
    engine = LocalEngine(folder, settings)
    sampled_from = []
    answer = engine.sample
    engine.sample = lambda requests: sampled_from.extend(r.prompt_ids for r in requests) or answer(requests)
    jobs = plan([dspy.Example(id=text, text=text).with_inputs("text") for text in TEXTS], 4, 0, "seam")
    rollouts = run(program, jobs, lambda e, p, t: float(len(p.short) % 3), engine, settings, settings.weights.draw)
    rows, _ = rows_of(rollouts, grouped(rollouts, settings), settings.weights)
    assert rows
    assert {row.call.prompt_ids for row in rows} <= set(sampled_from)
    format_of = make_adapter("plain").format
    expected = {engine.encode(format_of(program.signature, program.demos, {"text": text})) for text in TEXTS}
    assert set(sampled_from) == expected
    assert all("An instruction that was proposed." in engine.tokenizer.decode(prompt) for prompt in expected)
    assert all(engine.tokenizer.decode(prompt).count("shown") == 2 for prompt in expected)


def taught(rollouts: list[Rollout]) -> list[Rollout]:
    """The same rollouts with every second one from a source: off-policy, and nobody's log-probabilities."""
    mark = lambda call: replace(call, logprobs=(), off_policy=True)  # noqa: E731
    return [replace(r, source="wise", calls=tuple(map(mark, r.calls))) if k % 2 else r for k, r in enumerate(rollouts)]


def off_policy_gain(logps: torch.Tensor, rule: str) -> torch.Tensor:
    """What has the gradient of one token's gain per unit of advantage: log p, or that times 0.1 p / (p + 0.1)²."""
    p = logps.detach().exp()
    return logps if rule == "one" else logps * 0.1 * p / (p + 0.1) ** 2


@pytest.mark.parametrize(("rule", "beta"), [("one", 0.04), ("shaped", 0.0)])
def test_off_policy_rows_have_a_gradient_of_their_own(folder, rule, beta):
    """By hand: no ratio to an old policy, no clip, no KL; all else of the loss is that of the student's own rows."""
    settings = settings_for(off_policy=rule, loss={"beta": beta}, micro_batch=5)
    rollouts = taught(nudge(sampled(folder, settings)))
    rows, dropped = rows_of(rollouts, grouped(rollouts, settings), settings.weights)
    off = [row for row in rows if row.call.off_policy]
    own = [row for row in rows if not row.call.off_policy]
    assert (len(off), len(own)) == (6, 6)
    assert not dropped["bad_logprobs"]
    trainer = Trainer(folder, settings)
    shake(trainer.model)
    model = plain_model(folder, trainer)
    _, found = gradients(trainer, rows)
    share = sum(row.member_weight for row in own) / sum(row.member_weight for row in rows)
    (share * hand_loss(model, own, settings)).backward()
    for row in off:
        gain = off_policy_gain(plain_logps(model, row.call), rule).mean() * row.advantage * row.member_weight
        (-gain / sum(row.member_weight for row in rows)).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-3)


def test_metrics_of_the_sampler_are_over_the_students_own_tokens(folder):
    settings = settings_for()
    rollouts = taught(sampled(folder, settings))
    groups = grouped(rollouts, settings)
    rows, _ = rows_of(rollouts, groups, settings.weights)
    metrics = Trainer(folder, settings).update(rollouts, groups, 0)
    assert (metrics["rows"], metrics["rows_off_policy"], metrics["updated"]) == (12, 6, 1)
    own = sum(len(row.call.completion_ids) for row in rows if not row.call.off_policy)
    assert metrics["tokens_own"] == own < metrics["tokens"]
    assert metrics["sampler_gap"] <= 1e-4
    only = [replace(r, calls=tuple(replace(c, logprobs=(), off_policy=True) for c in r.calls)) for r in rollouts]
    alone = Trainer(folder, settings).update(only, groups, 0)
    assert (alone["rows_off_policy"], alone["tokens_own"], alone["updated"]) == (12, 0, 1)
