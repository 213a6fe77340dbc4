"""The champion: it follows from the decisions alone."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold import champion
from twofold.champion import Decision, Standing, decisions, folder_of, record, rollback, standing
from twofold.errors import ChampionError


def decide(kind: str, candidate: str, was: str | None = None) -> Decision:
    return Decision(kind, candidate, was, "2026-01-02T03:04:05Z", ("Why not.",), {"gain": {"n": 4}}, {"data": "d"}, "q")


def test_standing_follows_from_the_decisions() -> None:
    made = [
        decide("first", "a"),
        decide("promoted", "b", "a"),
        decide("refused", "c", "b"),
        decide("promoted", "d", "b"),
    ]
    assert [standing(made[:k]) for k in range(5)] == [
        Standing(),
        Standing("a"),
        Standing("b", "a"),
        Standing("b", "a"),
        Standing("d", "b"),
    ]


def test_records_are_read_back_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = [decide("first", "a"), *(decide("refused", f"c{k}", "a") for k in range(11))]
    paths = [record("tiny", one) for one in made]
    assert [path.name for path in paths[::11]] == ["0001-first.json", "0012-refused.json"]
    assert decisions("tiny") == made
    assert decisions("other") == []


def test_rollback_exchanges_the_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record("tiny", decide("first", "a"))
    with pytest.raises(ChampionError, match="no champion before"):
        rollback("tiny")
    record("tiny", decide("promoted", "b", "a"))
    with pytest.raises(ChampionError, match="models/a is missing"):
        rollback("tiny")
    for name in "ab":
        folder_of("tiny", name).mkdir(parents=True)
    for wanted in (Standing("a", "b"), Standing("b", "a")):
        rollback("tiny")
        assert standing(decisions("tiny")) == wanted


def test_an_id_is_of_names_and_contents() -> None:
    files = {"program/program.json": "1", "checkpoint/x": "2"}
    assert champion.id_of(files) == champion.id_of(dict(reversed(files.items())) | {"metrics.json": "9"})
    others = ({**files, "checkpoint/x": "3"}, {"program/a": "1"}, {"program/b": "1"})
    assert len({champion.id_of(found) for found in (files, *others)}) == 4


@given(st.lists(st.sampled_from(["promoted", "refused", "rolled_back"])))
def test_two_rollbacks_are_none(kinds: list[str]) -> None:
    made = [decide("first", "0")]
    for number, kind in enumerate(kinds, 1):
        now = standing(made)
        if kind != "rolled_back":
            made.append(decide(kind, str(number), now.champion))
        elif now.previous:
            made.append(decide(kind, now.previous, now.champion))
    now = standing(made)
    if now.previous:
        there = [*made, decide("rolled_back", now.previous, now.champion)]
        assert standing(there) == Standing(now.previous, now.champion)
        assert standing([*there, decide("rolled_back", now.champion, now.previous)]) == now
