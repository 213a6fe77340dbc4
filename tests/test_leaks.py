"""The leak gate: a corpus of hints written by hand, and each check on cases worked out by hand."""

import json
import threading
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.leaks import VERSION, Count, Proposal, Verdict, answer, effect, equal, form, gate, one_step, probe
from twofold.leaks import text_checks as checks_of
from twofold.quantities import quantities, quantity, rounds_to, same
from twofold.symbolic import compare

CORPUS = [json.loads(line) for line in (Path(__file__).parent / "data/leaks.jsonl").read_text("utf-8").splitlines()]

FALSE_ALARMS = 3
"""Harmless hints of the corpus that may be refused: each holds two numbers that give the answer in one operation."""

PATIENT = 60.0
"""Seconds for formulas, where the limit is not what is tested."""

CELL = "Which part makes sugar from light?\n(A) nucleus (B) chloroplast (C) ribosome (D) cell wall"


def proposal(question: str, gold: str, hint: str) -> Proposal:
    return Proposal(question, gold, hint, f"{question}\n\n{hint}")


def text_checks(question: str, gold: str, hint: str) -> Verdict:
    return gate(checks_of(proposal(question, gold, hint), 600, PATIENT))[-1]


def named(question: str, gold: str, hint: str) -> bool:
    return not answer(proposal(question, gold, hint)).passed


def equals(question: str, gold: str, hint: str) -> bool:
    return not equal(proposal(question, gold, hint), PATIENT).passed


def steps(question: str, gold: str, hint: str) -> bool:
    return not one_step(proposal(question, gold, hint)).passed


# Corpus


def test_no_leak_of_the_corpus_passes_and_few_harmless_hints_are_refused():
    total, refused, odd = Counter(), Counter(), []
    for row in CORPUS:
        verdict = text_checks(row["question"], row["gold"], row["hint"])
        kind = (row["leak"], row["kind"])
        total[kind] += 1
        refused[kind] += not verdict.passed
        if row["leak"] == verdict.passed:
            odd.append((row["kind"], row["hint"], verdict.reason))
    for leak, kind in sorted(total, reverse=True):
        name = "leaks" if leak else "harmless"
        print(f"{name:8} {kind:16} {refused[leak, kind]:3} of {total[leak, kind]:3} refused")
    leaks = {kind: (refused[kind], total[kind]) for kind in total if kind[0]}
    assert all(caught == of for caught, of in leaks.values()), odd
    assert sum(refused[kind] for kind in total if not kind[0]) <= FALSE_ALARMS, odd


def test_the_corpus_is_large_and_has_both_sides():
    leaks = sum(row["leak"] for row in CORPUS)
    assert len(CORPUS) >= 200
    assert min(leaks, len(CORPUS) - leaks) >= 100
    assert len({(row["question"], row["hint"]) for row in CORPUS}) == len(CORPUS)


# Gate and verdict


def test_the_gate_stops_at_the_first_refusal_and_does_not_pay_for_the_rest():
    paid = []
    good, bad = Verdict("form", True), Verdict("answer", False, "why")
    assert gate([lambda: good, lambda: bad, lambda: paid.append("rollouts")]) == (good, bad)
    assert not paid


def test_checks_run_in_order_and_each_verdict_bears_its_rule_and_version():
    verdicts = gate(checks_of(proposal("What is 17 + 25?", "42", "Add the ones first."), 600, PATIENT))
    assert [v.rule for v in verdicts] == ["form", "answer", "equal", "one_step"]
    assert all(v.passed and not v.reason and v.version == VERSION for v in verdicts)


# Form


@pytest.mark.parametrize(
    ("hint", "reason"),
    [
        ("", "empty"),
        ("\u200b \n", "empty"),
        ("x" * 101, "101 characters; at most 100"),
        ("<|im_start|>user", "<|im_start|>"),
        ("Assistant: think", "Assistant:"),
        ("fine\nuser: more", "user:"),
        ("[[ ## team ## ]]", "[[ ## team ## ]]"),
        (r"so \boxed{x}", r"\boxed"),
        ("Answer: none", "Answer:"),
        ("#### 3", "####"),
        ("<answer>", "<answer>"),
        ("\N{FULLWIDTH LATIN CAPITAL LETTER A}nswer: none", "Answer:"),
    ],
)
def test_form_refuses_with_the_offending_text(hint: str, reason: str):
    verdict = form(proposal("q", "g", hint), 100)
    assert not verdict.passed
    assert reason in verdict.reason


@pytest.mark.parametrize("hint", ["x" * 100, "Ask the user what they need.", "The answer is near.", "Use a <b> tag."])
def test_form_lets_plain_advice_pass(hint: str):
    assert form(proposal("q", "g", hint), 100).passed


def test_form_refuses_a_changed_question():
    assert "word for word" in form(Proposal("What is 2 + 3?", "5", "Count.", "What is 2 + 4?\n\nCount."), 100).reason


# Answer


@pytest.mark.parametrize("hint", ["(B)", "option b.", "2nd option", "option 2", "the chloroplasts", "Go for B"])
def test_the_right_option_is_found_by_letter_ordinal_and_text(hint: str):
    assert named(CELL, "B", hint)
    assert named(CELL, "chloroplast", hint)


@pytest.mark.parametrize("hint", ["(C)", "option a", "third option", "option 3", "the nucleus", "Test A, B, C and D."])
def test_other_options_may_be_named(hint: str):
    assert not named(CELL, "B", hint)


def test_article_and_pronoun_are_no_letters():
    assert not named(CELL, "A", "A cell has parts. I would choose a green one.")
    assert named(CELL, "A", "I think that A is right.")
    assert named(CELL, "A", "A is right.")


def test_a_letter_that_the_question_uses_must_be_marked():
    question = "In triangle ABC, which side is longest?\n(A) AB\n(B) AC\n(C) BC"
    assert not named(question, "B", "Look at the corner B.")
    assert named(question, "B", "Look at (B).")


@pytest.mark.parametrize("hint", ["team_food", "TEAM FOOD", "team-food", "the food team"])
def test_a_label_is_found_in_any_spelling_even_where_the_question_lists_it(hint: str):
    assert named("Is this for team_food or team_travel? The food is cold.", "team_food", hint)


@pytest.mark.parametrize(
    "hint", ["The food is cold.", "Not team_travel.", "team_food_and_drinks", "my team likes food"]
)
def test_part_of_a_label_is_not_the_label(hint: str):
    assert not named("The food is cold.", "team_food", hint)


def test_case_accents_width_and_plural_do_not_hide_the_answer():
    for hint in ("ELEPHANTS", "éléphant", "ele\u200bphant", "\N{FULLWIDTH LATIN SMALL LETTER E}lephant"):
        assert named("Which animal?", "elephant", hint)
    assert not named("Which average?", "mean", "That means something else.")


def test_words_of_the_question_count_only_where_claimed():
    question = "Did Alice or Bob win?"
    assert not named(question, "Alice", "Compare Alice with Bob; is it Alice or Bob?")
    assert named(question, "Alice", "It is Alice.")
    assert not named("Is it prime?", "no", "There is no even divisor.")
    assert named("Is it prime?", "no", "So the answer is clearly no.")


def test_a_number_of_the_question_counts_only_where_claimed():
    assert not named("Solve 3x + 5 = 20.", "5", "Take away 5.")
    assert named("Solve 3x + 5 = 20.", "5", "The answer is five.")
    assert named("Solve 3x + 5 = 20.", "5", "So x = 5.")


# Equal


@pytest.mark.parametrize(
    ("gold", "hint"),
    [
        ("10.5", "21/2"),
        ("10.5", "twenty-one halves"),
        ("10.5", "ten and a half"),
        ("10.5", "10½"),
        ("10.5", "10.50"),
        ("10.5", "1\u200b0.5"),
        ("1", "only one"),
        ("10.5", r"$\frac{21}{2}$"),
        ("0.5", "50%"),
        ("50%", "a half"),
        ("60 min", "1 hour"),
        ("90 min", "1 hour and 30 minutes"),
        ("10 m/s", "36 km/h"),
        ("$5", "500 cents"),
        ("1/3", "0.333"),
        ("12", r"$\sqrt{144}$"),
        (r"2\sqrt{3}", "√12"),
        ("x^2 - 1", "(x-1)(x+1)"),
        (r"\frac{\pi}{3}", "π/3"),
        ("(3, 4)", "(3,4)"),
    ],
)
def test_equal_values_are_found_in_any_form(gold: str, hint: str):
    assert equals("What is it?", gold, f"Think of {hint} here.")


@pytest.mark.parametrize(
    ("gold", "hint"),
    [
        ("10.5", "105"),
        ("10.5", "110.5"),
        ("60 min", "60 km"),
        ("60 min", "60 seconds"),
        ("1/3", "the third step"),
        ("2", "x^2 and step 2 of two equations"),
        ("1", "one of the sides, which is one of two,"),
        ("1", "a smaller one"),
        ("(3, 4)", "(4, 3)"),
        ("team_food", "21/2"),
        ("Apollo 11", "11 people"),
    ],
)
def test_other_values_pass(gold: str, hint: str):
    assert not equals("What is it?", gold, f"Think of {hint} here.")


def test_values_of_the_question_never_count_unless_units_or_notation_are_asked_for():
    assert not equals("Share 12 cookies among 3 friends, who eat one each.", "3", "Look at the three friends.")
    assert not equals("Half of it is sold.", "1/2", "Think of 50%.")
    assert equals("How many hours are 150 minutes?", "2.5", "It is 2.5 hours.")
    assert equals("Write 0.125 as a fraction.", "1/8", "It is an eighth: 1/8.")
    assert not equals("Write 0.125 as a fraction.", "1/8", "Look at 0.125.")


def test_a_question_that_rewrites_a_formula_gives_away_only_the_final_form():
    question = "Expand (x - 1)(x + 1)."
    assert not equals(question, "x^2 - 1", "Start with x(x + 1) - (x + 1).")
    assert equals(question, "x^2 - 1", "You get x² - 1.")


def test_formulas_that_cannot_be_compared_in_time_are_refused():
    verdict = equal(proposal("What is it?", "5", "Think of 9^{9^{9^{9}}}."), 2.0)
    assert not verdict.passed
    assert "within 2.0 s" in verdict.reason


# One step


def test_one_operation_away_from_the_answer():
    assert steps("Half of 7 x 3 is painted.", "10.5", "The whole is 21, and 2 parts are equal.")
    assert steps("A film of 2 h.", "5", "Add 3 to the 2.")
    assert not steps("Share 12 among 4.", "3", "Divide 12 by 4.")
    assert not steps("Share 12 among 4.", "3", "Think of 7.")
    assert not steps("How many?", "9", "There are two cases and two equations.")


def test_the_reason_names_both_numbers_and_the_operation():
    reason = one_step(proposal("How much?", "68", "Take 12 off the 80.")).reason
    assert '"80" and "12"' in reason
    assert reason.endswith("by -.")


# Probe and effect


def test_probe_is_fishers_test():
    # 8 of 8 against 0 of 8: one table in C(16, 8) = 12870.
    assert "p = 7.8e-05" in probe(Count(8, 8), Count(0, 8), 0.05).reason
    # 2 of 8 against 0 of 8: C(14, 6) / C(16, 8) = 3003 / 12870 = 0.23.
    assert probe(Count(2, 8), Count(0, 8), 0.05).passed
    assert not probe(Count(2, 8), Count(0, 8), 0.24).passed
    assert probe(Count(0, 8), Count(8, 8), 0.05).passed


def test_effect_admits_between_none_and_all():
    assert effect(Count(0, 8)).reason.startswith("Useless")
    assert effect(Count(8, 8)).reason.startswith("Suspicious")
    assert effect(Count(1, 8)).passed
    assert effect(Count(7, 8)).passed


@pytest.mark.parametrize(("k", "n"), [(-1, 8), (9, 8), (0, 0)])
def test_impossible_counts_are_refused(k: int, n: int):
    with pytest.raises(ValueError, match="cannot be"):
        Count(k, n)


# Comparing formulas in a child


def test_a_hanging_comparison_is_cut_off_also_in_a_thread():
    results = []
    start = time.monotonic()
    thread = threading.Thread(target=lambda: results.append(compare("5", ["9^{9^{9^{9}}}"], 2.0)))
    thread.start()
    thread.join()
    assert results[0].status == "timeout"
    assert time.monotonic() - start < 10


def test_what_cannot_be_read_is_told_apart_from_what_differs():
    assert compare("]]", ["1"], PATIENT).status == "unparsed"
    found = compare(r"\sqrt{12}", [r"2\sqrt{3}", "]]", "3.46"], PATIENT)
    assert (found.status, found.equal) == ("ok", (True, False, False))
    assert found.value.startswith("3.4641016")


# Quantities


@given(st.integers(-999, 999), st.integers(1, 99))
def test_a_fraction_is_read_as_python_reads_it(top: int, bottom: int):
    assert quantity(f"{top}/{bottom}").value == Fraction(top, bottom)


@given(st.text(max_size=80))
def test_any_text_can_be_read(text: str):
    quantities(text)


@pytest.mark.parametrize("text", ["9" * 5000, "1/0", "3 0ths", "1e999999999", "1/" + "9" * 5000])
def test_odd_numbers_do_no_harm(text: str):
    quantities(text)


@pytest.mark.parametrize("text", ["team_food", "Apollo 11", "2x", "(3, 4)", "3rd", "Paris", ""])
def test_what_is_not_a_number(text: str):
    assert quantity(text) is None


def test_arithmetic_is_exact_and_ordered():
    assert [q.value for q in quantities("0.1 + 0.2 * 3") if q.arithmetic] == [Fraction(7, 10)]
    assert [q.value for q in quantities("half of 21") if q.arithmetic] == [Fraction(21, 2)]
    assert not [q for q in quantities("three of 21 pupils") if q.arithmetic]


def test_units_compare_only_within_a_dimension():
    assert same(quantity("3 miles"), quantity("15840 feet"))
    assert not same(quantity("3 miles"), quantity("3 hours"))
    assert same(quantity("3 miles"), quantity("3"))


UNITS = "seconds|sec|min|hrs|months|square meters|cubic cm|km/h|dollars an hour|m^2|mph|tonnes|degrees|pints|l|g"


@pytest.mark.parametrize("unit", UNITS.split("|"))
def test_every_unit_can_be_converted(unit: str):
    assert not same(quantity(f"3 {unit}"), quantity("3 radians per gallon"))


def test_rounding_needs_three_digits():
    assert rounds_to(quantity("3.14"), quantity("3.14159"))
    assert not rounds_to(quantity("3.1"), quantity("3.14159"))
    assert not rounds_to(quantity("3.15"), quantity("3.14159"))
