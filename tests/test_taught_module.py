"""A training with `scaffold_only` whose teacher is a DSPy program: hints for the one module whose rewards tie."""

import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.test_pooled import COMMAND, history
from tests.test_scaffolds import completion, serving
from tests.test_taught import SCAFFOLD, make
from tests.tiny import SETTINGS, environment
from twofold.attempts import ATTEMPTS, read_attempts
from twofold.hints import Placed, read_hints
from twofold.records import Call, Group, read_groups, read_rollouts
from twofold.scores import of_examples, read_scores

pytestmark = pytest.mark.slow

PIPELINE = '''"""Half of the drafts lead to an answer. On odd messages it can be right only with a hint for it."""

import json
from pathlib import Path

import dspy

HINT_FIELD = "text"


class Draft(dspy.Signature):
    """Draft."""

    text: str = dspy.InputField()
    draft: str = dspy.OutputField()


class Answer(dspy.Signature):
    """Answer."""

    draft: str = dspy.InputField()
    answer: str = dspy.OutputField()


class Tiny(dspy.Module):
    def __init__(self):
        super().__init__()
        self.draft = dspy.Predict(Draft)
        self.answer = dspy.Predict(Answer)

    def forward(self, text):
        draft = self.draft(text=text).draft
        if not odd(draft):
            return dspy.Prediction(text=text, answer="", helped=False)
        helped = "Hint: Slowly." in self.answer.signature.instructions
        return dspy.Prediction(text=text, answer=self.answer(draft=draft).answer, helped=helped)


def odd(text):
    return sum(map(ord, text)) % 2


def program():
    return Tiny()


def metric(example, prediction, trace=None):
    if "number" not in prediction.text or not prediction.answer:
        return {"score": 0.0, "accuracy": 0.0}
    easy = int(example.id[1:]) % 2 == 0
    right = 1.0 if easy or prediction.helped and odd(prediction.answer) else 0.0
    return {"score": 0.5 + 0.5 * right, "accuracy": right}


def teacher():
    return dspy.Predict("input, attempts, score, verdict, reference, refused -> hint")


def load(settings):
    rows = [json.loads(line) for line in Path("data/tiny/examples.jsonl").read_text().splitlines()]
    examples = [dspy.Example(label="blue", **row).with_inputs("text") for row in rows]
    return examples[:6], examples[6:10], examples[10:14]
'''

SAID = completion("[[ ## hint ## ]]\nSlowly.\n\n[[ ## completed ## ]]")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, prefect_server: str) -> Path:
    """A checkout in which the training has run."""
    weights = {**SETTINGS["weights"], "examples_per_round": 6, "rollouts_per_example": 6, "groups": {"size": 6}}
    with serving(SAID) as server:
        teacher = {"kind": "program", "endpoint": server.settings()}
        scaffold = {**SCAFFOLD, "arm": "scaffold_only", "teacher": teacher}
        folder = tmp_path_factory.mktemp("module") / "checkout"
        make(folder, prefect_server, PIPELINE, scaffold=scaffold, weights=weights)
        done = subprocess.run(
            COMMAND, cwd=folder, env=environment(TEST_KEY="geheim"), capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    return folder


def groups_of(checkout: Path) -> dict[tuple[int, str], list[Group]]:
    """The groups by round, from 1, and prompt."""
    found = defaultdict(list)
    for group in read_groups(checkout / "outputs/weights/0-w/records/groups.parquet"):
        found[int(group.members[0].rollout_id.split("/")[2]) + 1, group.example_id].append(group)
    return found


def test_the_hint_goes_to_the_module_whose_groups_tie(checkout: Path) -> None:
    attempts = read_attempts(checkout / "outputs/weights/0-w/records" / ATTEMPTS)
    groups = groups_of(checkout)
    assert {attempt.teacher for attempt in attempts} == {"program"}
    for attempt in attempts:
        tied = {group.module: group.all_equal for group in groups[attempt.round, attempt.prompt_id]}
        alone = tied == {"draft": False, "answer": True}
        assert attempt.place == ("answer" if alone else "whole-program")
    assert "answer" in {attempt.place for attempt in attempts}


def test_a_modules_hint_is_in_its_prompt_alone_and_in_no_evaluation(checkout: Path) -> None:
    hints = read_hints(checkout / "outputs/weights/0-w/pool")
    assert hints
    # With a hint for the whole program no answer can be right.
    assert set(hints.values()) == {Placed(hint.parent, "Slowly.", "answer") for hint in hints.values()}
    tokenizer = AutoTokenizer.from_pretrained(checkout / "base")

    def helped(call: Call) -> bool:
        return "Hint: Slowly." in tokenizer.decode(call.prompt_ids)

    trained = read_rollouts(checkout / "outputs/weights/0-w/records")
    shown = {(one.example_id in hints, call.module, helped(call)) for one in trained for call in one.calls}
    assert shown == {
        (False, "draft", False),
        (False, "answer", False),
        (True, "draft", False),
        (True, "answer", True),
    }
    dev = [one for path in checkout.glob(".work/**/dev/rollouts-*") for one in read_rollouts(path)]
    assert dev
    assert not [call for one in dev for call in one.calls if helped(call)]


def test_scaffold_only_trains_on_all_that_it_draws(checkout: Path) -> None:
    rows = of_examples(read_scores(checkout / "outputs/weights/0-w/records/scores.parquet"))
    drawn = {(row.round, row.example_id) for row in rows if row.round < 3}  # in round 3 the reserve is due as well
    assert len({name for number, name in drawn if number == 1}) == 6
    assert {row.verdict for row in rows if row.round == 1} >= {"keep", "too_hard"}
    assert {(number, name) for number, name in groups_of(checkout) if number < 3} == drawn
    for row in history(checkout):
        assert row["kept"] == row["drawn"]
    assert sum(row["teacher/calls"] for row in history(checkout)) > 0
