"""Values of built-in types as JSON, between a program and the process that judges it.

No behaviour crosses: not a program's own `__eq__`, for example. Objects of
classes that both sides have, such as LeetCode's ListNode, cross as their attributes.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any

MAX_INTEGER_DIGITS = 100_000
"""For sys.set_int_max_str_digits: reading more takes minutes."""
MAX_EQUAL_HASHES = 64
"""In a set, or a dict's keys: their time grows with its square, and numbers with equal hashes are
easily made (multiples of 2**61 - 1)."""


def encode(value: Any, classes: Collection[str] = ()) -> Any:
    """Return what json.dumps takes; subclasses become the type itself, arrays become lists.

    Args:
        value: of Python's own types.
        classes: names of those whose objects cross too.

    Raises:
        TypeError: the value, or one in it, is of another type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item, classes) for item in value]
    if isinstance(value, dict):
        pairs = value.items()
        return {"dict": [[encode(key, classes), encode(item, classes)] for key, item in pairs]}
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [encode(item, classes) for item in value]}
    for name, (kind, parts, _) in _IN_PARTS.items():
        if isinstance(value, kind):
            return {name: parts(value)}
    if isinstance(value, bytes | bytearray):
        return {type(value).__name__: value.hex()}
    if type(value).__name__ in classes:
        return {"objects": _fields(value, classes)}
    if hasattr(value, "tolist"):
        return encode(value.tolist(), classes)
    raise TypeError(f"{type(value).__name__} is no plain value")


def _fields(first: Any, classes: Collection[str]) -> list[list[Any]]:
    """Return (class, attributes) of an object and those that it leads to: lists may be long."""
    objects, places = [first], {id(first): 0}
    found: list[list[Any]] = []
    for each in objects:
        fields: dict[str, Any] = {}
        for name, value in vars(each).items():
            if type(value).__name__ in classes:
                if id(value) not in places:
                    places[id(value)] = len(objects)
                    objects.append(value)
                fields[name] = {"object": places[id(value)]}
            else:
                fields[name] = encode(value, classes)
        found.append([type(each).__name__, fields])
    return found


def decode(value: Any, classes: Mapping[str, type] | None = None) -> Any:
    """Return the value that was encoded.

    Args:
        value: as from json.loads.
        classes: by name, those whose objects may be in it.

    Raises:
        ValueError, TypeError: nothing is encoded so.
    """
    if isinstance(value, list):
        return [decode(item, classes) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError("not an encoded value")
    ((name, content),) = value.items()
    if name in _FROM_TEXT:
        return _FROM_TEXT[name](content)
    if name == "objects":
        return _objects(content, classes or {})
    if isinstance(content, list):
        if name in _IN_PARTS:
            return _of_parts(name, content)
        if name in _FROM_ITEMS:
            return _FROM_ITEMS[name]([decode(item, classes) for item in content])
    raise ValueError("not an encoded value")


def _objects(content: list[Any], classes: Mapping[str, type]) -> Any:
    try:
        objects: list[Any] = [object.__new__(classes[name]) for name, _ in content]
        for each, (_, fields) in zip(objects, content):
            for name, value in fields.items():
                is_object = isinstance(value, dict) and value.keys() == {"object"}
                vars(each)[name] = objects[value["object"]] if is_object else decode(value, classes)
        return objects[0]
    except (LookupError, AttributeError) as error:
        raise ValueError(f"not an encoded object: {error}") from None


def _of_parts(name: str, parts: list[Any]) -> Any:
    try:
        return _IN_PARTS[name][2](*parts)
    except ArithmeticError as error:
        raise ValueError(f"no {name}: {error}") from None


def _fraction(numerator: int, denominator: int) -> fractions.Fraction:
    # Of a text alone, Fraction("1e999999999") would be computed.
    return fractions.Fraction(numerator, denominator)


def _decimal(text: str) -> decimal.Decimal:
    number = decimal.Decimal(text)
    if number.is_snan():
        raise ValueError("comparing it would raise")
    return number


def _set(items: list[Hashable]) -> set[Hashable]:
    _check_hashes(items)
    return set(items)


def _frozenset(items: list[Hashable]) -> frozenset[Hashable]:
    _check_hashes(items)
    return frozenset(items)


def _dict(pairs: list[list[Any]]) -> dict[Hashable, Any]:
    _check_hashes(key for key, _ in pairs)
    return dict(pairs)


def _check_hashes(items: Iterable[Hashable]) -> None:
    counts = Counter(map(hash, items))
    if max(counts.values(), default=0) > MAX_EQUAL_HASHES:
        raise ValueError(f"more than {MAX_EQUAL_HASHES} equal hashes")


_SEQUENCES: dict[str, Any] = {
    "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque, "iterator": Iterator,
}  # fmt: skip
_FROM_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "dict": _dict, "tuple": tuple, "set": _set, "frozenset": _frozenset, "deque": deque,
    "iterator": iter,
}  # fmt: skip
_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "bytes": bytes.fromhex, "bytearray": bytearray.fromhex,
}  # fmt: skip
_IN_PARTS: dict[str, tuple[type, Callable[[Any], list[Any]], Callable[..., Any]]] = {
    "complex": (complex, lambda v: [v.real, v.imag], complex),
    "range": (range, lambda v: [v.start, v.stop, v.step], range),
    "decimal": (decimal.Decimal, lambda v: [str(v)], _decimal),
    "fraction": (fractions.Fraction, lambda v: [v.numerator, v.denominator], _fraction),
    "datetime": (datetime.datetime, lambda v: [v.isoformat()], datetime.datetime.fromisoformat),
    "date": (datetime.date, lambda v: [v.isoformat()], datetime.date.fromisoformat),
    "time": (datetime.time, lambda v: [v.isoformat()], datetime.time.fromisoformat),
    "timedelta": (
        datetime.timedelta,
        lambda v: [v.days, v.seconds, v.microseconds],
        datetime.timedelta,
    ),
}
"""Name -> (type, its parts, what is made of them)."""
