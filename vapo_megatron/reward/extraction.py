r"""Extracts the final answer from a response, in time linear in its length for any input.

Only the last of `\boxed{X}`, `Answer: X` and `#### X` counts. A marker followed by nothing, and a
box that is never closed, do not count as answers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator

from vapo_megatron.data.ground_truths import members

MAX_ANSWER_CHARACTERS = 1000
"""Longer final answers are not judged: no ground truth needs them, and parsing takes minutes."""

MAX_EMPTY_MARKERS = 64
"""A response that ends in more markers without an answer is not searched further."""

# Each marker contains one of these, so that str.rfind can search a long text quickly.
_HEADS = ("\\boxed", "\\fbox", "####", "nswer", "NSWER")
_MARKER = re.compile(
    r"\\(?:boxed|fbox)\s{0,4}(?P<box>\{)"
    r"|(?i:answer)[*_]{0,3}\s{0,4}[:\uff1a]"
    r"|(?<!#)####(?!#)"
)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_LEADING = re.compile(r"[\s*_`]*")
_NEXT_SENTENCE = re.compile(r"\.\s+(?=[A-Z])")
_DISPLAY = {"$$": "$$", "\\[": "\\]"}
_MATH = re.compile(r"(?<!\\)\$\$?([^$]+)(?<!\\)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_MATH_DELIMITER = re.compile(r"(?<!\\)\$|\\[()\[\]]")
_WORDS_ONLY = re.compile(r"[A-Za-z\s,.:'*-]*")
_INTRODUCTION = re.compile(
    r"(?i:(?:(?:so|thus|therefore|hence),? )?(?:(?:the|my) )?(?:(?:final|correct) )?"
    r"(?:answer|result|value|solution) (?:is|equals)):? "
)
_QUANTITY = re.compile(r"(-?(?:[0-9]|\.[0-9])[0-9,.]*) ((?:[A-Za-z]{3,})(?:[ -][A-Za-z]+){0,5})")
_SCIENTIFIC = re.compile(r"([+-]?[0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]{1,3})")
# Next to a number or formula, these words are not its unit.
_NO_UNIT = re.compile(
    r"\b(?:and|or|not|nor|than|plus|minus|times|over|mod|choose|factorial|squared|cubed|half|dozen"
    r"|(?:hundred|thousand|million|billion|trillion|four|fif|six|seven|eigh|nin|ten)(?:th)?|third"
    r"|raised|divided|multiplied|percent|percentage|pct|sqrt|sin|cos|tan|log|exp)s?\b|n't",
    re.IGNORECASE,
)
_INTEGER = re.compile(r"[+-]?(?:[0-9]{1,60}|[1-9][0-9]{0,2}(?:,[0-9]{3}){1,20})")


def final_answer(
    text: str, tidy: Callable[[str], str] | None = None, whole_line: bool = False
) -> str | None:
    r"""Return the cleaned final answer of a response, or None if there is none.

    Args:
        text: the response alone, without its prompt.
        tidy: cleans it; None: `clean`.
        whole_line: an answer behind a marker may have several sentences.
    """
    tidy = tidy or clean
    end = len(text)
    for marker in itertools.islice(_markers_backwards(text), MAX_EMPTY_MARKERS):
        if marker["box"]:
            answer = tidy(_in_braces(text, marker.end()))
        else:
            answer = tidy(_rest_of_line(text, marker.end(), end, whole_line))
        if answer:
            return answer
        end = marker.start()
    return None


def ground_truth(text: str) -> str:
    """Return the answer in a data set's column: after its last marker, or the whole text.

    Of a list it is all members, with commas. Raises ValueError: see ground_truths.members.
    """
    return ", ".join(final_answer(member) or clean(member) for member in members(text))


def can_be_given(answer: str, tidy: Callable[[str], str] | None = None) -> bool:
    """Return whether some marker of a response can give exactly this final answer."""
    forms = (f"Answer: {answer}", f"\\boxed{{{answer}}}")
    return any(final_answer(form, tidy) == answer for form in forms)


def clean(answer: str) -> str:
    """Strip whitespace, emphasis, math delimiters, full stop and unit words around an answer."""
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return answer
    answer = _INTRODUCTION.sub("", " ".join(answer.split()), count=1).replace("\u2212", "-")
    formulas = list(_MATH.finditer(answer))
    if len(formulas) == 1:
        around = answer[: formulas[0].start()] + " " + answer[formulas[0].end() :]
        if _WORDS_ONLY.fullmatch(around) and not _NO_UNIT.search(around):
            answer = next(group for group in formulas[0].groups() if group is not None)
    answer = _MATH_DELIMITER.sub("", answer)
    answer = answer.lstrip(' *_`"').rstrip(' *_`".,;:')
    scientific = _SCIENTIFIC.fullmatch(answer)
    if scientific:
        return f"{scientific[1]} \\times 10^{{{int(scientific[2])}}}"
    quantity = _QUANTITY.fullmatch(answer)
    if quantity and not _NO_UNIT.search(quantity[2]):
        answer = quantity[1].rstrip(".,")
    return answer


def plain_integer(answer: str) -> int | None:
    """Return the value of an answer that is a plain integer (`-12`, `1,234`), else None."""
    return int(answer.replace(",", "")) if _INTEGER.fullmatch(answer) else None


def _markers_backwards(text: str) -> Iterator[re.Match[str]]:
    latest = {head: text.rfind(head) for head in _HEADS}
    while (position := max(latest.values())) >= 0:
        head = max(latest, key=lambda h: latest[h])
        latest[head] = text.rfind(head, 0, position)
        marker = _MARKER.match(text, position - 1 if "SWER" in head.upper() else position)
        if marker:
            yield marker


def _in_braces(text: str, start: int) -> str:
    """Return the text up to the brace that closes the one before start; "" if none does."""
    window = text[start : start + 2 * MAX_ANSWER_CHARACTERS]
    content = _balanced(window)
    cut_off = content == window and start + len(window) == len(text)
    return "" if cut_off else content


def _rest_of_line(text: str, start: int, end: int, whole_line: bool) -> str:
    """Return the text after a marker, before end: up to the end of line, sentence or formula."""
    # More than MAX_ANSWER_CHARACTERS, so that an answer that is too long is seen as such.
    window = text[start : min(start + 2 * MAX_ANSWER_CHARACTERS, end)]
    window = window[_LEADING.match(window).end() :]  # type: ignore[union-attr]
    end_of_display = 0
    if window[:2] in _DISPLAY:
        end_of_display = max(window.find(_DISPLAY[window[:2]], 2), 0)
    newline = window.find("\n", end_of_display)
    line = window if newline < 0 else window[:newline]
    sentence = None if whole_line else _NEXT_SENTENCE.search(line)
    return _balanced(line[: sentence.start()] if sentence else line)


def _balanced(line: str) -> str:
    """Cut at a brace that closes something opened before: `\\boxed{Answer: 5}` -> 5."""
    depth = 0
    for match in _BRACE.finditer(line):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth < 0:
            return line[: match.start()]
    return line
