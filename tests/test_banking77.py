"""Banking77: the program, and where its messages come from."""

import csv
from collections import Counter
from pathlib import Path

import datasets
import dspy
import pytest

from twofold import rollouts
from twofold.errors import PipelineError
from twofold.programs import Pipeline, load_pipeline, modules
from twofold.sampling.scripted import ScriptedEngine, decode
from twofold.settings import Draw, Sampling, Settings


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pipeline:
    """The pipeline, in a folder without data."""
    loaded = load_pipeline("banking77")
    monkeypatch.chdir(tmp_path)
    Path("data/banking77").mkdir(parents=True)
    return loaded


def write(split: str, rows: list[tuple[str, str]], columns: tuple[str, str] = ("text", "category")) -> None:
    with Path(f"data/banking77/{split}.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


def messages(split: str, count: int) -> list[tuple[str, str]]:
    return [(f"{split} message, number {n}", "atm_support") for n in range(count)]


def texts(examples: list[dspy.Example]) -> list[str]:
    return [example.text for example in examples]


def test_the_splits_have_the_papers_sizes_and_share_no_message(pipeline):
    shared = [("Same here ", "age_limit"), ("same here", "age_limit")]
    write("train", messages("train", 600) + shared)
    write("test", messages("test", 700) + shared[:1])
    train, dev, test = pipeline.load(Settings())
    assert [len(train), len(dev), len(test)] == [250, 250, 500]
    found = Counter(texts(train) + texts(dev) + texts(test))
    assert set(found.values()) == {1}
    assert not {"Same here", "same here"} & set(texts(train) + texts(dev))
    assert all(example.inputs().keys() == ["text"] for example in train)


def test_the_messages_depend_on_neither_the_order_of_the_files_nor_the_seed(pipeline):
    write("train", messages("train", 600))
    write("test", messages("test", 600))
    before = pipeline.load(Settings())
    write("train", messages("train", 600)[::-1])
    write("test", messages("test", 600)[::-1])
    assert [texts(part) for part in pipeline.load(Settings(seed=1))] == [texts(part) for part in before]
    # They are a mix of the file, not its beginning.
    assert sum(int(text.split()[-1]) >= 300 for text in texts(before[0])) > 100


def test_a_file_that_is_something_else_is_named(pipeline):
    write("test", messages("test", 3))
    write("train", messages("train", 3), columns=("text", "label"))
    with pytest.raises(PipelineError, match=r"train\.csv has the columns \['text', 'label'\]. Put train\.csv"):
        pipeline.load(Settings())
    write("train", [("hello", "greeting")])
    with pytest.raises(PipelineError, match=r"train\.csv: greeting is no intent"):
        pipeline.load(Settings())


def test_missing_files_are_loaded_from_the_hub(pipeline, monkeypatch):
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["atm_support"]))

    def load_dataset(name: str, split: str, revision: str) -> datasets.Dataset:
        assert (name, revision) == ("PolyAI/banking77", "refs/convert/parquet")
        return datasets.Dataset.from_dict({"text": [f"{split} {n}" for n in range(3)], "label": [0] * 3}, features)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    train, _, test = pipeline.load(Settings())
    assert sorted(texts(train)) == ["train 0", "train 1", "train 2"]
    assert {example.category for example in test} == {"atm_support"}


def test_without_files_and_hub_the_error_says_what_to_put_where(pipeline, monkeypatch):
    def load_dataset(name: str, **options: str) -> datasets.Dataset:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        PipelineError, match=r"test\.csv is missing.*no network.*Put train\.csv and test\.csv.*PolyAI/banking77"
    ):
        pipeline.load(Settings())


def test_the_reward_is_exact_match(pipeline):
    example = dspy.Example(text="m", category="reverted_card_payment?")
    assert pipeline.metric(example, dspy.Prediction(category="reverted_card_payment?")) == 1.0
    assert pipeline.metric(example, dspy.Prediction(category="card_arrival")) == 0.0


@pytest.mark.parametrize("adapter", ["plain", "chat"])
def test_one_module_thinks_and_chooses_among_77_intents(pipeline, adapter):
    """Also in a prompt with other instructions, as an optimizer writes them."""
    answers = {
        "plain": "Reasoning: It says so.\nCategory: Refund_not_showing_up",
        "chat": "[[ ## reasoning ## ]]\nIt says so.\n\n[[ ## category ## ]]\nRefund_not_showing_up\n",
    }
    engine = ScriptedEngine(lambda prompt, request: answers[adapter])
    program = pipeline.program()
    [predict] = modules(program).values()
    predict.signature = predict.signature.with_instructions("Sort the mail.")
    examples = [
        dspy.Example(text="Where is my refund?", category=category).with_inputs("text")
        for category in ("Refund_not_showing_up", "request_refund")
    ]
    settings = Settings(sampling=Sampling(adapter=adapter, context=32768, max_tokens=512))
    right, wrong = rollouts.run(
        program, rollouts.plan(examples, 1, 0, "test"), pipeline.metric, engine, settings, Draw()
    )
    assert (right.reward, wrong.reward, right.status) == (1.0, 0.0, "ok")
    assert right.output == {"reasoning": "It says so.", "category": "Refund_not_showing_up"}
    assert [(call.module, call.index) for call in right.calls] == [("predict", 0)]
    intents = predict.signature.output_fields["category"].annotation.__args__
    assert len(intents) == 77
    assert all(intent in decode(right.calls[0].prompt_ids) for intent in intents)
