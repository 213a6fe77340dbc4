"""What runs at paper size cost: the arithmetic, and that the table in the documents is what it gives."""

from pathlib import Path

import pytest

from bench.cost import H100, Call, Gpu, Task, planned, rows, seconds_of_batch, tried, weights

SIZES = {"train": 250, "dev": 250, "test": 500}


def test_a_batch_by_hand() -> None:
    """48 rollouts on a machine of round numbers.

    Reading: 48 · 100 tokens · 2 · 8.2e9 FLOP = 7.872e13, at half of 1e15 a second 0.157 s. Writing: a token reads
    16.4e9 bytes of weights and 48 · (1000 + 50) · 147,456 = 7.432e9 of cache, at 0.6 of 1e12 a second 0.03972 s; the
    longest answer has 150 tokens: 5.958 s. Twice that, and 3 s for others.
    """
    task = Task(SIZES, (Call(2, 1000, 900, 100),), waiting=3.0)
    assert seconds_of_batch(task, Gpu("round", 1e15, 1e12, 1.0)) == pytest.approx(2 * (0.1574 + 5.958) + 3, abs=0.01)


def test_a_training_by_hand() -> None:
    """750 rounds of 4 · 12 rollouts, and dev after every fifty.

    An update: 48 · 1,100 tokens · 6 · 8.2e9 FLOP = 2.598e15, at a quarter of 989e12 a second 10.51 s; 5 s for the rest.
    """
    task = Task(SIZES, (Call(1, 1000, 900, 100),), outside=0.01)
    cost = weights(task, H100)
    assert cost.rollouts == 750 * 48 + 15 * 250
    batches = 829  # 39,750 / 48, the last one not full
    assert cost.hours == pytest.approx((750 * (10.51 + 5) + batches * seconds_of_batch(task, H100)) / 3600, rel=1e-3)
    assert cost.dollars == pytest.approx(2 * 3.0 * cost.hours + 397.5)


def test_rollouts_of_mipro_by_hand() -> None:
    """One predictor: 18 trials of 35; 2 + 3 times the 200 that validate; 12 times the other 50."""
    task = Task(SIZES, (Call(1, 1000, 900, 100),))
    assert tried(task) == 18 * 35 + 5 * 200 + 12 * 50
    assert planned(task, "compare") == 4 * 500


def test_the_documents_show_this_table() -> None:
    assert "\n".join(rows()) in Path("docs/tasks.md").read_text(encoding="utf-8")
