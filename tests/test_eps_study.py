"""The study of EPS: what it makes of finished runs. The runs themselves are those of `flows.strategy`."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.eps_study import ARMS, PARAMS, Run, _table, curve_of, score_at, spent_to
from twofold.settings import load

CURVE = [(0.0, 0.2), (100.0, 0.4), (300.0, 0.3), (400.0, 0.5)]


@pytest.mark.parametrize(("spent", "score"), [(0, 0.2), (50, 0.3), (200, 0.35), (350, 0.4), (1000, 0.5)])
def test_scores_between_evaluations_are_interpolated(spent: float, score: float) -> None:
    assert score_at(CURVE, spent) == pytest.approx(score)


@pytest.mark.parametrize(("score", "spent"), [(0.1, 0), (0.2, 0), (0.3, 50), (0.4, 100), (0.45, 375), (0.5, 400)])
def test_a_score_is_reached_where_the_curve_first_crosses_it(score: float, spent: float) -> None:
    assert spent_to(CURVE, score) == pytest.approx(spent)


def test_a_score_above_the_curve_is_never_reached() -> None:
    assert spent_to(CURVE, 0.51) is None


@pytest.mark.parametrize(("kept", "first"), [(True, 0.3), (False, 0.5)])
def test_a_curve_begins_with_its_starts_score_and_leaves_evaluations_out(
    kept: bool, first: float, tmp_path: Path
) -> None:
    """The last step's gain is in the result's score only when the step was kept."""
    step = tmp_path / "1-w"
    step.mkdir()
    rows = ["round,dev/rollouts,dev/score,spent/rollouts", "1,,,12", "2,4,0.4,16", "3,4,0.5,20"]
    (step / "history.csv").write_text("\n".join(rows))
    metrics = {"dev": {"score": 0.5}, "steps": {"0-p": {}, "1-w": {"difference": 0.2, "kept": kept}}}
    assert curve_of(metrics, step) == [(0.0, pytest.approx(first)), (24.0, 0.4), (40.0, 0.5)]


def test_arms_are_compared_at_the_rollouts_of_the_cheapest() -> None:
    """`off` scores 0.4 after 100 rollouts; `whole` is there after 50 of its 200, and scores 0.6 after 100."""
    runs = [Run(0, "vanilla", arm, [(0.0, 0.2), (100.0, 0.4)], 10, 1, 3) for arm in ARMS if arm != "whole"]
    runs.append(Run(0, "vanilla", "whole", [(0.0, 0.2), (100.0, 0.6), (200.0, 0.7)], 10, 1, 5))
    # A seed that is not finished in all arms is left out.
    runs.append(Run(1, "vanilla", "whole", [(0.0, 0.2), (10.0, 0.9)], 10, 1, 9))
    lines = list(_table("vanilla", runs))
    assert lines[0] == "## From vanilla, seeds 0"
    assert "| off | 0.400 |  | 100 | 0.300, 3 of 10 | +0.000 |" in lines
    assert "| whole | 0.600 | +0.200 | 50 | 0.500, 5 of 10 | +0.200 |" in lines


def test_differences_between_arms_are_paired_by_seed() -> None:
    """`whole` is 0.1 and 0.3 above `off`: mean 0.2, and its interval is t(0.975, 1) = 12.706 times 0.1 on each side."""
    runs = [
        Run(seed, "vanilla", arm, [(0.0, 0.1), (10.0, 0.2 + gain * (arm == "whole"))], 4, seed, 2 * (arm != "off"))
        for seed, gain in enumerate([0.1, 0.3])
        for arm in ARMS
    ]
    row = next(line for line in _table("vanilla", runs) if line.startswith("| whole"))
    assert row.split(" | ")[2:] == [
        "+0.200 (-1.071 to 1.471)",
        "5, 2",
        "0.500 (0.500 to 0.500), 4 of 8",
        "+0.000 (0.000 to 0.000) |",
    ]


def test_luck_of_the_start_is_counted_once_over_the_seeds_shown() -> None:
    """Seeds 0 and 1: 1 and 2 of 4 and 6 inputs. Seed 2 is not finished in all arms."""
    runs = [Run(seed, "vanilla", arm, CURVE, 4 + 2 * seed, 1 + seed, 0) for seed in (0, 1) for arm in ARMS]
    runs.append(Run(2, "vanilla", "off", CURVE, 9, 9, 9))
    assert "\nAt a second look the start itself solves 3 of the 10 unsolved inputs." in list(_table("vanilla", runs))


def test_an_input_unsolved_at_no_start_has_no_share() -> None:
    runs = [Run(0, "vanilla", arm, [(0.0, 0.3), (10.0, 0.2)], 0, 0, 0) for arm in ARMS]
    assert "| off | 0.200 |  | 0 | none, 0 of 0 | none |" in list(_table("vanilla", runs))


def test_its_settings_are_the_committed_ones_with_less_data_fewer_rounds_and_a_pool() -> None:
    ours, committed = (flat(load(path).model_dump(mode="json")) for path in (PARAMS, Path("params.yaml")))
    changed = {name for name in ours.keys() | committed.keys() if ours.get(name) != committed.get(name)}
    names = {name for name in changed if not name.startswith(("strategies.", "scaffold"))}
    assert names == {
        "data.train",
        "data.dev",
        "evaluate.every",
        "sampling.timeout",
        "weights.rounds",
        "weights.examples_per_round",
    }


def flat(values: Mapping, above: str = "") -> dict:
    """Nested settings by their dotted names."""
    found: dict = {}
    for key, value in values.items():
        found |= flat(value, f"{above}{key}.") if isinstance(value, dict) else {above + key: value}
    return found
