"""Tools as users write them, and what they must not write, for the tests beside this."""

import datetime
import json
import os
import sys
import time
from typing import Literal

import numpy

MB = 10**6
_kept = []


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The one.
        b: The other.
    """
    return a + b


def keep(x: str) -> int:
    """Keep a text, and say how many are kept.

    Args:
        x: The text.
    """
    _kept.append(x)
    return len(_kept)


def shaped(unit: Literal["C", "F"], where: dict[str, list[float]], when: str | None = None) -> str:
    """Show the arguments.

    Args:
        unit: Of two.
        where: Places.
        when: A time.
    """
    return json.dumps([unit, where, when])


class BadText:
    """Cannot be shown."""

    def __str__(self):
        raise RuntimeError("no text")


def do(what: str) -> object:
    """Do it.

    Args:
        what: Its name.
    """
    return RESULTS[what] if what in RESULTS else _DEEDS[what]()


RESULTS = {
    "text": "plain <tool_call>",
    "none": None,
    "true": True,
    "float": 0.5,
    "dict": {"a": [1, None, "é"], "t": datetime.date(2026, 1, 2)},
    "tuple": (1, 2),
    "bytes": b"caf\xc3\xa9 \xff",
    "object": datetime.date(2026, 1, 2),
    "numpy": numpy.float64(0.25),
    "array": {"x": numpy.arange(3), "y": numpy.int64(7)},
    "half": "\ud800",
    "long": "x" * 50 * MB,
}


def _raise():
    raise RuntimeError("no\nsuch " + "thing " * 1000)


def _raise_badly():
    raise RuntimeError(BadText())


def _print():
    for _ in range(100):
        print("x" * MB, flush=True)
    return "printed"


def _recursive():
    found = []
    found.append(found)
    return found


def _interrupt():
    raise KeyboardInterrupt


_DEEDS = {
    "raise": _raise,
    "raise_badly": _raise_badly,
    "exit": lambda: sys.exit(3),
    "interrupt": _interrupt,
    "print": _print,
    "recursive": _recursive,
    "bad_text": BadText,
    "hang": lambda: time.sleep(600),
    "vanish": lambda: os._exit(0),
    "fill": lambda: [bytearray(50 * MB) for _ in range(10**6)],
}


def xml(action):
    """A parser of calls of one's own: <do>what</do>."""
    from vapo_megatron.environments.tool_calls import Call

    for part in action.split("<do>")[1:]:
        yield Call("do", {"what": part.partition("</do>")[0]})


def no_docstring(a: int) -> int:
    return a


def no_hint(a) -> int:
    """Do it.

    Args:
        a: The one.
    """
    return a


def no_description(a: int, b: int) -> int:
    """Add.

    Args:
        a: The one.
    """
    return a + b


def odd_hint(a: datetime.date | set[int]) -> int:
    """Do it.

    Args:
        a: The one.
    """
    return 0


def unknown_hint(a: "NoSuchType") -> int:  # noqa: F821
    """Do it.

    Args:
        a: The one.
    """
    return 0


def any_number(*a: int) -> int:
    """Add them.

    Args:
        a: The ones.
    """
    return sum(a)


async def later(a: int) -> int:
    """Do it.

    Args:
        a: The one.
    """
    return a


not_a_function = 5
