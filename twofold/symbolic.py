r"""Whether mathematical expressions equal an answer, decided in a child process that is killed at a time limit.

1. The parent starts this file as a script and sends the answer and the expressions as one JSON object.
2. The child reads each with math-verify, whose own time-outs need the main thread, and compares it with the answer.
3. What is not answered within the limit never is: the child is killed, and the comparison says so.

`timeout`, `crashed` and `unparsed` (the answer itself is no mathematics) are kept apart from "none is equal".
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the child found."""

    status: Literal["ok", "timeout", "unparsed", "crashed"]
    """`crashed`: a signal ended the child, as when a formula took all memory."""
    equal: tuple[bool, ...] = ()
    """For each expression, whether it equals the answer; empty unless the status is `ok`."""
    value: str = ""
    """The answer to 30 digits when it is a real number, such as `3.46410161513775458705489268301`; else empty."""


def compare(answer: str, expressions: Sequence[str], limit_s: float) -> Comparison:
    r"""Compares each expression with the answer, by value or symbolically.

    Args:
        answer: LaTeX without delimiters, such as `2\sqrt{3}` or `(x-1)^2`.
        expressions: the same; one that cannot be read equals nothing.
        limit_s: seconds of wall time for all of them together, the start of the child (about 1 s) included.
    """
    # -P keeps this file's folder out of the child's module path: it holds modules with common names.
    command = [sys.executable, "-P", __file__]
    request = json.dumps({"answer": answer, "expressions": list(expressions)})
    try:
        child = subprocess.run(command, input=request, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return Comparison("timeout")
    if child.returncode < 0:
        return Comparison("crashed")
    if child.returncode:
        raise RuntimeError(f"The child that compares formulas failed: {child.stderr[-500:]}\nIs math-verify installed?")
    reply = json.loads(child.stdout)
    return Comparison(reply["status"], tuple(reply["equal"]), reply["value"])


def _reply(answer: str, expressions: list[str]) -> dict:
    target = _parsed(answer)
    if not target:
        return {"status": "unparsed", "equal": [], "value": ""}
    equal = [_equal(target, _parsed(expression)) for expression in expressions]
    return {"status": "ok", "equal": equal, "value": _value(target[0])}


def _parsed(latex: str) -> list:
    from math_verify import LatexExtractionConfig, parse

    # Without the string that math-verify adds for what it cannot read, which would equal itself.
    config = [LatexExtractionConfig(boxed_match_priority=-1)]
    return parse(f"${latex}$", config, fallback_mode="no_fallback", parsing_timeout=None)[:1]


def _equal(target: list, found: list) -> bool:
    from math_verify import verify

    return bool(found) and verify(target, found, timeout_seconds=None)


def _value(expression: object) -> str:
    real = getattr(expression, "is_number", False) and expression.is_finite and expression.is_real
    return str(expression.evalf(30)) if real else ""


if __name__ == "__main__":
    print(json.dumps(_reply(**json.load(sys.stdin))))
