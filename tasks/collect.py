"""Collect: run a program on examples and write down its rollouts, one step per shard."""

import sys
from collections.abc import Callable
from pathlib import Path

from tasks.candidate import Candidate
from tasks.source import Source
from tasks.step import Manifest, step
from twofold import rollouts
from twofold.endpoints import Ledger
from twofold.examples import example_id, read_examples
from twofold.hints import prompts, read_hints
from twofold.programs import load_pipeline
from twofold.records import money_of, tokens_of, usage_of, write_rollouts
from twofold.rollouts import Progress
from twofold.settings import Budget, Draw, Settings


@step(reads=("seed", "model.device", "model.dtype", "sampling", "rewards", "asked"))
def collect(
    folder: Path,
    *,
    settings: Settings,
    candidate: Candidate,
    data: Manifest,
    split: str,
    examples: list[str],
    per_example: int,
    names: list[str | int],
    draw: Draw,
    parse_retries: int,
    judge: str,
    shard: int,
    pool: Manifest | None = None,
    source: Source | None = None,
) -> dict[str, float]:
    """Write the rollouts of one shard.

    Args:
        examples: ids of the examples to run, in order; all shards of one collection have the same list. With a pool,
            its prompts.
        names: what this collection is for; they name its seeds and begin its rollout ids.
        judge: `metric`, the reward, or `accuracy`, what programs are compared by.
        pool: where the hints of scaffolds lie; None knows no hints.
        source: the program that runs in the candidate's place; None for the candidate itself.
    """
    pipeline = load_pipeline(candidate.pipeline)
    known = {example_id(example): example for example in read_examples(data.folder / f"{split}.jsonl")}
    asked = prompts(examples, known, read_hints(pool.folder) if pool else {}, pipeline.hint_field)
    jobs = rollouts.plan_prompts(asked, per_example, settings.seed, *names)
    size = settings.sampling.shard_size
    engine, policies = candidate.open_engine(settings)
    ledger = Ledger(Budget())
    found = rollouts.run(
        candidate.open_program(),
        jobs[shard * size : (shard + 1) * size],
        pipeline.accuracy if judge == "accuracy" and pipeline.accuracy else pipeline.metric,
        engine,
        settings,
        draw,
        policies,
        source.open(candidate, settings, draw, ledger) if source else None,
        endpoints=candidate.open_endpoints(settings),
        parse_retries=parse_retries,
        progress=_line(f"{'/'.join(map(str, names))} shard {shard}"),
    )
    write_rollouts(found, folder)
    if source:
        # Its calls hold the student's prompts, and not what was asked.
        used = ledger.used()
        return {"rollouts": float(len(found)), **used, **usage_of(found), "money": used["money"] + money_of(found)}
    calls = [call for rollout in found for call in rollout.calls]
    tokens = {name: float(count) for name, count in tokens_of(calls).items()}
    return {"rollouts": float(len(found)), **tokens, "money": money_of(found), **usage_of(found)}


def shards(settings: Settings, wanted: int) -> range:
    """Numbers of the shards that `wanted` rollouts are collected in."""
    return range(-(-wanted // settings.sampling.shard_size))


def _line(title: str) -> Callable[[Progress], None]:
    """Shows progress: rewritten in place on a terminal, else one line when all is done."""
    live = sys.stderr.isatty()

    def show(now: Progress) -> None:
        last = now.done == now.total
        if not (live or last):
            return
        failed = now.done - now.statuses.get("ok", 0)
        text = f"{title}: {now.done}/{now.total}, {failed} failed, {now.tokens_per_second:.0f} tokens/s"
        rest = f"{now.seconds:.0f} s" if last else f"{now.eta:.0f} s to go"
        print(f"\r{text}, {rest}" if live else f"{text}, {rest}", end="\n" if last else "   ", file=sys.stderr)

    return show
