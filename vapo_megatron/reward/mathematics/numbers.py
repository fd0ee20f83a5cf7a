r"""Reads what needs no algebra: numbers exactly, numbers of other bases, units, words.

Texts are those of text.plain. Imports neither torch nor anything else of the package.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

MAX_EXPONENT = 400
"""Of a power of ten that is written out; larger ones are left to the algebra."""


class Number(NamedTuple):
    """A rational number as it was written."""

    value: Fraction
    has_point: bool = False
    is_percent: bool = False


class BasedNumber(NamedTuple):
    """Digits and the base that they are in."""

    digits: str
    base: int


class Unit(NamedTuple):
    """A unit: of physics, money and time with its powers, or a noun."""

    powers: tuple[tuple[str, int], ...]
    noun: str = ""


_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_POWER = r"10\s*\^\s*(?:\{\s*([+-]?\d{1,4})\s*\}|(\d)(?!\d))"
_SIMPLE = re.compile(rf"([+-]?)\s*({_DECIMAL})(\s*\\%)?")
_FRACTION = re.compile(
    rf"([+-]?)\s*(?:({_DIGITS})\s+)?(?:({_DECIMAL})\s?/\s?({_DECIMAL}))(\s*\\%)?"
)
_LATEX_FRACTION = re.compile(
    rf"([+-]?)\s*(?:({_DIGITS})\s*)?\\frac\s*(?:\{{\s*([+-]?{_DECIMAL})\s*\}}|(\d))"
    rf"\s*(?:\{{\s*([+-]?{_DECIMAL})\s*\}}|(\d))(\s*\\%)?"
)
_SCIENTIFIC = re.compile(rf"([+-]?)\s*(?:({_DECIMAL})\s*(?:\\times|\\cdot|\*)\s*)?{_POWER}")
_EXPONENT = re.compile(rf"([+-]?)\s*({_DECIMAL})[eE]([+-]?\d{{1,3}})")
_REPEATING = re.compile(
    r"([+-]?)\s*(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*\{\s*(\d+)\s*\}|\((\d+)\))(\s*\\%)?"
)
_BASED = re.compile(
    r"\(?\s*(?:\\text\{\s*)?([0-9A-Za-z]+)(?:\s*\})?\s*\)?\s*_\s*"
    r"(?:(\d)|\{\s*\(?(\d{1,2})\)?\s*\}|\{?\s*\\text\{\s*([a-z]+)\s*\}\s*\}?|\{\s*([a-z]+)\s*\})"
)
_BASES = dict(
    zip(
        "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
        "sixteen".split(),
        range(2, 17),
    )
)


def number(text: str) -> Number | None:
    r"""Return a number written as an integer, decimal, fraction, mixed or scientific, or None.

    Also with separated thousands, a repeating part (`0.\overline{3}`) or a percent sign.
    """
    if not text or text[-1] not in "0123456789}%.)":
        return None
    if match := _SIMPLE.fullmatch(text):
        return _signed(match[1], _value(match[2]), "." in match[2], match[3])
    if match := _FRACTION.fullmatch(text):
        return _mixed(match[1], match[2], match[3], match[4], match[5])
    if match := _LATEX_FRACTION.fullmatch(text):
        return _mixed(match[1], match[2], match[3] or match[4], match[5] or match[6], match[7])
    if (match := _SCIENTIFIC.fullmatch(text)) and abs(int(match[3] or match[4])) <= MAX_EXPONENT:
        value = _value(match[2] or "1") * Fraction(10) ** int(match[3] or match[4])
        return _signed(match[1], value, "." in (match[2] or ""), None)
    if (match := _EXPONENT.fullmatch(text)) and abs(int(match[3])) <= MAX_EXPONENT:
        return _signed(match[1], _value(match[2]) * Fraction(10) ** int(match[3]), True, None)
    if match := _REPEATING.fullmatch(text):
        whole, first, again = match[2] or "0", match[3], match[4] or match[5]
        if len(first) + len(again) > 60:
            return None
        repeated = Fraction(int(again), 10 ** len(again) - 1) / 10 ** len(first)
        value = int(whole) + Fraction(int(first or "0"), 10 ** len(first)) + repeated
        return _signed(match[1], value, False, match[6])
    return None


def _value(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").replace(" ", "").rstrip(".") or "0")


def _signed(sign: str, value: Fraction, has_point: bool, percent: str | None) -> Number:
    return Number(-value if sign == "-" else value, has_point, bool(percent))


def _mixed(
    sign: str, whole: str | None, above: str, below: str, percent: str | None
) -> Number | None:
    negative = (above[0] == "-") != (below[0] == "-")
    numerator, denominator = _value(above.lstrip("+-")), _value(below.lstrip("+-"))
    if not denominator or (whole and (negative or numerator >= denominator)):
        return None
    value = (-1 if negative else 1) * numerator / denominator + (_value(whole) if whole else 0)
    return _signed(sign, value, False, percent)


def based_number(text: str) -> BasedNumber | None:
    r"""Return a number with its base as an index, such as `1010_2` or `2A_{16}`, or None."""
    match = _BASED.fullmatch(text)
    if match is None or not any(map(str.isdigit, match[1])) and len(match[1]) < 2:
        return None
    word = match[4] or match[5]
    base = int(match[2] or match[3]) if word is None else _BASES.get(word, 0)
    if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in match[1]):
        return BasedNumber(match[1], base) if match[1].isdigit() and base else None
    return BasedNumber(match[1].upper().lstrip("0") or "0", base)


# Units ------------------------------------------------------------------------------------------

_ALIASES = """
m meter metre|cm centimeter centimetre|mm millimeter millimetre|km kilometer kilometre
in inch inche
ft foot feet|yd yard|mi mile|nm nanometer|g gram gm|kg kilogram kilo|mg milligram|lb pound lbs
oz ounce|ton tonne|s sec second|min minute mins|h hr hour hrs|day|week wk|month|year yr
ms millisecond
L liter litre|mL ml milliliter millilitre|gal gallon|qt quart|pt pint|cup|mph|kph kmh kmph
$ dollar USD buck|\u00a2 cent penny pennies|\u20ac euro EUR|\u00a3 GBP
\u00a5 yuan yen RMB CNY \uffe5|\u20b9 rupee Rs|deg degree \u00b0
rad radian|celsius|fahrenheit|N newton|J joule|kJ kilojoule|W watt|kW kilowatt|V volt
A ampere amp|Hz hertz|Pa pascal|kPa|K kelvin|mol mole|kWh|ohm \u03a9|acre|hectare ha|dm decimeter
unit|am|pm|dB|eV|cal calorie|kcal|rpm|mil|knot|C|F|bit|byte|KB|MB|GB
"""
_UNITS = {
    alias: names.split()[0]
    for names in _ALIASES.replace("\n", "|").split("|")
    for alias in names.split()
}
_UNITS |= {"mph": "mph", "inches": "in", "centuries": "century", "century": "century"}
_CURRENCY = "$\u20ac\u00a3\u00a5\u00a2\u20b9\uffe5"
_BINDING = {"am", "pm"}
"""Without these, the number says something else."""
_POWERS_BEFORE = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWERS_BEHIND = {"squared": 2, "cubed": 3}
_LONE_LETTERS = set("msghNJWVL")
"""Of the units of one letter those that need no \\text, if a space is before them."""
_MULTIPLIERS: dict[str, int | Fraction] = {
    "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "dozen": 12, "half": Fraction(1, 2), "halve": Fraction(1, 2), "third": Fraction(1, 3),
    "quarter": Fraction(1, 4), "fourth": Fraction(1, 4), "fifth": Fraction(1, 5),
    "sixth": Fraction(1, 6), "seventh": Fraction(1, 7), "eighth": Fraction(1, 8),
    "ninth": Fraction(1, 9), "tenth": Fraction(1, 10), "hundredth": Fraction(1, 100),
    "thousandth": Fraction(1, 1000),
}  # fmt: skip
_NO_UNIT = re.compile(
    r"\b(?:and|or|not|nor|than|plus|minus|times(?=\s*\S)|over|mod|choose|factorial|squared|cubed|hundred"
    r"|thousand|million|billion|trillion|dozen|raised|divided|multiplied|percent|percentage|sqrt|sin"
    r"|cos|tan|log|ln|exp|more|less|least|most|to|if|when|base|is|are|pi|infty)s?\b|n't|=|\d",
    re.IGNORECASE,
)
_TEXT_TAIL = re.compile(r"(?:\\text\{[^{}]*\}|\^\s*(?:\{\s*-?\d\s*\}|\d)|\\cdot|[\s/.*()])+")
_CIRCLE_TAIL = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*(?:\\text\{\s*)?([CF])?(?:\s*\})?$")
_PLAIN_TAIL = re.compile(
    r"(?P<head>.*[\d})\]])(?P<space>\s*)(?P<tail>[A-Za-z\u00b0\u00b5\u03a9\u20ac\u00a3\u00a5\u00a2\u20b9\uffe5][A-Za-z/^{}\d\s*.()\u00b0\u00b5\u03a9-]*)"
)
_TOKEN = re.compile(
    r"[A-Za-z\u00b0\u00b5\u03a9$\u20ac\u00a3\u00a5\u00a2\u20b9\uffe5]+|\^\s*\{?\s*-?\d\s*\}?|[/*]|\S"
)
_HALF_DAY = re.compile(r"\b([AaPp])\.?\s?[Mm]\b\.?")


class Quantity(NamedTuple):
    """The parts of a text that ends in a unit, or begins with a currency sign."""

    head: str
    unit: Unit | None
    factor: Fraction
    is_explicit: bool
    """Not a lone letter, which might be a variable."""


def quantity(text: str) -> Quantity | None:
    """Split a text into a number or expression, and the unit behind it; None: it has no unit."""
    if text[:2] == "\\$" or text[:1] in _CURRENCY:
        head = text[2 if text[0] == "\\" else 1 :].strip()
        inner = quantity(head)  # \$5 million
        sign = "$" if text[0] == "\\" else _UNITS.get(text[0], text[0])
        unit = Unit(((sign, 1),))
        if inner is not None and (inner.unit is None or inner.unit in (unit, Unit(((sign, -1),)))):
            return Quantity(inner.head, unit, inner.factor, True)
        return Quantity(head, unit, Fraction(1), True) if head else None
    if text[:1] == "-" and (text[1:3] == "\\$" or text[1:] and text[1] in _CURRENCY):
        inner = quantity(text[1:])
        return inner and inner._replace(head=f"-{inner.head}")
    if text.endswith("\\$") and len(text) > 2:
        return Quantity(text[:-2].strip(), Unit((("$", 1),)), Fraction(1), True)
    start = text.find("\\text{")
    if start > 0 and _TEXT_TAIL.fullmatch(text, start):
        tail = text[start:].replace("\\text{", " ").replace("}", " ").replace("{", " ")
        head = text[:start].rstrip(" ~")
        # 5^\circ \text{C}
        if circle := _CIRCLE_TAIL.search(head):
            head, tail = head[: circle.start()], f"degree {tail}"
        return _split(head, tail, True, is_text=True)
    if "\\circ" in text and (circle := _CIRCLE_TAIL.search(text)):
        names = {"C": "celsius", "F": "fahrenheit", None: "deg"}
        head = text[: circle.start()].strip()
        return Quantity(head, Unit(((names[circle[1]], 1),)), Fraction(1), True) if head else None
    if "\\Omega" in text or "\\cdot" in text:
        text = re.sub(
            r"(?<=[A-Za-z])\s*\\cdot\s*(?=[A-Za-z])", "*", text.replace("\\Omega", "\u03a9")
        )
    match = _PLAIN_TAIL.fullmatch(text)
    if match is None or "\\" in match["tail"]:
        return None
    return _split(match["head"], match["tail"], bool(match["space"]), is_text=False)


def _split(head: str, tail: str, has_space: bool, is_text: bool) -> Quantity | None:
    head, words = head.strip(), tail.split()
    if not head or not words:
        return None
    factor = Fraction(1)
    while words and (word := words[0].strip(".,").lower()) and has_space:
        one = _MULTIPLIERS.get(word) or _MULTIPLIERS.get(word.removesuffix("s"))
        if word == "second" or one is None:
            break
        factor, words = factor * one, words[1:]
        if words[:1] == ["of"] and isinstance(one, Fraction):
            words = []
    tail = " ".join(words)
    if not tail:
        return Quantity(head, None, factor, True)
    if _HALF_DAY.fullmatch(tail.strip()) and (is_text or has_space or len(tail) == 2):
        return Quantity(head, Unit(((tail.strip()[0].lower() + "m", 1),)), factor, True)
    powers = _powers(tail)
    if powers is not None:
        letters = re.fullmatch(r"([A-Za-z])(?:\s*\^.*)?", tail)
        if not is_text and letters and (not has_space or letters[1] not in _LONE_LETTERS):
            return None
        return Quantity(head, Unit(powers) if powers else None, factor, is_text or not letters)
    if _NO_UNIT.search(tail) or not has_space and not is_text:
        return None
    if not is_text and not re.fullmatch(r"(?:of|[A-Za-z]{3,})(?:[ -][A-Za-z]+){0,5}", tail):
        return None
    noun = " ".join(word.removesuffix("s") for word in re.findall(r"[a-z']+", tail.lower()))
    return Quantity(head, Unit((), noun), factor, True)


def _powers(tail: str) -> tuple[tuple[str, int], ...] | None:
    """Return the powers of known units; None: there is an unknown word."""
    found: dict[str, int] = {}
    sign, power, last = 1, 1, ""
    for token in _TOKEN.findall(tail):
        word = token.strip(".")
        if token in ("/", "per"):
            sign = -1
        elif token[0] == "^":
            if not last:
                return None
            exponent = int(re.sub(r"[^\d-]", "", token))
            found[last] += (exponent - 1) * (1 if found[last] > 0 else -1)
            last = ""
        elif token in "*()." or not word or word in ("of", "the") and found:
            continue
        elif word.lower() in _POWERS_BEFORE:
            power = _POWERS_BEFORE[word.lower()]
        elif word.lower() in _POWERS_BEHIND and last:
            found[last] *= _POWERS_BEHIND[word.lower()]
        else:
            name = _unit_name(word)
            if name is None:
                return None
            if found.get("deg") and name in ("C", "F", "celsius", "fahrenheit"):
                del found["deg"]
                name = {"C": "celsius", "F": "fahrenheit"}.get(name, name)
            found[name] = found.get(name, 0) + sign * power
            power, last = 1, name
    if found == {"mi": 1, "h": -1}:
        found = {"mph": 1}
    elif found == {"km": 1, "h": -1}:
        found = {"kph": 1}
    return tuple(sorted(item for item in found.items() if item[0] != "unit")) if found else None


def _unit_name(word: str) -> str | None:
    if len(word) <= 3 and word in _UNITS:
        return _UNITS[word]
    small = word.lower()
    for form in (small, small.removesuffix("s"), small.removesuffix("es")):
        if form in _UNITS and (len(form) > 1 or not word.isascii()):
            return _UNITS[form]
    return None


def units_agree(gold: Unit | None, answer: Unit | None) -> bool:
    """Return whether an answer's unit can stand where the ground truth has this one.

    One of the two may be left out, but for a.m. and p.m. Of two nouns that are counted one may
    contain the other.
    """
    names = {name for unit in (gold, answer) if unit for name, _ in unit.powers}
    if gold is None or answer is None:
        return not names & _BINDING
    if gold.powers or answer.powers or not (gold.noun and answer.noun):
        other = answer.noun or gold.noun
        return gold.powers == answer.powers and not other or len(other.split()) > 2
    first, second = set(gold.noun.split()), set(answer.noun.split())
    return first <= second or second <= first or max(len(first), len(second)) > 2


# Words ------------------------------------------------------------------------------------------

_WORDS = re.compile(r"[A-Za-z][A-Za-z'\u2019 .,/-]*|[^\x00-\x7f]+")
_VARIABLES = (set("abcd"), set("xyzwuv"), set("abcxyz"))


def words(text: str) -> str | None:
    r"""Return a text that is words and no product of letters, in small letters; else None.

    Words stand in \text{}, or have three letters with a vowel among them. Words in capitals alone
    stay as they are: they may be names of points.
    """
    if "\\" in text:
        bare = re.sub(r"\\text\{([^{}]*)\}", r"\1", text).strip()
        if "\\" in bare or len(bare) < 2:
            return None
        is_text = True
    else:
        bare, is_text = text, False
    if not _WORDS.fullmatch(bare):
        return None
    longest = max(re.findall(r"[^\W\d_]+", bare), key=len, default="")
    if not is_text and longest.isascii():
        letters = set(longest.lower())
        if (
            longest.lower() != "no"
            and not (longest.isupper() and len(longest) > 2)
            and (
                len(longest) < 3
                or not letters & set("aeiou")
                or any(letters <= v for v in _VARIABLES)
            )
        ):
            return None
    bare = " ".join(bare.split()).strip(" .,")
    if bare.isupper() and len(bare) <= 4 and bare not in ("NO", "YES", "TRUE", "EVEN", "NONE"):
        return bare
    return bare.lower().removesuffix("s") if len(bare) > 3 else bare.lower()
