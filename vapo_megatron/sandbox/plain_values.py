"""Values of Python's own types as JSON, between a program and those who judge it.

What arrives has no behaviour of its own: no `__eq__` of a program's class comes through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

MAX_INTEGER_DIGITS = 100_000
"""For sys.set_int_max_str_digits: reading more takes minutes."""
MAX_EQUAL_HASHES = 64
"""In a set, or a dict's keys: their time grows with its square, and numbers with equal hashes are
easily made (multiples of 2**61 - 1)."""


def encode(value: Any) -> Any:
    """Return what json.dumps takes; subclasses become the type itself, arrays become lists.

    Raises:
        TypeError: the value, or one in it, is of another type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    for name, kind in (("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if isinstance(value, kind):
            return {name: [encode(item) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {type(value).__name__: value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, Iterator):
        return {"iterator": [encode(item) for item in value]}
    if hasattr(value, "tolist"):
        return encode(value.tolist())
    raise TypeError(f"{type(value).__name__} is no plain value")


def decode(value: Any) -> Any:
    """Return the value that was encoded.

    Raises:
        ValueError, TypeError: nothing is encoded so.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError("not an encoded value")
    ((name, content),) = value.items()
    if name in _FROM_TEXT:
        return _FROM_TEXT[name](content)
    if name in _FROM_ITEMS and isinstance(content, list):
        return _FROM_ITEMS[name]([decode(item) for item in content])
    raise ValueError("not an encoded value")


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


_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "bytes": bytes.fromhex, "bytearray": bytearray.fromhex,
}  # fmt: skip
_FROM_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "dict": _dict, "tuple": tuple, "set": _set, "frozenset": _frozenset, "iterator": iter,
    "complex": lambda parts: complex(*parts), "range": lambda parts: range(*parts),
}  # fmt: skip
