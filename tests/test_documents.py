"""What docs/bring-your-own-program.md tells a reader to do, done: its file, its settings, its commands."""

import csv
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tiny import ROOT, commit, copy_project, environment
from twofold.records import read_rollouts

TEXT = (ROOT / "docs/bring-your-own-program.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `own`; of `weights` and `model` those that `own` does not name stay."""
    return base | own | {name: base[name] | own[name] for name in ("weights", "model")}


def test_the_program_is_one_file_of_at_most_60_lines() -> None:
    [program] = blocks("python")
    assert len(program.splitlines()) <= 60


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub names them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        place, _, anchor = link.partition("#")
        target = page.parent / place if place else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.slow
def test_a_reader_gets_a_trained_program(tmp_path: Path, prefect_server: str, smollm2: Path) -> None:
    copy_project(tmp_path, prefect_server)
    shutil.copytree(ROOT / "data/helpdesk", tmp_path / "data/helpdesk")
    (tmp_path / "pipelines").mkdir()
    [program], [settings] = blocks("python"), blocks("yaml")
    (tmp_path / "pipelines/triage.py").write_text(program)
    # The model is here already.
    changes = yaml.safe_load(settings) | {"model": {"source": str(smollm2)}}
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(merged(params, changes)))
    commit(tmp_path)

    _, checked, trained, _ = [run(commands, tmp_path) for commands in blocks("sh")]

    assert "modules department, office, people" in checked
    assert "16 train, 8 dev, 8 test" in checked
    assert "round 2: reward" in trained
    with (tmp_path / "outputs/weights/0-w/history.csv").open() as file:
        assert sum(float(row["updated"]) for row in csv.DictReader(file)) > 0
    rollouts = read_rollouts(tmp_path / "outputs/weights/0-w/records")
    assert len(rollouts) == 2 * 8 * 4
    assert all(rollout.calls[0].module == "department" for rollout in rollouts)
    assert {len(rollout.calls) for rollout in rollouts if rollout.status == "ok"} == {2}
    assert (tmp_path / "trained/program.json").is_file()


def run(commands: str, folder: Path) -> str:
    """What a shell says to a block of commands, all of which must succeed."""
    done = subprocess.run(
        ["sh", "-ec", commands],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
