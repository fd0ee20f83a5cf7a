"""Compares what a program printed or returned with what was expected."""

from __future__ import annotations

import decimal
import itertools
import math
from collections.abc import Mapping
from typing import Any

MAX_NUMBER_CHARACTERS = 400
"""Longer words are compared as text alone."""


def same_text(found: str, expected: str, tolerance: float) -> bool:
    """Return whether two outputs have the same words in the same lines; empty lines do not count.

    Args:
        found: the program's.
        expected: the problem's.
        tolerance: relative and absolute, for words that are numbers with a fraction.
    """
    lines, wanted = ([line.split() for line in t.splitlines()] for t in (found, expected))
    lines, wanted = [line for line in lines if line], [line for line in wanted if line]
    if lines == wanted:
        return True
    if list(map(len, lines)) != list(map(len, wanted)):
        return False
    words, wanted_words = itertools.chain(*lines), itertools.chain(*wanted)
    return all(a == b or _same_number(a, b, tolerance) for a, b in zip(words, wanted_words))


def same_value(found: Any, expected: Any, tolerance: float) -> bool:
    """Return whether a function returned what JSON has of the expected value.

    Tuples are lists there, and a dict's keys are texts.
    """
    if isinstance(expected, list):
        return (
            isinstance(found, list | tuple)
            and len(found) == len(expected)
            and all(same_value(a, b, tolerance) for a, b in zip(found, expected))
        )
    if isinstance(expected, Mapping):
        if not isinstance(found, dict) or len(found) != len(expected):
            return False
        named = {key if isinstance(key, str) else str(key): item for key, item in found.items()}
        return named.keys() == expected.keys() and all(
            same_value(named[key], expected[key], tolerance) for key in expected
        )
    if isinstance(expected, float) and isinstance(found, int | float):
        return found == expected or _is_close(found, expected, tolerance)
    return found == expected


def _same_number(found: str, expected: str, tolerance: float) -> bool:
    if max(len(found), len(expected)) > MAX_NUMBER_CHARACTERS:
        return False
    try:
        number, wanted = decimal.Decimal(found), decimal.Decimal(expected)
        if number == wanted:
            return True
        if wanted == wanted.to_integral_value() and "." not in expected:
            return False
        return _is_close(number, wanted, tolerance)
    except (decimal.InvalidOperation, ValueError):
        return False


def _is_close(found: Any, expected: Any, tolerance: float) -> bool:
    try:
        return math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # Too large for a float.
        return False
