"""The pool's two steps in a round: draw the inputs to visit, and then select what is trained on.

The pool counts rounds from 1, as `history.csv` does.
"""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import get_args

from tasks.group import GROUPS, means
from tasks.score import SCORES
from tasks.step import Manifest, step
from twofold import pool as pools
from twofold.asking import join, read_answers
from twofold.eps import Verdict
from twofold.examples import example_id, read_examples
from twofold.groups import account, account_sources, make_groups, taking_part
from twofold.hints import read_hints, write_hints
from twofold.pool import Pool, read_pool, write_pool
from twofold.records import read_json, read_rollouts, usage_of, write_groups, write_json, write_rollouts
from twofold.scores import Scored, deciding_scores, of_examples, read_scores, write_scores
from twofold.seeds import derive
from twofold.settings import Settings

ANSWERS = "answers.json"
POOL = "pool"
DRAWN = "drawn.json"


@step(reads=("seed", "scaffold.pooling", "weights.examples_per_round"))
def draw(
    folder: Path,
    *,
    settings: Settings,
    data: Manifest,
    before: Manifest | None,
    answers: Manifest | None,
    round_number: int,
) -> dict[str, float]:
    """Write the pool as the round finds it, and the inputs the round may visit: those drawn, and those due.

    Args:
        before: the pool after the round before, or the one that the first round begins with; None begins a pool in
            which every training example is active.
        answers: what the teacher's requests of the round before came to. They join here, before the refresh that may
            let their scaffolds into training.
    """
    periods = settings.scaffold.pooling
    examples = [example_id(example) for example in read_examples(data.folder / "train.jsonl")]
    pool, hints = (read_pool(before.folder), read_hints(before.folder)) if before else (pools.new_pool(examples), {})
    if before and not round_number:
        pool = pools.begin(pool, examples)
    if answers:
        pool, hints = join(pool, hints, read_answers(answers.folder / ANSWERS), round_number + 1)
    pool = pools.refresh(pool, round_number + 1, periods)
    write_pool(pool, folder / POOL)
    write_hints(hints, folder / POOL)
    drawn = pools.draw(pool, round_number + 1, periods, settings.seed)
    most = periods.reserve_batch or settings.weights.examples_per_round
    due = pools.due(pool, round_number + 1, periods, most)
    write_json({"drawn": list(drawn), "due": list(due)}, folder / DRAWN)
    return {}


@step(reads=("seed", "rewards", "weights.groups", "scaffold.eps", "scaffold.pooling"))
def select(
    folder: Path,
    *,
    settings: Settings,
    drawn: Manifest,
    shards: list[Manifest],
    scored: list[Manifest],
    kept: list[str],
    round_number: int,
) -> dict[str, float]:
    """Write the round's rollouts and scores, the groups of the inputs that are kept, and the pool after the visits.

    The groups are those that `group` would make of the rollouts of inputs that are kept. Inputs that were due are no
    part of the mean reward, for they come in some rounds only.
    """
    pool, hints = read_pool(drawn.folder / POOL), read_hints(drawn.folder / POOL)
    due = set(read_json(drawn.folder / DRAWN)["due"])
    rows = [row for part in scored for row in read_scores(part.folder / SCORES)]
    rows, pool = _route(rows, pool, settings, round_number + 1)
    rollouts = [rollout for shard in shards for rollout in read_rollouts(shard.folder)]
    trained = set(kept)
    chosen = [rollout for rollout in rollouts if rollout.example_id in trained]
    compared = taking_part(chosen)
    seed = derive(settings.seed, "groups", round_number)
    groups = make_groups(compared, settings.weights.groups, settings.rewards, seed)
    write_rollouts(rollouts, folder)
    write_groups(groups, folder / GROUPS)
    write_scores(rows, folder / SCORES)
    write_pool(pool, folder / POOL)
    write_hints(hints, folder / POOL)
    reward = means([rollout for rollout in rollouts if rollout.example_id not in due])
    counts = {**_shares(rows, len(due)), **_sizes(pool), "kept": float(len(kept))}
    if settings.scaffold.teaches:
        counts |= _useful([row for row in of_examples(rows) if row.example_id in hints and row.example_id not in due])
    used = {**usage_of(rollouts), **account(compared, groups), **account_sources(chosen, groups)}
    return {**reward, **used, **counts}


def kept_in(scored: Manifest, settings: Settings) -> set[str]:
    """The inputs of a visit to train on: those that teach, or all where nothing is filtered."""
    rows = of_examples(read_scores(scored.folder / SCORES))
    return {row.example_id for row in rows if row.verdict == "keep" or not settings.scaffold.filters}


def _route(rows: list[Scored], pool: Pool, settings: Settings, round_number: int) -> tuple[list[Scored], Pool]:
    """The scores with what became of their inputs, and the pool that has taken them in."""
    eps, scores = settings.scaffold.eps, deciding_scores(rows)
    actions = pools.actions(pool, scores, eps)
    routed = [row if row.group_id else dataclasses.replace(row, action=actions[row.example_id]) for row in rows]
    return routed, pools.visit(pool, round_number, scores, eps, settings.scaffold.pooling)


def _shares(rows: list[Scored], due: int) -> dict[str, float]:
    """How many inputs were visited for which reason, and the share of each verdict among them."""
    verdicts = Counter(row.verdict for row in of_examples(rows))
    visited = verdicts.total()
    shares = {f"visited/{name}": verdicts[name] / visited if visited else 0.0 for name in get_args(Verdict)}
    return {"drawn": float(visited - due), "due": float(due), **shares}


def _useful(scaffolds: list[Scored]) -> dict[str, float]:
    """How many scaffolds were drawn, the share of them that teaches, and the sum of what these scored."""
    teaching = [row.score.value for row in scaffolds if row.verdict == "keep"]
    share = len(teaching) / len(scaffolds) if scaffolds else 0.0
    return {"scaffolds/drawn": float(len(scaffolds)), "scaffolds/useful": share, "scaffolds/gain": sum(teaching)}


def _sizes(pool: Pool) -> dict[str, float]:
    return {f"pool/{state}": float(count) for state, count in pools.counts(pool).items()}
