"""A response's chain of thought: all of it before the final answer, or the beginning of that."""

from __future__ import annotations

import math
import re

from vapo_megatron.reward.extraction import answer_begins

_SENTENCE_ENDS = re.compile(r"[.!?]\s|\n")


def without_answer(response: str) -> str:
    """Return a response up to the sentence, or line, that gives its final answer.

    Where that is the first one it is cut at the answer's marker. A response without a final answer
    is returned as it is; without white space at its end in any case.
    """
    begin = answer_begins(response)
    if begin is None:
        return response.rstrip()
    ends = [match.end() for match in _SENTENCE_ENDS.finditer(response, 0, begin)]
    before = response[: ends[-1]] if ends else ""
    return (before if before.strip() else response[:begin]).rstrip()


def cut(chain: str, share: float, separator: str) -> str:
    """Return the first steps of a chain: the share of their number, rounded down, at least one.

    Args:
        chain: a text.
        share: in (0, 1]; 1: all of it.
        separator: a regular expression of what ends a step; it stays, but for white space.
    """
    ends = [match.end() for match in re.finditer(separator, chain) if match.end() < len(chain)]
    ends.append(len(chain))
    # Three of five steps are .6, which floating point may hold as a little less.
    return chain[: ends[max(1, math.floor(share * len(ends) + 1e-9)) - 1]].rstrip()
