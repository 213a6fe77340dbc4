"""What the tasks cost at paper size: rollouts from the presets, tokens from assumptions, hours from a GPU's peak rates.

    python -m bench.cost

1. The plan of a preset says how many rollouts a strategy makes (`twofold.plan`); what MIPROv2's `auto` makes is counted
   here, with DSPy's own formula.
2. A rollout's calls come one after the other, those of a batch of rollouts side by side. A call of a batch reads its
   prompts (2 N FLOP a token, without what all prompts share), then writes its longest answer, one token after the
   other, each in the time that weights and cache take from memory.
3. An update costs 6 N FLOP for each token of prompt and answer: 2 N forward, 2 N backward (a LoRA needs no gradients of
   the other weights), and 2 N for the reference of the KL term.
4. Hours are those of both GPUs, one for vLLM and one for training, though they take turns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log2

from twofold.plan import work
from twofold.presets import preset

SETTINGS = preset("hover", "qwen3-8b")
"""Of all tasks: the paper has one set for each model."""
ROLLOUTS_AT_ONCE = SETTINGS.sampling.shard_size

PARAMETERS = 8.2e9
WEIGHTS = 2 * PARAMETERS
"""Bytes, in bfloat16."""
CACHE = 36 * 2 * 8 * 128 * 2
"""Bytes of one token's keys and values: layers, both, heads, width, bfloat16."""

READING, WRITING, TRAINING = 0.5, 0.6, 0.25
"""Shares of the peak that are reached: of FLOP in prompts, of memory in answers, of FLOP in updates of single rows."""
LONGEST = 1.5
"""The longest answer of a batch, in means."""
ROUND = 5.0
"""Seconds of a round for all else: handing the adapter over, records, bookkeeping."""
GPUS = 2


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    flop: float
    """A second, dense bfloat16."""
    memory: float
    """Bytes a second."""
    price: float
    """Dollars an hour, rented."""


H100 = Gpu("H100 80 GB", 989e12, 3.35e12, 3.0)
A100 = Gpu("A100 80 GB", 312e12, 2.04e12, 1.8)


@dataclass(frozen=True, slots=True)
class Call:
    """One module's calls in a rollout, of the model that is trained."""

    times: int
    prompt: int
    """Tokens; `shared` of them begin every prompt of the module."""
    shared: int
    answer: int
    """Tokens, in the mean."""


@dataclass(frozen=True, slots=True)
class Task:
    sizes: dict[str, int]
    calls: tuple[Call, ...]
    outside: float = 0.0
    """Dollars that other LMs cost in a rollout."""
    waiting: float = 0.0
    """Seconds that a batch waits for them."""

    @property
    def tokens_in(self) -> int:
        return sum(call.times * call.prompt for call in self.calls)

    @property
    def tokens_out(self) -> int:
        return sum(call.times * call.answer for call in self.calls)


TASKS = {
    "banking77": Task({"train": 250, "dev": 250, "test": 500}, (Call(1, 2000, 1950, 150),)),
    # Untrusted LM: 200 tokens in and 500 out; judge: twice 1,400 in and 100 out; $0.40 and $1.60 a million.
    "papillon": Task(
        {"train": 111, "dev": 221, "test": 221},
        (Call(1, 650, 300, 250), Call(1, 1250, 300, 400)),
        outside=(3000 * 0.40 + 700 * 1.60) / 1e6,
        waiting=20.0,
    ),
    "hover": Task({"train": 500, "dev": 250, "test": 500}, (Call(4, 380, 200, 100), Call(3, 3600, 250, 200))),
}
"""Sizes as in the paper. Prompts are typical ones in DSPy's ChatAdapter, four characters a token; answers: guesses."""


@dataclass(frozen=True, slots=True)
class Cost:
    rollouts: int
    hours: float
    dollars: float


def main() -> None:
    print("\n".join(rows()))


def rows() -> list[str]:
    """The table of docs/tasks.md, line by line."""
    lines = [
        "| task | step | rollouts | tokens in | tokens out | hours, 2 H100 | cost | hours, 2 A100 | cost |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, task in TASKS.items():
        for step, cost in (("`p`", prompts), ("`w`", weights), ("all", everything)):
            lines.append(_row(name, step, task, cost))
    return lines


def _row(name: str, step: str, task: Task, cost: Callable[[Task, Gpu], Cost]) -> str:
    costs = [cost(task, gpu) for gpu in (H100, A100)]
    rollouts = costs[0].rollouts
    tokens = [f"{rollouts * each / 1e6:.1f} M" for each in (task.tokens_in, task.tokens_out)]
    money = [part for one in costs for part in (f"{one.hours:.1f}", f"${ceil(one.dollars)}")]
    return f"| {' | '.join([name, step, f'{rollouts:,}', *tokens, *money])} |"


def prompts(task: Task, gpu: Gpu) -> Cost:
    """Step `p`, with its evaluation on dev."""
    return _cost(task, gpu, tried(task) + task.sizes["dev"])


def weights(task: Task, gpu: Gpu) -> Cost:
    """Step `w`, with its evaluations on dev."""
    wanted = SETTINGS.weights
    each = wanted.examples_per_round * wanted.rollouts_per_example
    update = each * (task.tokens_in + task.tokens_out) * 6 * PARAMETERS / (TRAINING * gpu.flop)
    return _cost(task, gpu, planned(task, "weights"), wanted.rounds * (update + ROUND))


def everything(task: Task, gpu: Gpu) -> Cost:
    """All strategies, and test: one step `p`, and two steps `w`, because `together` trains other prompts."""
    other = _cost(task, gpu, planned(task, "all") + planned(task, "compare"))
    parts = [prompts(task, gpu), weights(task, gpu), weights(task, gpu), other]
    return Cost(*(sum(getattr(part, of) for part in parts) for of in ("rollouts", "hours", "dollars")))


def planned(task: Task, stage: str) -> int:
    """Rollouts of a stage, by the plan."""
    return sum(one.rollouts for one in work(SETTINGS, task.sizes, len(task.calls), 0) if one.stage == stage)


def tried(task: Task) -> int:
    """Rollouts of MIPROv2 with `auto=medium` (12 candidates), as DSPy 3.4.1 sets it.

    With 2 variables for each predictor, max(2 · variables · log2 12, 1.5 · 12) trials on a minibatch; the first, the
    last and every fifth also on all of the validation part; and one run of the other examples for each set of demos.
    """
    trials = int(max(2 * 2 * len(task.calls) * log2(12), 1.5 * 12))
    validation = int(task.sizes["train"] * SETTINGS.prompts.validation_share)
    demos = 12 * (task.sizes["train"] - validation)
    full = 2 + trials // SETTINGS.prompts.full_every
    return trials * SETTINGS.prompts.minibatch + full * min(300, validation) + demos


def _cost(task: Task, gpu: Gpu, rollouts: int, more: float = 0.0) -> Cost:
    """Of so many rollouts, and `more` seconds beside them."""
    hours = (ceil(rollouts / ROLLOUTS_AT_ONCE) * seconds_of_batch(task, gpu) + more) / 3600
    return Cost(rollouts, hours, hours * GPUS * gpu.price + rollouts * task.outside)


def seconds_of_batch(task: Task, gpu: Gpu) -> float:
    """A batch of rollouts, side by side."""
    return task.waiting + sum(call.times * _seconds_of_call(call, gpu) for call in task.calls)


def _seconds_of_call(call: Call, gpu: Gpu) -> float:
    read = ROLLOUTS_AT_ONCE * (call.prompt - call.shared) * 2 * PARAMETERS / (READING * gpu.flop)
    token = (WEIGHTS + ROLLOUTS_AT_ONCE * (call.prompt + call.answer / 2) * CACHE) / (WRITING * gpu.memory)
    return read + LONGEST * call.answer * token


if __name__ == "__main__":
    main()
