"""Rows that arrive: which are good, and that none is lost or taken twice."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twofold import arrivals
from twofold.arrivals import ORIGINAL, REJECTED, ROWS, batches, take
from twofold.examples import read_examples
from twofold.programs import Pipeline, load_pipeline
from twofold.settings import Settings
from twofold.splits import write_splits

PIPELINE = '''
from typing import Literal

import dspy


class Choose(dspy.Signature):
    """Choose."""

    text: str = dspy.InputField()
    team: Literal["red", "blue"] = dspy.OutputField()


def program():
    return dspy.Predict(Choose)


def metric(example, prediction, trace=None):
    return float(prediction.team == example.team)


def load(settings):
    rows = [dict(id=f"e{k}", text=f"text {k}", team="red", weight=1.5) for k in range(6)]
    rows[1]["note"] = ""
    examples = [dspy.Example(**row).with_inputs("text") for row in rows]
    return examples[:2], examples[2:4], examples[4:]
'''


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    monkeypatch.chdir(tmp_path)
    Path("pipelines").mkdir()
    Path("pipelines/choose.py").write_text(PIPELINE)
    Path("incoming").mkdir()
    return load_pipeline("choose")


def taken(pipeline: Pipeline) -> list[tuple[int, int]]:
    return [(one.rows, one.rejected) for one in take(Path("incoming"), pipeline, Settings())]


def drop(name: str, *rows: object) -> None:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    Path("incoming", name).write_bytes(b"".join(line + b"\n" for line in lines))


def row(**changes: object) -> dict[str, object]:
    """A good row; None takes a field out."""
    return {
        name: value for name, value in {"text": "new", "team": "blue", "weight": 1}.items() if name not in changes
    } | {name: value for name, value in changes.items() if value is not None}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"{", "It is not JSON: "),
        (b'{"text": "\xff"}', "It is not JSON: "),
        (b"[" * 100_000, "It is not JSON: "),
        (b'{"text": "\\ud800"}', "It is not JSON: "),
        (b'{"\\ud800": 1}', "It is not JSON: "),
        (b'{"text": "new", "team": "blue", "weight": NaN}', "It is not JSON: "),
        ([1], "It is not a JSON object."),
        (row(team=None), "It lacks team."),
        (row(colour="red", size=1), "No example has colour, size."),
        (row(text=7), "`text` must be text, not a number."),
        (row(weight=True), "`weight` must be a number, not true or false."),
        (row(id=3), "`id` must be text, not a number."),
        (row(text=" "), "`text` is empty."),
        (row(team="green"), "`team`: Input should be 'red' or 'blue'."),
        (row(id="e5"), "Example e5 of test has it already."),
        (row(text="text 3"), "Example e3 of dev has it already."),
    ],
)
def test_a_bad_row_is_set_aside_with_its_reason(pipeline: Pipeline, bad: object, reason: str) -> None:
    drop("a.jsonl", bad, row(note=""))
    assert taken(pipeline) == [(1, 1)]
    (batch,) = batches("choose")
    (rejected,) = map(json.loads, (batch / REJECTED).read_text().splitlines())
    assert rejected["reason"].startswith(reason)
    if not isinstance(bad, bytes):
        assert json.loads(rejected["row"]) == bad
    assert [json.loads(line) for line in (batch / ROWS).read_text().splitlines()] == [row(note="")]


def test_good_rows_follow_the_train_examples(pipeline: Pipeline) -> None:
    drop("b.jsonl", row(id="n2", text="second"))
    drop("a.jsonl", row(id="n1", text="a \u2028 b"))
    assert taken(pipeline) == [(1, 0), (1, 0)]
    assert not list(Path("incoming").iterdir())
    # The cut is of the pipeline's own examples.
    cut = Settings.model_validate({"data": {"train": 1}})
    assert write_splits(pipeline, cut, Path("out")) == {"train": 3, "dev": 2, "test": 2}
    train = read_examples(Path("out/train.jsonl"))
    assert [example.id for example in train] == ["e0", "n1", "n2"]
    assert train[1].inputs().toDict() == {"text": "a \u2028 b"}


def test_what_came_before_is_not_taken_again(pipeline: Pipeline) -> None:
    drop("a.jsonl", row(), row(team="red"))
    assert taken(pipeline) == [(1, 1)]
    drop("again.jsonl", row(), row(team="red"))
    assert taken(pipeline) == []
    drop("more.jsonl", row(), row(text="newer"))
    assert taken(pipeline) == [(1, 1)]
    assert [batch.name[:5] for batch in batches("choose")] == ["0001-", "0002-"]


def test_files_that_are_not_ready_are_left(pipeline: Pipeline) -> None:
    drop("a.jsonl.part", row())
    drop(".a.jsonl", row())
    drop("notes.txt", row())
    assert taken(pipeline) == []
    assert len(list(Path("incoming").iterdir())) == 3


def test_a_file_that_grows_while_it_is_taken_stays(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    drop("a.jsonl", row())
    keep = arrivals._keep

    def grow(*arguments: object) -> object:
        drop("a.jsonl", row(), row(text="late"))
        return keep(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(arrivals, "_keep", grow)
        assert taken(pipeline) == [(1, 0)]
    assert taken(pipeline) == [(1, 1)]
    assert sum(len((batch / ROWS).read_text().splitlines()) for batch in batches("choose")) == 2


class Killed(BaseException):
    pass


def _dies(call: Callable[..., object], after: bool) -> Callable[..., object]:
    def dying(*arguments: object, **named: object) -> object:
        if after:
            call(*arguments, **named)
        raise Killed

    return dying


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("place", ["mkdir", "write_bytes", "rename", "unlink"])
def test_killed_anywhere_it_loses_and_doubles_nothing(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, place: str, after: bool
) -> None:
    wanted = [row(id=f"n{k}", text=f"new {k}") for k in range(4)]
    drop("a.jsonl", wanted[0], row(text=""), wanted[1])
    drop("b.jsonl", *wanted[2:])
    with monkeypatch.context() as patch:
        patch.setattr(Path, place, _dies(getattr(Path, place), after))
        with pytest.raises(Killed):
            taken(pipeline)
    taken(pipeline)
    found = [json.loads(line) for batch in batches("choose") for line in (batch / ROWS).read_text().splitlines()]
    assert found == wanted
    assert not list(Path("incoming").iterdir())
    assert not list(Path("data/arrived/choose").glob(".*"))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.lists(
        st.one_of(
            st.binary(max_size=20), st.builds(lambda k: json.dumps(row(text=f"n{k}")).encode(), st.integers(0, 5))
        )
    )
)
def test_every_line_is_taken_or_set_aside(pipeline: Pipeline, content: list[bytes]) -> None:
    for batch in batches("choose"):
        for file in batch.iterdir():
            file.unlink()
        batch.rmdir()
    whole = b"\n".join(content)
    Path("incoming/a.jsonl").write_bytes(whole)
    ((good, bad),) = taken(pipeline)
    assert good + bad == len([line for line in whole.split(b"\n") if line.strip()])
    assert (batches("choose")[0] / ORIGINAL).read_bytes() == whole
