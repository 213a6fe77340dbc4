"""The default task's data: sizes, balance, and nothing that gives the answer away."""

import re
from collections import Counter
from itertools import combinations
from typing import get_args

import dspy
import pytest

from twofold.programs import Pipeline, load_pipeline, modules
from twofold.settings import Settings

# Words that say nothing of the topic.
STOP = set(
    "a about after again all also am an and any are as at be because been before but by can can't could did do does "
    "don't for from get got had has have how i i'd i'll i'm i've if in into is isn't it it's its just like me my no "
    "not now of off on one only or our out over please s said says since so some still t than that that's the their "
    "them then there they this to too two up us was want we were what when where which while who why will with would "
    "yet you your".split()
)


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    return load_pipeline("helpdesk")


@pytest.fixture(scope="module")
def splits(pipeline: Pipeline) -> dict[str, list[dspy.Example]]:
    return dict(zip(("train", "dev", "test"), pipeline.load(Settings()), strict=True))


def words(example: dspy.Example) -> set[str]:
    return set(re.findall(r"[a-z']+", example.message.lower()))


def test_splits_are_large_enough_and_balanced(splits):
    assert len(splits["train"]) >= 240
    assert len(splits["dev"]) >= 120
    assert len(splits["test"]) >= 160
    assert sum(map(len, splits.values())) >= 560
    for examples in splits.values():
        counts = Counter(example.team for example in examples)
        assert len(counts) == 8
        assert len(set(counts.values())) == 1


def test_no_message_comes_twice_and_no_split_knows_another(splits):
    messages = [example.message.strip().lower() for examples in splits.values() for example in examples]
    assert len(set(messages)) == len(messages)
    for one, other in combinations(splits.values(), 2):
        for a, b in ((words(x), words(y)) for x in one for y in other):
            assert len(a & b) / len(a | b) < 0.6


def test_no_word_gives_a_team_away(splits):
    examples = [example for part in splits.values() for example in part]
    for team in {example.team for example in examples}:
        own = [words(example) - STOP for example in examples if example.team == team]
        [(word, times)] = Counter(word for message in own for word in message).most_common(1)
        assert times <= len(own) / 2, (team, word)


def test_messages_are_short_and_long(splits):
    lengths = [len(example.message.split()) for part in splits.values() for example in part]
    assert min(lengths) <= 8
    assert max(lengths) >= 60


def test_the_untrained_program_has_at_most_one_demo_a_module(pipeline, splits):
    predictors = modules(pipeline.program())
    assert list(predictors) == ["condense", "route"]
    assert all(len(predictor.demos) <= 1 for predictor in predictors.values())
    teams = get_args(predictors["route"].signature.output_fields["team"].annotation)
    assert set(teams) == {example.team for example in splits["test"]}
    assert all(team in predictors["route"].signature.instructions for team in teams)
    demo = predictors["condense"].demos[0].message
    assert all(demo != example.message for part in splits.values() for example in part)


def test_the_reward_is_accuracy(pipeline):
    example = dspy.Example(message="m", team="team_travel")
    assert pipeline.metric(example, dspy.Prediction(team="team_travel")) == 1.0
    assert pipeline.metric(example, dspy.Prediction(team="team_food")) == 0.0
