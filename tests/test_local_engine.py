"""The engine in this process, against plain transformers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from tests.tiny import make_model
from twofold import prefix
from twofold.errors import ModelError
from twofold.policy import load_base
from twofold.sampling import Refusal, SampleRequest
from twofold.sampling.local import LocalEngine
from twofold.settings import Model, Settings

FLOAT32 = {"device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def engine_for(folder: Path, **sampling: object) -> LocalEngine:
    return LocalEngine(folder, Settings.model_validate({"model": FLOAT32, "sampling": {"context": 256, **sampling}}))


@pytest.fixture(scope="module")
def engine(folder: Path) -> LocalEngine:
    return engine_for(folder)


def ask(prompt: tuple[int, ...], seed: int = 0, **changes: object) -> SampleRequest:
    asked = SampleRequest(prompt, seed, temperature=0.7, top_p=1.0, top_k=0, max_tokens=12, policy="base", family="m")
    return replace(asked, **changes)


def prompts(engine: LocalEngine, *texts: str) -> list[tuple[int, ...]]:
    return [engine.encode([{"role": "system", "content": "red green"}, {"role": "user", "content": t}]) for t in texts]


def full_logits(model: torch.nn.Module, request: SampleRequest, ids: tuple[int, ...]) -> torch.Tensor:
    """Logits before each sampled token, from one plain forward of the whole sequence."""
    with torch.no_grad():
        return model(torch.tensor([request.prompt_ids + ids])).logits[0, len(request.prompt_ids) - 1 : -1]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_logprobs_are_those_of_the_distribution_sampled_from(engine, reference, temperature):
    texts = ("blue", "the parcel is late", "which team", "nobody answers the customer, red or blue")
    requests = [ask(p, seed, temperature=temperature) for seed, p in enumerate(prompts(engine, *texts))]
    for request, answer in zip(requests, engine.sample(requests), strict=True):
        logits = full_logits(reference, request, answer.token_ids) / temperature
        expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)


def test_top_k_and_top_p_are_part_of_the_logprobs(engine, reference):
    [prompt] = prompts(engine, "blue")
    [answer] = engine.sample([ask(prompt, 5, top_k=3)])
    logits = full_logits(reference, ask(prompt), answer.token_ids) / 0.7
    for step, (token, logprob) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        kept, places = logits[step].topk(3)
        assert token in places
        assert logprob == pytest.approx(torch.log_softmax(kept, -1)[places.tolist().index(token)].item(), abs=1e-4)
    [narrow] = engine.sample([ask(prompt, 5, top_p=1e-6)])
    assert set(narrow.logprobs) == {0.0}


def test_temperature_zero_takes_the_likeliest_token(engine, reference):
    [prompt] = prompts(engine, "which team")
    [answer] = engine.sample([ask(prompt, temperature=0.0)])
    assert torch.equal(full_logits(reference, ask(prompt), answer.token_ids).argmax(-1), torch.tensor(answer.token_ids))
    assert set(answer.logprobs) == {0.0}


def test_tokens_come_as_often_as_their_probability_says(engine, reference):
    [prompt] = prompts(engine, "blue")
    draws = 4000
    answers = engine.sample([ask(prompt, seed, temperature=0.5, max_tokens=1) for seed in range(draws)])
    seen = np.bincount([a.token_ids[0] for a in answers], minlength=reference.config.vocab_size) / draws
    with torch.no_grad():
        expected = torch.softmax(reference(torch.tensor([prompt])).logits[0, -1] / 0.5, -1).numpy()
    # Five standard deviations of a frequency, and a few draws more where almost none are expected.
    assert (abs(seen - expected) <= 5 * np.sqrt(expected * (1 - expected) / draws) + 3 / draws).all()


def test_an_answer_does_not_depend_on_its_neighbours(engine):
    a, b, c = prompts(engine, "blue", "the parcel is late and red", "which")
    together = engine.sample([ask(a, 1), ask(b, 2), ask(c, 3), ask(a, 4)])
    alone = [engine.sample([request])[0] for request in (ask(a, 1), ask(b, 2), ask(c, 3), ask(a, 4))]
    assert [x.token_ids for x in together] == [x.token_ids for x in alone]
    assert together[0].token_ids != together[3].token_ids
    np.testing.assert_allclose(together[1].logprobs, alone[1].logprobs, atol=1e-5)


def test_the_same_requests_give_the_same_bytes(folder, engine):
    requests = [ask(p, seed) for seed, p in enumerate(prompts(engine, "blue", "red", "which team"))]
    assert engine.sample(requests) == engine_for(folder).sample(requests)


def test_batches_keep_the_order_and_respect_each_request(folder, engine):
    small = engine_for(folder, batch_size=2)
    ps = prompts(engine, *(f"red {n}" for n in range(7)))
    requests = [
        ask(p, n, temperature=(0.7, 0.0)[n % 2], max_tokens=3 + n, family="xy"[n % 2]) for n, p in enumerate(ps)
    ]
    answers = small.sample(requests)
    assert [a.token_ids for a in answers] == [engine.sample([r])[0].token_ids for r in requests]
    assert all(len(a.token_ids) <= r.max_tokens for a, r in zip(answers, requests, strict=True))


def test_an_answer_ends_at_the_end_token_or_at_max_tokens(engine):
    [prompt] = prompts(engine, "blue")
    answers = engine.sample([ask(prompt, seed, temperature=2.0, max_tokens=40) for seed in range(300)])
    ended = [a for a in answers if a.finish_reason == "stop"]
    cut = [a for a in answers if a.finish_reason == "length"]
    end = engine.tokenizer.eos_token_id
    assert ended
    assert cut
    assert all(a.token_ids[-1] == end and end not in a.token_ids[:-1] and "<|im_end|>" not in a.text for a in ended)
    assert all(len(a.token_ids) == 40 and end not in a.token_ids for a in cut)


def test_what_exceeds_the_context_is_refused_and_spoils_nothing(engine):
    [prompt] = prompts(engine, "blue")
    long = prompt * 20
    refused, answered, exact = engine.sample([ask(long), ask(prompt), ask(prompt, max_tokens=256 - len(prompt))])
    assert isinstance(refused, Refusal)
    assert refused.kind == "context_overflow"
    assert str(len(long)) in refused.message
    assert answered.token_ids
    assert exact.token_ids


def test_an_unknown_policy_is_an_error(engine):
    with pytest.raises(ModelError, match="never loaded"):
        engine.sample([ask((1, 5, 6), policy="0123456789ab")])


def test_a_sliding_window_model_is_refused(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ModelError, match="sliding_attention"):
        prefix.install(model)


def test_a_folder_without_a_model_is_an_error(tmp_path):
    with pytest.raises(ModelError, match="dvc repro model"):
        load_base(tmp_path, Model(**FLOAT32))


def test_prompts_and_completions_after_a_shared_beginning_equal_full_rows(folder, reference):
    """Hidden states and gradients: padded prompts, of which some have several completions, some none."""
    model = load_base(folder, Model(**FLOAT32))
    torch.manual_seed(0)
    start = torch.randint(3, 200, (7,))
    prompts = [torch.randint(3, 200, (length,)) for length in (5, 2, 4)]
    completions = [torch.randint(3, 200, (length,)) for length in (3, 1, 2, 3)]
    origin = torch.tensor([2, 0, 2, 2])
    own, seen = padded(prompts, left=True)
    ids, mask = padded(completions, left=False)
    beginning = prefix.run_beginning(model, start.tolist())
    ran, hidden = prefix.run_prompts(model, own, seen, beginning)
    after = prefix.run_completions(model, ids, mask, ran, origin)
    states = torch.cat([hidden[seen], after[mask]])
    full = [torch.cat([start, prompts[k], row]) for k, row in zip(origin, completions, strict=True)]
    plain = [reference.model(torch.cat([start, row])[None]).last_hidden_state[0, 7:] for row in prompts]
    plain += [
        reference.model(row[None]).last_hidden_state[0, -len(c) :] for row, c in zip(full, completions, strict=True)
    ]
    plain = torch.cat(plain)
    torch.testing.assert_close(states, plain, atol=1e-5, rtol=1e-4)
    for weights, found in ((model, states), (reference, plain)):
        weights.zero_grad()
        found.square().sum().backward()
    for ours, theirs in zip(model.model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-3, rtol=1e-3)


def test_training_on_prompts_twice_as_long_takes_about_twice_the_memory(folder):
    """What a pass keeps for its gradients is no matrix of all tokens by all tokens, in any layer."""
    model = load_base(folder, Model(**FLOAT32))

    def kept(length):
        """Bytes, but for what all layers share and for the weights."""
        known = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        sizes = {}

        def note(tensor):
            sizes.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor.untyped_storage().nbytes())
            return tensor

        beginning = prefix.run_beginning(model, [3, 4])
        own, seen = torch.full((4, length), 5), torch.ones(4, length, dtype=torch.bool)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            ran, hidden = prefix.run_prompts(model, own, seen, beginning)
        known.add(ran.bias.untyped_storage().data_ptr())
        del hidden
        return sum(found[0] for place, found in sizes.items() if place not in known)

    assert kept(200) < 2.2 * kept(100)


def padded(rows, *, left):
    """Ids and mask, (B, S) each."""
    side = "left" if left else "right"
    masks = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    return tuple(pad_sequence(part, batch_first=True, padding_side=side) for part in (rows, masks))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [([(1, 2, 3, 4), (1, 2, 5)], 2), ([(1, 2, 3)], 2), ([(1, 2), (1, 2)], 1), ([(1, 2), (3, 4)], 0), ([(1,)], 0)],
)
def test_shared_length_leaves_each_row_a_token(rows, expected):
    assert prefix.shared_length(rows) == expected
