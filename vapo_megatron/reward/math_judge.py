"""Runs math-verify, in a worker process: final answers against ground truths.

Imports neither torch nor anything else of the package.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable
from typing import Any

# math-verify treats everything from the first \text to a closing brace at the end as a unit.
_DROPPED_AS_UNIT = re.compile(r"\\(?:text|mbox)\{.*\}(?:\^\d)?$", re.DOTALL)
_UNIT = re.compile(r"(?:\\(?:text|mbox)\{[^{}]*\}|\^\{?-?\d\}?|\\cdot|\\[,;:!]|[\s~/.*])*")


def make_handler() -> tuple[Callable[[dict[str, Any]], dict[str, Any]], dict[str, Any]]:
    """Return what answers {"gold": ..., "answer": ...} with {"status": ...}.

    The status is "correct", "wrong", "unparsable" or "bad_gold". If the answer is null, only the
    ground truth is parsed: "correct" or "bad_gold".
    """
    logging.disable(logging.CRITICAL)
    # Warm up: imports everything, and fills the parser's tables.
    judge(r"\sqrt{x + 1}", r"\frac{x}{2}")
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # The parser prints what it cannot read.
        os.dup2(null, descriptor)
    os.close(null)
    return lambda request: {"status": judge(request["gold"], request["answer"])}, {}


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
