"""Puts one wrong number into a chain of thought, and what follows from it.

    She sold 48/2 = 24 in May. Together 48+24 = 72.     ->  ... 48/2 = 23 in May. ... 48+23 = 71.

A step is an expression of numbers, an equals sign and its value. Only a step whose value occurs
nowhere before it is given a wrong one, so that every later mention of that number means the step's
value: these are replaced, and later steps that use them are computed anew.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

_NUMBER = re.compile(
    r"(?<![\w.])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\w])|(?<![\w.])\.\d+(?!\w)"
)
_OPERAND = r"\(*\s*\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)\s*\)*"
_EXPRESSION = re.compile(
    rf"(?<![\w.)%])(?P<left>{_OPERAND}(?:\s*[-+*/\u00d7\u00f7\u2212]\s*{_OPERAND})+)\s*=\s*\$?(?=[\d.])"
)
_OPERATORS = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-", "$": None, ",": None})
_CHANGES = (-2, -1, 1, 2)
"""By how much a number may be wrong, in units of its last digit."""
_MOST_DECIMALS = 2
"""Of a quotient that a chain's whole numbers did not have."""


class Corrupted(NamedTuple):
    """A chain with an error."""

    chain: str
    answer: str
    """The value of its last step."""


class _Number(NamedTuple):
    begin: int
    end: int
    text: str

    @property
    def value(self) -> Fraction:
        return to_fraction(self.text)

    @property
    def decimals(self) -> int:
        return len(self.text.partition(".")[2])


class _Step(NamedTuple):
    """An expression whose value a chain gives."""

    begin: int
    end: int
    """Of the expression, in characters."""
    result: int
    """Index of its value among the chain's numbers."""


def to_fraction(text: str) -> Fraction:
    """Return a number's value. ValueError: it is none."""
    return Fraction(text.replace(",", "").strip().removeprefix("$"))


def corruptions(chain: str, prompt: str, rng: random.Random) -> Iterator[Corrupted]:
    """Yield the chain with one wrong step, for each step and error that there may be, in any order.

    Args:
        chain: without its final answer.
        prompt: whose numbers are given.
        rng: decides the order.
    """
    numbers = [_Number(*match.span(), match[0]) for match in _NUMBER.finditer(chain)]
    steps = _steps(chain, numbers)
    known = {to_fraction(match[0]) for match in _NUMBER.finditer(prompt)}
    places = []
    for index, number in enumerate(numbers):
        if index in steps and number.value not in known:
            places += [(index, change) for change in _CHANGES]
        known.add(number.value)
    rng.shuffle(places)
    for index, change in places:
        number = numbers[index]
        wrong = number.value + Fraction(change, 10**number.decimals)
        # A count does not become zero or negative; a number that was stays what it is.
        if wrong > 0 and wrong not in (n.value for n in numbers[:index]):
            texts = _replaced(chain, numbers, steps, index, _written(wrong, number))
            yield Corrupted(_joined(chain, numbers, texts), texts[max(steps)])


def last_value(chain: str) -> Fraction | None:
    """Return the value of a chain's last step; None: it has no step."""
    numbers = [_Number(*match.span(), match[0]) for match in _NUMBER.finditer(chain)]
    steps = _steps(chain, numbers)
    return numbers[max(steps)].value if steps else None


def _steps(chain: str, numbers: Sequence[_Number]) -> dict[int, _Step]:
    """Return the chain's steps by the index of their value; what is not so computed is none."""
    at = {number.begin: index for index, number in enumerate(numbers)}
    found, position = {}, 0
    while match := _EXPRESSION.search(chain, position):
        # The value may be the first number of the next expression: 2 * 3 = 6 + 1 = 7.
        position = match.end()
        result = at.get(position)
        value = _value(match["left"])
        if result is not None and value is not None and _agrees(value, numbers[result]):
            found[result] = _Step(*match.span("left"), result)
    return found


def _replaced(
    chain: str, numbers: Sequence[_Number], steps: dict[int, _Step], index: int, wrong: str
) -> list[str]:
    """Return the texts of all numbers after the one at `index` has become wrong."""
    texts = [number.text for number in numbers]
    texts[index] = wrong
    changed = {numbers[index].value: wrong}
    for later in range(index + 1, len(numbers)):
        number = numbers[later]
        if later not in steps:
            texts[later] = changed.get(number.value, number.text)
            continue
        value = _value(_joined(chain, numbers, texts, steps[later].begin, steps[later].end))
        if value is None or _agrees(value, number):
            # From here on the number is this step's value; a division by zero stays as it is.
            changed.pop(number.value, None)
        else:
            texts[later] = changed[number.value] = _written(value, number)
    return texts


def _joined(
    chain: str, numbers: Sequence[_Number], texts: Sequence[str], begin: int = 0,
    end: int | None = None,
) -> str:  # fmt: skip
    """Return a part of the chain with these texts for its numbers."""
    parts, end = [], len(chain) if end is None else end
    for number, text in zip(numbers, texts, strict=True):
        if begin <= number.begin and number.end <= end:
            parts += [chain[begin : number.begin], text]
            begin = number.end
    return "".join([*parts, chain[begin:end]])


def _value(expression: str) -> Fraction | None:
    """Return an expression's value; None: it has none."""
    try:
        return _of_node(ast.parse(expression.translate(_OPERATORS).strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _of_node(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_of_node(node.operand)
    if isinstance(node, ast.BinOp):
        left, right = _of_node(node.left), _of_node(node.right)
        match node.op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Div():
                return left / right
    raise ValueError("no arithmetic")


def _agrees(value: Fraction, number: _Number) -> bool:
    """Return whether a chain gives this value, perhaps rounded to the number's decimals."""
    return abs(value - number.value) * 10**number.decimals * 2 <= (1 if number.decimals else 0)


def _written(value: Fraction, like: _Number) -> str:
    """Return a number as text, with decimals and commas as another has them."""
    decimals = like.decimals
    if not decimals and value.denominator != 1:
        decimals = _MOST_DECIMALS
    scaled = round(value * 10**decimals)
    whole, rest = divmod(abs(scaled), 10**decimals)
    text = f"{whole:,}" if "," in like.text else str(whole)
    if decimals:
        digits = f"{rest:0{decimals}}"
        text += f".{digits if like.decimals else digits.rstrip('0') or '0'}"
    return f"-{text}" if scaled < 0 else text
