"""The LM that `twofold export` ships, as far as the exported folders of test_export.py do not try it."""

import asyncio
from pathlib import Path

import dspy
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import make_model
from twofold.adapters import PlainAdapter
from twofold.local_lm import local_lm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, object]:
    """A model and its tokenizer."""
    folder: Path = make_model(tmp_path_factory.mktemp("model"))
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_awaited_it_answers_the_same(model: tuple[object, object]) -> None:
    program = dspy.Predict("text -> answer")
    with dspy.context(lm=local_lm(*model, temperature=0, max_tokens=6), adapter=PlainAdapter()):
        assert asyncio.run(program.acall(text="hello")) == program(text="hello")


def test_a_copied_program_keeps_the_weights(model: tuple[object, object]) -> None:
    program = dspy.Predict("text -> answer")
    program.lm = local_lm(*model, max_tokens=6)
    assert program.deepcopy().lm.engine.model is model[0]


def test_it_draws_with_a_temperature(model: tuple[object, object]) -> None:
    def drawn(**draw: float) -> list[str]:
        torch.manual_seed(0)
        lm = local_lm(*model, max_tokens=6, **draw)
        return [lm("hello")[0] for _ in range(4)]

    assert drawn(temperature=1.0) == drawn(temperature=1.0)
    assert len(set(drawn(temperature=1.0))) > 1
    assert set(drawn(temperature=1.0, top_k=1)) == set(drawn(temperature=0)) == set(drawn())


def test_wishes_that_it_cannot_meet_are_refused(model: tuple[object, object]) -> None:
    with pytest.raises(dspy.LMError, match="sets stop"):
        local_lm(*model, max_tokens=6)("hello", stop=["."])
