"""Ground truths as texts: of any column's values, and out of texts of lists and dicts.

Imports no torch, as the processes that judge do not.
"""

from __future__ import annotations

import ast
import decimal
import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from vapo_megatron.data.chat import encodable
from vapo_megatron.errors import DataError

KEYS = ("answer", "final_answer", "ground_truth", "target", "gold", "solution", "value", "label")
"""Of a dict whose one entry with such a key is the ground truth."""

_PACKED = re.compile(r"""[\[{(]|b?["']|array\(""")
# No notation of mathematics begins with a bracket and a quote, or a value that Python cannot read.
_SURELY_PACKED = re.compile(
    r"""(?:array\()?[\[{(]\s*[\[{(]*\s*(?:["']|(?:np\.\w+|Decimal|array)\()"""
)
_ARRAY = re.compile(r"array\((?P<items>.*?)(?:,\s*dtype=.*)?\)", re.DOTALL)
_LONGEST = 10_000
"""In characters; longer texts are no short answers, such as a program's tests."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def answer_text(value: Any, column: str, where: str) -> str:
    """Return a column's value as a text; empty where the row has no ground truth.

    Numbers have no exponent and whole ones no point, as in a column of integers that became one of
    floats beside a missing value. Lists and dicts become JSON, which verifiers unpack; see members.

    Args:
        value: of JSON or of a parquet column; numbers with the digits of the column's own type.
        column, where: named in errors.

    Raises:
        DataError: the value has no such text.
    """
    try:
        text = _text(value)
    except ValueError as error:
        raise DataError(
            f"{where}: {column}={excerpt(value)} {error}; correct or remove the row"
        ) from None
    return encodable(text, column, where)


def excerpt(value: Any) -> str:
    """Return a value for a message, cut after 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _text(value: Any) -> str:
    if value is None or isinstance(value, float | decimal.Decimal) and math.isnan(value):
        return ""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and value.is_integer():
        return str(_whole(value))
    if isinstance(value, float | decimal.Decimal) and math.isfinite(value):
        # No exponent: 1e-07 would parse as 1*e - 7.
        return f"{value if isinstance(value, decimal.Decimal) else decimal.Decimal(repr(value)):f}"
    if isinstance(value, list | tuple | dict | bytes):
        plain = _plain(value)
        if isinstance(plain, str):
            return plain.strip()
        if isinstance(plain, list) and len(plain) == 2 and all(map(_is_number, plain)):
            raise ValueError(
                "is a list of two numbers, which could be an interval or two answers: it must be "
                "a text such as '3, 5' (two answers) or '[3, 5]' (an interval, or JSON)"
            )
        return json.dumps(plain, ensure_ascii=False) if plain else ""
    found = f"must be a finite number or a text, found a {type(value).__name__}"
    if isinstance(value, bool):
        found += "; write the word that a response should give"
    raise ValueError(found)


def _whole(value: float) -> int:
    """Return a whole float by its shortest digits: 1e23 is stored as 99999999999999991611392."""
    return int(decimal.Decimal(repr(value)))


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise ValueError("must be a text, found bytes that are not UTF-8") from None
    if isinstance(value, decimal.Decimal):
        value = float(value)
    if isinstance(value, float):
        return (_whole(value) if value.is_integer() else value) if math.isfinite(value) else None
    if isinstance(value, dict):
        # A parquet struct has every row's keys.
        return {str(k): _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int):
        return value
    raise ValueError(f"holds a {type(value).__name__}, which JSON has not")


def members(text: str) -> list[str]:
    r"""Return the ground truths that a text holds: itself, or what it lists.

    Data sets store lists and dicts as the text of JSON or of Python: `["3", "5"]`, `['\\pi']`,
    `{"answer": 42}`, also within one another. Several unquoted numbers are notation of mathematics
    and stay: `[3, 5]`, `{1, 2}`.

    Raises:
        ValueError: what is wrong, to be read after "has the answer ..., which".
    """
    if len(text) > _LONGEST or not _PACKED.match(text):
        return [text]
    found = _literal(text)
    if isinstance(found, list) and _ARRAY.fullmatch(text) and not _has_lists(found):
        found = list(map(str, found))
    if found is None:
        if _SURELY_PACKED.match(text):
            raise ValueError("looks like a list or a dict, but is neither JSON nor Python")
        return [text]
    return _members(found, text)


def _members(value: Any, text: str) -> list[str]:
    """Return the members of a value; text: it, as the data have it."""
    if isinstance(value, bytes):
        value = _plain(value)
    if isinstance(value, str):
        if _CONTROL.search(value.rstrip("\n")):
            raise ValueError(
                "has control characters in a list or a dict, such as where a backslash was written "
                "once in JSON"
            )
        return members(value.strip())
    if isinstance(value, Mapping):
        named = [v for k, v in value.items() if k in KEYS and v is not None]
        if len(named) != 1:
            raise ValueError(
                f"is a dict with the keys {', '.join(map(str, value)) or 'none'}: exactly one of "
                f"{', '.join(KEYS)} must have the ground truth"
            )
        return _members(named[0], _text(named[0]))
    if not isinstance(value, Sequence | set):
        return [_text(value)]
    if len(value) == 1 and not isinstance(value, set):
        return _members(value[0], _text(value[0]))
    if not _has_texts(value):
        return [text]
    found = [_item(item) for item in (sorted(value, key=str) if isinstance(value, set) else value)]
    if not all(found):
        raise ValueError("lists an empty text")
    return found


def _item(value: Any) -> str:
    """Return the one member of an item among several."""
    if isinstance(value, str | bytes | int | float) and len(found := _members(value, "")) == 1:
        return found[0]
    raise ValueError(f"lists {excerpt(value)}, which is not one answer")


def _literal(text: str) -> Any:
    """Return a value of JSON or Python, or None."""
    array = _ARRAY.fullmatch(text)
    for read in (json.loads, ast.literal_eval):
        try:
            with warnings.catch_warnings():  # Python warns of "\p".
                warnings.simplefilter("ignore")
                value = read(array["items"] if array else text)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            continue
        is_packed = isinstance(value, str | bytes | list | tuple | set | dict)
        return value if is_packed else None
    return None


def _has_texts(value: Any) -> bool:
    if isinstance(value, list | tuple | set):
        return any(map(_has_texts, value))
    return value is None or isinstance(value, str | bytes | bool | Mapping)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _has_lists(value: Any) -> bool:
    return any(isinstance(item, list | tuple) for item in value)
