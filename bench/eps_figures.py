"""Figures of the parts of EPS, none of which needs the default model: score, leak gate, pool, and a teacher that fails.

    python -m bench.eps_figures

Writes docs/eps-figures.md. Takes less than ten minutes on one core. The labelled hints, the tiny model and the failing
server are those of the tests.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from scipy.stats import binomtest

from twofold import pool as pools
from twofold.attempts import ATTEMPTS, Tried, read_attempts
from twofold.eps import Score, potential, score
from twofold.leaks import Proposal, gate, text_checks
from twofold.settings import Eps, Pooling

T = TypeVar("T")

REPORT = Path("docs/eps-figures.md")

DATA = Path("tests/data")
CORPORA = {
    "leaks.jsonl": "the gate was developed on these",
    "leaks-unseen.jsonl": "written afterwards; no check was changed for them",
}

SIZES = range(2, 33)
CONSTANT, RANDOM = 10_000, 100_000
"""Groups of equal rewards for each size and kind of number; groups of random rewards."""

PATIENT = 600.0
"""Seconds for formulas, so that a busy machine refuses nothing."""

PROMPTS, VISITS, DRAWS = 1_000_000, 20_000, 50


def main() -> None:
    parts: list[tuple[str, Callable[[], Iterator[str]]]] = [
        ("Ties are exactly 0, and nothing is below", _ties),
        ("What the leak gate refuses", _leaks),
        (f"A pool of {PROMPTS:,} prompts", _pool),
        ("A teacher's server that fails in every way", _server),
    ]
    lines = ["# EPS: figures of its parts", "", "Made by `python -m bench.eps_figures`.", ""]
    for title, part in parts:
        start = time.perf_counter()
        lines += [f"## {title}", "", *part(), ""]
        print(f"{title}: {time.perf_counter() - start:.0f} s", flush=True)
    REPORT.write_text("\n".join(lines).rstrip("\n") + "\n", encoding="utf-8")


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Markdown, with all columns but the first to the right."""
    yield f"| {' | '.join(header)} |"
    yield f"|---|{'---:|' * (len(header) - 1)}"
    yield from (f"| {' | '.join(map(str, row))} |" for row in rows)


# Ties


def _ties() -> Iterator[str]:
    rng = np.random.default_rng(0)
    largest, wrong = 0.0, Counter()
    for size in SIZES:
        floats = rng.normal(size=CONSTANT) * 10.0 ** rng.uniform(-9, 9, CONSTANT)
        integers = rng.integers(-(10**6), 10**6, CONSTANT)
        for kind, values in (("floats", floats), ("integers", integers)):
            for value in values.tolist():
                largest = max(largest, potential([value] * size, 0.01, 0.0))
                wrong[kind] += _as_defined(np.full(size, float(value)), 0.01) != 0
    lowest, zeros, below = _random_groups(rng)
    yield (
        f"Groups of equal rewards: {CONSTANT:,} of floats and {CONSTANT:,} of integers for each size from {SIZES[0]} "
        f"to {SIZES[-1]}, {2 * CONSTANT * len(SIZES):,} in all, scored with a tolerance of 0. The largest score is "
        f"{largest!r}. The formula as it is defined, Σ r softmax(r/β) - mean(r), is not 0 for {wrong['floats']:,} of "
        f"the floats and {wrong['integers']:,} of the integers."
    )
    yield ""
    yield (
        f"{RANDOM:,} groups of 2 to 32 unequal rewards (binary, uniform, normal; β from 0.001 to 1,000): the lowest "
        f"score is {lowest:.3g}, and {zeros:,} scores are 0. The formula as it is defined is 0 or below for {below:,}."
    )


def _random_groups(rng: np.random.Generator) -> tuple[float, int, int]:
    """Of groups whose rewards differ: the lowest score, and how many are 0; how many are not above 0 as defined."""
    lowest, zeros, below = np.inf, 0, 0
    for _ in range(RANDOM):
        size, beta = int(rng.integers(2, 33)), float(10 ** rng.uniform(-3, 3))
        draws = (rng.integers(0, 2, size).astype(float), rng.random(size), rng.normal(size=size))
        rewards = draws[rng.integers(3)]
        rewards[0] = rewards[1] + 1.0  # no tie
        found = potential(rewards, beta, 0.0)
        lowest, zeros = min(lowest, found), zeros + (found == 0)
        below += _as_defined(rewards, beta) <= 0
    return lowest, zeros, below


def _as_defined(rewards: np.ndarray, beta: float) -> float:
    chances = np.exp((rewards - rewards.max()) / beta)
    return float(rewards @ (chances / chances.sum()) - rewards.mean())


# Leaks


def _leaks() -> Iterator[str]:
    yield (
        "Hints written by hand, labelled by whether they give the answer away, and the four checks that need no "
        "rollouts. All shares with 95% intervals (Wilson)."
    )
    for name, about in CORPORA.items():
        rows = [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]
        yield ""
        yield f"### [{name}](../{DATA / name}): {about}"
        yield ""
        yield from _judged(rows)


def _judged(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    rules = [_refusal(row) for row in rows]
    leaks = [(row["kind"], rule) for row, rule in zip(rows, rules, strict=True) if row["leak"]]
    harmless = [(row["kind"], rule) for row, rule in zip(rows, rules, strict=True) if not row["leak"]]
    caught, alarms = sum(bool(rule) for _, rule in leaks), sum(bool(rule) for _, rule in harmless)
    yield (
        f"Of {len(leaks)} leaks {caught} are refused: recall {_share(caught, len(leaks))}. Of {len(harmless)} harmless "
        f"hints {alarms} are refused: precision {_share(caught, caught + alarms)}."
    )
    yield ""
    yield from _table(["leak", "refused", "recall"], [_of_kind(kind, leaks, True) for kind in _kinds(leaks)])
    yield ""
    passed = [_of_kind(kind, harmless, False) for kind in _kinds(harmless)]
    yield from _table(["harmless", "passed", "share"], passed)
    yield ""
    right = Counter(rule for _, rule in leaks if rule)
    total = right + Counter(rule for _, rule in harmless if rule)
    refused = [(rule, f"{right[rule]} of {total[rule]}", _share(right[rule], total[rule])) for rule in total]
    yield from _table(["check that refused", "leaks", "precision"], refused)


def _refusal(row: dict[str, str]) -> str:
    """The check that refuses the hint; empty when it passes."""
    proposal = Proposal(row["question"], row["gold"], row["hint"], f"{row['question']}\n\n{row['hint']}")
    last = gate(text_checks(proposal, 600, PATIENT))[-1]
    return "" if last.passed else last.rule


def _kinds(found: Sequence[tuple[str, str]]) -> list[str]:
    return sorted({kind for kind, _ in found})


def _of_kind(kind: str, found: Sequence[tuple[str, str]], refused: bool) -> tuple[str, str, str]:
    own = [bool(rule) == refused for name, rule in found if name == kind]
    return kind.replace("_", " "), f"{sum(own)} of {len(own)}", _share(sum(own), len(own))


def _share(k: int, n: int) -> str:
    low, high = binomtest(k, n).proportion_ci(0.95, "wilson")
    return f"{k / n:.3f} ({low:.3f} to {high:.3f})"


# Pool


def _pool() -> Iterator[str]:
    # A process of its own, so that the memory is that of the pool.
    with ProcessPoolExecutor(1, get_context("spawn")) as child:
        rows = child.submit(_pool_figures).result()
    yield (
        f"{PROMPTS:,} originals, of which {VISITS:,} have been visited: half of these teach, a quarter is solved, and "
        "a quarter was too hard and has a hint by now. Times are processor times of one core."
    )
    yield ""
    yield from _table(["", "figure"], rows)


def _pool_figures() -> list[tuple[str, str]]:
    settings, eps = Pooling(), Eps(visits_before_teacher=1)
    empty = _peak()
    ids = [f"{number:012x}" for number in np.random.default_rng(0).integers(2**48, size=PROMPTS).tolist()]
    pool, made = _timed(lambda: pools.new_pool(ids))
    scores = [score(rewards, eps, "base", "v1") for rewards in ([0, 1], [1, 0], [1, 1], [0, 0])]
    wanted: dict[str, Score] = {pool.ids[k]: scores[k % 4] for k in range(VISITS)}
    pool = pools.visit(pool, 1, wanted, eps, settings)
    queued = [name for name, state in pool.states().items() if state == "queued"]
    pool = pools.answer(pool, 2, [pools.Answer(name, "admitted", "teacher", "v1") for name in queued])
    drawn = [_timed(lambda number=number: pools.draw(pool, number, settings, 0)) for number in range(2, 2 + DRAWS)]
    due = _timed(lambda: pools.due(pool, 25, settings, 32))[1]
    refreshed, merged = _timed(lambda: pools.refresh(pool, 2, settings))
    batch = dict.fromkeys(drawn[0][0], scores[0])
    visited = _timed(lambda: pools.visit(refreshed, 2, batch, eps, settings))[1]
    with tempfile.TemporaryDirectory() as folder:
        written = _timed(lambda: pools.write_pool(refreshed, Path(folder)))[1]
        read = _timed(lambda: pools.read_pool(Path(folder)))[1]
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
    times = sorted(seconds for _, seconds in drawn)
    return [
        (f"a draw of {settings.max_draws}, median of {DRAWS}", f"{1000 * times[DRAWS // 2]:.1f} ms"),
        (f"a draw of {settings.max_draws}, slowest of {DRAWS}", f"{1000 * times[-1]:.1f} ms"),
        ("what is due in a round", f"{1000 * due:.1f} ms"),
        (f"a visit of {len(batch)}", f"{1000 * visited:.1f} ms"),
        (f"a refresh that merges {len(queued):,} scaffolds", f"{1000 * merged:.0f} ms"),
        ("a new pool", f"{made:.2f} s"),
        ("to write it", f"{written:.2f} s"),
        ("to read it", f"{read:.2f} s"),
        ("on disk, with its history", f"{size / 1e6:.1f} MB"),
        ("peak memory of the process", f"{_peak():.0f} MB, {empty:.0f} MB of it before the pool"),
    ]


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """What it gives, and the seconds of processor time it takes."""
    start = time.process_time()
    return work(), time.process_time() - start


def _peak() -> float:
    """Most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


# Server

ROUNDS = 6


def _said(text: str) -> dict[str, Any]:
    """A chat completion with this text."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    tokens = {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100}
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": tokens}


SENT: tuple[tuple[str, Any], ...] = (
    ("429", 429),
    ("429", 429),
    ("500", 500),
    ("500", 500),
    ("text that is no JSON", _said("garbage")),
    ("a hint that names the answer", _said('{"hint": "The label is blue."}')),
    ("empty text", _said("")),
    ("nothing in time", 3.0),
    ("nothing in time", 3.0),
    ("a hint that helps, or not", _said('{"hint": "Look twice."}')),
)
"""What the server answers, in order; the last for ever."""


def _server() -> Iterator[str]:
    from tests.test_scaffolds import serving  # with torch, which the pool's memory must not contain

    with tempfile.TemporaryDirectory() as folder, serving(*(answer for _, answer in SENT)) as server:
        rows, attempts = _trained(Path(folder) / "checkout", server.settings(timeout=2.0, concurrency=1))
        asked = len(server.asked)
    sent = Counter(name for name, _ in SENT[:asked])
    sent[SENT[-1][0]] += max(0, asked - len(SENT))
    yield (
        f"A training of the tests' tiny model with `arm: whole`: of {ROUNDS} rounds it went through {len(rows)}. "
        "Requests come one at a time; each is tried twice, and given up after 2 seconds."
    )
    yield ""
    yield from _table(["the server sent", "times"], [*sent.items(), ("all requests", asked)])
    yield ""
    ends = Counter(attempt.end for attempt in attempts)
    yield from _table(["an attempt ended with", "times"], [*sorted(ends.items()), ("all attempts", len(attempts))])
    yield ""
    names = (
        "scaffolds/asked",
        "scaffolds/admitted",
        *(f"teacher/{name}" for name in ("calls", "tokens_in", "tokens_out", "money")),
    )
    sums = [(f"`{name}`", f"{sum(row[name] for row in rows):g}") for name in names]
    yield from _table(["counted in `history.csv`", "sum over rounds"], sums)


def _trained(checkout: Path, endpoint: dict[str, Any]) -> tuple[list[dict[str, float]], list[Tried]]:
    """The rounds of the training, and all that its teacher tried."""
    from tests.test_pooled import COMMAND, history
    from tests.test_taught import SCAFFOLD, make
    from tests.tiny import SETTINGS, environment

    weights = {**SETTINGS["weights"], "rounds": ROUNDS, "rollouts_per_example": 6, "groups": {"size": 6}}
    teacher = {"kind": "endpoint", "endpoint": endpoint, "budget": {"calls": 40}}
    pool = {**SCAFFOLD["pool"], "reserve_every": 2}
    make(checkout, None, weights=weights, scaffold={**SCAFFOLD, "pool": pool, "teacher": teacher})
    subprocess.run(COMMAND, cwd=checkout, env=environment(TEST_KEY="none"), check=True, capture_output=True)
    return history(checkout), read_attempts(checkout / "outputs/weights/0-w/records" / ATTEMPTS)


if __name__ == "__main__":
    main()
