"""A message to a company's help desk: restate the problem, then choose the team that handles it.

Two modules: `condense` sees the message, `route` sees only what `condense` made of it. The program is untrained and
weak: each module has one demo, and a small model neither keeps what matters nor knows the teams.
"""

import json
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


def _read(split: str) -> list[dspy.Example]:
    lines = (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [dspy.Example(**json.loads(line)).with_inputs("message") for line in lines]
