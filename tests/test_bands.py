"""Learning by band of the score, worked out by hand."""

import csv
from pathlib import Path

import pytest

from twofold.bands import Band, band_of, learning, metrics, read_bands, write_bands
from twofold.eps import score
from twofold.scores import Scored
from twofold.settings import Eps


def visit(round_number: int, example: str, successes: int, group: str | None = None) -> Scored:
    """A visit of four rollouts; with beta 0.01 its score is 1 less the share of successes, if there were any."""
    found = score([1.0] * successes + [0.0] * (4 - successes), Eps(), "base", "v1")
    return Scored(round_number, example, group, found, example, "keep")


@pytest.mark.parametrize(
    ("rewards", "band"),
    [
        ([0, 0, 0, 0], "too_hard"),
        ([1, 1, 1, 1], "solved"),
        ([0.5, 0.5, 0.5, 0.5], "flat"),
        ([0.4, 0.5, 0.5, 0.6], "0-0.25"),
        ([0, 1, 1, 1], "0.25-0.5"),
        ([0, 0, 1, 1], "0.5-0.75"),
        ([0, 0, 0, 1], "0.75-1"),
        ([0, 0, 0, 9], "0.75-1"),
    ],
)
def test_the_band_of_a_score(rewards: list[float], band: str) -> None:
    assert band_of(score(rewards, Eps(), "base", "v1")) == band


def test_changes_are_averaged_by_original_and_then_over_originals() -> None:
    rows = [
        # a: 1/4 -> 3/4 -> 1/4 -> 1/4, so in the highest band +0.5 and 0, and in the one of 3/4 -0.5.
        *(visit(k, "a", successes) for k, successes in ((1, 1), (3, 3), (4, 1), (5, 1))),
        # b: 1/4 -> 2/4; c: 0 -> 4/4; d was visited once.
        *(visit(k, "b", successes) for k, successes in ((2, 1), (6, 2))),
        *(visit(k, "c", successes) for k, successes in ((2, 0), (3, 4))),
        visit(1, "d", 1),
        # Neither hinted prompts nor groups count.
        *(visit(k, "c+1", successes) for k, successes in ((1, 1), (2, 4))),
        *(visit(k, "a", successes, "a/answer/0") for k, successes in ((1, 1), (2, 4))),
    ]
    too_hard, quarter, highest = learning(rows[::-1], {"a", "b", "c", "d"})
    assert too_hard == Band("too_hard", 1, 1, 1.0, 0.0, 1.0, None, None)
    assert quarter == Band("0.25-0.5", 1, 1, 1.0, 0.75, -0.5, None, None)
    # Both a and b changed by 0.25 on average; rounds apart: 2, 1 and 4.
    assert highest == Band("0.75-1", 2, 3, pytest.approx(7 / 3), 0.25, 0.25, 0.25, 0.25)


def test_the_interval_is_students() -> None:
    """Changes of 0, 0.25 and 0.5: mean 0.25, deviation 0.25, and t with two degrees of freedom is 4.3027."""
    rows = [visit(1, name, 1) for name in "abc"] + [visit(2, name, k) for k, name in enumerate("abc", 1)]
    (found,) = learning(rows, set("abc"))
    assert (found.n, found.change) == (3, 0.25)
    half = 4.3027 * 0.25 / 3**0.5
    assert (found.ci_low, found.ci_high) == pytest.approx((0.25 - half, 0.25 + half), abs=1e-4)


def test_a_training_without_second_visits_learned_nothing_that_shows(tmp_path: Path) -> None:
    assert learning([visit(1, "a", 1), visit(1, "b", 2)], {"a", "b"}) == []
    write_bands([], tmp_path / "bands.csv")
    assert (tmp_path / "bands.csv").read_text() == "band,n,pairs,rounds,before,change,ci_low,ci_high\n"


def test_bands_as_a_file_and_as_metrics(tmp_path: Path) -> None:
    bands = [Band("flat", 1, 2, 1.5, 0.5, 0.25, None, None), Band("0-0.25", 2, 2, 1.0, 0.5, -0.25, -0.5, 0.0)]
    write_bands(bands, tmp_path / "bands.csv")
    rows = list(csv.DictReader((tmp_path / "bands.csv").open()))
    assert [row["band"] for row in rows] == ["flat", "0-0.25"]
    assert (rows[0]["change"], rows[0]["ci_low"], rows[1]["ci_low"]) == ("0.25", "", "-0.5")
    assert read_bands(tmp_path / "bands.csv") == bands
    found = metrics(bands)
    assert found["bands/0-0.25/ci_high"] == 0.0
    assert "bands/flat/ci_low" not in found
    assert found["bands/flat/n"] == 1.0
