"""A customer's message to a help desk: restate the problem, then choose the team that handles it.

Two modules: `condense` sees the message, `route` sees only what `condense` made of it. The program is untrained and
weak: each module has one demo, and a small model neither keeps what matters nor knows the teams.
"""

import json
from pathlib import Path
from typing import Literal

import dspy

DATA = Path("data/helpdesk")

TEAMS = {
    "team_update": "error message, app crashes, will not connect, settings",
    "team_exchange": "wrong size, changed my mind, send it back",
    "team_repair": "broke after a year, guarantee, spare part",
    "team_shopping": "which one to buy, in stock, price, discount",
    "team_delivery": "parcel is late, lost, wrong address, courier",
    "team_payment": "charged twice, invoice, money not refunded",
    "team_login": "forgot password, code, profile, my data",
    "team_subscription": "cancel my plan, trial, pause, family plan",
}
"""What each team handles, in the words of customers."""

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
        # Near to its likeliest words: what it invents at a higher temperature has nothing to do with the message.
        self.condense = dspy.Predict(Condense, temperature=0.3)
        self.route = dspy.Predict(Route)

    def forward(self, message: str) -> dspy.Prediction:
        problem = self.condense(message=message).problem
        return dspy.Prediction(problem=problem, team=self.route(problem=problem).team)


def program() -> HelpDesk:
    desk = HelpDesk()
    message = "Hello, I cannot log in since I changed my phone, please help."
    desk.condense.demos = [dspy.Example(message=message, problem="cannot log in since I changed my phone")]
    desk.route.demos = [dspy.Example(problem="I was charged twice for one order", team="team_payment")]
    return desk


def metric(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> float:
    return float(prediction.team == example.team)


def load(settings: object) -> tuple[list[dspy.Example], list[dspy.Example], list[dspy.Example]]:
    return _read("train"), _read("dev"), _read("test")


def _read(split: str) -> list[dspy.Example]:
    lines = (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [dspy.Example(**json.loads(line)).with_inputs("message") for line in lines]
