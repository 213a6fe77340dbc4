"""`twofold check`, the plan behind it, and the errors a user sees."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import dspy
import pytest
import yaml

from flows.cli import main
from tests.tiny import PIPELINE, SETTINGS, make_model
from twofold.asking import Answers, join
from twofold.attempts import ATTEMPTS, attempts_of, write_attempts
from twofold.endpoints import Spent
from twofold.eps import score
from twofold.hints import read_hints, write_hints
from twofold.leaks import Verdict
from twofold.plan import examples_of_round, prompt_tokens, work
from twofold.pool import at_round, new_pool, read_pool, visit, write_pool
from twofold.programs import load_pipeline, save_state
from twofold.records import Rollout, write_rollouts
from twofold.scaffolds import PROGRAM, Attempt, Hint, Scaffolding
from twofold.settings import Eps, Pooling, Settings


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the tiny pipeline, its data, model and settings."""
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines/tiny.py").write_text(PIPELINE)
    (tmp_path / "data/tiny").mkdir(parents=True)
    lines = [f'{{"id": "e{k}", "text": "text number {k}"}}\n' for k in range(14)]
    (tmp_path / "data/tiny/examples.jsonl").write_text("".join(lines))
    make_model(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    settle(tmp_path)
    return tmp_path


def settle(project: Path, **changes: object) -> None:
    (project / "params.yaml").write_text(yaml.safe_dump({**SETTINGS, **changes}, sort_keys=False))


def test_check_shows_settings_data_model_and_plan(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    shown = capsys.readouterr().out
    assert "modules restate, answer" in shown
    assert "6 train, 4 dev, 4 test" in shown
    assert "./base: copied from ./base" in shown
    assert "epsilon_high: 0.2" in shown
    # 4 dev; prompts: 2 trials x 2, 3 for demos, 3 x 3, 4 dev; twice: 3 rounds of 3 x 4, dev after rounds 2 and 3; test
    # for four strategies: 128 rollouts of two calls each.
    (total,) = (line for line in shown.splitlines() if "total" in line)
    assert total.replace("│", " ").split()[1:3] == ["128", "256"]
    assert sorted(path.name for path in project.iterdir()) == ["base", "data", "params.yaml", "pipelines"]


def test_check_cuts_the_data(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settle(project, data={"train": 5, "test": 1})
    assert main(["check"]) == 0
    assert "5 train, 4 dev, 1 test" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeed": 1}, "unknown key 'seeed'. Did you mean 'seed'?"),
        ({"pipeline": "tinny"}, "Did you mean 'tiny'?"),
        ({"model": {"source": "./none"}}, "./none: no such folder"),
        ({"sampling": {"context": 8, "max_tokens": 9}}, "sampling.max_tokens must be smaller"),
    ],
)
def test_errors_are_said_in_words(
    project: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], message: str
) -> None:
    settle(project, **changes)
    assert main(["check"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert "Traceback" not in said


SERVER = {"model": "m", "base_url": "http://127.0.0.1:9/v1", "key": "NO_SUCH_KEY"}


@pytest.mark.parametrize(
    ("more", "scaffold", "message"),
    [
        ("", {"arm": "whole"}, "pipeline with a function `scaffold`, and pipelines/tiny.py has none"),
        ("", {"arm": "scaffold_only", "teacher": {"kind": "program"}}, "with a function `teacher`"),
        ("", {"arm": "whole", "teacher": {"kind": "endpoint", "endpoint": SERVER}}, "no variable NO_SUCH_KEY"),
        ("", {"arm": "whole", "teacher": {"kind": "endpoint"}}, "'endpoint' must name its model and base_url"),
        ("scaffold = print", {"arm": "whole"}, "no input takes its hints. Set HINT_FIELD"),
        ("scaffold = print; HINT_FIELD = 'txt'", {"arm": "whole"}, "'txt', which is no text input of example e0"),
        ("", {"pool": {"start": "none"}}, "none/prompts.parquet is missing"),
        ("", {"pool": {"start": "pool"}}, "1 prompts of the pool are no training examples: e6"),
    ],
)
def test_check_finds_what_a_scaffold_lacks(
    project: Path, capsys: pytest.CaptureFixture[str], more: str, scaffold: dict[str, object], message: str
) -> None:
    (project / "pipelines/tiny.py").write_text(f"{PIPELINE}\n\n{more}\n")
    write_pool(new_pool(["e0", "e6"]), project / "pool")
    settle(project, scaffold=scaffold)
    assert main(["check"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said


def test_missing_settings_file(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--params", "none.yaml"]) == 2
    assert "none.yaml" in capsys.readouterr().err


def test_example_in_two_splits_is_refused(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = PIPELINE.replace("examples[6:10]", "examples[5:10]")
    (project / "pipelines/tiny.py").write_text(shared)
    assert main(["check"]) == 2
    assert "example e5 is both in train and in dev" in capsys.readouterr().err


def test_warnings_are_shown(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settle(project, weights={**SETTINGS["weights"], "lora": {"dropout": 0.1}})
    assert main(["check"]) == 0
    assert "warning: weights.lora.dropout is not 0" in capsys.readouterr().err


def test_help_waits_for_no_library() -> None:
    code = "import sys, flows.cli; print(sorted({'dspy', 'torch', 'rich', 'pydantic', 'yaml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_flow_with_wrong_settings_ends_in_words(project: Path) -> None:
    settle(project, weights={"roundz": 3})
    command = [sys.executable, "-m", "flows.compare", "--params", "params.yaml"]
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": root})
    assert done.returncode == 2
    assert "unknown key 'weights.roundz'. Did you mean 'rounds'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_epoch_sees_every_example_once() -> None:
    names = [f"e{k}" for k in range(12)]
    epochs = [[examples_of_round(names, 4, 3 * epoch + step, 0) for step in range(3)] for epoch in range(2)]
    orders = [[name for step in epoch for name in step] for epoch in epochs]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(names)
    assert orders[0] != orders[1]
    assert examples_of_round(names, 4, 0, 1) != epochs[0][0]


def test_leftovers_wait_and_few_examples_all_train() -> None:
    names = [f"e{k}" for k in range(7)]
    steps = [examples_of_round(names, 3, k, 0) for k in range(200)]
    assert {len(set(step)) for step in steps} == {3}
    assert set(Counter(name for step in steps for name in step)) == set(names)
    assert sorted(examples_of_round(names, 50, 9, 0)) == names


def test_work_by_hand() -> None:
    strategies = {"vanilla": [], "weights": ["w"], "again": ["w", "w"]}
    settings = Settings.model_validate(SETTINGS | {"strategies": strategies})
    planned = work(settings, {"train": 2, "dev": 4, "test": 5}, predictors=3, prompt_tokens=10)
    # Two examples of the three a step would take: 3 rounds x 2 x 4, and dev twice. The first `w` is run once.
    assert [one.rollouts for one in planned] == [4, 24, 8, 24, 8, 15]
    assert [one.calls for one in planned] == [12, 72, 24, 72, 24, 45]
    assert planned[1].tokens_in == 720
    assert planned[1].tokens_out == 72 * 6


def test_the_plan_has_the_rollouts_of_sources(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = {"name": "wise", "share": 0.3, "program": "wise.json"}
    changes = {"strategies": {"weights": ["w"]}, "weights": {**SETTINGS["weights"], "sources": [source]}}
    settings = Settings.model_validate(SETTINGS | changes)
    planned = work(settings, {"train": 6, "dev": 4, "test": 5}, predictors=1, prompt_tokens=10)
    # 4 · 0.3 = 1.2: one of four rollouts is the source's.
    assert [(one.what, one.rollouts) for one in planned[1:3]] == [
        ("0-w: 3 rounds x 3 x 3", 27),
        ("0-w: 3 rounds x 3 x 1 of wise", 9),
    ]
    settle(project, **changes)
    assert main(["check"]) == 2
    assert "weights.sources: wise: there is no wise.json" in capsys.readouterr().err
    save_state(load_pipeline("tiny").program(), project / "wise.json")
    assert main(["check"]) == 0
    assert "of wise" in capsys.readouterr().out


FAR = {"model": "m", "base_url": "http://127.0.0.1:1", "key": "FAR_KEY"}


@pytest.mark.parametrize(
    ("place", "changes"),
    [
        ("weights.sources.far.lm", {"weights": {"sources": [{"name": "far", "share": 0.3, "lm": FAR}]}}),
        ("prompts.proposer", {"prompts": {"proposer": FAR}}),
    ],
)
def test_check_misses_a_key(
    project: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    changes: dict[str, dict[str, object]],
) -> None:
    monkeypatch.delenv("FAR_KEY", raising=False)
    settle(project, **{name: {**SETTINGS[name], **change} for name, change in changes.items()})
    assert main(["check"]) == 2
    assert f"{place}: the environment has no variable FAR_KEY" in capsys.readouterr().err


def test_work_with_a_pool_by_hand() -> None:
    scaffold = {"pool": {"max_draws": 5, "reserve_every": 4, "recheck_every": 3}}
    changes = {"scaffold": scaffold, "strategies": {"weights": ["w"]}}
    weights = {**SETTINGS["weights"], "rounds": 9}
    settings = Settings.model_validate(SETTINGS | changes | {"weights": weights})
    planned = work(settings, {"train": 20, "dev": 4, "test": 5}, predictors=1, prompt_tokens=10)
    # 9 rounds draw 5 of 4 rollouts each, and look at 3 more at most.
    assert [one.rollouts for one in planned] == [4, 9 * 5 * 4, 9 * 3 * 4, 5 * 4, 5]
    assert "at most" in planned[1].what
    # Both examples may be in reserve in rounds 4 and 8; or solved in round 1, and due in rounds 4 and 7.
    few = work(settings, {"train": 2, "dev": 4, "test": 5}, predictors=1, prompt_tokens=10)
    assert [one.rollouts for one in few[1:3]] == [9 * 2 * 4, (2 + 2) * 2 * 4]
    # Two rounds end before the first look, and nothing is said of it.
    short = settings.model_copy(update={"weights": settings.weights.model_copy(update={"rounds": 2})})
    planned = work(short, {"train": 20, "dev": 4, "test": 5}, predictors=1, prompt_tokens=10)
    assert [one.rollouts for one in planned] == [4, 2 * 5 * 4, 4, 5]


def test_work_with_a_teacher_by_hand() -> None:
    pool = {"max_draws": 5, "reserve_every": 9, "recheck_every": 9, "max_depth": 1}
    gate = {"probe_rollouts": 3, "effect_rollouts": 2}
    scaffold = {"arm": "whole", "pool": pool, "gate": gate, "teacher": {"retries": 1}}
    weights = {**SETTINGS["weights"], "rounds": 9}
    changes = {"scaffold": scaffold, "strategies": {"weights": ["w"]}, "weights": weights}
    settings = Settings.model_validate(SETTINGS | changes)
    planned = work(settings, {"train": 20, "dev": 4, "test": 5}, predictors=1, prompt_tokens=10)
    # 45 draws, and 3 more are looked at in each round, for 40 may be in reserve. Every second visit may queue a prompt;
    # each of two hints has 3 rollouts without the question, 3 blind ones, and 2 with both.
    prompts = (9 * 5 + 9 * 3) // 2
    assert [one.rollouts for one in planned][1:4] == [9 * 5 * 4, 9 * 3 * 4, prompts * 2 * 8]
    assert planned[3].what == f"0-w: at most {prompts} x 2 hints x 8"


@pytest.fixture
def pooled(tmp_path: Path) -> Path:
    """A folder with a pool of three prompts: in round 1 `a` was too hard, in round 2 `[b]` was solved."""
    pool, eps = new_pool(["a", "[b]", "c"]), Eps(visits_before_teacher=1)
    for number, (name, rewards) in enumerate([("a", [0.0, 0.0]), ("[b]", [1.0, 1.0])], 1):
        pool = visit(pool, number, {name: score(rewards, eps, "base", "v1")}, eps, Pooling(max_depth=0))
    write_pool(pool, tmp_path / "pool")
    return tmp_path / "pool"


def cells(shown: str) -> list[list[str]]:
    """The rows of a table on a terminal."""
    return [line.replace("│", " ").split() for line in shown.splitlines() if line.startswith("│")]


def test_pool_show(pooled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool", "show", str(pooled)]) == 0
    shown = capsys.readouterr().out
    assert "1 active, 1 reserve, 1 solved" in shown
    assert cells(shown) == [
        # Beta(1, 3) and Beta(3, 1): the cube roots of 0.975 and 0.025 are 0.992 and 0.292.
        ["a", "reserve", "1", "1", "too_hard", "0.000", "2", "0.000", "(0.008", "to", "0.708)"],
        ["[b]", "solved", "1", "2", "solved", "0.000", "2", "1.000", "(0.292", "to", "0.992)"],
        ["c", "active", "0"],
    ]
    assert main(["pool", "show", str(pooled), "--round", "1"]) == 0
    assert "2 active, 1 reserve" in capsys.readouterr().out
    assert main(["pool", "show", str(pooled), "--round", "0"]) == 0
    assert "3 active" in capsys.readouterr().out


def test_pool_diff(pooled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool", "diff", str(pooled), str(pooled), "--round-a", "1"]) == 0
    shown = capsys.readouterr().out
    assert "prompts that differ: 1" in shown
    assert cells(shown) == [["[b]", "active", "solved"]]
    assert main(["pool", "diff", str(pooled), str(pooled), "--round-a", "2", "--round-b", "0"]) == 0
    assert cells(capsys.readouterr().out) == [["a", "reserve", "active"], ["[b]", "solved", "active"]]


def test_pool_restore(pooled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_hints({}, pooled)
    out = pooled.parent / "restored"
    assert main(["pool", "restore", str(pooled), "--round", "1", str(out)]) == 0
    assert "the pool after round 1: 2 active, 1 reserve" in capsys.readouterr().out
    assert read_pool(out) == at_round(read_pool(pooled), 1)
    assert main(["pool", "diff", str(pooled), str(out), "--round-a", "1"]) == 0
    assert "prompts that differ: 0" in capsys.readouterr().out
    assert main(["pool", "restore", str(pooled), "--round", "2", str(out)]) == 2
    assert "is not empty. Name a new folder" in capsys.readouterr().err


def test_a_restored_pool_has_the_hints_of_its_scaffolds(taught: Path) -> None:
    for number, known in ((1, set()), (2, {"[a]+1"})):
        out = taught / f"after-{number}"
        assert main(["pool", "restore", str(taught / "pool"), "--round", str(number), str(out)]) == 0
        assert read_hints(out).keys() == known


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["restore", "pool", "out", "--round", "3"], "nothing is logged for round 3"),
        (["show", "none"], "none/prompts.parquet is missing"),
        (["show", "pool", "--round", "3"], "nothing is logged for round 3. Name one from 0, before the first, to 2."),
        (["diff", "pool", "pool", "--round-b", "-1"], "nothing is logged for round -1"),
    ],
)
def test_errors_about_pools_are_said_in_words(
    pooled: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(pooled.parent)
    assert main(["pool", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said


def test_work_of_prompt_optimization_by_hand() -> None:
    prompts = {"trials": 7, "minibatch": 5, "full_every": 3, "validation_share": 0.6}
    settings = Settings.model_validate(SETTINGS | {"prompts": prompts, "strategies": {"both": ["p"]}})
    planned = work(settings, {"train": 20, "dev": 4, "test": 5}, predictors=1, prompt_tokens=10)
    # The program as it came, after trials 3 and 6, and at the end: 4 times 12 of 20 examples, and the other 8 once.
    assert [one.rollouts for one in planned] == [4, 35, 56, 4, 5]


def test_prompt_tokens_by_hand() -> None:
    program = dspy.Predict(dspy.Signature("text -> answer", "x" * 40))
    program.demos = [{"text": "yyyy", "answer": "zz"}]
    # Instruction 40, demo "text: yyyy" 10 and "answer: zz" 10, input "text: uuuuuuuuuuuuuu" 20: 80 characters.
    assert prompt_tokens(program, [dspy.Example(text="u" * 14).with_inputs("text")]) == 20


@pytest.fixture
def taught(tmp_path: Path) -> Path:
    """What a training left in which a teacher leaked the answer of `[a]`, and then helped."""
    eps = Eps(visits_before_teacher=1)
    pool = visit(new_pool(["[a]", "b"]), 1, {"[a]": score([0.0, 0.0], eps, "base", "v1")}, eps, Pooling())
    refused = Attempt(Hint("It is [blue].", "t", "v"), (Verdict("answer", False, "The hint says blue."),))
    admitted = Attempt(Hint("Look.", "t", "v"), (Verdict("effect", True),))
    answers = Answers((Scaffolding("[a]", (refused, admitted)),), {"[a]": PROGRAM}, Spent())
    pool, hints = join(pool, {}, answers, 2)
    write_pool(pool, tmp_path / "pool")
    write_hints(hints, tmp_path / "pool")
    write_attempts(attempts_of(1, answers), tmp_path / "records" / ATTEMPTS)
    tried = [Rollout(f"weights/0/0/[a]/{k}", "[a]", 0, "student", (), {"team": "[red]"}, 0.0) for k in range(2)]
    write_rollouts([*tried, replace(tried[0], rollout_id="weights/0/0/b/0", example_id="b")], tmp_path / "records")
    return tmp_path


@pytest.mark.parametrize("name", ["[a]", "[a]+1"])
def test_scaffolds_show(taught: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scaffolds", "show", name, str(taught)]) == 0
    shown = capsys.readouterr().out
    assert "hints for [a]" in shown
    assert "[a] reserve, [a]+1 refresh" in shown
    assert cells(shown) == [
        ["1", "[a]", "1", "gate/answer", "It", "is", "[blue].", "The", "hint", "says", "blue."],
        ["1", "[a]", "2", "admitted", "Look."],
        ["1", "[a]", "2", "0", "team:", "[red]"],
        ["1", "[a]", "active", "queued", "score", "too_hard", "0.000", "2", "0.000", "(0.008", "to", "0.708)"],
        ["2", "[a]", "queued", "reserve", "hint_admitted"],
        ["2", "[a]+1", "-", "refresh", "hint_admitted"],
    ]


def test_scaffolds_show_says_what_is_not_there(taught: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scaffolds", "show", "c", str(taught)]) == 2
    assert "there is no prompt 'c'. See all: twofold pool show" in capsys.readouterr().err
