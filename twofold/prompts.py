"""Prompt optimization: DSPy's optimizers, run on our engine and recorded like rollouts.

1. The training examples are cut in two: one part gives demos, the other, `validation_share` of them, scores candidates.
   So no demo is ever an example that its program is scored on.
2. The program's rollouts on the first part are made in one batch. Bootstrapping then replays them.
3. MIPROv2 (arXiv 2406.11695) makes sets of demos out of successful rollouts, lets an LM propose instructions, and
   searches the combinations, the program's own demos and instructions among them, with a tree-structured Parzen
   estimator. GEPA (arXiv 2507.19457) rewrites instructions by
   reflecting on rollouts. Labeled few-shot takes examples as demos as they are.
4. Every evaluation of a candidate is a batch of rollouts from `RolloutCache`. A candidate that cannot be parsed, times
   out or raises gets the reward of its kind of failure; no evaluation ends the search.
5. The candidate with the highest score on the whole validation part wins; of equal ones the first, which is the program
   as it came.
"""

import contextlib
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

import dspy
from dspy.propose import GroundedProposer
from dspy.teleprompt.gepa.gepa_utils import DspyAdapter
from dspy.utils.exceptions import AdapterParseError, LMError

from twofold import digests, programs
from twofold.adapters import make_adapter
from twofold.endpoints import lm_of, money_for
from twofold.errors import SettingsError
from twofold.lm import Recorder, module_lm, recording
from twofold.records import BASE_POLICY, Call, Rollout, money_of, policy_of, read_json, tokens_of, usage_of, write_json
from twofold.replay import Replay, RolloutCache
from twofold.rollouts import Metric, plan, run, scored
from twofold.sampling import Engine
from twofold.seeds import derive
from twofold.servers import asking
from twofold.settings import Draw, Endpoint, Settings

PROPOSER = "proposer"
"""Name of the module that the calls of the proposing LM are recorded under."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One evaluation of one candidate."""

    program: str
    """Digest of the candidate's state."""
    instructions: dict[str, str]
    """By module."""
    demos: dict[str, int]
    """How many, by module."""
    score: float
    """Mean reward, over `n` examples."""
    n: int
    full: bool
    """Whether this was the whole validation part."""


@dataclass(frozen=True, slots=True)
class Optimized:
    """What an optimizer found."""

    program: dspy.Module
    """The best candidate, without LMs of ours."""
    trials: list[Trial]
    rollouts: list[Rollout]
    """Of all trials and of bootstrapping; a rollout's id begins with `prompts/` and the program's digest."""
    lost: dict[str, int]
    """How many proposals could not be made, by reason."""
    spent: dict[str, float]
    """`rollouts`, `tokens_in`, `tokens_out` and `money` of all that was run in this process: what a cache gave costs
    nothing. An endpoint's tokens count as money, at its prices."""


@dataclass
class _Search:
    """What all optimizers work with."""

    program: dspy.Module
    demo_part: list[dspy.Example]
    validation: list[dspy.Example]
    metric: Callable[..., float]
    cache: RolloutCache
    replay: Replay
    settings: Settings
    progress: Callable[[Trial], None]
    work: Path
    policies: dict[str, str]
    callbacks: list[Any] = field(default_factory=lambda: list(dspy.settings.callbacks))
    trials: list[Trial] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    best: dspy.Module | None = None

    def lm_of(self, module: str) -> dspy.LM:
        sampling = self.settings.sampling
        policy = policy_of(module, self.policies)
        return module_lm(module, self.replay.engine, self.settings.evaluate.draw, sampling.max_tokens, policy)

    def seed(self, *names: str | int) -> int:
        return derive(self.settings.seed, "prompts", *names)

    def rollouts(self, candidate: dspy.Module, examples: Sequence[dspy.Example]) -> list[Rollout]:
        """The candidate's rollouts; whoever runs it on these examples from now on is answered from them."""
        # The recorder of the search is a callback; the rollouts have recorders of their own.
        with dspy.context(callbacks=self.callbacks):
            found = self.cache(self.released(candidate), examples)
        self.replay.learn(found)
        return found

    def released(self, candidate: dspy.Module) -> dspy.Module:
        """A copy without the LMs that the search gave to it."""
        copy = candidate.deepcopy()
        came = programs.modules(self.program)
        for name, predictor in programs.modules(copy).items():
            predictor.lm = came[name].lm
        return copy

    def score(self, candidate: dspy.Module, examples: Sequence[dspy.Example]) -> float:
        """The candidate's mean reward on the examples; it is remembered when it is the best on the whole part."""
        value = fmean(rollout.reward for rollout in self.rollouts(candidate, examples))
        full = len(examples) == len(self.validation)
        trial = _trial(candidate, value, len(examples), full)
        best = max((one.score for one in self.trials if one.full), default=None)
        if full and (best is None or value > best):
            self.best = self.released(candidate)
        if trial not in self.trials:
            self.trials.append(trial)
            self.progress(trial)
        return value


def optimize(
    program: dspy.Module,
    examples: Sequence[dspy.Example],
    metric: Metric,
    engine: Engine,
    settings: Settings,
    policies: dict[str, str],
    work: Path,
    endpoints: Mapping[str, dspy.LM] = MappingProxyType({}),
    progress: Callable[[Trial], None] = lambda trial: None,
) -> Optimized:
    """Search better instructions and demos for the program.

    Equal arguments give the same program, whether `work` is empty or holds what a killed search left there.

    Args:
        examples: training examples; no others are ever looked at.
        policies: digests of the adapters that the modules answer with (see `rollouts.run`).
        endpoints: LMs that the program and the metric ask by name.
        work: folder for finished evaluations, for this program, these weights and these settings alone.
        progress: called after each evaluation.

    Raises:
        SettingsError: there are too few examples, or the proposing LM's key is not in the environment.
    """
    demo_part, validation = _parts(examples, settings)
    draw = settings.evaluate.draw

    def roll(candidate: dspy.Module, wanted: Sequence[dspy.Example]) -> list[Rollout]:
        jobs = plan(wanted, 1, settings.seed, "prompts", digests.short(programs.digest(candidate)))
        return run(candidate, jobs, metric, engine, settings, draw, policies, endpoints=endpoints)

    cache = RolloutCache(work / "rollouts", roll)
    search = _Search(
        program=program,
        demo_part=demo_part,
        validation=validation,
        metric=scored(metric),
        cache=cache,
        replay=Replay(engine),
        settings=settings,
        progress=progress,
        work=work,
        policies=policies,
    )
    recorder = Recorder("prompts/search", search.seed("search"), search.replay.sample)
    adapter = make_adapter(settings.sampling.adapter)
    with _silence(), asking(endpoints), recording(recorder, adapter), dspy.track_usage() as usage:
        match settings.prompts.optimizer:
            case "mipro":
                _mipro(search)
            case "gepa":
                _gepa(search)
            case "labeled":
                _labeled(search)
    money = _money(settings.prompts.proposer, usage.get_total_tokens())
    spent = {**_spent(cache, recorder.calls), **usage_of(cache.made), "money": money + money_of(cache.made)}
    return Optimized(search.best, search.trials, cache.kept(), dict(search.lost), spent)


def _parts(examples: Sequence[dspy.Example], settings: Settings) -> tuple[list[dspy.Example], list[dspy.Example]]:
    """The part that gives demos and the part that scores, in an order of our own."""
    order = list(examples)
    random.Random(derive(settings.seed, "prompts", "parts")).shuffle(order)
    size = round(len(order) * settings.prompts.validation_share)
    if not 0 < size < len(order):
        raise SettingsError(
            f"prompts.validation_share {settings.prompts.validation_share} leaves {len(order) - size} of {len(order)} "
            f"training examples for demos and {size} for scoring; both parts need at least one."
        )
    return order[size:], order[:size]


def _mipro(search: _Search) -> None:
    wanted = search.settings.prompts
    demo_sets = wanted.demo_sets
    if not wanted.bootstrapped_demos and wanted.labeled_demos:
        # DSPy draws the size of the fourth set and later ones from 1 to the number of bootstrapped demos.
        demo_sets = min(demo_sets, 3)
    search.rollouts(search.program, search.demo_part)
    student = programs.bind(search.program, search.lm_of)
    teacher = student.deepcopy()
    # Or else DSPy would take the program's own demos away and put labeled ones in their place.
    teacher._compiled = True
    optimizer = _Mipro(search, demo_sets)
    optimizer.compile(
        student,
        trainset=search.demo_part,
        teacher=teacher,
        valset=search.validation,
        num_trials=None if wanted.auto else wanted.trials,
        minibatch=wanted.minibatch < len(search.validation),
        minibatch_size=min(wanted.minibatch, len(search.validation)),
        minibatch_full_eval_steps=wanted.full_every,
        program_aware_proposer=wanted.program_aware,
        data_aware_proposer=wanted.data_aware,
        tip_aware_proposer=wanted.tip_aware,
        fewshot_aware_proposer=wanted.demo_aware,
    )


class _Mipro(dspy.MIPROv2):
    """DSPy's MIPROv2 with our evaluations in place of its own."""

    def __init__(self, search: _Search, demo_sets: int):
        wanted = search.settings.prompts
        proposer = _proposer(search)
        super().__init__(
            metric=search.metric,
            prompt_model=proposer,
            task_model=proposer,  # never asked: every predictor has an LM
            max_bootstrapped_demos=wanted.bootstrapped_demos,
            max_labeled_demos=wanted.labeled_demos,
            auto=wanted.auto,
            num_candidates=None if wanted.auto else max(demo_sets, 1),
            max_errors=len(search.demo_part) * (demo_sets + 1),
            seed=search.seed("mipro") % 2**32,
            init_temperature=wanted.temperature,
            metric_threshold=wanted.threshold,
        )
        self.search = search
        if not wanted.auto:
            self.num_instruct_candidates = wanted.instructions

    def _bootstrap_fewshot_examples(self, program: dspy.Module, *rest: Any, **named: Any) -> dict[int, list[Any]]:
        """DSPy's sets of demos, by predictor, the first of which is what the program came with.

        DSPy has the empty set there, and credits it with the score of the program as it came.
        """
        sets = super()._bootstrap_fewshot_examples(program, *rest, **named)
        own = [predictor.demos for predictor in program.predictors()]
        return {k: [own[k], *found[1:]] for k, found in sets.items()}

    def _propose_instructions(
        self,
        program: dspy.Module,
        trainset: list[dspy.Example],
        demo_candidates: Any,
        view_data_batch_size: int,
        program_aware: bool,
        data_aware: bool,
        tip_aware: bool,
        demo_aware: bool,
        num_instruct_candidates: int,
    ) -> dict[int, list[str]]:
        """DSPy's, but a proposal that fails is left out, and proposals are made once."""
        kept = self.search.work / "proposals.json"
        own = [predictor.signature.instructions for predictor in program.predictors()]
        if kept.is_file():
            proposals = read_json(kept)["instructions"]
        else:
            proposer = _Proposer(
                search=self.search,
                program=program,
                trainset=trainset,
                prompt_model=self.prompt_model,
                view_data_batch_size=view_data_batch_size,
                program_aware=program_aware,
                use_dataset_summary=data_aware,
                use_task_demos=demo_aware,
                use_tip=tip_aware,
                set_tip_randomly=tip_aware,
                use_instruct_history=False,
                set_history_randomly=False,
                # Of its own: what it draws must not move the search when the proposals are read instead.
                rng=random.Random(self.search.seed("proposals")),
                init_temperature=self.init_temperature,
            )
            found = proposer.propose_instructions_for_program(
                trainset, program, demo_candidates, trial_logs={}, N=num_instruct_candidates
            )
            proposals = [found[k] for k in range(len(own))]
            write_json({"instructions": proposals}, kept)
        # As in DSPy, the program's own instruction takes the place of the first proposal.
        return {k: list(dict.fromkeys([mine, *filter(None, proposals[k][1:])])) for k, mine in enumerate(own)}

    def _optimize_prompt_parameters(
        self, program: dspy.Module, instructions: Any, demos: Any, evaluate: Any, *rest: Any
    ) -> Any:
        def evaluate_ours(candidate: dspy.Module, devset: list[dspy.Example], **_: Any) -> dspy.Prediction:
            return dspy.Prediction(score=100 * self.search.score(candidate, devset), results=[])

        return super()._optimize_prompt_parameters(program, instructions, demos, evaluate_ours, *rest)

    def _perform_full_evaluation(self, *arguments: Any) -> Any:
        _, _, tried, done, _, _, _, calls, _, score, program, *_ = arguments
        # DSPy raises when every combination it tried has been evaluated in full already.
        if tried.keys() <= done.keys():
            return score, program, calls
        return super()._perform_full_evaluation(*arguments)


class _Proposer(GroundedProposer):
    """DSPy's, but a proposal that fails is empty and counted."""

    def __init__(self, search: _Search, **named: Any):
        super().__init__(**named)
        self.search = search

    def propose_instruction_for_predictor(self, *args: Any, **named: Any) -> str:
        try:
            return super().propose_instruction_for_predictor(*args, **named)
        except (LMError, AdapterParseError) as error:
            self.search.lost[f"proposal: {type(error).__name__}"] += 1
            return ""


def _gepa(search: _Search) -> None:
    from dspy.teleprompt.gepa import InstructionProposer
    from gepa import optimize as evolve

    wanted = search.settings.prompts
    student = programs.bind(search.program, search.lm_of)
    evolve(
        seed_candidate={name: p.signature.instructions for name, p in student.named_predictors()},
        trainset=search.demo_part,
        valset=search.validation,
        adapter=_GepaAdapter(
            search,
            student_module=student,
            metric_fn=search.metric,
            feedback_map={name: _feedback(search) for name, _ in student.named_predictors()},
            num_threads=1,  # the rollouts were made in batches before; this replays them
            rng=random.Random(search.seed("gepa", "adapter")),
            reflection_lm=_proposer(search),
            custom_instruction_proposer=InstructionProposer(adapter=make_adapter(search.settings.sampling.adapter)),
        ),
        reflection_minibatch_size=wanted.reflection_batch,
        max_metric_calls=wanted.metric_calls,
        skip_perfect_score=True,
        perfect_score=1.0,
        raise_on_exception=False,
        display_progress_bar=False,
        logger=_Quiet(),
        seed=search.seed("gepa") % 2**32,
    )


class _GepaAdapter(DspyAdapter):
    """DSPy's, with rollouts that were made in a batch before it runs the program."""

    def __init__(self, search: _Search, **named: Any):
        super().__init__(**named)
        self.search = search

    def evaluate(self, batch: list[dspy.Example], candidate: dict[str, str], *args: Any, **named: Any) -> Any:
        self.search.score(self.build_program(candidate), batch)
        return super().evaluate(batch, candidate, *args, **named)


class _Quiet:
    def log(self, message: str) -> None:
        """GEPA's logger; our progress says what happens."""


def _feedback(search: _Search) -> Callable[..., dict[str, Any]]:
    def feedback(module_inputs: Any, module_outputs: Any, captured_trace: Any, **_: Any) -> dict[str, Any]:
        value = search.metric(module_inputs, module_outputs, captured_trace)
        return {"score": value, "feedback": f"This trajectory got a score of {value}."}

    return feedback


def _labeled(search: _Search) -> None:
    optimizer = dspy.LabeledFewShot(k=search.settings.prompts.labeled_demos)
    # The part is in an order of our own; sampling would be by a seed of DSPy's.
    candidate = optimizer.compile(search.program, trainset=search.demo_part, sample=False)
    search.score(search.program, search.validation)
    search.score(candidate, search.validation)


def _proposer(search: _Search) -> dspy.LM:
    """The LM that proposes instructions: an endpoint when one is configured, else the base model."""
    wanted = search.settings.prompts
    if wanted.proposer is None:
        draw = Draw(temperature=wanted.temperature)
        return module_lm(PROPOSER, search.replay.engine, draw, wanted.proposal_tokens, BASE_POLICY)
    return lm_of(wanted.proposer, "prompts.proposer", wanted.proposal_tokens, wanted.temperature)


def _trial(candidate: dspy.Module, score: float, n: int, full: bool) -> Trial:
    found = programs.modules(candidate)
    return Trial(
        program=digests.short(programs.digest(candidate)),
        instructions={name: predictor.signature.instructions for name, predictor in found.items()},
        demos={name: len(predictor.demos) for name, predictor in found.items()},
        score=score,
        n=n,
        full=full,
    )


def _spent(cache: RolloutCache, calls: Sequence[Call]) -> dict[str, float]:
    everything = [*calls, *(call for rollout in cache.made for call in rollout.calls)]
    return {"rollouts": float(len(cache.made)), **{name: float(count) for name, count in tokens_of(everything).items()}}


def _money(endpoint: Endpoint | None, usage: dict[str, dict[str, Any]]) -> float:
    used = usage.get(f"openai/{endpoint.model}", {}) if endpoint else {}
    return money_for(endpoint, used.get("prompt_tokens", 0), used.get("completion_tokens", 0))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Without what DSPy's optimizers print: their bars, and log lines that hold examples."""
    with open(os.devnull, "w") as nowhere:
        dspy.disable_logging()
        try:
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                yield
        finally:
            dspy.enable_logging()
