"""The server for a model of this machine, asked through the openai package."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.beside import running
from twofold.sampling import Refusal
from twofold.sampling.scripted import ScriptedEngine
from twofold.serving import ModelServer


def echo(prompt, request):
    return Refusal("context_overflow", "too long") if "long" in prompt else prompt.split("[user]\n")[1].split("\n")[0]


@pytest.fixture
def served():
    engine = ScriptedEngine(echo)
    with running(ModelServer(engine, 0, 64)) as server:
        yield engine, openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)


def test_requests_are_answered_in_batches_each_with_its_own(served):
    engine, client = served

    def ask(text):
        return client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, (f"text {k}" for k in range(16))))
    assert [one.choices[0].message.content for one in answers] == [f"text {k}" for k in range(16)]
    assert len(engine.batches) < 16
    # "[user]\ntext 0\n[assistant]\n" has 26 characters; "text 0" six and the end.
    assert (answers[0].usage.prompt_tokens, answers[0].usage.completion_tokens) == (26, 7)


def test_equal_requests_have_equal_seeds(served):
    engine, client = served
    for text in ("a", "a", "b"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}], temperature=0.5)
    one, same, other = (request.seed for request in engine.requests)
    assert one == same != other
    assert engine.requests[0].temperature == 0.5


def test_a_refusal_is_an_error_and_other_paths_are_not_there(served):
    _, client = served
    with pytest.raises(openai.BadRequestError, match="too long"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "long"}])
    with pytest.raises(openai.BadRequestError, match="messages"):
        client.post("/chat/completions", body={}, cast_to=object)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="m", prompt="a")


@pytest.mark.parametrize("wish", [{"n": 2}, {"stop": "."}, {"logprobs": True}])
def test_a_wish_that_cannot_be_met_is_refused_and_not_passed_over(served, wish):
    _, client = served
    with pytest.raises(openai.BadRequestError, match=f"{next(iter(wish))} cannot be met"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}], **wish)


def test_a_wish_for_what_happens_anyway_is_none(served):
    _, client = served
    answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}], n=1, stream=False)
    assert answer.choices[0].message.content == "a"
