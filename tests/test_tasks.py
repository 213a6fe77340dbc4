"""Steps against a real Prefect server, and tracking against a real MLflow store."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import dspy
import pytest
from prefect import flow

from tasks import tracking
from tasks.group import means
from tasks.step import Manifest, Step, publish, step
from twofold.programs import STATE, load_pipeline, save_state
from twofold.records import Rollout
from twofold.settings import Evaluate, Settings, Tracking


@dataclass
class Counting:
    """A step that counts its runs and fails as often as it is told to."""

    step: Step
    runs: list[str]


def counting(*errors: Exception, reads: tuple[str, ...] = ("seed",)) -> Counting:
    runs: list[str] = []
    left = list(errors)

    @step(reads=reads)
    def write(folder: Path, *, settings: Settings, text: str, source: Manifest | None = None) -> dict[str, float]:
        runs.append(text)
        (folder / "half.txt").write_text("half")
        if left:
            raise left.pop(0)
        (folder / "deep").mkdir()
        (folder / "deep" / "text.txt").write_text(text)
        return {"length": len(text)}

    write.task = write.task.with_options(retry_delay_seconds=0)
    return Counting(write, runs)


def in_flow(call: Callable[[], Manifest]) -> Manifest:
    """Each call is a flow run of its own, as in another process."""
    return flow(call, name="test")()


def test_finished_step_is_not_repeated(workplace: Path) -> None:
    one = counting()
    first = in_flow(lambda: one.step(Path("made"), settings=Settings(), text="abc"))
    second = in_flow(lambda: one.step(Path("made"), settings=Settings(), text="abc"))
    assert one.runs == ["abc"]
    assert first == second
    assert first.path == "made"
    assert sorted(first.outputs) == ["deep/text.txt", "half.txt"]
    assert first.metrics["length"] == 3
    assert first.metrics["seconds"] >= 0
    assert (workplace / "made/deep/text.txt").read_text() == "abc"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "deep/text.txt").write_text("abd"),
        lambda folder: (folder / "deep/text.txt").unlink(),
        lambda folder: (folder / "more.txt").write_text(""),
        lambda folder: folder.rename("elsewhere"),
    ],
    ids=["changed", "missing", "added", "moved"],
)
def test_spoilt_output_is_made_again(workplace: Path, spoil: Callable[[Path], object]) -> None:
    one = counting()
    first = in_flow(lambda: one.step(Path("made"), settings=Settings(), text="abc"))
    spoil(Path("made"))
    again = in_flow(lambda: one.step(Path("made"), settings=Settings(), text="abc"))
    assert one.runs == ["abc", "abc"]
    assert again.intact()
    assert again.outputs == first.outputs
    in_flow(lambda: one.step(Path("made"), settings=Settings(), text="abc"))
    assert len(one.runs) == 2


def test_a_step_runs_beside_another(workplace: Path) -> None:
    """Neither could end without the other."""
    other = threading.Event(), threading.Event()

    @step()
    def first(folder: Path, *, number: int) -> dict[str, float]:
        other[0].set()
        assert other[1].wait(60)
        (folder / "text").write_text("first")
        return {}

    @step()
    def second(folder: Path, *, number: int) -> dict[str, float]:
        other[1].set()
        assert other[0].wait(60)
        return {}

    def both() -> Manifest:
        begun = first.begin(Path("first"), number=1)
        second(Path("second"), number=1)
        return begun()

    made = in_flow(both)
    assert made.intact()
    (made.folder / "text").unlink()
    assert in_flow(both).intact()


@pytest.mark.parametrize("error", [ConnectionError("gone"), TimeoutError("slow")])
def test_transport_error_is_tried_again(workplace: Path, error: Exception) -> None:
    one = counting(error, error)
    made = in_flow(lambda: one.step(Path("made"), settings=Settings(), text="abc"))
    assert len(one.runs) == 3
    assert made.intact()


@pytest.mark.parametrize("error", [ValueError("wrong"), FileNotFoundError("none"), MemoryError("full")])
def test_other_error_is_not_tried_again(workplace: Path, error: Exception) -> None:
    one = counting(error)
    with pytest.raises(type(error)):
        in_flow(lambda: one.step(Path("made"), settings=Settings(), text="abc"))
    assert len(one.runs) == 1
    assert not Path("made").exists()


def test_step_that_failed_runs_the_next_time(workplace: Path) -> None:
    one = counting(ValueError("wrong"))
    with pytest.raises(ValueError, match="wrong"):
        in_flow(lambda: one.step(Path("made"), settings=Settings(), text="abc"))
    assert in_flow(lambda: one.step(Path("made"), settings=Settings(), text="abc")).intact()
    assert len(one.runs) == 2


def test_results_are_json_without_decoder(workplace: Path) -> None:
    one = counting()
    in_flow(lambda: one.step(Path("made"), settings=Settings(), text="abc"))
    (stored,) = (path for path in Path("results").iterdir() if path.is_file())
    content = json.loads(stored.read_bytes())
    assert content["metadata"]["serializer"]["type"] == "json"
    assert content["metadata"]["serializer"]["object_decoder"] is None
    assert json.loads(content["result"])["path"] == "made"


def test_key_follows_what_the_step_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    write = counting(reads=("seed", "evaluate.every")).step
    settings = Settings()
    key = write.key(settings=settings, text="abc")
    assert write.key(settings=settings, text="abc") == key
    assert write.key(settings=settings, text="abd") != key
    assert write.key(settings=Settings(seed=1), text="abc") != key
    assert write.key(settings=Settings(evaluate=Evaluate(every=9)), text="abc") != key
    assert write.key(settings=Settings(evaluate=Evaluate(resamples=9)), text="abc") == key
    monkeypatch.setattr("tasks.step.code_digest", lambda: "other code")
    assert write.key(settings=settings, text="abc") != key


def test_key_follows_contents_and_not_places(tmp_path: Path) -> None:
    write = counting().step
    keys = []
    for place, text in (("a", "same"), ("b", "same"), ("c", "other")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "file").write_text(text)
        source = Manifest.of(tmp_path / place, {"seconds": len(keys)})
        keys.append(write.key(settings=Settings(), text="", source=source))
    assert keys[0] == keys[1] != keys[2]


def test_path_is_no_input() -> None:
    with pytest.raises(TypeError, match="cannot be part of a step's key"):
        counting().step.key(settings=Settings(), text=Path("x"))


def test_steps_with_other_names_have_other_keys() -> None:
    def first(folder: Path) -> dict[str, float]:
        return {}

    def second(folder: Path) -> dict[str, float]:
        return {}

    assert step()(first).key() != step()(second).key()


def test_publish_replaces_everything(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    publish(tmp_path / "new", tmp_path / "old")
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]


def test_stages_of_one_run_share_a_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".work").mkdir()
    settings = Settings()
    with tracking.stage_run("vanilla", settings, "d" * 64) as vanilla:
        vanilla.log({"dev/score": 0.25, "kl": float("nan")})
    with tracking.stage_run("weights", settings, "d" * 64) as weights:
        checkpoint = Manifest("somewhere", {"adapter": "0" * 64})
        model = weights.log_checkpoint(checkpoint, 2, {"round": "2"})
        weights.log({"dev/score": 0.5}, 2, model)
    with tracking.stage_run("vanilla", Settings(seed=1), "d" * 64) as other:
        pass
    client = weights.client
    first, second, third = (client.get_run(run.run_id) for run in (vanilla, weights, other))
    parent = first.data.tags["mlflow.parentRunId"]
    assert second.data.tags["mlflow.parentRunId"] == parent
    assert third.data.tags["mlflow.parentRunId"] != parent
    assert first.data.metrics == {"dev/score": 0.25}
    assert first.info.status == "FINISHED"
    assert second.inputs.dataset_inputs[0].dataset.digest == "d" * 12
    for run in (parent, weights.run_id):
        assert client.get_run(run).data.params["weights.optimizer.learning_rate"] == "0.0002"
    found = client.get_logged_model(model)
    assert found.source_run_id == weights.run_id
    assert found.tags["digest"] == checkpoint.digest
    (metric,) = found.metrics
    assert (metric.key, metric.value, metric.step, metric.dataset_digest) == ("dev/score", 0.5, 2, "d" * 12)
    experiment = client.get_experiment(weights.experiment_id)
    assert Path(experiment.artifact_location.removeprefix("file://")).is_absolute()


def test_failed_and_killed_stages_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".work").mkdir()
    with pytest.raises(ValueError, match="wrong"), tracking.stage_run("weights", Settings(), "d") as failed:
        raise ValueError("wrong")
    tags = {**failed.client.get_run(failed.run_id).data.tags}
    killed = failed.client.create_run(failed.experiment_id, tags=tags).info.run_id
    with tracking.stage_run("weights", Settings(), "d"):
        pass
    assert failed.client.get_run(failed.run_id).info.status == "FAILED"
    assert failed.client.get_run(killed).info.status == "KILLED"


def test_tracking_address_is_no_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".work").mkdir()
    address = f"sqlite:///{tmp_path}/mlflow.db?password=geheim"
    with tracking.stage_run("data", Settings(tracking=Tracking(uri=address)), "d") as run:
        pass
    parent = run.client.get_run(run.client.get_run(run.run_id).data.tags["mlflow.parentRunId"])
    assert "geheim" not in str(parent.data)


def test_a_rounds_channels_are_means_over_the_rollouts_that_have_them() -> None:
    good = Rollout("a/0", "a", 0, "student", (), {}, 1.0, channels={"kept": 0.5})
    failed = Rollout("a/1", "a", 0, "student", (), {}, 0.0, status="lm_error")
    assert means([good, failed]) == {"reward": 0.5, "channel/kept": 0.5}
    assert means([]) == {}


def test_prompts_are_versioned_without_their_demos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helpdesk, papillon = load_pipeline("helpdesk"), load_pipeline("papillon")
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".work").mkdir()
    program = dspy.Predict(dspy.Signature("question -> answer", "Answer with {{care}}."))
    program.demos = [dspy.Example(question="a private one", answer="secret")]
    save_state(program, tmp_path / "program" / STATE)
    with tracking.stage_run("prompts", Settings(), "d") as run:
        for instructions in ("Answer with {{care}}.", "Answer with {{care}}.", "Answer."):
            program.signature = program.signature.with_instructions(instructions)
            save_state(program, tmp_path / "program" / STATE)
            run.log_prompts(helpdesk, Manifest.of(tmp_path / "program"))
            # An optimizer that read private examples may have repeated them.
            run.log_prompts(papillon, Manifest.of(tmp_path / "program"))
    newest = run.client.load_prompt("helpdesk.prompts.self")
    assert (newest.version, newest.template) == (2, "Answer.")
    assert run.client.load_prompt("prompts:/helpdesk.prompts.self/1").template == "Answer with {{care}}."
    assert run.client.load_prompt("papillon.prompts.self", allow_missing=True) is None
    assert b"a private one" not in (tmp_path / ".work/mlflow.db").read_bytes()


def test_scores_on_test_join_the_strategys_own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".work").mkdir()
    with tracking.stage_run("weights", Settings(), "d") as run:
        run.log({"dev/score": 0.5})
    tracking.log_test("weights", Settings(), "d", {"test/score": 0.25})
    tracking.log_test("prompts", Settings(), "d", {"test/score": 0.75})
    assert run.client.get_run(run.run_id).data.metrics == {"dev/score": 0.5, "test/score": 0.25}
    found = run.client.search_runs([run.experiment_id], "tags.`twofold.stage` = 'prompts'")
    assert [one.data.metrics for one in found] == [{"test/score": 0.75}]


def test_a_part_of_a_manifest_is_the_manifest_of_that_folder(tmp_path: Path) -> None:
    for name in ("a/x", "a/b/y", "c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert Manifest.of(tmp_path).part("a") == Manifest.of(tmp_path / "a")
    assert Manifest.of(tmp_path).part("none").outputs == {}
