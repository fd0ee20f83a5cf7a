"""Which of a few choices an answer names: `CORRECT` is not in `INCORRECT`, nor in `not CORRECT`."""

from __future__ import annotations

import re
from collections.abc import Iterable

# What makes a choice part of something longer: INCORRECT, YES/NO, CORRECT-ish, NO's.
_BEFORE = r"(?<![\w+/-])(?<!/ )(?<!\w['\u2019])"
_AFTER = r"(?![\w+/-])(?! /)(?!['\u2019]\w)"
# A number's besides: 0.5, 1,000, 5%, 7 out of 10.
_BEFORE_DIGIT = r"(?<![.\u2212])(?<!\d,)(?<!out of )"
_AFTER_DIGIT = r"(?![.,]\d)(?!\s?%)"
_NEGATED = re.compile(
    r"(?:\b(?:not|never|cannot|neither|nor|without|no longer)|n['\u2019]t)"
    r"(?:[ \t*_`\"'(\[\u201c\u2018]+[A-Za-z]+){0,2}[ \t*_`\"'(\[\u201c\u2018]+$",
    re.IGNORECASE,
)
# "YES is not", "YES isn't", and the question "YES?".
_DENIED = re.compile(
    r"[*_`\"'\u201d\u2019)\]]*(?:\?|\s+(?:\w{2,6}n['\u2019]t|(?:\w{2,6} ){0,2}not)\b)",
    re.IGNORECASE,
)
_NEGATION_CHARACTERS = 80
_THOUGHT, _THOUGHT_END = "<think>", "</think>"


def named_choice(text: str, choices: Iterable[str], *, may_think: bool) -> str:
    """Return the choice that an answer names.

    Choices count as whole words, in their own case; the longest where one is part of another. A
    model that may think names several: the last one counts, of what follows its `</think>`.

    Args:
        text: the answer.
        choices: not empty.
        may_think: False: all that the answer names must be the same choice.

    Raises:
        ValueError: it names none, several, or one that is negated; the message says so.
    """
    choices = sorted(choices, key=len, reverse=True)
    _, _, said = text.rpartition(_THOUGHT_END) if may_think else ("", "", text)
    if said.strip() in choices:
        return said.strip()
    if may_think and _THOUGHT in said:
        raise ValueError("it answered a thought alone")
    mentions = list(_pattern(choices).finditer(said))
    counted = mentions[-1:] if may_think else mentions
    named = {mention[0] for mention in counted}
    if len(named) != 1:
        several = f"{len(named)} of the choices: " if named else ""
        raise ValueError(f"it answered {several}{_quoted(said)}")
    for mention in counted:
        before = said[max(0, mention.start() - _NEGATION_CHARACTERS) : mention.start()]
        if _NEGATED.search(before) or _DENIED.match(said, mention.end()):
            raise ValueError(f"it answered a negated choice: {_quoted(said)}")
    return named.pop()


def _pattern(choices: Iterable[str]) -> re.Pattern[str]:
    """Match any of the choices, the longest first, as a whole word."""
    return re.compile(
        "|".join(
            _BEFORE + (_BEFORE_DIGIT if choice[0].isdigit() else "") + re.escape(choice)
            + (_AFTER_DIGIT if choice[-1].isdigit() else "") + _AFTER
            for choice in choices
        )
    )  # fmt: skip


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 80 else f"... {text[-76:]}")
