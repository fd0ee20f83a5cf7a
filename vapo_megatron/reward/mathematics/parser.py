r"""Takes a formula apart: lists, tuples, sets, relations, units; math-verify parses the rest.

The parser of math-verify reads expressions alone. Its normalization drops letters at the end as
units, its verdicts small numbers, and it accepts a part where the whole cannot be parsed, so what
holds expressions together is read here. Imports nothing of the package outside this folder.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

from vapo_megatron.reward.mathematics.expression import Expression, Unparsable, expression
from vapo_megatron.reward.mathematics.numbers import (
    BasedNumber,
    Number,
    Unit,
    based_number,
    number,
    quantity,
    words,
)
from vapo_megatron.reward.mathematics.text import closing, depths, plain


class Word(NamedTuple):
    """A text that is compared as it is."""

    text: str


class Measured(NamedTuple):
    """A number or expression with a unit; `whole` is all of it, where the unit may be a letter."""

    value: Any
    unit: Unit | None
    whole: str | None = None


class Items(NamedTuple):
    """Values between brackets: "" of a list, "{" of a set, "(" and "[" of tuples and intervals."""

    left: str
    right: str
    values: tuple[Any, ...]


class Either(NamedTuple):
    """A union of sets, or alternatives that are inequalities."""

    parts: tuple[Any, ...]


class Relation(NamedTuple):
    """`sides[0] operators[0] sides[1] ...`; the name is that on the left of `name = ...`."""

    operators: tuple[str, ...]
    sides: tuple[Any, ...]
    name: str | None


class Builder(NamedTuple):
    r"""`\{element | condition\}`."""

    element: Any
    condition: Any


class Residue(NamedTuple):
    """A value modulo another."""

    value: Any
    modulus: Any


Value: TypeAlias = (
    Number
    | BasedNumber
    | Expression
    | Word
    | Measured
    | Items
    | Either
    | Relation
    | Builder
    | Residue
)

MAX_PARTS = 64
_SEPARATOR = re.compile(
    r"[,;]|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\\(?:lor|vee|land|wedge)(?![A-Za-z])"
)
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
# Names of points and statements, not products of letters.
_AS_IT_IS = re.compile(
    r"\\ldots|m?\\(?:angle|triangle|odot|square|arc)(?![A-Za-z])\s*[A-Z]+"
    r"|[A-Za-z\s]+\\(?:parallel|perp)(?![A-Za-z])[A-Za-z\s]+"
)
_CLOCK = re.compile(r"\d{1,2}:[0-5]\d")
_OPERATOR = re.compile(
    r"[=<>]|\\(?:le|ge|ne|approx|simeq|equiv|cong|in|notin|subset|subseteq|to|rightarrow)(?![A-Za-z])"
)
_INEQUALITIES = {"<", ">", r"\le", r"\ge", r"\ne"}
_UNION = re.compile(r"\\cup(?![A-Za-z])|(?<=[\])}])\s*U\s*(?=[\[({\\])")
_SIGNS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])|\+\s*/\s*-|\+-")
_MODULO = re.compile(
    r"\\?(?:pmod|bmod|mod)(?![A-Za-z])\s*(?:\{\s*([^{}]+)\s*\}|(\w+))|\(\s*(?:\\text\{\s*mod\s*\}|\\?mod)\s*([^()]+)\)"
    r"|\\text\{\s*\(?\s*mod\s*\}?\s*([^(){}]+)\s*\}?\)?"
)
_NAME = re.compile(
    r"[A-Za-z]+(?:_(?:\w|\{[^{}]*\}))?'*(?:\^\{-1\})?(?:\([A-Za-z0-9, ]*\))?"
    r"|\\text\{[^{}]*\}(?:_\w)?"
    r"|\\[a-z]+(?:_\w)?|m?\\angle\s*[A-Za-z]+|\\det\s*[A-Z]"
    r"|\\overline\{[A-Z]+\}|\\frac\{d\w\}\{d\w\}|[A-Za-z]*\[[A-Z]+\]|\|[A-Za-z]+\|"
    r"|\(\s*[a-z](?:\s*,\s*[a-z])+\s*\)"
)
_CASES = re.compile(
    r"\\begin\{(cases|aligned|array|gathered)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}", re.DOTALL
)
_BAR = re.compile(r"\\mid(?![A-Za-z])|\\vert(?![A-Za-z])|\||:")


def parse(text: str) -> Value:
    r"""Return the value of a formula without delimiters.

    Raises:
        Unparsable: it is none.
    """
    return _parse(plain(text))


def _parse(text: str) -> Value:
    text = text.strip()
    if not text:
        raise Unparsable("empty")
    if (found := number(text)) is not None:
        return found
    word = "".join(text.split()) if _AS_IT_IS.fullmatch(text) else words(text)
    if word is not None:
        return Word(word)
    if text.startswith("\\begin{") and (block := _CASES.fullmatch(text)):
        rows = [row.replace("&", " ").strip(" ,;") for row in block[2].split("\\\\")]
        return _items("", "", [row for row in rows if row])
    thousands = [match.span() for match in _THOUSANDS.finditer(text)] if "," in text else []
    cuts = [
        match
        for i, depth in depths(text)
        if depth == 0
        and (match := _SEPARATOR.match(text, i)) is not None
        and not any(start < i < end for start, end in thousands)
    ]
    if cuts:
        return _listed(text, cuts)
    if _SIGNS.search(text):
        return _items("", "", _with_signs(text))
    if "\\cup" in text or "U" in text:
        parts = _split(text, _UNION)
        if len(parts) > 1:
            return Either(tuple(map(_parse, parts)))
    if (residue := _residue(text)) is not None:
        return residue
    operators, sides = _relation(text)
    if operators:
        return _related(operators, sides)
    bracketed = _bracketed(text)
    if bracketed is not None:
        return bracketed
    return _scalar(text)


def _listed(text: str, cuts: list[re.Match[str]]) -> Value:
    """Return the list that a text is, cut at its separators."""
    parts, start, joints = [], 0, []
    for match in cuts:
        parts.append(text[start : match.start()].strip())
        joints.append(match[0])
        start = match.end()
    parts.append(text[start:].strip())
    parts = [part for i, part in enumerate(parts) if part or not _before_word(parts, joints, i)]
    found = _items("", "", parts)
    alternatives = joints[-1] in ("or", "\\lor", "\\vee")
    if alternatives and all(map(_is_region, found.values)):
        return Either(found.values)
    return found


def _before_word(parts: list[str], joints: list[str], i: int) -> bool:
    """Return whether the empty part i stands between a comma and a word, as in `1, and 2`."""
    return 0 < i < len(joints) and joints[i - 1] in ",;" and joints[i] in ("and", "or")


def _is_region(value: Value) -> bool:
    if isinstance(value, Relation):
        return bool(_INEQUALITIES & set(value.operators))
    return isinstance(value, Items) and value.left in ("(", "[") and len(value.values) == 2


def _items(left: str, right: str, parts: Iterable[str]) -> Items:
    expanded = [form for part in parts for form in _with_signs(part)]
    if not expanded or len(expanded) > MAX_PARTS:
        raise Unparsable("no or too many parts")
    return Items(left, right, tuple(map(_parse, expanded)))


def _with_signs(text: str) -> list[str]:
    r"""Return a text for each choice of the signs of \pm; several choose apart, \mp the other."""
    found = list(_SIGNS.finditer(text))
    if not found:
        return [text]
    together = any("mp" in match[0] for match in found)
    choices = [("+", "-")] if together else [("+", "-")] * len(found)
    if len(choices) > 3:
        raise Unparsable("too many signs")
    forms = []
    for signs in itertools.product(*choices):
        form, end = "", 0
        for i, match in enumerate(found):
            sign = signs[0 if together else i]
            if "mp" in match[0]:
                sign = "-" if sign == "+" else "+"
            form += text[end : match.start()] + sign
            end = match.end()
        form = re.sub(r"(^|[=(\[{,]\s*)\+\s*", r"\1", form + text[end:])
        forms.append(form)
    return forms


def _split(text: str, pattern: re.Pattern[str]) -> list[str]:
    parts, start = [], 0
    for i, depth in depths(text):
        if depth == 0 and i >= start and (match := pattern.match(text, i)):
            parts.append(text[start:i])
            start = match.end()
    return [*parts, text[start:]]


def _relation(text: str) -> tuple[list[str], list[str]]:
    operators, sides, start = [], [], 0
    for i, depth in depths(text):
        if depth == 0 and i >= start and (match := _OPERATOR.match(text, i)):
            operators.append(match[0])
            sides.append(text[start:i].strip())
            start = match.end()
    return operators, [*sides, text[start:].strip()]


def _related(operators: list[str], sides: list[str]) -> Value:
    if operators[0] == r"\approx" and sides[0] and number(sides[0]) is None and len(operators) == 1:
        return _parse(sides[1] if _NAME.fullmatch(sides[0]) and len(sides[0]) < 3 else sides[0])
    if not all(sides):
        if not sides[0] and len(sides) == 2:
            if operators[0] in ("=", r"\approx"):  # "= 5"
                return _parse(sides[1])
            return Word(operators[0] + "".join(sides[1].split()))
        raise Unparsable("an operator without a side")
    if sides[0][0] == "(" and len(sides) == 2 and operators == ["="] and _NAME.fullmatch(sides[0]):
        names, values = re.findall("[a-z]", sides[0]), _parse(sides[1])  # (x, y) = (1, 2)
        if isinstance(values, Items) and len(values.values) == len(names):
            pairs = [Relation(("=",), (_Name(n), v), n) for n, v in zip(names, values.values)]
            return Items("", "", tuple(pairs))
    name = re.sub(r"\s|[{}]", "", sides[0]) if _NAME.fullmatch(sides[0]) else None
    parsed = [_Name(sides[0]) if name else _parse(sides[0]), *map(_parse, sides[1:])]
    return Relation(tuple(operators), tuple(parsed), name)


class _Name(str):
    """A first side, which is parsed when it is computed with."""


def side(value: Any) -> Value:
    """Return a relation's side."""
    return _parse(str(value)) if isinstance(value, _Name) else value


def _residue(text: str) -> Value | None:
    match = _MODULO.search(text)
    if match is None:
        return None
    modulus = number(next(group for group in match.groups() if group).strip())
    before, behind = text[: match.start()].strip(), text[match.end() :].strip(" )}")
    if modulus is None or modulus.value.denominator != 1 or not modulus.value:
        raise Unparsable("a modulus that is no integer")
    before = before.removesuffix("(").strip()
    operators, sides = _relation(before)
    value = _parse(sides[-1])
    if "bmod" in match[0] or "p" not in match[0] and "(" not in match[0]:
        if not isinstance(value, Number) or value.value.denominator != 1:
            raise Unparsable("a remainder of no integer")
        rest = Number(Fraction(int(value.value) % int(modulus.value)))
        if not behind:
            return rest
        if behind[0] == "=":
            return Relation(("=",), (rest, _parse(behind[1:])), None)
        raise Unparsable("text behind a modulus")
    if behind:
        raise Unparsable("text behind a modulus")
    # 23 \equiv 3 \pmod 5 must hold.
    first = number(sides[0])
    if len(sides) > 1 and first is not None and isinstance(value, Number):
        if (first.value - value.value) % modulus.value:
            raise Unparsable("a congruence that does not hold")
    return Residue(value, modulus)


def _bracketed(text: str) -> Value | None:
    left = "{" if text.startswith("\\{") else text[0]
    if left not in "([{":
        return None
    start = 1 if text.startswith("\\{") else 0
    end = closing(text, start)
    if end != len(text) - 1:
        return None
    right = text[-1]
    inner = text[start + 1 : end].removesuffix("\\").strip()
    is_set = text.startswith("\\{")
    if left == "{" and not is_set:
        return _parse(inner)
    if not inner:
        return Items("{", "}", ()) if is_set else None
    if is_set:
        for i, depth in depths(inner):
            if depth == 0 and (bar := _BAR.match(inner, i)):
                return _built(inner[:i].strip(), inner[bar.end() :].strip())
    parts = _split(inner, re.compile("[,;]"))
    if len(parts) == 1 and not is_set:
        if right not in ")]" or _SIGNS.search(inner):
            return None
        operators, _ = _relation(inner)
        if (left, right) == ("(", ")") and (operators or words(inner) or len(inner) == 1):
            return _parse(inner)
        return None
    if _SIGNS.search(inner) and not is_set:
        return _items("", "", [text])
    return _items(left, right, parts)


def _built(element: str, condition: str) -> Value:
    operators, sides = _relation(element)
    if operators == [r"\in"]:  # x \in R
        element = sides[0]
    found = _parse(condition)
    if re.fullmatch(r"[A-Za-z]|\\[a-z]+", element):
        return found
    return Builder(_parse(element), found)


def _scalar(text: str) -> Value:
    try:
        return _of_one(text)
    except Unparsable:
        if "\\text{" not in text or text.count("{") != text.count("}"):
            raise
        return Word(re.sub(r"\s+", " ", text).casefold())  # Words around a formula.


def _of_one(text: str) -> Value:
    if (based := based_number(text)) is not None:
        return based
    if (measured := quantity(text)) is not None:
        value = Word(measured.head) if _CLOCK.fullmatch(measured.head) else _parse(measured.head)
        if measured.factor != 1:
            if not isinstance(value, Number):
                raise Unparsable("a multiple of no number")
            value = value._replace(value=value.value * measured.factor)
        if measured.unit is None or not (measured.unit.powers or measured.unit.noun):
            return value
        return Measured(value, measured.unit, None if measured.is_explicit else text)
    if _CLOCK.fullmatch(text) and text.endswith("00"):
        return Word(text)
    return expression(text)
