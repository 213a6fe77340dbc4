"""mmGRPO: one update of the policy from groups made elsewhere (arXiv 2508.04660, eq. 2).

1. A row is one call of a member of a usable group: its prompt and completion tokens as they were sampled, the sampled
   log-probabilities, and the member's advantage.
2. Rows of one module go through the model in micro-batches. What their prompts share runs once, with gradients
   (`prefix`), and the LM head sees completion positions only, as one flat (tokens, hidden) tensor.
3. TRL's `GRPOTrainer` computes each token's loss: clipped probability ratio times advantage, less beta times the KL
   divergence to the base model. All its averages are one formula, sum(w_t loss_t) / N, with

       loss       w_t (module)   w_t (trajectory)   N
       grpo       m / |o|        m / L              sum of m over members
       bnpo       m              m                  sum of w_t
       dapo       m              m                  sum of w_t
       cispo      m              m                  sum of w_t
       dr_grpo    m              m                  sum of m over rows, times max_tokens

   where m is the member's weight, |o| the completion's length and L the length of all its rollout's completions.
4. Rows of teacher programs (`off_policy`) have the same weights, and -ratio times advantage as the loss of a token.
   There is no old policy to divide by and to be clipped to, and no KL, whose estimate needs the policy's own tokens:

       one        ratio = p / p without gradient: 1, so that the gradient is advantage times that of log p
       shaped     ratio = p / (p + 0.1), LUFFY's (arXiv 2504.14945, with the teacher's probability taken as 1): the
                  gradient is advantage times that of log p times 0.1 p / (p + 0.1)², which is largest at p = 0.1, and
                  fades where the student is sure of the token and where it would never say it

5. One step of the optimizer and of the scheduler follows. A round without a usable row takes none.
6. A round's examples may be cut in several parts (`steps_per_round`), with 2 to 5 for each. From the second part on the
   clipped ratio corrects for the steps before, as in PPO's minibatches (arXiv 1707.06347, algorithm 1).
7. With `weights.correction` the round's rows are scored before its first step, and each token's loss is weighted for
   what the sampler's probability differs from the trainer's (`correction`).
8. With an adapter for each module, all this is done for each adapter, with the rows of its module alone.

What differs from `Trainer.train()`: the loop over micro-batches is ours, so that training can stop between any two
rounds and go on to the same bytes.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedModel, get_scheduler
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import use_adapter

from twofold import correction, policy, prefix
from twofold.records import SHARED, Call, Group, Rollout, read_json, write_json
from twofold.seeds import derive
from twofold.settings import Correction, Loss, Settings, Weights

OPTIMIZER = "optimizer.safetensors"
STATE = "trainer.json"

SHAPE = 0.1
"""LUFFY's gamma."""

OWN = "tokens_own"
"""Tokens of a batch, or of a step, that the student said itself."""

_OF_ALL = ("loss", "tokens", OWN, "grad_norm", "learning_rate", "updated")
"""Metrics of a step that are not means over the student's own tokens."""


@dataclass(frozen=True, slots=True)
class Row:
    """One call to learn from."""

    call: Call
    example_id: str
    advantage: float
    member_weight: float
    """m: how much the member counts among its group's members."""
    length: int
    """Tokens the member's loss is averaged over: those of the call, or of all calls of its rollout."""
    scored: tuple[float, ...] = ()
    """The trainer's log-probability of each token when the round began; empty takes the sampler's."""
    ratios: tuple[float, ...] = ()
    """Of each token: its probability by the trainer over that by the sampler; empty where nothing is corrected."""


def rows_of(rollouts: Sequence[Rollout], groups: Sequence[Group], settings: Weights) -> tuple[list[Row], Counter[str]]:
    """The rows of all usable groups, and how many members' calls were left out for which reason.

    Reasons: `all_equal` (the group has no gradient), `empty` (no completion token), `bad_logprobs` (missing or not
    finite), `greedy` (drawn at temperature 0, where every token has probability 1), `too_long` (longer than
    `weights.context`).
    """
    by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    rows: list[Row] = []
    dropped: Counter[str] = Counter()
    for group in groups:
        for member in group.members:
            calls = _calls_of(by_id[member.rollout_id], group.module, member.call_index)
            length = sum(len(call.completion_ids) for call in calls)
            for call in calls:
                reason = "all_equal" if group.all_equal else _defect(call, settings)
                if reason:
                    dropped[reason] += 1
                else:
                    rows.append(Row(call, group.example_id, member.advantage, member.weight, length))
    return rows, dropped


def _calls_of(rollout: Rollout, module: str, index: int) -> list[Call]:
    if not module:
        return list(rollout.calls)
    return [call for call in rollout.calls if (call.module, call.index) == (module, index)]


def _defect(call: Call, settings: Weights) -> str:
    if not call.completion_ids:
        return "empty"
    if not call.off_policy and not _has_logprobs(call):
        return "bad_logprobs"
    if call.temperature == 0:
        return "greedy"
    return "too_long" if len(call.prompt_ids) + len(call.completion_ids) > settings.context else ""


def _has_logprobs(call: Call) -> bool:
    return len(call.logprobs) == len(call.completion_ids) and all(map(math.isfinite, call.logprobs))


def parts_of(rows: Sequence[Row], count: int) -> list[list[Row]]:
    """The rows cut by example into at most `count` parts, none of them empty; an example's rows stay together."""
    examples = {name: number for number, name in enumerate(dict.fromkeys(row.example_id for row in rows))}
    parts = [[row for row in rows if examples[row.example_id] % count == part] for part in range(count)]
    return [part for part in parts if part]


def micro_batches(rows: Sequence[Row], size: int) -> Iterator[list[Row]]:
    """Rows cut into batches of one module, one loss, one temperature and one first token, so that each shares a
    beginning."""
    families: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        call = row.call
        families[call.module, call.off_policy, call.temperature, call.prompt_ids[0]].append(row)
    for family in families.values():
        # Rows of one prompt lie together, for it runs once, and prompts of like length, for less padding.
        family.sort(key=lambda row: (len(row.call.prompt_ids), row.call.prompt_ids, len(row.call.completion_ids)))
        yield from (family[start : start + size] for start in range(0, len(family), size))


def token_weight(row: Row, loss: Loss) -> float:
    """w_t of each of the row's tokens (see the table above)."""
    return row.member_weight / row.length if loss.type == "grpo" else row.member_weight


def normalizer(rows: Sequence[Row], loss: Loss, max_tokens: int) -> float:
    """N, over all rows of the update (see the table above)."""
    if loss.type == "dr_grpo":
        return max_tokens * sum(row.member_weight for row in rows)
    return sum(token_weight(row, loss) * len(row.call.completion_ids) for row in rows)


class Trainer:
    """The policy while it is trained: one adapter for all modules, or several for a module each.

    `update` is a function of the checkpoint that is open, the groups and the settings: whether the checkpoint was just
    made by this object or read from disk changes no byte of the next one.

    Args:
        adapters: `(SHARED,)`, or the names of all modules.
    """

    def __init__(self, model_dir: Path, settings: Settings, adapters: Sequence[str] = (SHARED,)):
        self.settings = settings
        torch.manual_seed(derive(settings.seed, "adapter"))
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        self.trl = GroupTrainer(policy.load_base(model_dir, settings.model), tokenizer, settings)
        self.model = self.trl.model
        for number in range(1, len(adapters)):
            self.model.add_adapter(_peft_name(number), policy.lora_config(settings.weights.lora))
        self.learners = {name: Learner(self.trl, _peft_name(k), settings.weights) for k, name in enumerate(adapters)}

    def open(self, folder: Path | None) -> None:
        """Go on from the checkpoint in `folder`, or from the base model when it is None.

        Raises:
            RecordError: a file of the checkpoint is missing, torn, or from a newer version.
            ModelError: an adapter does not fit the model.
        """
        for name, learner in self.learners.items():
            learner.restart()
            if folder is not None:
                learner.open(folder / name)

    def save(self, folder: Path) -> dict[str, str]:
        """Write a checkpoint: a folder for each adapter. Returns each adapter's digest, its name as a policy."""
        return {name: learner.save(folder / name) for name, learner in self.learners.items()}

    def update(self, rollouts: Sequence[Rollout], groups: Sequence[Group], round_number: int) -> dict[str, float]:
        """The steps of every adapter on the groups of one round. Each loss is averaged over its adapter's own rows.

        Returns metrics: `loss`, `grad_norm` (of all adapters), both means over the steps, `learning_rate`,
        `entropy` (nats a token), `kl` (to the base, with beta), `clip_share`, `sampler_gap` (mean absolute difference
        between the trainer's and the sampler's log-probability of a token, before the first step), these four over the
        student's own tokens; `sampler_gap_n`, how many of these the first step had; `rows`, `rows_off_policy`,
        `tokens`, `tokens_own`, `dropped/REASON` per reason, and `updated`: the share of the steps that were taken; for
        the others there was nothing to learn from, or the gradient was not finite. With `weights.correction` also
        `correction/weight`, the mean of the own tokens' weights, and `correction/capped`, the share of them with a
        ratio above the cap.
        """
        rows, dropped = rows_of(rollouts, groups, self.settings.weights)
        metrics = {f"dropped/{reason}": float(count) for reason, count in sorted(dropped.items())}
        off_policy = sum(row.call.off_policy for row in rows)
        metrics |= {"rows": float(len(rows)), "rows_off_policy": float(off_policy), "updated": 0.0}
        if not rows:
            return metrics
        torch.manual_seed(derive(self.settings.seed, "update", round_number))
        if self.settings.weights.correction.mode != "none":
            rows = self._scored(rows)
            metrics |= _corrections(rows, self.settings.weights.correction)
        count = self.settings.weights.steps_per_round
        return metrics | _of_round([self._step(part) for part in parts_of(rows, count)], count)

    def _scored(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with the trainer's log-probabilities as they are now, and the ratios that follow."""
        weights, found = self.settings.weights, {}
        for learner, own in self._by_learner([row for row in rows if not row.call.off_policy]):
            learner.activate()
            for batch in micro_batches(own, weights.micro_batch):
                for row, scored in zip(batch, self.trl.score(batch), strict=True):
                    sampled = torch.tensor(row.call.logprobs)
                    ratios = correction.ratios_of(scored, sampled, weights.correction)
                    found[_name(row.call)] = {"scored": tuple(scored.tolist()), "ratios": tuple(ratios.tolist())}
        return [replace(row, **found.get(_name(row.call), {})) for row in rows]

    def _step(self, rows: Sequence[Row]) -> dict[str, float]:
        """One step of every adapter on its own of these rows. Returns its metrics."""
        batches, steps = [], []
        for learner, own in self._by_learner(rows):
            batches += self._backward_all(learner, own)
            steps.append(learner.step())
        return _summed(batches) | _step_metrics(steps, len(self.learners))

    def _by_learner(self, rows: Sequence[Row]) -> Iterator[tuple["Learner", list[Row]]]:
        for name, learner in self.learners.items():
            own = [row for row in rows if name in (SHARED, row.call.module)]
            if own:
                yield learner, own

    def _backward_all(self, learner: "Learner", rows: list[Row]) -> list[dict[str, float]]:
        """Add the gradient of all rows of one adapter. Returns the metrics of its micro-batches."""
        weights = self.settings.weights
        total = normalizer(rows, weights.loss, self.settings.sampling.max_tokens)
        learner.activate()
        self.model.train()
        batches = [self._backward(batch, total) for batch in micro_batches(rows, weights.micro_batch)]
        self.model.eval()
        return batches

    def _backward(self, rows: list[Row], total: float) -> dict[str, float]:
        """Add one micro-batch's gradient. Returns its loss, its tokens, how many are the student's own, and sums of its
        metrics over these."""
        self.trl.reset_metrics()
        loss = self.trl.loss_of(rows, self.settings.weights, total)
        self.trl.accelerator.backward(loss)
        tokens = sum(len(row.call.completion_ids) for row in rows)
        found = {"loss": loss.item(), "tokens": float(tokens), OWN: 0.0}
        if rows[0].call.off_policy:
            return found
        sampled = torch.tensor([value for row in rows for value in row.call.logprobs])
        gap = (self.trl.scored.cpu() - sampled).abs().mean().item()
        means = {**self.trl.batch_metrics(), "sampler_gap": gap}
        return found | {OWN: float(tokens)} | {name: value * tokens for name, value in means.items()}


class Learner:
    """One adapter, its optimizer and its scheduler."""

    def __init__(self, trl: "GroupTrainer", peft_name: str, settings: Weights):
        self.trl = trl
        self.peft_name = peft_name
        self.settings = settings
        state = get_peft_model_state_dict(trl.model, adapter_name=peft_name)
        self._initial = {name: tensor.clone() for name, tensor in state.items()}
        self.restart()

    def activate(self) -> None:
        """Make this the adapter that the model computes with, and the only one with a gradient."""
        self.trl.model.set_adapter(self.peft_name)

    def restart(self) -> None:
        """Forget all updates."""
        self.activate()
        set_peft_model_state_dict(self.trl.model, self._initial, adapter_name=self.peft_name)
        self.updates = 0
        self.trl.optimizer = None
        self.optimizer = self.trl.create_optimizer()
        options = self.settings.optimizer
        self.scheduler = get_scheduler(
            options.schedule, self.optimizer, options.warmup_steps, num_training_steps=self.settings.steps
        )

    def open(self, folder: Path) -> None:
        """Go on from what `save` wrote; the learner must be fresh."""
        state = read_json(folder / STATE)
        policy.load_adapter(self.trl.model, folder / policy.ADAPTER, self.peft_name)
        self.updates = state["updates"]
        self.scheduler.load_state_dict({**state["scheduler"], "lr_lambdas": [None]})
        for group, rate in zip(self.optimizer.param_groups, state["learning_rates"], strict=True):
            group["lr"] = rate
        moments = load_file(folder / OPTIMIZER)
        for name, parameter in self.trained():
            found = {key.rpartition("/")[2]: value for key, value in moments.items() if key.startswith(name + "/")}
            if found:
                self.optimizer.state[parameter] = found

    def save(self, folder: Path) -> str:
        """Write `adapter/` and the optimizer's and the scheduler's state. Returns the adapter's digest."""
        folder.mkdir(parents=True, exist_ok=True)
        moments = {
            f"{name}/{key}": value.contiguous()
            for name, parameter in self.trained()
            for key, value in self.optimizer.state[parameter].items()
        }
        save_file(moments, folder / OPTIMIZER)
        state = {
            "updates": self.updates,
            "scheduler": {k: v for k, v in self.scheduler.state_dict().items() if k != "lr_lambdas"},
            "learning_rates": [group["lr"] for group in self.optimizer.param_groups],
        }
        write_json(state, folder / STATE)
        return policy.save_adapter(self.trl.model, folder / policy.ADAPTER, self.peft_name)

    def step(self) -> dict[str, float]:
        """Take a step along the gradient, unless that is not finite, and clear it."""
        norm = self.trl.accelerator.clip_grad_norm_([p for _, p in self.trained()], self.settings.optimizer.grad_clip)
        rate = self.optimizer.param_groups[0]["lr"]
        finite = math.isfinite(norm)
        if finite:
            self.optimizer.step()
            self.scheduler.step()
            self.updates += 1
        self.optimizer.zero_grad()
        return {"grad_norm": norm.item(), "learning_rate": rate, "updated": float(finite)}

    def trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The adapter's weights; their names hold PEFT's name of it, which is the same in every run."""
        mark = f".{self.peft_name}."
        return [(name, p) for name, p in self.trl.model.named_parameters() if mark in name]


class GroupTrainer(GRPOTrainer):
    """TRL's trainer with rows instead of rewards: it computes losses, and is never asked to generate or to loop."""

    def __init__(self, base: PreTrainedModel, tokenizer: Any, settings: Settings):
        super().__init__(
            model=base,
            args=_config(settings, base.device),
            reward_funcs=_no_reward,
            train_dataset=Dataset.from_dict({"prompt": ["unused"] * 2}),
            processing_class=tokenizer,
            # TRL wraps the base itself, so that its reference for the KL is the base with the adapter switched off.
            peft_config=policy.lora_config(settings.weights.lora),
        )
        # `dapo` divides the weighted sum of token losses by a number we give: the formula above. Only `cispo` has a
        # token loss of its own.
        self.loss_type = "cispo" if settings.weights.loss.type == "cispo" else "dapo"
        self.current_gradient_accumulation_steps = 1  # TRL sets it when its own loop starts
        # TRL weights a token's loss by `importance_sampling_ratio` only where it believes that vLLM sampled.
        self.correction = settings.weights.correction
        self.use_vllm = self.correction.mode != "none"
        self.scored = torch.empty(0)
        """Log-probabilities of the completion tokens in the last micro-batch, row after row."""

    def loss_of(self, rows: Sequence[Row], settings: Weights, total: float) -> Tensor:
        """This micro-batch's part of the update's loss; `total` is N."""
        self.temperature = rows[0].call.temperature
        inputs = {name: value.to(self.model.device) for name, value in _tensors(rows, settings.loss, total).items()}
        if rows[0].call.off_policy:
            return self._off_policy_loss(inputs, settings.off_policy)
        if self.use_vllm:
            weights = [correction.weights_of(torch.tensor(row.ratios), self.correction) for row in rows]
            inputs["importance_sampling_ratio"] = pad_sequence(weights, batch_first=True).to(self.model.device)
        if self.beta:
            with torch.no_grad(), use_adapter(self.model, adapter_name=None):
                inputs["ref_per_token_logps"] = self._logps(inputs)
        return self.compute_loss(self.model, inputs)

    def _off_policy_loss(self, inputs: dict[str, Tensor], rule: str) -> Tensor:
        gain = off_policy_ratio(self._logps(inputs), rule) * inputs["advantages"][:, None]
        return -(gain * inputs["completion_mask"] * inputs["tool_mask"]).sum() / inputs["num_items_in_batch"]

    def score(self, rows: Sequence[Row]) -> list[Tensor]:
        """The log-probabilities, (T,), of each row's tokens under the adapter that is active."""
        self.temperature = rows[0].call.temperature
        tokens = {name: value.to(self.model.device) for name, value in _tokens(rows).items()}
        with torch.no_grad():
            found = self._logps(tokens).cpu()
        return [scored[: len(row.call.completion_ids)] for row, scored in zip(rows, found, strict=True)]

    def _logps(self, inputs: dict[str, Tensor]) -> Tensor:
        """(B, completion), under the adapter that is active."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        return self._get_per_token_logps_and_entropies(self.model, ids, mask, inputs["completion_ids"].shape[1])[0]

    def _get_per_token_logps_and_entropies(
        self, model: PeftModel, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **_: Any
    ) -> tuple[Tensor, Tensor, None]:
        """TRL's hook that scores tokens: here with the shared beginning run once and a flat LM head.

        Takes (B, prompt + completion) ids and mask; returns log-probabilities and entropies (B, completion).
        """
        mask = attention_mask.bool()
        scored = mask[:, -logits_to_keep:]
        head = model.get_output_embeddings()
        with self.accelerator.autocast():
            states = _states_before(model.get_base_model(), input_ids, mask, logits_to_keep)[scored]
            logits = torch.nn.functional.linear(states, head.weight, head.bias)
        distribution = torch.log_softmax(logits.float() / self.temperature, dim=-1)
        chosen = distribution.gather(-1, input_ids[:, -logits_to_keep:][scored][:, None])[:, 0]
        entropy = -(distribution.detach().exp() * distribution.detach()).sum(-1)
        self.scored = chosen.detach()
        nothing = torch.zeros(scored.shape, device=chosen.device)
        return nothing.masked_scatter(scored, chosen), nothing.masked_scatter(scored, entropy), None

    def reset_metrics(self) -> None:
        self._metrics["train"].clear()

    def batch_metrics(self) -> dict[str, float]:
        """What TRL noted of the last micro-batch: means over its tokens."""
        names = {
            "entropy": "entropy",
            "kl": "kl",
            "clip_ratio/region_mean": "clip_share",
            "cispo_clip_ratio": "clip_share",
        }
        noted = self._metrics["train"]
        return {ours: noted[theirs][-1] for theirs, ours in names.items() if noted.get(theirs)}


def off_policy_ratio(logps: Tensor, rule: str) -> Tensor:
    """What stands for the probability ratio of tokens that another program said (see the table above)."""
    if rule == "shaped":
        return logps.exp() / (logps.exp() + SHAPE)
    return (logps - logps.detach()).exp()


def _states_before(model: PreTrainedModel, ids: Tensor, mask: Tensor, completion: int) -> Tensor:
    """The hidden state before each completion position, (B, completion, hidden); it predicts the token there.

    Rows are [padding | prompt | completion | padding]. What all prompts begin with runs once, a prompt that several
    rows have runs once, and every completion goes on from its prompt.
    """
    width = ids.shape[1] - completion
    each = [tuple(row[keep].tolist()) for row, keep in zip(ids[:, :width], mask[:, :width], strict=True)]
    place = {prompt: number for number, prompt in enumerate(dict.fromkeys(each))}
    origin = torch.tensor([place[prompt] for prompt in each], device=ids.device)
    shared = prefix.shared_length(list(place))
    beginning = prefix.run_beginning(model, each[0][:shared])
    own = [torch.tensor(prompt[shared:], device=ids.device) for prompt in place]
    lengths = [torch.ones_like(prompt, dtype=torch.bool) for prompt in own]
    own, seen = (pad_sequence(rows, batch_first=True, padding_side="left") for rows in (own, lengths))
    prompts, hidden = prefix.run_prompts(model, own, seen, beginning)
    last = hidden[origin, -1:]
    if completion == 1:
        return last
    after = prefix.run_completions(model, ids[:, width:-1], mask[:, width:-1], prompts, origin)
    return torch.cat([last, after], dim=1)


def _tokens(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Tokens and masks of one micro-batch, by TRL's names: prompts padded on the left, completions on the right."""
    prompts = [torch.tensor(row.call.prompt_ids) for row in rows]
    completions = [torch.tensor(row.call.completion_ids) for row in rows]
    return {
        "prompt_ids": pad_sequence(prompts, batch_first=True, padding_side="left"),
        "prompt_mask": pad_sequence([torch.ones_like(p) for p in prompts], batch_first=True, padding_side="left"),
        "completion_ids": pad_sequence(completions, batch_first=True),
        "completion_mask": pad_sequence([torch.ones_like(c) for c in completions], batch_first=True),
    }


def _tensors(rows: Sequence[Row], loss: Loss, total: float) -> dict[str, Tensor]:
    """TRL's inputs for one micro-batch."""
    weights = [torch.full((len(row.call.completion_ids),), token_weight(row, loss)) for row in rows]
    old = [torch.tensor(row.scored or row.call.logprobs) for row in rows]
    return {
        **_tokens(rows),
        # TRL multiplies its token mask by this one: the place for w_t.
        "tool_mask": pad_sequence(weights, batch_first=True),
        "old_per_token_logps": pad_sequence(old, batch_first=True),
        "advantages": torch.tensor([row.advantage for row in rows]),
        "num_items_in_batch": torch.tensor(total),
    }


def _config(settings: Settings, device: torch.device) -> GRPOConfig:
    weights = settings.weights
    return GRPOConfig(
        output_dir="unused",  # nothing is ever written there
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=device.type == "cpu",
        bf16=policy.dtype_of(settings.model) == torch.bfloat16,
        fp16=policy.dtype_of(settings.model) == torch.float16,
        seed=settings.seed,
        per_device_train_batch_size=2,  # of the placeholder rows; ours come in micro-batches of their own
        num_generations=2,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        beta=weights.loss.beta,
        epsilon=weights.loss.epsilon_low,
        epsilon_high=weights.loss.epsilon_high,
        temperature=weights.draw.temperature or 1.0,
        max_completion_length=settings.sampling.max_tokens,
        learning_rate=weights.optimizer.learning_rate,
        weight_decay=weights.optimizer.weight_decay,
        max_grad_norm=weights.optimizer.grad_clip,
        max_steps=weights.steps,
        optim="adamw_torch",
    )


def _name(call: Call) -> tuple[str, str, int]:
    """What tells a call from all others; copies of a member have the same."""
    return call.rollout_id, call.module, call.index


def _corrections(rows: Sequence[Row], settings: Correction) -> dict[str, float]:
    """Means over all tokens of a round."""
    ratios = torch.tensor([ratio for row in rows for ratio in row.ratios])
    if not len(ratios):
        return {}
    weights = correction.weights_of(ratios, settings)
    capped = (ratios > settings.cap).float()
    return {"correction/weight": weights.mean().item(), "correction/capped": capped.mean().item()}


def _summed(batches: Sequence[dict[str, float]]) -> dict[str, float]:
    """Losses and tokens summed, the other metrics averaged over the student's own tokens, if there are any."""
    names = dict.fromkeys(name for batch in batches for name in batch)
    sums = {name: sum(batch.get(name, 0.0) for batch in batches) for name in names}
    return {name: total if name in ("loss", "tokens", OWN) else total / sums[OWN] for name, total in sums.items()}


def _step_metrics(steps: Sequence[dict[str, float]], learners: int) -> dict[str, float]:
    return {
        "grad_norm": math.hypot(*(step["grad_norm"] for step in steps)),
        "learning_rate": steps[0]["learning_rate"],
        "updated": sum(step["updated"] for step in steps) / learners,
    }


def _of_round(steps: Sequence[dict[str, float]], wanted: int) -> dict[str, float]:
    """Metrics of all steps of a round: means over tokens, but for what can only be summed, or only begins the round."""
    tokens = sum(step["tokens"] for step in steps)
    means = {name: _mean(name, "tokens", steps) for name in ("loss", "grad_norm")}
    noted = dict.fromkeys(name for step in steps for name in step if name not in _OF_ALL)
    means |= {name: _mean(name, OWN, steps) for name in noted}
    first = {name: steps[0][name] for name in ("sampler_gap", "learning_rate") if name in steps[0]}
    first["sampler_gap_n"] = steps[0][OWN]
    own = sum(step[OWN] for step in steps)
    return means | first | {"tokens": tokens, OWN: own, "updated": sum(step["updated"] for step in steps) / wanted}


def _mean(name: str, by: str, steps: Sequence[dict[str, float]]) -> float:
    total = sum(step[by] for step in steps)
    return sum(step[name] * (step[by] / total) for step in steps if name in step)


def _peft_name(number: int) -> str:
    """PEFT's names of adapters may hold no dots, as modules' do; TRL calls the first one `default`."""
    return f"adapter{number}" if number else "default"


def _no_reward(**_: Any) -> list[float]:
    raise NotImplementedError("rewards are made before the update; TRL must never ask for one")
