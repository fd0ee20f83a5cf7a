"""The worker process: runs math-verify, and imports neither torch nor anything else of the package.

Run as a script by `pool.py`, with a time limit in seconds and a memory limit in bytes. Messages are
a 4-byte length and a JSON object, on stdin and stdout. It sends {"status": "ready"} once, then
answers each {"gold": ..., "answer": ...} with {"status": ...}: "correct", "wrong", "unparsable",
"bad_gold" or "out_of_memory" (then it exits). If the answer is null, only the ground truth is
parsed: "correct" or "bad_gold".

Its parent kills it when an answer takes too long; if the parent is gone, its own timer does so a
little later.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

HEADER = struct.Struct(">I")
# math-verify treats everything from the first \text to a closing brace at the end as a unit.
_DROPPED_AS_UNIT = re.compile(r"\\(?:text|mbox)\{.*\}(?:\^\d)?$", re.DOTALL)
_UNIT = re.compile(r"(?:\\(?:text|mbox)\{[^{}]*\}|\^\{?-?\d\}?|\\cdot|\\[,;:!]|[\s~/.*])*")


def main() -> None:
    """Judge until stdin ends."""
    timeout_seconds, memory_limit_bytes = float(sys.argv[1]), int(sys.argv[2])
    # A job's signals reach every process; this one ends when its parent closes the pipe.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    # What libraries print must not mix with the messages on stdout.
    with os.fdopen(os.dup(1), "wb") as output, os.fdopen(os.dup(0), "rb") as requests:
        os.dup2(2, 1)
        # Warm up: imports everything, and fills the parser's tables.
        judge(r"\sqrt{x + 1}", r"\frac{x}{2}")
        _silence()
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
        send(output, {"status": "ready"})
        while True:
            request = receive(requests)
            if request is None:
                return
            signal.setitimer(signal.ITIMER_REAL, 2 * timeout_seconds + 1)
            try:
                status = judge(request["gold"], request["answer"])
            except MemoryError:
                send(output, {"status": "out_of_memory"})
                return
            signal.setitimer(signal.ITIMER_REAL, 0)
            send(output, {"status": status})


def _silence() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)


def send(stream: BinaryIO, message: dict[str, Any]) -> None:
    """Write one message."""
    data = json.dumps(message).encode()
    stream.write(HEADER.pack(len(data)) + data)
    stream.flush()


def receive(stream: BinaryIO) -> dict[str, Any] | None:
    """Read one message; None at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return json.loads(stream.read(HEADER.unpack(header)[0]))


def judge(gold: str, answer: str | None) -> str:
    """Return the status of a final answer against the ground truth, both without markers."""
    expected = _parse_gold(gold)
    if expected is None:
        return "bad_gold"
    if answer is None:
        return "correct"
    found = _parse(answer, whole=True)
    if found is None:
        return "unparsable"
    return "correct" if _equal(expected, found) else "wrong"


def _equal(expected: Any, found: Any) -> bool:
    """Return math-verify's verdict, but raise MemoryError, which it would count as a difference.

    Its `except Exception` is narrowed to all loaded subclasses but MemoryError. If an error escapes
    that (a bare Exception, or a class loaded later), it is asked again unpatched.
    """
    from math_verify import grader

    ordinary = tuple(error for error in Exception.__subclasses__() if error is not MemoryError)
    for caught in (ordinary, Exception):
        grader.Exception = caught  # type: ignore[attr-defined]
        try:
            # Its own time limits use signals and whole seconds; here the pool kills the process.
            return grader.verify(expected, found, timeout_seconds=None, raise_on_error=True)
        except MemoryError:
            raise
        except Exception:
            continue
    return False


@functools.lru_cache(maxsize=4096)
def _parse_gold(gold: str) -> Any:
    return _parse(gold, whole=False)


def _parse(text: str, whole: bool) -> Any:
    """Return the text's expression; None: it cannot be parsed.

    Follows math-verify's steps for one formula. Its search for formulas in a text is left out: it
    accepts a part where the whole cannot be parsed, such as one member of a list.

    Args:
        text: one formula without delimiters.
        whole: refuse a text from which math-verify would drop more than a unit.
    """
    from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
    from math_verify.parser import parse_latex_cached
    from sympy import Basic, MatrixBase

    rest = NormalizationConfig(False, units=True, malformed_operators=True, nits=True, boxed="none")
    try:
        text = normalize_latex(text, NormalizationConfig(boxed="none"))
        dropped = _DROPPED_AS_UNIT.search(text)
        if whole and dropped and dropped.start() and not _UNIT.fullmatch(dropped[0]):
            return None
        expression = parse_latex_cached(normalize_latex(text, rest))
    except MemoryError:
        raise
    except Exception:
        return None
    return expression if isinstance(expression, (Basic, MatrixBase)) else None


if __name__ == "__main__":
    main()
