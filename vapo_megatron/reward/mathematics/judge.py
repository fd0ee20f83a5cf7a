"""Runs the comparison of mathematics, in a worker process: final answers against ground truths.

text.py writes a formula in one way, parser.py takes it apart (expressions by math-verify's
parser), equality.py compares. Imports neither torch nor anything else of the package.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable
from typing import Any

from vapo_megatron.reward.mathematics.equality import equal
from vapo_megatron.reward.mathematics.parser import Value, parse
from vapo_megatron.reward.mathematics.text import plain

_TEXT = re.compile(r"\\text\{([^{}]*)\}")
# Behind a clock's time alone: 3pm is a product elsewhere, whose letters have a case.
_HALF_OF_DAY = re.compile(r"(?<=:\d\d)\s*([apAP])\.?\s?[mM]\b\.?")


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
    expected = _parsed(gold)
    if expected is None:
        return "bad_gold"
    if answer is None:
        return "correct"
    found = _parsed(answer)
    if plain(gold) != plain(answer) and _as_text(gold) == _as_text(answer):
        return "correct"
    if found is None:
        return "unparsable"
    try:
        return "correct" if equal(expected, found) else "wrong"
    except MemoryError:
        raise
    except Exception:  # Whatever sympy raises of what it cannot compute with.
        return "wrong"


def _as_text(text: str) -> str:
    r"""Return a formula's characters: dates and times, with \text{} or without."""
    text = " ".join(_TEXT.sub(r"\1", plain(text)).split())
    return _HALF_OF_DAY.sub(lambda match: f"{match[1].lower()}m", text)


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> Value | None:
    try:
        return parse(text)
    except (MemoryError, ImportError):
        raise
    except Exception:  # Unparsable, or whatever a parser makes of what no one writes.
        return None
