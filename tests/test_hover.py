"""Multi-hop retrieval, HoVer's and HotpotQA's: the program, its retrievers, its metric and its data."""

import json
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import dspy
import pytest

from pipelines.hotpotqa import Bm25
from pipelines.hover import MultiHop, Server, metric
from tests.beside import running
from twofold import rollouts
from twofold.errors import PipelineError
from twofold.groups import make_groups
from twofold.programs import Pipeline, load_pipeline, modules
from twofold.records import Rollout
from twofold.sampling import SampleRequest
from twofold.sampling.scripted import ScriptedEngine
from twofold.settings import Draw, Grouping, Rewards, Sampling, Settings

FRUIT = [
    "Apple | A red fruit that grows on trees.",
    "Cherry | A small fruit, red and sweet; a red fruit with a stone.",
    "Lemon | A sour yellow fruit.",
    "Tractor | A machine for fields.",
]


def run(program: dspy.Module, answer: Any, per_example: int = 1) -> list[Rollout]:
    example = dspy.Example(id="x", claim="c", titles=["A", "B", "C", "D"]).with_inputs("claim")
    jobs = rollouts.plan([example], per_example, 0, "test")
    settings = Settings(sampling=Sampling(context=4096, max_tokens=256))
    return rollouts.run(program, jobs, metric, ScriptedEngine(answer), settings, Draw())


def called(rollout: Rollout) -> list[tuple[str, int]]:
    return [(call.module, call.index) for call in rollout.calls]


def writes_query(prompt: str) -> bool:
    return prompt.startswith("[system]\nWrite a search query")


def letters(query: str, k: int) -> list[str]:
    """A retriever that finds one page for each letter of the query."""
    return [f"{letter} | page {letter}" for letter in query][:k]


def hops(**options: Any) -> MultiHop:
    return MultiHop(letters, **({"hops": 4, "passages": 8, "predictor": dspy.Predict} | options))


def test_both_modules_take_turns_until_the_last_search():
    def answer(prompt: str, request: SampleRequest) -> str:
        if not writes_query(prompt):
            return "Enough: false\nNote: seen"
        return "ABCD"[prompt.count("seen")]

    [rollout] = run(hops(), answer)
    query, note = "generate_query", "append_notes"
    assert called(rollout) == [
        (query, 0), (note, 0), (query, 1), (note, 1), (query, 2), (note, 2), (query, 3)
    ]  # fmt: skip
    assert rollout.output == {"titles": ["A", "B", "C", "D"], "notes": ["seen", "seen", "seen"]}
    assert (rollout.reward, rollout.channels["all_found"]) == (1.0, 1.0)


def test_the_notes_module_sees_the_passages_and_may_stop_the_search():
    def answer(prompt: str, request: SampleRequest) -> str:
        if writes_query(prompt):
            return "BXXA"
        assert "B | page B" in prompt
        assert "A | page A" not in prompt  # The third of 8 / 4 passages is not asked for.
        return "Enough: true\nNote: done"

    [rollout] = run(hops(), answer)
    assert called(rollout) == [("generate_query", 0), ("append_notes", 0)]
    assert rollout.output == {"titles": ["B", "X"], "notes": ["done"]}
    assert (rollout.reward, rollout.channels["all_found"]) == (0.25, 0.0)


def some_stop_early(prompt: str, request: SampleRequest) -> str:
    """Half of the first queries, by the draw's seed, lead to a page after which enough is found."""
    if writes_query(prompt):
        return "S" if "seen" not in prompt and request.seed % 2 else "A"
    return f"Enough: {'S | page S' in prompt}\nNote: seen"


@pytest.mark.parametrize("pad", ["ragged", "fill", "truncate"])
def test_rollouts_of_different_length_form_groups_by_module_and_index(pad):
    made = run(hops(), some_stop_early, per_example=8)
    short, long = ([r for r in made if len(r.calls) == n] for n in (2, 7))
    assert len(short) + len(long) == 8
    assert min(len(short), len(long)) >= 2
    groups = make_groups(made, Grouping(pad=pad, size=8), Rewards(), seed=0)
    reached = {(group.module, group.index): {member.rollout_id for member in group.members} for group in groups}
    every, stayed = {r.rollout_id for r in made}, {r.rollout_id for r in long}
    later = {"ragged": stayed, "fill": every}.get(pad)
    expected = {("generate_query", 0): every, ("append_notes", 0): every}
    if later:
        expected |= {("generate_query", k): later for k in (1, 2, 3)} | {("append_notes", k): later for k in (1, 2)}
    assert reached == expected
    filled = Counter(member.rollout_id for group in groups for member in group.members if member.filled)
    assert set(filled) == ({r.rollout_id for r in short} if pad == "fill" else set())


def test_an_answer_without_a_note_is_a_failure_of_that_call():
    [rollout] = run(hops(), lambda prompt, request: "A" if writes_query(prompt) else "Enough: perhaps")
    assert (rollout.status, rollout.reward) == ("parse_error", 0.0)
    assert [call.parsed for call in rollout.calls] == [True, False]


@pytest.mark.parametrize(
    ("gold", "found", "score"),
    [
        (["A", "B", "C", "D"], ["D", "X", "A"], 0.5),
        (["A", "B"], ["A", "B", "C"], 1.0),
        (["A"], [], 0.0),
        (["The Beatles", "Björk"], ["beatles", "X", "Björk"], 1.0),
    ],
)
def test_the_reward_is_the_recall_of_the_gold_titles(gold, found, score):
    value = metric(dspy.Example(titles=gold), dspy.Prediction(titles=found))
    assert value == {"score": score, "all_found": float(score == 1)}


def test_bm25_ranks_by_the_words_that_are_shared():
    search = Bm25(FRUIT)
    assert [passage.split(" | ")[0] for passage in search("red fruit", 10)] == ["Cherry", "Apple", "Lemon"]
    assert search("a yellow thing", 2) == [FRUIT[2]]
    assert search("Which MACHINE?", 1) == [FRUIT[3]]
    assert Bm25(["B | same", "A | same", "C | other"])("same", 3) == ["B | same", "A | same"]


@pytest.mark.parametrize("query", ["zebra", "the", "?!", ""])
def test_bm25_finds_nothing_where_no_word_is_shared(query):
    assert Bm25(FRUIT)(query, 3) == []


class Retriever(BaseHTTPRequestHandler):
    """Answers like a ColBERT server with the letters of the query, or with what is no answer."""

    def do_GET(self) -> None:
        asked = parse_qs(urlsplit(self.path).query)
        texts = letters(asked["query"][0], int(asked["k"][0]) + 1)
        content = {"topk": [{"text": text, "score": 1.0} for text in texts]}
        body = b"busy" if self.path.startswith("/busy") else json.dumps(content).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: Any) -> None: ...


@pytest.fixture
def address() -> Iterator[str]:
    with running(ThreadingHTTPServer(("127.0.0.1", 0), Retriever)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


def test_a_run_shows_no_debugging_lines_of_bm25(caplog):
    with caplog.at_level("DEBUG"):
        Bm25(FRUIT)
    assert caplog.records == []


def test_a_server_is_asked_for_k_passages(address):
    # The query's letters must arrive as they are, and a server that sends more than k is cut.
    assert Server(f"{address}/api/search")("A&ü", 2) == ["A | page A", "& | page &"]
    assert Server(f"{address}/api/search")("ü", 2) == ["ü | page ü"]


def test_a_server_that_gives_no_passages_is_named(address):
    for url in (f"{address}/busy", "http://127.0.0.1:1/nobody"):
        with pytest.raises(PipelineError, match=rf"{url} gave no passages .*set TWOFOLD_RETRIEVER"):
            Server(url)("A", 2)


def test_hovers_program_searches_on_the_server_of_the_environment(address, monkeypatch):
    pipeline = load_pipeline("hover")
    monkeypatch.delenv("TWOFOLD_RETRIEVER", raising=False)
    with pytest.raises(PipelineError, match=r"Set TWOFOLD_RETRIEVER"):
        pipeline.program()
    monkeypatch.setenv("TWOFOLD_RETRIEVER", address)
    program = pipeline.program()
    assert list(modules(program)) == ["generate_query.predict", "append_notes.predict"]
    assert program.hops * program.per_hop == 100

    def answer(prompt: str, request: SampleRequest) -> str:
        return "Reasoning: r\n" + ("Query: AB" if writes_query(prompt) else "Enough: false\nNote: n")

    [rollout] = run(program, answer)
    assert (rollout.status, rollout.reward, len(rollout.calls)) == ("ok", 0.5, 7)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder for data, in a checkout without any. Ask for pipelines first: they are loaded from here."""
    monkeypatch.chdir(tmp_path)
    for name in ("hover", "hotpotqa"):
        Path("data", name).mkdir(parents=True)
    return tmp_path


@pytest.fixture(scope="module")
def hover() -> Pipeline:
    return load_pipeline("hover")


@pytest.fixture
def hotpotqa() -> Pipeline:
    """Loaded anew, and with it what it remembers of its passages."""
    return load_pipeline("hotpotqa")


def write_claims(split: str, count: int, reverse: bool = False) -> None:
    """Claims of two to four hops, of which every three are made of one question."""
    claims = [
        {
            "uid": f"{split}{n}",
            "claim": f"{split} claim {n}",
            "supporting_facts": [["B", 0], ["A", 1], ["B", 2]],
            "num_hops": 2 + n % 3,
            "hpqa_id": f"{split}-{n // 9}",
        }
        for n in range(count)
    ]
    Path(f"data/hover/hover_{split}_release_v1.1.json").write_text(json.dumps(claims[:: -1 if reverse else 1]))


def test_hovers_claims_have_four_hops_and_no_question_twice(hover, folder):
    write_claims("train", 6000)
    write_claims("dev", 1800)
    train, dev, test = hover.load(Settings())
    assert (len(train), len(test)) == (500, 500)
    assert 0 < len(dev) <= 250
    numbers = [[int(example.id.removeprefix("train")) for example in part] for part in (train, dev)]
    assert {n % 3 for part in numbers for n in part} == {2}
    assert not {n // 9 for n in numbers[0]} & {n // 9 for n in numbers[1]}
    assert train[0].titles == ["A", "B"]
    write_claims("train", 6000, reverse=True)
    assert [example.id for example in hover.load(Settings(seed=1))[0]] == [example.id for example in train]


def test_hovers_missing_or_torn_file_is_named(hover, folder):
    with pytest.raises(PipelineError, match=r"hover_train_release_v1\.1\.json cannot be read.*hover-nlp/hover"):
        hover.load(Settings())
    Path("data/hover/hover_train_release_v1.1.json").write_text('[{"claim": "c"}]')
    with pytest.raises(PipelineError, match=r"KeyError\('num_hops'\)"):
        hover.load(Settings())


def write_questions(passages: list[str], count: int = 100) -> None:
    facts = [["Cherry", 0], ["Apple", 1], ["Apple", 2]]
    questions = [{"_id": f"q{n}", "question": f"question {n}", "supporting_facts": facts} for n in range(count)]
    corpus = {title: [text] for title, text in (passage.split(" | ") for passage in passages)}
    Path("data/hotpotqa/hotpotqa_train.json").write_text(json.dumps(questions))
    Path("data/hotpotqa/hotpotqa_train_corpus.json").write_text(json.dumps(corpus))


def test_hotpotqas_questions_know_their_passages(hotpotqa, folder):
    write_questions(FRUIT)
    parts = hotpotqa.load(Settings())
    assert [len(part) for part in parts] == [50, 20, 30]
    assert len({example.id for part in parts for example in part}) == 100
    assert parts[0][0].titles == ["Apple", "Cherry"]
    write_questions(FRUIT[1:])
    assert hotpotqa.load(Settings())[0][0].corpus != parts[0][0].corpus


def test_hotpotqas_missing_or_wrong_file_is_named(hotpotqa, folder):
    with pytest.raises(PipelineError, match=r"hotpotqa_train\.json cannot be read.*HippoRAG"):
        hotpotqa.load(Settings())
    Path("data/hotpotqa/hotpotqa_train_corpus.json").write_text('[{"title": "Apple"}]')
    with pytest.raises(PipelineError, match=r"hotpotqa_train_corpus\.json .*a list instead of a dict"):
        hotpotqa.program()


def test_hotpotqas_program_searches_its_own_passages(hotpotqa, folder):
    write_questions(FRUIT)
    program = hotpotqa.program()
    assert list(modules(program)) == ["generate_query", "append_notes"]

    def answer(prompt: str, request: SampleRequest) -> str:
        return "red fruit" if writes_query(prompt) else "Enough: true\nNote: n"

    [rollout] = run(program, answer)
    assert rollout.output["titles"] == ["Cherry", "Apple", "Lemon"]
    example = hotpotqa.load(Settings())[2][0]
    assert hotpotqa.metric(example, dspy.Prediction(titles=rollout.output["titles"]))["score"] == 1.0
