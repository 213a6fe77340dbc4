"""Runs a program on examples, several times each, and records everything that happened.

1. The jobs are cut into shards of `sampling.shard_size`; the rollouts of a shard run side by side, a thread each.
2. Each rollout runs the program on its example under a `Recorder`; LM calls meet in a `Rendezvous` and are batched.
3. The metric rewards what the program returned.
4. A rollout that failed keeps its place, with the calls made so far and the reward its kind of failure is given.
"""

import inspect
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

import dspy
from dspy.utils.exceptions import AdapterParseError, ContextWindowExceededError, LMError, LMTimeoutError
from pydantic_core import to_jsonable_python
from tqdm import tqdm

from twofold.adapters import make_adapter
from twofold.errors import PipelineError, TwofoldError
from twofold.examples import example_id
from twofold.hints import ModuleHints, Prompt, with_hints
from twofold.lm import Recorder, module_lm, parsed_share, recording
from twofold.programs import bind
from twofold.records import STUDENT, Call, Rollout, Status, policy_of, tokens_of
from twofold.sampling import Engine
from twofold.sampling.rendezvous import Rendezvous, Stopwatch
from twofold.seeds import derive
from twofold.servers import Server, Tally, asking, hosted_lm
from twofold.settings import Draw, Settings
from twofold.sources import Source, SourceAdapter, staged

Metric = Callable[..., Any]
Trace = list[tuple[Any, dict[str, Any], Any]]
Stage = tuple[dspy.Module, dspy.Adapter | SourceAdapter]
"""A program, and how its modules ask."""

_PATIENCE = 0.1
"""Seconds between two looks at rollouts that are about to run out of time."""


class _Bars(WeakSet):
    """tqdm's set of bars, without an error for a bar that is gone already.

    Whenever a `dspy.Parallel` starts, DSPy empties this set, and with it the bars of all other threads; a bar that is
    switched off then fails to take itself out, and the rollout whose program made it would be a `program_error`.
    """

    remove = WeakSet.discard


tqdm._instances = _Bars()


@dataclass(frozen=True, slots=True)
class Job:
    """One rollout that is wanted."""

    example: dspy.Example
    example_id: str
    number: int
    """This is the n-th rollout of its example, from 0."""
    seed: int
    rollout_id: str
    module_hints: ModuleHints = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands, for a person to look at; no record depends on it."""

    done: int
    total: int
    statuses: dict[str, int]
    tokens_in: int
    tokens_out: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per second."""
        return self.tokens_out / self.seconds

    @property
    def eta(self) -> float:
        """Seconds the rest will take at this speed."""
        return self.seconds / self.done * (self.total - self.done)


def plan(examples: Sequence[dspy.Example], per_example: int, seed: int, *names: str | int) -> list[Job]:
    """`per_example` jobs for each example, the jobs of one example next to each other.

    `names` tell this use of the examples from others (a stage, a round): they begin the rollout ids and name the seeds.
    """
    return plan_prompts([Prompt(example_id(example), example) for example in examples], per_example, seed, *names)


def plan_prompts(prompts: Sequence[Prompt], per_prompt: int, seed: int, *names: str | int) -> list[Job]:
    """Jobs as of `plan`, for prompts that may hold hints; a prompt's id is its rollouts' `example_id`."""
    jobs = []
    for prompt in prompts:
        for number in range(per_prompt):
            names_of = (*names, prompt.prompt_id, number)
            rollout_id = "/".join(map(str, names_of))
            own = derive(seed, *names_of)
            jobs.append(Job(prompt.example, prompt.prompt_id, number, own, rollout_id, prompt.module_hints))
    return jobs


def run(
    program: dspy.Module,
    jobs: Sequence[Job],
    metric: Metric,
    engine: Engine | Server,
    settings: Settings,
    draw: Draw,
    policies: Mapping[str, str] = MappingProxyType({}),
    source: Source | None = None,
    endpoints: Mapping[str, dspy.LM] = MappingProxyType({}),
    parse_retries: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> list[Rollout]:
    """One rollout per job, in the jobs' order. Equal arguments give equal rollouts, whatever the threads do.

    The program is shared by all threads, as in DSPy's own evaluation: its `forward` must keep no state in the program.

    Args:
        metric: takes (example, prediction), (example, prediction, trace) or the five arguments of a GEPA metric, and
            returns a number or named channels: with `score` the reward is the score, else it is `accuracy`.
        engine: what answers for the modules; a server draws as its own settings say, and gives texts without tokens.
        policies: digests of the adapters that answer, by module, or one by `all-modules`; the engine must have loaded
            them. Without any, the base model answers.
        source: a program that runs in the student's place, with its own LM, and whose answers are recorded as the
            student's; None runs the student itself.
        endpoints: LMs that the program and the metric ask by name, in `dspy.settings.endpoints`.
        parse_retries: how often a module may ask again after an answer that does not parse.
        progress: called after each rollout.

    Raises:
        PipelineError: the metric cannot be called with any of these arguments.
        TwofoldError: what the engine raised and somebody must mend; no rollout is to blame.
        SettingsError: an endpoint refuses all requests, or its budget is used up.
    """

    def lm_of(module: str) -> dspy.LM:
        if isinstance(engine, Server):
            return hosted_lm(module, engine)
        return module_lm(module, engine, draw, settings.sampling.max_tokens, policy_of(module, policies))

    bound = bind(program, lm_of)
    adapter = make_adapter(settings.sampling.adapter, parse_retries)

    def stage(hints: ModuleHints) -> Stage:
        if source is None:
            return with_hints(bound, hints), adapter
        return staged(source, program, hints, adapter, engine, draw, settings.sampling.max_tokens)

    runner = _Runner(
        stages={hints: stage(hints) for hints in {job.module_hints for job in jobs}},
        metric=_with_trace(metric),
        engine=engine,
        settings=settings,
        source=source.name if source else STUDENT,
        endpoints=endpoints,
    )
    size = settings.sampling.shard_size
    report = _reporter(len(jobs), progress)
    rollouts = []
    for start in range(0, len(jobs), size):
        rollouts += runner.shard(jobs[start : start + size], report)
    return rollouts


@dataclass(slots=True)
class _Run:
    """A rollout on its way."""

    job: Job
    order: int
    stopwatch: Stopwatch
    future: "Future[Rollout]"
    recorder: Recorder | None = None
    tally: Tally = field(default_factory=Tally)


@dataclass(frozen=True, slots=True)
class _Runner:
    stages: Mapping[ModuleHints, Stage]
    """By the hints in the modules' prompts."""
    metric: Callable[[dspy.Example, Any, Trace], Any]
    engine: Engine | Server
    settings: Settings
    source: str
    endpoints: Mapping[str, dspy.LM]

    def shard(self, jobs: Sequence[Job], report: Callable[[Rollout], None]) -> list[Rollout]:
        """Run all jobs at once; the result is in their order."""
        meeting = Rendezvous(self.engine)
        runs = [_Run(job, n, Stopwatch(self.settings.sampling.timeout), Future()) for n, job in enumerate(jobs)]
        for run in runs:
            meeting.enter(run.order, run.stopwatch)
        try:
            for run in runs:
                # Threads are daemons: one that hangs in the program's own code must not keep the process alive. Each
                # has a copy of the caller's context, and with it DSPy's settings.
                threading.Thread(target=copy_context().run, args=(self._thread, run, meeting), daemon=True).start()
            done = dict(self._collect(runs, meeting, report))
        finally:
            for run in runs:
                meeting.leave(run.order)
        if meeting.failure:
            raise meeting.failure
        return [done[run.order] for run in runs]

    def _collect(
        self, runs: list[_Run], meeting: Rendezvous, report: Callable[[Rollout], None]
    ) -> Iterator[tuple[int, Rollout]]:
        """Each rollout as it ends or runs out of time."""
        waiting = {run.future: run for run in runs}
        while waiting:
            patience = max(_PATIENCE, min(run.stopwatch.left for run in waiting.values()))
            ended, _ = wait(waiting, timeout=patience, return_when=FIRST_COMPLETED)
            late = [future for future, run in waiting.items() if future not in ended and run.stopwatch.expired]
            for future in [*ended, *late]:
                run = waiting.pop(future)
                meeting.leave(run.order)
                rollout = future.result() if future in ended else self._late(run)
                report(rollout)
                yield run.order, rollout

    def _thread(self, run: _Run, meeting: Rendezvous) -> None:
        try:
            with asking(self.endpoints, run.tally):
                rollout = self._rollout(run, meeting)
            run.future.set_result(replace(rollout, usage=run.tally.usage))
        except BaseException as error:
            # Only what is no failure of the rollout comes here (SystemExit, an endpoint's refusal): it ends the run.
            run.future.set_exception(error)

    def _rollout(self, run: _Run, meeting: Rendezvous) -> Rollout:
        job = run.job
        run.recorder = recorder = Recorder(job.rollout_id, job.seed, lambda request: meeting.sample(run.order, request))
        try:
            program, adapter = self.stages[job.module_hints]
            with recording(recorder, adapter) as trace:
                prediction = program(**job.example.inputs())
        except Exception as error:
            _check_goes_on(error)
            reward = self.settings.rewards.of(status := _status(error), parsed_share(error))
            return self._failed(job, recorder.calls, status, reward, _said(error))
        finally:
            # The metric needs no answers from the engine: nobody has to wait for it.
            meeting.leave(run.order)
        try:
            reward, channels = _read_metric(self.metric(job.example, prediction, trace))
            output = _jsonable(prediction)
        except Exception as error:
            _check_goes_on(error)
            # A judge that fails, or that nobody understands, is no fault of the program's.
            status = "lm_error" if isinstance(error, LMError | AdapterParseError) else "program_error"
            reward = self.settings.rewards.of(status)
            return self._failed(job, recorder.calls, status, reward, f"in the metric: {_said(error)}")
        return Rollout(
            rollout_id=job.rollout_id,
            example_id=job.example_id,
            seed=job.seed,
            source=self.source,
            calls=recorder.calls,
            output=output,
            reward=reward,
            channels=channels,
        )

    def _late(self, run: _Run) -> Rollout:
        calls = run.recorder.calls if run.recorder else ()
        seconds = self.settings.sampling.timeout
        text = f"TimeoutError: the rollout did not end within {seconds:g} seconds. See sampling.timeout."
        failed = self._failed(run.job, calls, "timeout", self.settings.rewards.timeout, text)
        return replace(failed, usage=run.tally.usage)

    def _failed(self, job: Job, calls: tuple[Call, ...], status: Status, reward: float, error: str) -> Rollout:
        return Rollout(
            rollout_id=job.rollout_id,
            example_id=job.example_id,
            seed=job.seed,
            source=self.source,
            calls=calls,
            output={},
            reward=reward,
            status=status,
            error=error,
        )


def scored(metric: Metric) -> Callable[..., float]:
    """The metric as DSPy's optimizers call it, (example, prediction, trace), and as the plain reward."""
    full = _with_trace(metric)
    return lambda example, prediction, trace=None, *_: _read_metric(full(example, prediction, trace))[0]


def _check_goes_on(error: Exception) -> None:
    """Raise what DSPy made an LM error of although it concerns all rollouts: an endpoint's refusal."""
    if isinstance(error, LMError) and isinstance(error.__cause__, TwofoldError):
        raise error.__cause__


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _status(error: Exception) -> Status:
    match error:
        case AdapterParseError():
            return "parse_error"
        case ContextWindowExceededError():
            return "context_overflow"
        case LMTimeoutError():
            return "timeout"
        case LMError():
            return "lm_error"
    return "program_error"


def _with_trace(metric: Metric) -> Callable[[dspy.Example, Any, Trace], Any]:
    """The metric as a function of example, prediction and trace."""
    parameters = inspect.signature(metric)
    for count, call in (
        (3, metric),
        (2, lambda example, prediction, trace: metric(example, prediction)),
        (5, lambda example, prediction, trace: metric(example, prediction, trace, None, None)),
    ):
        try:
            parameters.bind(*range(count))
        except TypeError:
            continue
        return call
    raise PipelineError(f"The metric {metric!r} must take (example, prediction, trace), not {parameters}.")


def _read_metric(value: Any) -> tuple[float, dict[str, float]]:
    """Reward and channels out of what a metric returned; raises `ValueError` for what is no finite number."""
    named = value.toDict() if isinstance(value, dspy.Example) else value
    if not isinstance(named, dict):
        named = {"score": named}
    # A GEPA metric also returns its feedback, a text.
    channels = {name: float(part) for name, part in named.items() if not isinstance(part, str | None)}
    if not channels.keys() & {"score", "accuracy"} or not all(map(math.isfinite, channels.values())):
        raise ValueError(f"The metric returned {value!r}; it must be a finite number, or a dict with `score`.")
    reward = channels.pop("score", channels.get("accuracy"))
    return reward, {"accuracy": reward, **channels}


def _jsonable(prediction: Any) -> dict[str, Any]:
    fields = prediction.toDict() if isinstance(prediction, dspy.Example) else {"output": prediction}
    plain = to_jsonable_python(fields, fallback=str)
    # JSON has no NaN; a record must hold what a strict reader can read.
    return json.loads(json.dumps(plain), parse_constant=lambda _: None)


def _reporter(total: int, progress: Callable[[Progress], None] | None) -> Callable[[Rollout], None]:
    start = time.monotonic()
    statuses: Counter[str] = Counter()
    tokens: Counter[str] = Counter()

    def report(rollout: Rollout) -> None:
        statuses[rollout.status] += 1
        tokens.update(tokens_of(rollout.calls))
        if progress is not None:
            seconds = max(time.monotonic() - start, 1e-9)
            progress(Progress(statuses.total(), total, dict(statuses), **tokens, seconds=seconds))

    return report
