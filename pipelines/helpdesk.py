"""A message to a company's help desk: restate the problem, then choose the team that handles it.

Two modules: `condense` sees the message, `route` sees only what `condense` made of it. The program is untrained and
weak: each module has one demo, and a small model neither keeps what matters nor knows the teams.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import dspy

DATA = Path("data/helpdesk")

TEAMS = {
    "team_travel": "flight cancelled, hotel, visa, taxi receipt",
    "team_food": "cold soup, sandwiches for guests, coffee machine",
    "team_internet": "wifi drops, no connection, vpn",
    "team_printing": "paper stuck, toner, scanner, copies",
    "team_salary": "paid too little, pay slip, bonus",
    "team_heating": "too cold, radiator, air conditioner",
    "team_training": "course, workshop, certificate",
    "team_health": "sick note, doctor, flu shot, back hurts",
}
"""What each team handles, in the words of those who write."""

Team = Literal[*TEAMS]

EVERYDAY = frozenset(
    "about after again already also another anybody anyone anything because been before being both cannot could does "
    "doing done down each else even ever every everybody everyone first from getting give goes going have hello help "
    "here into just know last like long made make many maybe more morning most much must need never next none nobody "
    "nothing once only other over people please possible really said same several should since some somebody someone "
    "something still such sure take team teams than thank thanks that their them then there these they thing things "
    "think this those though three times today told tomorrow twice under until very want wants week weeks well went "
    "were what when where which while whole will with without would year yesterday your".split()
)
"""Words that say nothing of the problem; `team` beside another word would make a label of it."""


HINT_FIELD = "message"


class Condense(dspy.Signature):
    """Repeat the important part of the message in the same words."""

    message: str = dspy.InputField()
    problem: str = dspy.OutputField()


class Route(dspy.Signature):
    __doc__ = "\n".join(
        ["Choose the team that handles the problem.", *(f"Problem: {p}\nTeam: {t}" for t, p in TEAMS.items())]
    )

    problem: str = dspy.InputField()
    team: Team = dspy.OutputField()


class HelpDesk(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.condense = dspy.Predict(Condense)
        self.route = dspy.Predict(Route)

    def forward(self, message: str) -> dspy.Prediction:
        problem = self.condense(message=message).problem
        return dspy.Prediction(problem=problem, team=self.route(problem=problem).team)


def program() -> HelpDesk:
    desk = HelpDesk()
    message = "Hi, sorry to bother you again, but I was promised two boxes of A4 paper last week. Nobody came."
    desk.condense.demos = [dspy.Example(message=message, problem="promised two boxes of A4 paper")]
    desk.route.demos = [dspy.Example(problem="two more boxes of A4 paper", team="team_printing")]
    return desk


def metric(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> float:
    return float(prediction.team == example.team)


def load(settings: object) -> tuple[list[dspy.Example], list[dspy.Example], list[dspy.Example]]:
    return _read("train"), _read("dev"), _read("test")


def scaffold(example: dspy.Example, rollouts: Sequence[object]) -> str | None:
    """A short hint, in the form of `condense`'s task: the words of the message that the rollouts dropped.

    It names no team, not even to rule it out: a small model tends to choose a label that it reads.
    """
    words = _dropped(example.message, [rollout.output.get("problem", "") for rollout in rollouts])
    return f"Repeat these words: {', '.join(words)}." if words else None


def _dropped(message: str, problems: list[str]) -> list[str]:
    """Three words of the message, in its order: those that the fewest restatements kept, the longest first."""
    words = list(dict.fromkeys(word for word in re.findall(r"[a-z]{4,}", message.lower()) if word not in EVERYDAY))
    kept = {word: sum(word in problem.lower() for problem in problems) for word in words}
    best = sorted(words, key=lambda word: (kept[word], -len(word)))[:3]
    return [word for word in words if word in best]


def _read(split: str) -> list[dspy.Example]:
    lines = (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [dspy.Example(**json.loads(line)).with_inputs("message") for line in lines]
