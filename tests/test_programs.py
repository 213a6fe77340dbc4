import copy
import json
from pathlib import Path

import dspy
import pytest

from twofold import programs
from twofold.errors import PipelineError
from twofold.examples import example_id, read_examples, write_examples

PIPELINE = '''
import dspy

class Route(dspy.Signature):
    """Pick the team."""
    problem: str = dspy.InputField()
    team: str = dspy.OutputField()

def program():
    return dspy.Predict(Route)

def metric(example, prediction, trace=None):
    return float(example.team == prediction.team)

def load(settings):
    return [], [], []
'''


class Hop(dspy.Module):
    def __init__(self):
        super().__init__()
        self.query = dspy.ChainOfThought("question -> query")


class Deep(dspy.Module):
    def __init__(self):
        super().__init__()
        self.route = dspy.Predict("question -> team")
        self.hops = [Hop(), Hop()]
        self.tools = {"a": dspy.Predict("x -> y")}
        self.again = self.route
        self.frozen = Hop()
        self.frozen._compiled = True
        self.nested = [[dspy.Predict("u -> v")]]


NAMES = [
    "route",
    "hops[0].query.predict",
    "hops[1].query.predict",
    "tools['a']",
    "frozen.query.predict",
    "nested[0][0]",
]


def some_lm(name="openai/some"):
    return dspy.LM(name, api_key="none")


def test_a_pipeline_is_loaded_from_its_file(tmp_path):
    path = tmp_path / "tickets.py"
    path.write_text(PIPELINE + "accuracy = metric\n")
    pipeline = programs.load_pipeline("tickets", tmp_path)
    assert isinstance(pipeline.program(), dspy.Predict)
    example = dspy.Example(team="a")
    assert pipeline.accuracy(example, dspy.Prediction(team="a")) == 1.0
    assert pipeline.load(None) == ([], [], [])
    assert pipeline.scaffold is None
    before = pipeline.digest
    path.write_text(PIPELINE)
    assert programs.load_pipeline("tickets", tmp_path).digest != before
    assert programs.load_pipeline("tickets", tmp_path).accuracy is None


def test_a_pipelines_digest_covers_the_pipelines_it_imports(tmp_path):
    folder = tmp_path / "pipelines"
    folder.mkdir()
    (folder / "whole.py").write_text(PIPELINE)
    (folder / "part.py").write_text("from pipelines.helpdesk import load, metric, program\n")
    (folder / "helpdesk.py").write_text("")
    before = {name: programs.load_pipeline(name, folder).digest for name in ("part", "whole")}
    (folder / "helpdesk.py").write_text("# changed")
    after = {name: programs.load_pipeline(name, folder).digest for name in ("part", "whole")}
    assert after["part"] != before["part"]
    assert after["whole"] == before["whole"]


def test_a_missing_pipeline_names_the_nearest_and_all(tmp_path):
    (tmp_path / "helpdesk.py").touch()
    (tmp_path / "banking.py").touch()
    (tmp_path / "__init__.py").touch()
    with pytest.raises(PipelineError, match=r"helpdsk\.py\. Did you mean 'helpdesk'\? .*: banking, helpdesk\."):
        programs.load_pipeline("helpdsk", tmp_path)
    with pytest.raises(PipelineError, match=r"Pipelines there: none\."):
        programs.load_pipeline("x", tmp_path / "nowhere")


def test_a_pipeline_without_its_parts_says_which(tmp_path):
    (tmp_path / "half.py").write_text("def program(): ...\nmetric = 3\n")
    with pytest.raises(PipelineError, match=r"half\.py must define `metric`, `load`"):
        programs.load_pipeline("half", tmp_path)


def test_private_fields_are_names(tmp_path):
    text = "def program(): ...\ndef metric(): ...\ndef load(): ...\n"
    (tmp_path / "some.py").write_text(f'{text}private = ("query", "note")\n')
    (tmp_path / "one.py").write_text(f'{text}private = "query"\n')
    assert programs.load_pipeline("some", tmp_path).private == ("query", "note")
    with pytest.raises(PipelineError, match=r'Write private = \("query",\)'):
        programs.load_pipeline("one", tmp_path)


def test_a_pipeline_that_does_not_import_says_why(tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    with pytest.raises(PipelineError, match=r"broken\.py cannot be imported: ModuleNotFoundError: .*no_such_package"):
        programs.load_pipeline("broken", tmp_path)


def test_modules_are_named_by_their_path_and_named_once():
    assert list(programs.modules(Deep())) == NAMES
    assert list(programs.modules(dspy.Predict("a -> b"))) == ["self"]
    assert list(programs.modules(dspy.ReAct("q -> a", tools=[]))) == ["react", "extract.predict"]


def test_two_predictors_on_one_signature_class_are_two_modules():
    class Ask(dspy.Signature):
        q: str = dspy.InputField()
        a: str = dspy.OutputField()

    program = dspy.Module()
    program.first, program.second = dspy.Predict(Ask), dspy.Predict(Ask)
    assert list(programs.modules(program)) == ["first", "second"]


def test_binding_gives_every_module_an_lm_and_leaves_the_program_alone():
    program = Deep()
    own = some_lm("openai/own")
    program.tools["a"].lm = own
    bound = programs.bind(program, lambda name: some_lm(f"twofold/{name}"))
    models = {name: predictor.lm.model for name, predictor in programs.modules(bound).items()}
    assert models == {name: f"twofold/{name}" for name in NAMES} | {"tools['a']": "openai/own"}
    assert bound.again is bound.route
    assert program.route.lm is None
    assert program.tools["a"].lm is own


def trained(program):
    program.route.demos = [dspy.Example(question="q", team="t", augmented=True)]
    program.hops[1].query.predict.signature = program.hops[1].query.predict.signature.with_instructions("Dig.")
    return program


def test_state_is_saved_without_lms_and_loaded_into_a_program_that_keeps_its_own(tmp_path):
    path = tmp_path / "deep" / "state.json"
    program = trained(programs.bind(Deep(), lambda name: some_lm()))
    programs.save_state(program, path)
    assert {part.get("lm") for part in json.loads(path.read_text()).values()} == {None}
    assert list(path.parent.iterdir()) == [path]

    fresh = Deep()
    own = some_lm("openai/own")
    fresh.hops[0].query.predict.lm = own
    programs.load_state(fresh, path)
    assert fresh.hops[0].query.predict.lm is own
    assert fresh.route.lm is None
    assert [dict(demo) for demo in fresh.route.demos] == [{"question": "q", "team": "t", "augmented": True}]
    assert fresh.hops[1].query.predict.signature.instructions == "Dig."
    assert programs.digest(fresh) == programs.digest(program)
    assert program.route.lm is not None


def test_the_digest_follows_instructions_and_demos_only():
    plain = programs.digest(Deep())
    assert plain == programs.digest(Deep()) == programs.digest(programs.bind(Deep(), lambda name: some_lm()))
    assert programs.digest(trained(Deep())) != plain
    assert programs.digest(copy.deepcopy(trained(Deep()))) == programs.digest(trained(Deep()))


def test_a_state_of_another_program_is_refused(tmp_path):
    path = tmp_path / "state.json"
    programs.save_state(dspy.Predict("a -> b"), path)
    with pytest.raises(PipelineError, match="holds no state of this program"):
        programs.load_state(Deep(), path)
    path.write_text('{"route": {')
    with pytest.raises(PipelineError, match="holds no state of this program"):
        programs.load_state(Deep(), path)
    with pytest.raises(PipelineError, match="holds no state of this program"):
        programs.load_state(Deep(), Path("nowhere.json"))


def examples():
    return [
        dspy.Example(message="café, été 日本", team="Billing", id=7).with_inputs("message"),
        dspy.Example(message="b", labels=["x", {"y": 1.5}], team=None).with_inputs("message", "labels"),
    ]


def test_examples_come_back_as_they_were_and_as_the_same_bytes(tmp_path):
    first, second = tmp_path / "data" / "train.jsonl", tmp_path / "again.jsonl"
    write_examples(examples(), first)
    back = read_examples(first)
    assert [example.toDict() for example in back] == [example.toDict() for example in examples()]
    assert [example.inputs().toDict() for example in back] == [example.inputs().toDict() for example in examples()]
    assert [example_id(example) for example in back] == [example_id(example) for example in examples()]
    write_examples(back, second)
    assert first.read_bytes() == second.read_bytes()
    assert b"\r" not in first.read_bytes()
    assert first.read_bytes().count(b"\n") == 2


def test_an_examples_id_is_its_own_or_depends_on_its_content_alone():
    assert example_id(dspy.Example(id=7, a=1)) == "7"
    assert example_id(dspy.Example(a=1, b=2)) == example_id(dspy.Example(b=2, a=1).with_inputs("a"))
    assert example_id(dspy.Example(a=1)) != example_id(dspy.Example(a=2))
    assert len(example_id(dspy.Example(a=1, id=""))) == 12


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], "no examples"),
        ([dspy.Example(a=1).with_inputs("a")] * 2, "1 ids occur more than once"),
        ([dspy.Example(a=1, id=3).with_inputs("a"), dspy.Example(a=2, id="3").with_inputs("a")], "such as 3"),
        ([dspy.Example(a=1)], "with_inputs"),
        ([dspy.Example(a=object()).with_inputs("a")], "example 0 .*JSON"),
    ],
)
def test_examples_that_cannot_be_used_are_refused(tmp_path, wrong, message):
    path = tmp_path / "x.jsonl"
    with pytest.raises(PipelineError, match=message):
        write_examples(wrong, path)
    assert not path.exists()


@pytest.mark.parametrize("text", ["", '{"fields": {}', '{"fields": {}}', "[]"])
def test_a_file_that_holds_no_examples_is_refused(tmp_path, text):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(PipelineError, match=str(path)):
        read_examples(path)
    with pytest.raises(PipelineError, match="data"):
        read_examples(tmp_path / "none.jsonl")


def test_a_program_may_be_a_single_predictor(tmp_path):
    program = dspy.Predict(dspy.Signature("q -> a", "Answer."))
    programs.save_state(program, tmp_path / "program.json")
    assert list(programs.modules(program)) == list(programs.state(program)) == ["self"]
    assert programs.instructions_at(tmp_path / "program.json") == {"self": "Answer."}
    other = dspy.Predict(dspy.Signature("q -> a", "Something else."))
    assert programs.digest(other) != programs.digest(program)
    programs.load_state(other, tmp_path / "program.json")
    assert programs.digest(other) == programs.digest(program)
