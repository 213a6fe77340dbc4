"""Settings: what is wrong is said with file, line and key."""

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from twofold.errors import SettingsError
from twofold.settings import Pooling, Rewards, Scaffold, Settings, Teacher, change, load


def written(folder: Path, text: str) -> Path:
    path = folder / "params.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_projects_own_file_is_complete():
    """Every setting is in params.yaml, so that DVC can watch it."""
    import yaml

    content = yaml.safe_load(Path("params.yaml").read_text(encoding="utf-8"))
    assert set(content) == set(Settings.model_fields)
    assert not load(Path("params.yaml")).warnings()


def test_dvc_sees_every_setting_that_changes_a_strategy():
    import yaml

    stage = yaml.safe_load(Path("dvc.yaml").read_text(encoding="utf-8"))["stages"]["strategy"]["do"]
    # `data` comes with data/prepared.
    others = {"data", "strategies", "hosted", "vllm", "tracking", "retrain", "ui"}
    assert {*stage["params"]} == {*Settings.model_fields} - others | {"strategies.${key}"}


def test_an_empty_file_has_the_defaults(tmp_path):
    assert load(written(tmp_path, "")) == Settings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nsampling:\n  tokens: 3\n", r":3: unknown key 'sampling\.tokens'\. Did you mean 'max_tokens'\?"),
        ("wieghts: {}\n", r":1: unknown key 'wieghts'\. Did you mean 'weights'\?"),
        ("weights:\n  lora:\n    r: 4\n    alpa: 2\n", r":4: unknown key 'weights\.lora\.alpa'\. Did you mean 'alpha'"),
        ("data:\n  zzz: 1\n", r":2: unknown key 'data\.zzz'\. Valid names here: train, dev, test\."),
        ("weights:\n  rounds: 0\n", r":2: weights\.rounds: .*greater than or equal to 1 \(found 0\)"),
        ("seed: 1\nweights:\n  lora: {r: x}\n", r":3: weights\.lora\.r: .*integer.*\(found 'x'\)"),
        ("weights:\n  draw: {temperature: .nan}\n", r":2: weights\.draw\.temperature: .*finite"),
        ("scaffold: {arm: half}\n", r":1: scaffold\.arm: .*'whole', 'filter_only', .* \(found 'half'\)"),
        (
            "scaffold:\n  pool: {max_draw: 3}\n",
            r":2: unknown key 'scaffold\.pool\.max_draw'\. Did you mean 'max_draws'",
        ),
        (
            "endpoints:\n  far: {model: m, base_url: u, price: 1}\n",
            r":2: unknown key 'endpoints\.far\.price'\. Did you mean 'price_in'",
        ),
        ("hosted:\n  far: {model: m}\n", r":2: hosted\.far\.base_url: Field required"),
        ("sampling: {adapter: xlm}\n", r":1: sampling\.adapter: .*'plain', 'chat', 'json' or 'xml'"),
        ("sampling: {context: 10, max_tokens: 10}\n", r"max_tokens must be smaller than sampling\.context"),
        ("retrain: {schedule: {cron: x, interval: 3}}\n", "give either cron or interval"),
        ("ui: {mlflow_port: 4200}\n", "prefect_port and mlflow_port must differ"),
        ("sampling: {engine: vllm}\n", r"'vllm' must name base_urls, or how many servers to start"),
        ("seed: 1\nvllm: {port: 1}\n", r":2: unknown key 'vllm\.port'\. Valid names here: base_urls, start"),
        ("vllm: {adapters: 1}\n", r":1: vllm: .*one of the two"),
        ("vllm: {start: 1, base_urls: [a]}\n", r":1: vllm: .*one of the two"),
        ("- a\n", r":1: settings: "),
        ("a: [\n", "not valid YAML"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(SettingsError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))


def test_every_problem_is_said(tmp_path):
    with pytest.raises(SettingsError) as caught:
        load(written(tmp_path, "seeed: 1\nweights:\n  rounds: -1\n"))
    assert str(caught.value).count("params.yaml:") == 2


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(SettingsError, match="--params"):
        load(tmp_path / "none.yaml")


def test_settings_cannot_be_changed():
    with pytest.raises(ValidationError):
        Settings().seed = 2


@pytest.mark.parametrize(
    ("weights", "word"),
    [
        ({"draw": {"top_p": 0.95}}, "top_p"),
        ({"draw": {"top_k": 20}}, "top_k"),
        ({"lora": {"dropout": 0.05}}, "dropout"),
        ({"loss": {"type": "cispo"}}, "epsilon_high"),
    ],
)
def test_likely_mistakes_are_warned_of(weights, word):
    [warning] = Settings.model_validate({"weights": weights}).warnings()
    assert word in warning


def test_a_server_without_a_correction_is_warned_of():
    served = {"sampling": {"engine": "vllm"}, "vllm": {"start": 1}}
    [warning] = Settings.model_validate(served).warnings()
    assert "weights.correction.mode" in warning
    assert not Settings.model_validate({**served, "weights": {"correction": {"mode": "mask"}}}).warnings()


def test_too_few_draws_for_a_batch_are_warned_of():
    draws = {"pool": {"max_draws": 7}}
    [warning] = Settings.model_validate({"scaffold": draws, "weights": {"examples_per_round": 8}}).warnings()
    assert "scaffold.pool.max_draws is 7: no round can keep the 8 inputs" in warning
    assert not Settings.model_validate({"scaffold": draws, "weights": {"examples_per_round": 7}}).warnings()


@pytest.mark.parametrize(
    ("arm", "kind", "depth", "filters"),
    [
        ("whole", "scripted", 3, True),
        ("whole", "none", 0, True),
        ("scaffold_only", "scripted", 3, False),
        ("filter_only", "scripted", 0, True),
        ("random_routing", "scripted", 0, True),
    ],
)
def test_arms_without_a_teacher_queue_nothing_for_one(arm, kind, depth, filters):
    found = Scaffold(arm=arm, teacher=Teacher(kind=kind), pool=Pooling(max_draws=9, max_depth=3))
    assert (found.pooling.max_draws, found.pooling.max_depth, found.filters) == (9, depth, filters)


def test_rewards_of_failures():
    rewards = Rewards(failure=0.5, format_failure=-1.0, timeout=-2.0)
    assert rewards.of("timeout") == -2.0
    assert [rewards.of("parse_error", share) for share in (0.0, 0.5, 1.0)] == [-1.0, -0.25, 0.5]
    # 0 is a reward, not a missing one.
    assert Rewards(failure=0.5).of("parse_error", 0.0) == 0.0


def test_a_change_leaves_everything_else(tmp_path):
    path = written(tmp_path, "# mine\npipeline: tiny   # which\nweights:\n  rounds: 3\n  loss: {beta: 0.1}\n")
    change(path, {"weights.rounds": 20, "pipeline": "other-one", "weights.loss.beta": 0})
    assert path.read_text() == ('# mine\npipeline: "other-one"   # which\nweights:\n  rounds: 20\n  loss: {beta: 0}\n')


@pytest.mark.parametrize(("name", "value"), [("weights.rounds", 0), ("weights.steps", 1), ("seed.x", 1)])
def test_a_wrong_change_changes_nothing(tmp_path, name, value):
    text = "seed: 1\nweights: {rounds: 3}\n"
    path = written(tmp_path, text)
    with pytest.raises(SettingsError):
        change(path, {"seed": 7, name: value})
    assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_results_do_not_depend_on_when_they_are_made():
    later = Settings.model_validate({"retrain": {"schedule": {"interval": 60}}, "ui": {"mlflow_port": 5001}})
    assert later.of_results() == Settings().of_results()


def test_what_is_public_names_no_server_and_no_key():
    server = {"model": "m", "base_url": "http://me:geheim@inside:1", "key": "KEY_NAME"}
    found = Settings.model_validate(
        {
            "tracking": {"uri": "http://inside:2"},
            "prompts": {"proposer": server},
            "endpoints": {"far": server},
            "weights": {"sources": [{"name": "wise", "share": 0.5, "lm": server}]},
            "vllm": {"base_urls": ["http://inside:3"], "key": "KEY_NAME"},
        }
    ).public()
    assert not re.search("inside|geheim|KEY_NAME", str(found))
    assert found["endpoints"]["far"]["model"] == found["weights"]["sources"][0]["lm"]["model"] == "m"
