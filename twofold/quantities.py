"""Numbers in English text, with their units: digits, words, fractions, mixed numbers, percent, simple arithmetic.

1. Plain the text: one form for each sign, LaTeX fractions and multiplication as `/` and `*`, number words as digits
   (text2num). The pronoun "one" is no number.
2. Read fractions ("three quarters", "21 over 2", "2 1/2") and plain numbers, each with the unit word that follows.
   What only orders or points is left out: "2nd", the 2 of `x^2`, `2x` and "step 2", the marker of a list.
3. Join neighbours that an operator connects ("3 times 7", "1 in 36") or the same dimension ("1 hour and 30 minutes"),
   and compute them exactly.
4. Two quantities are the same by value, after conversion (pint) when both have a unit.
"""

import functools
import itertools
import operator
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from text_to_num import alpha2digit

Notation = Literal["decimal", "fraction", "percent"]


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number as it stands in a text."""

    value: Fraction
    unit: str
    """Unit in pint's syntax, such as `minute` or `km/h`; empty when none is written."""
    text: str
    """The number and its unit as read, after number words became digits."""
    start: int
    end: int
    """Where it stands in the plained text."""
    arithmetic: bool = False
    """True when it was computed from several numbers, as from "3 times 7" or "15/3"."""

    @property
    def notation(self) -> Notation:
        if self.unit == "percent":
            return "percent"
        return "fraction" if re.search(r"/|half|halves|quarter|over|\d(?:st|rd|th)", self.text) else "decimal"


_ATOM = (
    r"(?:secs?|minutes?|mins?|hours?|hrs?|days?|weeks?|months?|years?|millimet(?:er|re)s?|centimet(?:er|re)s?"
    r"|kilomet(?:er|re)s?|met(?:er|re)s?|inch(?:es)?|feet|foot|yards?|miles?|milligrams?|kilograms?|grams?|tonnes?"
    r"|pounds?|ounces?|millilit(?:er|re)s?|lit(?:er|re)s?|gallons?|pints?|quarts?|cups?|dollars?|cents?|degrees?"
    r"|radians?|percent|mm|cm|km|kg|mg|ml|ft|mph|(?<=[\s/])s|m|h|g|l)"
)
_UNIT = rf"(?:(?:square|cubic)\s)?{_ATOM}(?:\^\d)?(?:\s?(?:/|\bper\b)\s?{_ATOM}(?:\^\d)?)?(?![\w^])"

_ASKED = re.compile(rf"\bhow many ({_UNIT})|\bwhat (percent)(?:age)?\b|\bin ({_UNIT})", re.IGNORECASE)

# Longer numbers are no answers, and Python refuses to read the longest.
_N = r"(?:\d{1,99}(?:\.\d{1,99})?|\.\d{1,99})"
_PART = r"(?:half|halves|quarters?|(?!0+t)\d{0,99}(?:1st|3rd|\dth)s?)"

_NUMBER = re.compile(
    rf"""(?<![\w._\\])(?<!\D\^)(?<!\D\^\{{)(?P<minus>(?<![\d)])-)?
    (?: (?:(?P<whole>\d{{1,99}})\s(?:and\s)?)?(?P<top>{_N})\s?(?:/|\bover\b)\s?(?P<bottom>{_N})
      | (?:(?P<wholes>{_N})\sand\s)?(?:(?P<many>an?|{_N})\s)?(?P<part>{_PART})
      | (?P<plain>{_N})(?:e(?P<power>[+-]?\d{{1,9}})|\s?\*\s?10\^(?P<ten>-?\d{{1,9}}))?(?P<dozen>\s?dozen)?
    )(?!\.?\d)(?:\s?(?:of\san?\s)?(?P<unit>{_UNIT})|(?![\w^]))""",
    re.VERBOSE,
)

_PIECE = (
    r"(?:steps?|equations?|cases?|unknowns?|conditions?|things?|numbers?|terms?|clues?|hints?|quantit(?:y|ies)"
    r"|values?|facts?|formulas?|expressions?|operations?|rules?|ideas?|questions?)"
)
"""What an argument has a few of."""
_NAMED = re.compile(r"\b(?:step|equation|case|part|clue|hint|fact|formula|rule|question)s? #?$")

_OPERATORS = {
    "+": operator.add,
    "plus": operator.add,
    "-": operator.sub,
    "minus": operator.sub,
    "*": operator.mul,
    "times": operator.mul,
    "multiplied by": operator.mul,
    "of": operator.mul,
    "/": operator.truediv,
    "divided by": operator.truediv,
    "out of": operator.truediv,
    "in": operator.truediv,
}
_GAP = re.compile(r",?\s*(\+|-|\*|/|plus|minus|times|multiplied by|divided by|out of|in|of(?: the)?)\s*")

_SUPERSCRIPTS = str.maketrans({c: f"^{i}" for i, c in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")})
_SIGNS = str.maketrans(
    {
        "\N{MINUS SIGN}": "-",
        "\N{EN DASH}": "-",
        "\N{MULTIPLICATION SIGN}": "*",
        "\N{MIDDLE DOT}": "*",
        "\N{DOT OPERATOR}": "*",
        "\N{DIVISION SIGN}": "/",
        "\N{FRACTION SLASH}": "/",
        "\N{DEGREE SIGN}": " degrees ",
    }
)

_LATEX = [
    # A pair of dollars around mathematics, by pandoc's rule; any other stands before an amount.
    (r"\$(?!\s)([^$\n]+?)(?<!\s)\$(?!\d)", r" \1 "),
    (r"\$\s?(\d[\d,]*(?:\.\d+)?)", r"\1 dollars"),
    (r"\\[dt]?frac\s*\{\s*(-?[\d.]+)\s*\}\s*\{\s*([\d.]+)\s*\}", r" \1/\2 "),
    (r"\\[dt]?frac\s*(\d)\s*(\d)", r" \1/\2 "),
    (r"\\(?:times|cdot)(?![a-z])", " * "),
    (r"\\div(?![a-z])", " / "),
    (r"\\(?:text|mathrm|mathbf)\s*\{([^{}]*)\}", r" \1 "),
    (r"\^\s*\{?\\circ\}?", " degrees "),
    (r"\\[,;!: ]|\\(?:left|right)(?![a-z])|\\[()\[\]]", " "),
    (r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))", ""),
    (r"\\?%|\bper ?cent\b", " percent "),
    (r"[ \t]+", " "),
]
_BEFORE_WORDS = [
    (r"(?<=[a-z])-(?=[a-z])", " "),
    (r"\btenths\b", "over 10"),
    (r"\bhundredths\b", "over 100"),
    (r"\bthousandths\b", "over 1000"),
    (r"\bhalf an? (?=dozen|hour|day|year|minute|mile|meter|dollar|pound|kilogram|liter)", "0.5 "),
    # As an ordinal it is no number, and as a unit text2num would read it as 2nd.
    (r"\bsecond(s?)\b", r"sec\1"),
    (rf"\b({_ATOM}) (?:each|every|an?) (?={_ATOM}\b)", r"\1 per "),
    (r"(?<!of )\ban? (?=dozen|hundred|thousand|million|hour|week|dollar|mile)", "one "),
]
_BEFORE_ONE = "is equals to exactly only get gives leaves plus minus times by over point and".split()
_AFTER_ONE = (
    "hundred thousand million billion half third quarter fourth fifth sixth seventh eighth ninth tenth over point out"
    " and plus minus times dozen percent hour minute day week year dollar cent meter mile"
).split()
_PRONOUN = re.compile(
    rf"\bone\b(?: (?=of\b)|(?! (?:{'|'.join(_AFTER_ONE)}))(?<!ty one)"
    + "".join(rf"(?<!\b{word} one)" for word in _BEFORE_ONE)
    + ")"
)
"""The word "one" where nothing says that it counts."""

_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9}


def visible(text: str) -> str:
    """The text in Unicode's compatibility form, without characters that have no width."""
    return "".join(c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) != "Cf")


def plain(text: str) -> str:
    """The text in lower case with one way to write each number: "Twenty-one halves" gives "21 halves"."""
    text = re.sub(r"(\d)([¼½¾⅐-⅞])", r"\1 \2", text.translate(_SUPERSCRIPTS))
    text = visible(text).translate(_SIGNS)
    for pattern, replacement in _LATEX:
        text = re.sub(pattern, replacement, text)
    text = text.casefold()
    for pattern, replacement in _BEFORE_WORDS:
        text = re.sub(pattern, replacement, text)
    text = re.sub(rf"({_N}) ({'|'.join(_SCALES)})\b", lambda m: str(Fraction(m[1]) * _SCALES[m[2]]), text)
    text = alpha2digit(_PRONOUN.sub("some ", text), "en", threshold=0)
    return re.sub(r"\b(?:minus|negative) (?=\d)(?<!\d minus )", "-", text)


def quantities(text: str, question: str = "") -> list[Quantity]:
    """Every quantity of a text, in order, then what the arithmetic in it comes to.

    Args:
        question: what it counts itself ("How many terms …") is counted in the text as well.
    """
    text, question = plain(text), plain(question)
    matches = [match for match in _NUMBER.finditer(text) if not _only_points(match, question)]
    found = [q for q in map(_quantity, matches) if q]
    return found + list(_compounds(found, text)) + list(_computed(found, text))


def quantity(text: str) -> Quantity | None:
    """The quantity that a text is, such as "$10.50", "x = 21/2" or "12 apples"; None when it is anything else."""
    text = re.sub(r"^\s*[a-z]\s*=", "", plain(text)).strip(" .")
    match = _NUMBER.match(text)
    if not match or not re.fullmatch(r"(?: [a-z]+){0,3}", text[match.end() :]):
        return None
    return _quantity(match)


def asked_unit(question: str) -> str:
    """The unit a question wants its answer in ("How many minutes …"), in pint's syntax; empty when it names none."""
    match = _ASKED.search(plain(question))
    return _pint(next(filter(None, match.groups()))) if match else ""


def same(a: Quantity, b: Quantity) -> bool:
    """Whether two quantities have one value: 60 min and 1 h, 50% and 1/2, 10.5 and 21/2, 12 and "12 apples"."""
    if a.unit and b.unit:
        return _base(a) == _base(b)
    return a.value == b.value or ("percent" in (a.unit, b.unit) and _base(a) == _base(b))


def rounds_to(short: Quantity, exact: Quantity) -> bool:
    """Whether `short` is a decimal of at least three digits to which `exact` rounds: 0.333 for 1/3."""
    match = re.match(r"-?(\d*)\.(\d+)", short.text)
    if not match or len((match[1] + match[2]).lstrip("0")) < 3 or short.unit != exact.unit:
        return False
    return abs(short.value - exact.value) <= Fraction(1, 2 * 10 ** len(match[2]))


def _quantity(match: re.Match) -> Quantity | None:
    """None for a division by zero and for an ordinal."""
    if (match["part"] and _ordinal(match)) or (match["bottom"] and not Fraction(match["bottom"])):
        return None
    value = _value(match) * (-1 if match["minus"] else 1)
    # A fraction that can be reduced, such as 15/3, is a division to be done.
    division = bool(match["bottom"]) and value.denominator != Fraction(match["bottom"])
    return Quantity(value, _pint(match["unit"] or ""), match[0].strip(), *match.span(), division)


def _ordinal(match: re.Match) -> bool:
    """Whether "a 3rd" or "5th" orders; "2 3rds", "1 3rd", "2 and a 3rd" and "a 3rd of" are fractions."""
    if not match["part"][0].isdigit():
        return False
    if match["many"] not in ("a", "an"):
        return not match["many"]
    return not (match["wholes"] or match["unit"] or re.match(r" of\b|[.,;!?)]|$", match.string[match.end() :]))


def _value(match: re.Match) -> Fraction:
    if match["top"]:
        return Fraction(match["whole"] or 0) + Fraction(match["top"]) / Fraction(match["bottom"])
    if match["part"]:
        many = Fraction(1) if match["many"] in (None, "a", "an") else Fraction(match["many"])
        return Fraction(match["wholes"] or 0) + many / _below(match["part"])
    # Beyond 10^400 no answer is meant, and the power would take long.
    power = max(-400, min(400, int(match["power"] or match["ten"] or 0)))
    return Fraction(match["plain"]) * (12 if match["dozen"] else 1) * Fraction(10) ** power


def _below(part: str) -> int:
    if part[0].isdigit():
        return int(re.match(r"\d+", part)[0])
    return 2 if part.startswith("hal") else 4


def _only_points(match: re.Match, question: str) -> bool:
    """Whether a number counts or names pieces of the argument ("two equations", "step 2") or marks a list's item."""
    before, after = match.string[: match.start()], match.string[match.end() :]
    if not match["plain"] or match["unit"]:
        return False
    if re.search(r"(?:^|\n)\s*\(?$", before) and re.match(r"[.):]\s", after):
        return True
    counted = re.match(rf"(?: \w+)? ({_PIECE})\b", after) if re.fullmatch("[1-4]", match["plain"]) else None
    return bool(_NAMED.search(before) or (counted and counted[1] not in question))


def _compounds(found: list[Quantity], text: str) -> Iterator[Quantity]:
    """Neighbours such as "1 hour and 30 minutes", in the unit of the first."""
    for large, small in itertools.pairwise(found):
        if not (large.unit and small.unit and re.fullmatch(r",? (?:and )?", text[large.end : small.start])):
            continue
        (factor, dimension), (small_factor, small_dimension) = _scale(large.unit), _scale(small.unit)
        if dimension == small_dimension and small_factor < factor:
            value = large.value + small.value * small_factor / factor
            yield Quantity(value, large.unit, text[large.start : small.end], large.start, small.end, arithmetic=True)


def _computed(found: list[Quantity], text: str) -> Iterator[Quantity]:
    """What each longest run of quantities with an operator between neighbours comes to."""
    run: list[Quantity | str] = []
    for q in found:
        sign = _sign(run[-1], q, text) if run else ""
        if run and not sign:
            yield from _total(run, text)
            run = []
        run += [sign, q] if sign else [q]
    yield from _total(run, text)


def _sign(left: Quantity, right: Quantity, text: str) -> str:
    """The operator that joins two quantities; empty when none does."""
    gap = _GAP.fullmatch(text[left.end : right.start])
    sign = gap[1].removesuffix(" the") if gap else ""
    # "three of 21 pupils" is no product, "half of 21" is.
    return "" if sign == "of" and left.unit != "percent" and left.value.denominator == 1 else sign


def _total(run: list[Quantity | str], text: str) -> Iterator[Quantity]:
    """One quantity without a unit, by the usual order of operations; nothing for one number or a division by zero."""
    if len(run) < 2:
        return
    terms = [_number(run[0])]
    for sign, q in zip(run[1::2], run[2::2], strict=True):
        if _OPERATORS[sign] is operator.truediv and not q.value:
            return
        if _OPERATORS[sign] in (operator.mul, operator.truediv):
            terms[-1] = _OPERATORS[sign](terms[-1], _number(q))
        else:
            terms.append(_OPERATORS[sign](0, _number(q)))
    start, end = run[0].start, run[-1].end
    yield Quantity(sum(terms, Fraction(0)), "", text[start:end].strip(), start, end, arithmetic=True)


def _number(q: Quantity) -> Fraction:
    return q.value / 100 if q.unit == "percent" else q.value


def _pint(unit: str) -> str:
    return re.sub(r"\s*\bper\b\s*", "/", unit.strip()).replace("^", "**")


@functools.cache
def _scale(unit: str) -> tuple[Fraction, str]:
    """Factor to base units, and what it measures."""
    one = _registry().Quantity(Fraction(1), unit)
    return one.to_base_units().magnitude, str(dict(one.dimensionality))


def _base(q: Quantity) -> tuple[Fraction, str]:
    factor, dimension = _scale(q.unit)
    return q.value * factor, dimension


@functools.cache
def _registry():
    import pint

    # Exact, so that 20 min is 1/3 h.
    registry = pint.UnitRegistry(non_int_type=Fraction)
    registry.define("dollar = [currency]")
    registry.define("cent = 0.01 * dollar")
    return registry
