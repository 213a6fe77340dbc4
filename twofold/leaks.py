r"""The leak gate: whether a teacher's hint gives the answer away, the cheap checks first (EPS, arXiv 2609.15051).

1. `form`: the hint is not empty, not too long, holds no chat roles and no answer markup; the question is unchanged.
2. `answer`: it does not name the answer: its words, or the option by letter, ordinal or text.
3. `equal`: no number or expression in it equals the answer, in words, as fraction, percent, unit or LaTeX.
4. `one_step`: no two of its numbers give the answer in one operation, unless both stand in the question already.
5. `probe`: a student who sees the hint without the question succeeds no more often than blind.
6. `effect`: with the hint some rollouts succeed, and not all.

What the question says already gives nothing away: its numbers and words count only where the hint claims them to be
the answer ("the answer is …"). Its options and its labels such as `team_food` do count: to name the right one is to
answer.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations

from scipy.stats import fisher_exact

from twofold.quantities import Quantity, asked_unit, plain, quantities, quantity, rounds_to, same, visible
from twofold.symbolic import compare

VERSION = 1
"""Rises when a check would judge differently; stored with each verdict."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one check says of a hint."""

    rule: str
    """Name of the check."""
    passed: bool
    reason: str = ""
    """Why the hint is refused, with the offending text, in words a teacher can act on; empty when it passed."""
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Proposal:
    """A hint as the checks see it."""

    question: str
    """The whole question as the student sees it; options stand in it as "(A) …" or "A) …", or "A. …" on own lines."""
    gold: str
    """The answer, or the letter of the right option."""
    hint: str
    shown: str
    """The student's input with the hint in it."""


@dataclass(frozen=True, slots=True)
class Count:
    """`k` successes in `n` rollouts."""

    k: int
    n: int

    def __post_init__(self) -> None:
        if not 0 <= self.k <= self.n or not self.n:
            raise ValueError(
                f"{self.k} successes in {self.n} rollouts cannot be; count at least one rollout, 0 <= k <= n."
            )


@dataclass(frozen=True, slots=True)
class _Target:
    """What must not be given away."""

    stem: str
    """The question without its options."""
    options: tuple[str, ...]
    index: int
    """Position of the right option; -1 when there is none."""
    text: str
    """The answer in words or mathematics; empty when only its letter is known."""


def gate(checks: Iterable[Callable[[], Verdict]]) -> tuple[Verdict, ...]:
    """Runs checks in order up to the first that refuses; all but the last verdict have passed.

    Later checks may cost rollouts, so each is called only when those before it have passed:
    `gate([*text_checks(proposal, 600, 5.0), lambda: probe(...), lambda: effect(...)])`.
    """
    verdicts = []
    for check in checks:
        verdicts.append(check())
        if not verdicts[-1].passed:
            break
    return tuple(verdicts)


def text_checks(proposal: Proposal, max_chars: int, limit_s: float) -> list[Callable[[], Verdict]]:
    """The four checks that need no rollouts, in order, for `gate`; the arguments are those of `form` and `equal`."""
    return [
        lambda: form(proposal, max_chars),
        lambda: answer(proposal),
        lambda: equal(proposal, limit_s),
        lambda: one_step(proposal),
    ]


# 1. Form

_ROLES = re.compile(
    r"<\|[^|<>]{1,40}\|>|<(?:start|end)_of_turn>|\[/?INST\]|<</?SYS>>|</?s>|\[\[ ?## .{0,40}? ?## ?\]\]"
    r"|^\W*(?:system|user|assistant|human)\b\W{0,3}:|\bassistant ?:|^#+ ?(?:instruction|response)\b",
    re.IGNORECASE | re.MULTILINE,
)
_MARKUP = re.compile(
    r"\\f?boxed\b|\banswer\W{0,3}[:=]|####|</?(?:final[_ ]?)?(?:answer|solution|result)\b[^>]{0,40}>", re.IGNORECASE
)


def form(proposal: Proposal, max_chars: int) -> Verdict:
    """Refuses a hint that is empty, longer than `max_chars`, or not plain advice beside an unchanged question."""
    hint = visible(proposal.hint)
    if not hint.strip():
        return Verdict("form", False, "The hint is empty.")
    if len(proposal.hint) > max_chars:
        return Verdict("form", False, f"The hint has {len(proposal.hint)} characters; at most {max_chars} are allowed.")
    if found := _ROLES.search(hint):
        return Verdict("form", False, f'The hint contains "{found[0].strip()}", which marks a turn of a chat.')
    if found := _MARKUP.search(hint):
        return Verdict("form", False, f'The hint contains "{found[0]}", which marks an answer.')
    if proposal.question not in proposal.shown:
        return Verdict("form", False, "The question was changed; add the hint and leave the question word for word.")
    return Verdict("form", True)


# 2. Answer

_LETTERS = "ABCDEFGHIJ"
_CARDINALS = "one two three four five six seven eight nine ten".split()
_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth".split()
_MARKER = re.compile(r"(?<![\w(])\(?([A-J])\)\s|(?:^|(?<=\n))\s*([A-J])[.:]\s")
_OPTION = r"(?:options?|choices?|alternatives?|answers?|candidates?|statements?)"

_COMMON = frozenset("yes no true false none all both neither same other more less a i".split())
"""Answers that are also everyday words of a hint."""

_BE = r"(?:'s| is| are| must be| should be| will be| would be| has to be| can only be| equals|:| =)"
_SURELY = (
    r"(?: (?:probably|clearly|simply|just|exactly|indeed|therefore|thus|definitely|obviously|equal to|likely|most))*"
)
_THING = r"(?:answer|solution|result|conclusion|final value|correct (?:option|choice|value|label))"
_SUBJECT = rf"(?:{_THING}|label|choice|option|category|class|intent|team|verdict|statement|claim|it|this|that)"
_ADVISE = r"(?:answer|say|choose|pick|select|respond|reply|go (?:with|for)|classify (?:it|this) as|label (?:it|this))"
_CLAIM = rf"\b(?:{_SUBJECT}{_BE}{_SURELY}|{_ADVISE}(?: with| as)?:?) (?:the |an? )?[\"'(]*"
_SUPPOSED = re.compile(r"\b(?:if|whether|when|suppose|assum(?:e|ing)|not|would)\b[^.;!?]{0,25}$")


def answer(proposal: Proposal) -> Verdict:
    """Refuses a hint that names the answer or the right option; labels match as whole tokens, however joined."""
    target = _target(proposal)
    finders = (_by_letter, _by_ordinal, _by_text, _by_claim)
    found = next(filter(None, (find(target, proposal.hint) for find in finders)), "")
    return Verdict("answer", not found, f'The hint says "{found}", which names the answer.' if found else "")


def _target(proposal: Proposal) -> _Target:
    stem, options = _options(proposal.question)
    gold = proposal.gold.strip()
    letter = re.fullmatch(r"\(?([A-Ja-j])[).:]?", gold)
    same_text = [i for i, option in enumerate(options) if _fold(option) == _fold(gold)]
    if letter and (options or letter[1].isupper()):
        index = _LETTERS.index(letter[1].upper())
        return _Target(stem, options, index, options[index] if index < len(options) else "")
    return _Target(stem, options, same_text[0] if same_text else -1, gold)


def _options(question: str) -> tuple[str, tuple[str, ...]]:
    """The question before its options, and the text of each; none when fewer than two are marked A, B, …"""
    marks: list[re.Match] = []
    for mark in _MARKER.finditer(question):
        if (mark[1] or mark[2]) == _LETTERS[len(marks) : len(marks) + 1]:
            marks.append(mark)
    if len(marks) < 2:
        return question, ()
    ends = [mark.start() for mark in marks[1:]] + [len(question)]
    texts = [question[mark.end() : end].strip(" \n;,.") for mark, end in zip(marks, ends, strict=True)]
    return question[: marks[0].start()], tuple(texts)


def _by_letter(target: _Target, hint: str) -> str:
    if target.index < 0:
        return ""
    if target.options and all(_letter(i, target.stem, hint) for i in range(len(target.options))):
        # "Test A, B, C and D in turn" prefers none.
        return ""
    return _letter(target.index, target.stem, hint)


def _letter(index: int, stem: str, hint: str) -> str:
    """Where a hint names the option with this index by its letter; a letter that the question uses must be marked."""
    letter = _LETTERS[index]
    marked = (
        rf"\({letter}\)|(?<!\w){letter}\)|\b(?i:option|choice|alternative|letter)s? ?[:#]?[\"'(]*{letter}\b"
        rf"|\b(?i:option|choice) ?[:#]?[\"'(]*{letter.lower()}(?=[\"').,;:!?]|$| is\b)"
        rf"|\b(?i:answer is|answer must be|choose|pick|select|go with|go for) [\"'(]*{letter}(?=[\"').,;:!?]|$)"
    )
    found = re.search(marked, hint)
    without_articles = re.sub(r"(?:^|(?<=[.!?:]\s))A ", "", stem)
    if not found and not any(letter in word for word in re.findall(r"\b[A-Z]+\b", without_articles)):
        found = _bare_letter(letter, hint)
    return found[0] if found else ""


def _bare_letter(letter: str, hint: str) -> re.Match | None:
    """A capital by itself; "A" and "I" that may be article and pronoun do not count, nor what names something else."""
    if letter == "I":
        return None
    named = r"(?i:(?<!vitamin )(?<!point )(?<!plan )(?<!grade )(?<!angle )(?<!type )(?<!side )(?<!part )(?<!vertex ))"
    start = r"(?<=[a-z,] )" if letter == "A" else ""
    verb = r"|(?:^|[.!?] )A(?= (?:is|seems|looks|fits|must|works|would)\b)" if letter == "A" else ""
    return re.search(rf"{named}{start}(?<![\w'.^/=+*-]){letter}(?![\w'\u2019)(^/=+*-]| ?[=+*/^-]|\.\w){verb}", hint)


def _by_ordinal(target: _Target, hint: str) -> str:
    if target.index < 0:
        return ""
    names = "|".join(_ordinals(target.index, len(target.options)))
    number = rf"(?:{target.index + 1}|{_CARDINALS[target.index]})"
    pattern = (
        rf"(?<!-)\b(?:{names})\b(?! to last| last)(?: \w+| of the(?: \w+)?)? {_OPTION}\b"
        rf"|\b(?:option|choice|alternative|answer) (?:number |no\.? ?|#)?{number}\b(?!\.\d)"
    )
    found = re.search(pattern, _fold(hint))
    return found[0] if found else ""


def _ordinals(index: int, count: int) -> list[str]:
    """Patterns of the ways to say where an option stands among `count` options, from the front or the back."""
    names = [_ORDINALS[index], rf"{index + 1}(?:st|nd|rd|th)"]
    if index == count - 1:
        names.append("(?:last|final)")
    if index == count - 2:
        names.append("(?:second[ -]to[ -]last|second[ -]last|penultimate)")
    if 2 * index == count - 1:
        names.append("middle")
    return names


def _by_text(target: _Target, hint: str) -> str:
    phrase = _fold(target.text)
    if not phrase or phrase in _COMMON or quantity(target.text) or len(phrase) < 2:
        return ""
    folded = _fold(hint)
    # A label such as team_food is no word of the language: to name it is to answer, wherever it is listed.
    if "_" not in target.text and _named(phrase, _fold(target.stem)):
        return ""
    others = [option for i, option in enumerate(target.options) if i != target.index]
    if others and all(_named(_fold(option), folded) for option in others):
        return ""
    return _named(phrase, folded)


def _named(phrase: str, text: str) -> str:
    """Where a folded text holds a folded phrase as whole tokens; two words in either order."""
    words = _words(phrase)
    orders = [words, words[::-1]] if len(words) == 2 else [words]
    spellings = "|".join(rf"(?<![\w.]){_spelled(order)}(?!\w|\.\d)" for order in orders)
    found = re.search(spellings, text)
    return found[0] if found else ""


def _words(phrase: str) -> list[str]:
    return re.findall(r"[^\s_-]+", phrase) or [phrase]


def _spelled(words: list[str]) -> str:
    """Pattern of words however they are joined, the last in singular or plural.

    Short words stand as they are, for both forms exist apart ("mean", "means").
    """
    *first, last = words
    singular = last.removesuffix("s")
    if last[-1].isalpha() and not singular.endswith("s") and (first or len(singular) >= 5):
        ending = rf"{re.escape(singular)}(?:s|es)?"
    else:
        ending = re.escape(last)
    return r"[\s,_-]+".join([*map(re.escape, first), ending])


def _by_claim(target: _Target, hint: str) -> str:
    if target.text and quantity(target.text):
        return _claimed_number(quantity(target.text), target.stem, hint)
    if not target.text:
        return ""
    folded = _fold(hint)
    pattern = rf"{_CLAIM}{_spelled(_words(_fold(target.text)))}(?!\w| (?:or|and|more|need|longer|matter|of|if)\b)"
    return next((m[0] for m in re.finditer(pattern, folded) if not _SUPPOSED.search(folded[: m.start()])), "")


def _claimed_number(gold: Quantity, stem: str, hint: str) -> str:
    """Where a hint says "the answer is 5" or, unless the question does too, "x = 5"."""
    text = plain(hint)
    for claim in re.finditer(rf"\b(?:{_THING}|[b-z]){_BE}{_SURELY} ", text):
        stated = quantities(re.split(r"[.;!?] ", text[claim.end() :])[0][:40])
        said = claim[0] + stated[0].text if stated and stated[0].start == 0 and same(stated[0], gold) else ""
        if said and said not in plain(stem) and not _SUPPOSED.search(text[: claim.start()]):
            return said
    return ""


def _fold(text: str) -> str:
    """The text without case, accents and punctuation at its ends, and with single spaces."""
    letters = unicodedata.normalize("NFKD", visible(text).replace("\u2019", "'"))
    bare = "".join(c for c in letters if not unicodedata.combining(c)).casefold()
    return re.sub(r"\s+", " ", bare.strip(" \n.\"'"))


# 3. Equal


def equal(proposal: Proposal, limit_s: float) -> Verdict:
    """Refuses a hint with a number or expression that equals the answer.

    Args:
        limit_s: seconds that comparing formulas may take; a hint whose formulas take longer is refused too.
    """
    target = _target(proposal)
    gold = _gold_quantity(target)
    if gold and (found := _equal_number(gold, target.stem, proposal.hint)):
        return Verdict("equal", False, f'"{found}" in the hint equals the answer.')
    return _equal_formula(target, gold, proposal.hint, limit_s)


def _gold_quantity(target: _Target) -> Quantity | None:
    """The answer as a number, in the unit that the question asks for; None when it is none."""
    gold = quantity(target.text) if target.text else None
    if gold is None or gold.unit:
        return gold
    return Quantity(gold.value, asked_unit(target.stem), gold.text, gold.start, gold.end)


def _equal_number(gold: Quantity, stem: str, hint: str) -> str:
    known = quantities(stem, stem)
    return next((q.text for q in quantities(hint, stem) if _matches(q, gold) and not _repeated(q, gold, known)), "")


def _repeated(q: Quantity, gold: Quantity, known: Sequence[Quantity]) -> bool:
    """Whether the question has the number already, or the very same arithmetic; conversion of units makes a new one.

    Where only the notation is asked for (0.125 as a fraction), a number in the answer's notation is new as well.
    """
    if q.arithmetic:
        return any(q.text == k.text for k in known)
    numbers = [k for k in known if not k.arithmetic]
    notations = {k.notation for k in numbers if q.value == k.value or ("percent" in (q.unit, k.unit) and same(q, k))}
    return bool(notations) and not (q.notation == gold.notation and gold.notation not in notations)


def _matches(q: Quantity, gold: Quantity) -> bool:
    return same(q, gold) or rounds_to(q, gold)


_FORMULA = re.compile(
    r"(?:\\[a-z]+|\d+(?:\.\d+)?"
    r"|\\?[({\[][^(){}\[\]a-z]{1,40},[^(){}\[\]a-z]{1,40}[)}\]]|[-+*/^=(){}]|\b[a-z]\b|(?<=\d)[a-z]\b| )+"
)
_SYMBOLS = [
    (r"√\s?(\w+)", r"\\sqrt{\1}"),
    (r"√\s?\(([^()]+)\)|\bsqrt ?\(([^()]+)\)", r"\\sqrt{\1\2}"),
    (r"\b(?:the )?(?:square )?root of (\d+)|(?<![\w\\])(?:square )?root (\d+)", r"\\sqrt{\1\2}"),
    (r"(?<!\\)\bsqrt ?(\d+)|\\sqrt ?(\w+)", r"\\sqrt{\1\2}"),
    (r"\\?\{([^{}]*,[^{}]*?)\\?\}", r"\\{\1\\}"),
    (r"π|(?<![\w\\])pi\b|(?<=\d)pi\b", r"\\pi "),
    (r" squared\b", "^2"),
    (r" cubed\b", "^3"),
]


def _equal_formula(target: _Target, gold: Quantity | None, hint: str, limit_s: float) -> Verdict:
    """The part of `equal` that a child process decides; no child is started when there is nothing to compare."""
    answer_form = _formulas(target.text)
    if len(answer_form) != 1 or (not gold and answer_form[0] != _latex(target.text)):
        return Verdict("equal", True)
    asked = {_shape(f) for f in _formulas(target.stem)}
    offered = [f for f in _formulas(hint) if _shape(f) not in asked and _comparable(f, gold)]
    if not offered:
        return Verdict("equal", True)
    known = _formulas(target.stem)
    found = compare(answer_form[0], offered + known, limit_s)
    if found.status in ("timeout", "crashed"):
        reason = f'"{offered[0]}" could not be compared with the answer within {limit_s} s; leave out the formula.'
        return Verdict("equal", False, reason)
    leak = _leaking(answer_form[0], offered, found.equal, found.value)
    return Verdict("equal", not leak, f'"{leak}" in the hint equals the answer.' if leak else "")


def _leaking(gold: str, offered: Sequence[str], equal_to_gold: Sequence[bool], value: str) -> str:
    if any(equal_to_gold[len(offered) :]):
        # The question is to rewrite what it gives: every step equals the answer, and only its very form tells.
        return next((f for f in offered if _shape(f) == _shape(gold)), "")
    exact = Quantity(Fraction(value), "", value, 0, 0) if value else None
    for formula, is_equal in zip(offered, equal_to_gold, strict=False):
        short = quantity(formula)
        if is_equal or (exact and short and rounds_to(short, exact)):
            return formula
    return ""


def _comparable(formula: str, gold: Quantity | None) -> bool:
    """Whether a formula could equal the answer: for a number, one without variables that is more than arithmetic."""
    if not gold:
        return bool(re.search(r"\d|\\|[+*/^=-]", formula))
    variables = re.search(r"[a-z]", re.sub(r"\\[a-z]+", "", formula))
    return not variables and bool(re.search(r"\^|\\sqrt|\\frac|\\pi|\(.*[-+*/].*\)", formula))


def _formulas(text: str) -> list[str]:
    """The longest runs of mathematics in a text, as LaTeX, and both sides of each equation."""
    runs = [run.strip(" =*/,") for run in _FORMULA.findall(_latex(text))]
    sides = [side.strip() for run in runs for side in (run.split("=") if "=" in run else [run])]
    return [side for side in dict.fromkeys(sides) if re.search(r"[\da-z]", side)]


def _latex(text: str) -> str:
    latex = plain(text)
    for pattern, replacement in _SYMBOLS:
        latex = re.sub(pattern, replacement, latex)
    return re.sub(r"^[a-z] ?= ?", "", latex.strip(" ."))


def _shape(formula: str) -> str:
    return re.sub(r"[\s*{}]|\\cdot", "", formula)


# 4. One step


def one_step(proposal: Proposal) -> Verdict:
    """Refuses a hint with two numbers whose sum, difference, product or quotient is the answer, one of them new."""
    target = _target(proposal)
    gold = _gold_quantity(target)
    known = [q.value for q in quantities(target.stem, target.stem) if not q.arithmetic]
    if not gold:
        return Verdict("one_step", True)
    offered = [q for q in quantities(proposal.hint, target.stem) if not q.arithmetic]
    for a, b in permutations(offered, 2):
        if not (a.value in known and b.value in known) and (sign := _operation(a.value, b.value, gold.value)):
            return Verdict("one_step", False, f'"{a.text}" and "{b.text}" in the hint give the answer by {sign}.')
    return Verdict("one_step", True)


def _operation(a: Fraction, b: Fraction, gold: Fraction) -> str:
    """How two numbers give a third; empty when they don't, or when one of them is that number."""
    if gold in (a, b):
        return ""
    results = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}
    return next((sign for sign, result in results.items() if result == gold), "")


# 5. Probe and 6. effect


def probe(hint_only: Count, blind: Count, threshold: float) -> Verdict:
    """Refuses a hint that helps without its question.

    Args:
        hint_only: rollouts that saw the hint and not the question.
        blind: rollouts that saw neither.
        threshold: refuse when Fisher's exact test, one-sided, gives such a lead a probability below this.
    """
    table = [[hint_only.k, hint_only.n - hint_only.k], [blind.k, blind.n - blind.k]]
    chance = float(fisher_exact(table, alternative="greater").pvalue)
    if chance >= threshold:
        return Verdict("probe", True)
    reason = (
        f"Without the question the hint alone led to the answer in {hint_only.k} of {hint_only.n} tries, "
        f"against {blind.k} of {blind.n} without it (p = {chance:.2g})."
    )
    return Verdict("probe", False, reason)


_USELESS = "Useless:"


def effect(hinted: Count) -> Verdict:
    """Refuses a hint with which no rollout succeeds (useless) or all do (suspicious: it may hold the answer)."""
    if hinted.k == 0:
        return Verdict("effect", False, f"{_USELESS} none of {hinted.n} rollouts succeeded with the hint.")
    if hinted.k == hinted.n:
        return Verdict("effect", False, f"Suspicious: all {hinted.n} rollouts succeeded with the hint.")
    return Verdict("effect", True)


def useless(verdict: Verdict) -> bool:
    """Whether `effect` refused the hint because the student fails with it as well."""
    return verdict.rule == "effect" and not verdict.passed and verdict.reason.startswith(_USELESS)
