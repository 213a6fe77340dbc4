"""The report: its figures, what it draws, what it hides, and the page in a real browser."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import runs
from twofold.programs import load_pipeline
from twofold.records import Rollout
from twofold.report import sets, write_page
from twofold.report.private import MARK, Redactor
from twofold.report.sets import Set
from twofold.settings import Settings

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

EVIL = "</script><img src=x onerror=\"document.title='taken'\"> &lt;b&gt; {{ 7*7 }}"


def write(folder: Path, settings: Settings, name: str = "other.html") -> str:
    """Write the page of a run, and return it."""
    names = list(settings.strategies)
    path = folder / "reports" / name
    write_page(
        path,
        runs.report(settings),
        {name: folder / "outputs" / name for name in names},
        {name: folder / "reports/test" / name for name in names},
        folder / "data/prepared",
        load_pipeline("tiny", folder / "pipelines"),
        settings,
        runs.decode,
    )
    return path.read_text(encoding="utf-8")


def embedded(page: str, name: str) -> Any:
    """The JSON in the page's data block of this name."""
    return json.loads(re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', page, re.S)[1])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page of a run in which one kind of answer is hostile."""
    folder = tmp_path_factory.mktemp("report")
    write(folder, runs.make_run(folder, answer=EVIL), "index.html")
    return folder


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return (run / "reports/index.html").read_text(encoding="utf-8")


def test_every_rollout_is_counted_and_leads_to_its_advantage(page: str) -> None:
    data = embedded(page, "data")
    # Two strategies: 4 on test each; vanilla 4 on dev; the training 3 x (16 + 4 on dev), and one trial.
    assert data["total"] == len(data["rollouts"]) == 8 + 4 + 3 * 20 + 1
    one = next(row for row in data["rollouts"] if row["id"] == "weights/0/1/t1/0")
    assert (one["inputs"], one["labels"]) == ({"text": "text train 1"}, {"color": "blue"})
    assert (one["verdict"], one["action"]) == ("keep", None)
    # Round 2: two of the four rollouts of t1 are right. (1 - 0.5) / (0.5 + 1e-4), or over the sample deviation.
    restate = one["calls"][0]
    group = data["groups"][restate["groups"][0]]
    assert Counter(member["reward"] for member in group["members"]) == {1.0: 2, 0.0: 2}
    mine = next(member for member in group["members"] if member["id"] == one["id"])
    assert mine["advantage"] == pytest.approx(0.5 / (group["std"] + 1e-4))
    assert data["beginnings"][restate["beginning"]] + restate["prompt"] == "Say it again.\nText: text train 1\n"


def test_a_hint_is_shown_with_its_lineage(page: str) -> None:
    rows = {row["id"]: row for row in embedded(page, "data")["rollouts"]}
    hinted = rows["weights/0/1/t0+1/0"]
    assert hinted["example"] == "t0"
    assert hinted["hints"] == [{"parent": "t0", "place": "program", "text": "Look twice."}]
    assert [(one["end"], one["reason"]) for one in hinted["attempts"]] == [("gate/answer", "it holds the answer")]
    assert not rows["weights/0/0/t1/0"]["hints"]


def test_failed_rollouts_are_counted_with_their_reason(page: str) -> None:
    [row] = embedded(page, "charts")["losses"]["data"]["values"]
    assert (row["made"], row["status"], row["count"], row["n"]) == ("weights 0-w training", "timeout", 1, 48)
    # Wilson's interval of 1 of 48 at z = 1.96, by hand: (p + z²/2n ± z·sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n).
    assert '<b>2.1%</b> <span class="ci">0.4% to 10.9%</span>' in page
    assert "timeout 1" in page


def test_a_hosted_model_has_figures_and_no_rollouts_to_see(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.model_validate(runs.SETTINGS)
    report = runs.report(settings)
    report["strategies"]["hosted-big"] = report["strategies"]["vanilla"]
    monkeypatch.setattr(runs, "report", lambda settings: report)
    page = write(run, settings)
    assert '<th scope="row">hosted-big</th>' in page
    assert 'data-strategy="weights" data-purpose="test"' in page
    assert 'data-strategy="hosted-big"' not in page


def test_the_page_asks_the_network_for_nothing(page: str) -> None:
    assert "default-src 'none'" in page
    without_scripts = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert not re.search(r"(src|href)=[\"'](?!#)", without_scripts)
    assert len(page.encode()) < 8_000_000


def test_equal_records_make_equal_pages(run: Path, page: str) -> None:
    assert write(run, Settings.model_validate(runs.SETTINGS)) == page


def test_a_big_run_is_sampled_by_input_and_every_round_has_its_share(
    monkeypatch: pytest.MonkeyPatch, run: Path
) -> None:
    monkeypatch.setattr(sets, "LIMIT", 30)
    settings = Settings.model_validate(runs.SETTINGS)
    page = write(run, settings)
    data = embedded(page, "data")
    assert f"Showing {len(data['rollouts'])} of 73 rollouts: all of some inputs, drawn at random" in page
    assert len(data["rollouts"]) <= 30
    assert {row["set"] for row in data["rollouts"]} == set(range(len(data["sets"])))
    training = [row for row in data["rollouts"] if data["sets"][row["set"]]["purpose"] == "training"]
    assert set(Counter((row["set"], row["prompt"]) for row in training).values()) == {4}
    other = write(run, settings.model_copy(update={"seed": 1}))
    assert [row["id"] for row in embedded(other, "data")["rollouts"]] != [row["id"] for row in data["rollouts"]]


def test_one_input_is_shown_however_long_it_is(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    monkeypatch.setattr(sets, "TEXT", 1)
    data = embedded(write(run, Settings.model_validate(runs.SETTINGS)), "data")
    assert [data["sets"][row["set"]]["round"] for row in data["rollouts"]] == [None]


# ---- private fields ----


def test_private_fields_are_nowhere_in_the_page(tmp_path: Path) -> None:
    secret = "Mrs Ada Lovelace of 12 Dorset Street"
    settings = runs.make_run(tmp_path, rounds=1, answer=f"Ask {secret[4:]} about it")
    pipeline = tmp_path / "pipelines/tiny.py"
    pipeline.write_text(pipeline.read_text() + '\nprivate = ("text", "short")\n')
    examples = tmp_path / "data/prepared/train.jsonl"
    examples.write_text(examples.read_text().replace("text train 2", secret))
    page = write(tmp_path, settings)
    data = embedded(page, "data")
    assert "Private fields are left out: short, text." in page
    assert not re.search(r"lovelace|dorset", page, re.I)
    assert {row["inputs"]["text"] for row in data["rollouts"]} == {MARK}
    assert {call["answer"] for row in data["rollouts"] for call in row["calls"] if call["module"] == "restate"} == {
        MARK
    }
    answers = {row["output"]["answer"] for row in data["rollouts"] if row["output"] and "train" not in row["id"]}
    assert f"Ask {MARK} about it" in answers
    assert not any(call["pieces"] for row in data["rollouts"] for call in row["calls"])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("My name is Ada Lovelace.", f"My name is {MARK}."),
        ("ADA  lovelace!", f"{MARK}!"),
        ("Ada and Lovelace", "Ada and Lovelace"),
        ("she said: the meeting is at\\nnoon on friday", f"she said: {MARK}"),
        ("the meeting is", "the meeting is"),
        ("so meeting is at noon, then", f"so {MARK}, then"),
    ],
)
def test_values_and_runs_of_their_words_are_replaced(text: str, shown: str) -> None:
    redactor = Redactor(["query"], ["Ada Lovelace", {"note": "The meeting is at noon on Friday"}])
    assert redactor.text(text.replace("\\n", " ")) == shown


def test_a_value_is_replaced_where_it_stands_in_json() -> None:
    value = 'Zoë "Z" Müller\nHauptstraße 7\n1010 Wien'
    redactor = Redactor(["query"], [value])
    for ascii_only in (True, False):
        assert redactor.text(json.dumps(f"To {value}!", ensure_ascii=ascii_only)) == f'"To {MARK}!"'
    assert redactor.text(r'"hauptstraße 7\n1010 wien"') == f'"{MARK}"'


def test_a_private_field_is_replaced_whole_wherever_it_is_nested() -> None:
    redactor = Redactor(["query"], ["secret word"])
    found = redactor.fields({"query": 3, "kept": [{"query": "x", "other": "a secret word"}], "n": 1})
    assert found == {"query": MARK, "kept": [{"query": MARK, "other": f"a {MARK}"}], "n": 1}


@given(st.lists(st.from_regex(r"[a-z]{3,8}", fullmatch=True), min_size=1, max_size=12), st.text(), st.text())
def test_no_surrounding_text_keeps_a_value_in(words: list[str], before: str, after: str) -> None:
    value = " ".join(words)
    found = Redactor(["query"], [value]).text(f"{before} {value} {after}")
    assert value not in found or value in MARK


def test_draw_takes_sets_in_turn_and_never_part_of_an_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from twofold.records import write_rollouts

    def one(name: str, inputs: int, each: int) -> Set:
        made = [
            Rollout(f"{name}/{k}/{n}", f"e{k}", 0, "student", (), {}, 0.0) for k in range(inputs) for n in range(each)
        ]
        write_rollouts(made, tmp_path / name)
        return Set(name, "", "training", 1, tmp_path / name, tuple(made))

    monkeypatch.setattr(sets, "LIMIT", 10)
    drawn = sets.draw([one("a", 9, 2), one("b", 1, 3), one("c", 9, 1)], 0)
    # In turn: 2, 3, 1; then b is empty: 2, 1; then a's next 2 are too many, and one more of c makes ten.
    assert [len(ids) for ids in drawn] == [4, 3, 3]
    assert len({name.split("/")[1] for name in drawn[0]}) == 2


# ---- in the browser ----


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """The system's Chromium; Playwright's own would have to be downloaded."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not found:
        pytest.skip("no Chromium is installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"], timeout=180_000)
        yield browser
        browser.close()


@pytest.fixture(params=[(1280, 900, "light"), (390, 844, "dark")], ids=["wide light", "phone dark"])
def opened(request: pytest.FixtureRequest, browser: "Browser", run: Path) -> "Iterator[Page]":
    """The page, drawn; whatever it says on the console, asks the network for, or throws fails the test."""
    width, height, scheme = request.param
    problems: list[str] = []
    tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    tab.set_default_timeout(120_000)
    tab.on("console", lambda message: problems.append(message.text))
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("request", lambda asked: asked.url.startswith(("file:", "data:")) or problems.append(asked.url))
    tab.goto((run / "reports/index.html").as_uri())
    tab.wait_for_selector("body[data-drawn]")
    yield tab
    tab.close()
    assert not problems


def test_page_is_laid_out_and_leads_from_an_input_to_its_advantage(opened: "Page") -> None:
    tab = opened
    width = tab.viewport_size["width"]
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    for plot in tab.locator("[data-chart]").all():
        box = plot.locator("svg").bounding_box()
        assert box["height"] > 60
        assert 200 < box["width"] <= width
    assert tab.locator(".row").count() == 73

    tab.select_option("[name=purpose]", "training")
    tab.select_option("[name=status]", "timeout")
    assert tab.locator(".row").count() == 1
    assert tab.locator("#count").inner_text() == "1 of 73 shown here"
    tab.select_option("[name=status]", "")
    tab.select_option("[name=round]", "2")
    tab.select_option("[name=route]", "keep")
    tab.select_option("[name=module]", "answer")
    tab.fill("[name=text]", "look TWICE")
    # In round 2 the prompt with the hint has four rollouts, one of them right.
    assert tab.locator(".row").count() == 4

    # By keyboard alone: to the second row, open it, on to the next, and back to where it was.
    tab.locator(".row").first.focus()
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("Enter")
    dialog = tab.locator("dialog[open]")
    assert dialog.locator(".bar p").inner_text() == "2 of 4"
    assert "Look twice." in dialog.locator(".input .chain").first.inner_text()
    restate, answer = dialog.locator(".call").all()
    assert "off" in restate.get_attribute("class").split()
    assert answer.locator(".answer").inner_text() == EVIL
    assert "keep" in dialog.locator(".route").inner_text()
    own = answer.locator("tr.self")
    advantage = own.locator(".advantage").inner_text()
    # One of four is right: ±(distance from 0.25) / (sample deviation 0.5), or the right one's 0.75 / 0.5.
    assert advantage in {"+1.50", "\N{MINUS SIGN}0.50"}
    assert dialog.locator(".result .facts b").inner_text() == f"reward {'1' if advantage == '+1.50' else '0'}.000"
    tab.keyboard.press("ArrowRight")
    assert dialog.locator(".bar p").inner_text() == "3 of 4"
    # The button that goes back keeps the focus, so that it can be pressed again.
    tab.keyboard.press("Shift+Tab")
    tab.keyboard.press("Shift+Tab")
    tab.keyboard.press("Enter")
    assert dialog.locator(".bar p").inner_text() == "2 of 4"
    tab.keyboard.press("Enter")
    assert dialog.locator(".bar p").inner_text() == "1 of 4"
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Escape")
    assert tab.locator("dialog[open]").count() == 0
    assert tab.evaluate("document.activeElement.dataset.at") == "2"


def test_what_a_model_wrote_is_never_markup(opened: "Page") -> None:
    opened.locator(".row").nth(opened.locator(".row").count() - 5).click()
    assert opened.title() == "tiny: report"
    assert opened.locator("img").count() == 0


def test_a_figure_leads_to_its_rollouts(opened: "Page") -> None:
    opened.locator("#strategies button.see").last.click()
    assert opened.locator("#count").inner_text() == "4 of 73 shown here"
    assert {row.inner_text() for row in opened.locator(".row .where").all()} == {"weights test"}
