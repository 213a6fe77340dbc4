"""How much running shared prompt beginnings once brings: ratios measured in one run, on the default task's prompts.

    make bench

Each line compares two ways to do the same work with the same model, one after the other, several times in turn.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from trl import GRPOTrainer

from tasks.stage import fetched_model
from twofold.policy import dtype_of
from twofold.programs import load_pipeline
from twofold.rollouts import plan, run
from twofold.sampling import SampleRequest
from twofold.sampling.local import LocalEngine
from twofold.settings import Settings, load
from twofold.trainer import GroupTrainer, Row, Trainer, micro_batches, normalizer

ROWS = 16
REPEATS = 2


def main() -> None:
    settings = load(Path("params.yaml"))
    folder = fetched_model(settings).folder
    requests, rows = _work(folder, settings)
    table = Table("work", "plain", "Twofold", "ratio", title=f"{ROWS} rows, {dtype_of(settings.model)}, median seconds")
    for name, plain, ours in (
        ("one update", _update(folder, settings, rows, plain=True), _update(folder, settings, rows, plain=False)),
        (f"sampling, {settings.sampling.max_tokens} tokens a row", *_samplers(folder, settings, requests)),
    ):
        slow, fast = _alternate(plain, ours)
        table.add_row(name, f"{slow:.2f}", f"{fast:.2f}", f"{slow / fast:.1f}")
    Console().print(table)


def _alternate(plain: Callable[[], None], ours: Callable[[], None]) -> tuple[float, float]:
    """Median seconds of each, run in turn after one round to warm up."""
    times = [(_seconds(plain), _seconds(ours)) for _ in range(REPEATS + 1)][1:]
    return median(a for a, _ in times), median(b for _, b in times)


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _work(folder: Path, settings: Settings) -> tuple[list[SampleRequest], list[Row]]:
    """Calls of the pipeline's first module: as requests, and as rows to learn from."""
    pipeline = load_pipeline(settings.pipeline)
    engine = LocalEngine(folder, settings)
    examples, _, _ = pipeline.load(settings)
    jobs = plan(examples[:ROWS], 1, settings.seed, "bench")
    rollouts = run(pipeline.program(), jobs, pipeline.metric, engine, settings, settings.weights.draw)
    calls = [rollout.calls[0] for rollout in rollouts]
    draw = settings.weights.draw
    requests = [
        SampleRequest(c.prompt_ids, c.seed, draw.temperature, 1.0, 0, settings.sampling.max_tokens, "base", c.module)
        for c in calls
    ]
    return requests, [Row(call, (-1.0) ** k, 1.0, len(call.completion_ids)) for k, call in enumerate(calls)]


class _PlainTrainer(GroupTrainer):
    """Scores tokens as TRL does: every row in full."""

    _get_per_token_logps_and_entropies = GRPOTrainer._get_per_token_logps_and_entropies


def _update(folder: Path, settings: Settings, rows: list[Row], *, plain: bool) -> Callable[[], None]:
    """Forward and backward of all rows in one micro-batch."""
    trainer = Trainer(folder, settings)
    if plain:
        trainer.trl.__class__ = _PlainTrainer
        trainer.model.get_base_model().set_attn_implementation("sdpa")
    loss = settings.weights.loss

    def work() -> None:
        trainer.model.train()
        for batch in micro_batches(rows, ROWS):
            trainer.trl.loss_of(
                batch, settings.weights, normalizer(rows, loss, settings.sampling.max_tokens)
            ).backward()
        trainer.model.zero_grad()

    return work


def _samplers(
    folder: Path, settings: Settings, requests: list[SampleRequest]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """transformers' `generate` and ours; every row is decoded to its full length."""
    plain, ours = LocalEngine(folder, settings), LocalEngine(folder, settings)
    plain.model.set_attn_implementation("sdpa")
    ours.eos = frozenset()
    length = settings.sampling.max_tokens
    batch = plain.tokenizer.pad(
        {"input_ids": [list(r.prompt_ids) for r in requests]}, padding_side="left", return_tensors="pt"
    )

    def generate() -> None:
        with torch.inference_mode():
            plain.model.generate(
                **batch, do_sample=True, temperature=0.7, max_new_tokens=length, min_new_tokens=length, top_k=0
            )

    return generate, lambda: ours.sample([replace(request, max_tokens=length) for request in requests])


if __name__ == "__main__":
    main()
