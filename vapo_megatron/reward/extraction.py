r"""Extracts the final answer from a response, in time linear in its length for any input.

Only the last of `\boxed{X}`, `Answer: X` and `#### X` counts, and in a response without them the
last `final answer is X`. Boxes that only a comma, "and" or "or" separates are one list. A marker
followed by nothing, and a box that is never closed, do not count as answers.
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
_HEADS = ("\\boxed", "\\fbox", "####", "nswer", "NSWER", "\u7b54\u6848")
_SAID = "inal answer is"
"""Counts in a response without a marker alone."""
_MARKER = re.compile(
    r"\\(?:boxed|fbox)(?:\s{0,4}(?P<box>\{)|(?<=\$\\boxed)\s{1,4}(?P<bare>[-+]?\d[\d,]*(?:\.\d+)?))"
    r"|(?i:answer)[*_]{0,3}\s{0,4}[:\uff1a]"
    r"|\u7b54\u6848[*_]{0,3}\s{0,4}(?:[:\uff1a]|[\u662f\u4e3a]\s{0,4}[:\uff1a]?)"
    r"|(?<!#)####(?!#)"
)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_LEADING = re.compile(r"[\s*_`]*")
# What separates boxes of one list, with the second's name: `$\\boxed{1}$ and $y = \\boxed{2}$`.
_BETWEEN_BOXES = re.compile(
    r"[\s$.*]*(?:,?\s*(?:\\text\{)?\s*(?:and|or)\b\s*\}?|[,;&]|\\(?:quad|qquad|;|,))"
    r"[\s$*]*(?:([A-Za-z](?:_\w)?)\s*=\s*)?"
)
_NAME_BEFORE = re.compile(r"(?<![A-Za-z\\])([A-Za-z](?:_\w)?)\s*=\s*$")
MAX_BOXES = 32
_SENTENCE = re.compile(
    r"(?:[A-Z][a-z']*|the|there|it|this|we|so|thus|hence|then) (?:.{0,300}[\w$)}\]] )?"
    r"(?:is|are|was|be|equals?|equal to|has|have|gets?|gives?|obtain|find):? (?P<value>.+)",
    re.DOTALL,
)
_SAYS = re.compile(r"\b(?:is|are|was|equals?|not|has|have|gets?|gives?)(?= )|n't|[=;]")
_REASON = re.compile(r"(?:[,;]? \(?|[,;.] ?)(?:because|since)\b.*")
_EMPHASIS = re.compile(r"(?<!\S)\*\*(?=\S)|(?<=\S)\*\*(?=[\s.,;:]|$)")
_SPACES_AT_END = re.compile(r"(?:\\(?:[,;:! ]|q?quad|e[nm]space|thinspace|\\)|~|\s|(?<!\\)\\$)+$")
_NEXT_SENTENCE = re.compile(r"\.\s+(?=[A-Z])")
_DISPLAY = {"$$": "$$", "\\[": "\\]"}
_MATH = re.compile(r"(?<!\\)\$\$?([^$]+)(?<!\\)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_MATH_DELIMITER = re.compile(r"(?<!\\)\$|\\[()\[\]]")
_WORDS_ONLY = re.compile(r"[A-Za-z\s,.:'*-]*")
_INTRODUCTION = re.compile(
    r"(?i:(?:(?:so|thus|therefore|hence),? )?(?:(?:the|my) )?(?:(?:final|correct) )?"
    r"(?:answer|result|value|solution) (?:is|equals)):? "
    r"|\\text\s?\{\s*(?i:(?:the )?(?:final )?answer(?: is)?:?)\s*\} *"
)
_QUANTITY = re.compile(r"(-?(?:[0-9]|\.[0-9])[0-9,.]*) ((?:[A-Za-z]{3,})(?:[ -][A-Za-z]+){0,5})")
_NUMBER = re.compile(r"-?(?:[0-9]|\.[0-9])[0-9,.]*")
_UNIT_WORDS = re.compile(r"\s*([A-Za-z]{2,}(?:[ -][A-Za-z]+){0,5})[ .*]*")
_HAS_VALUE = re.compile(r"[0-9$\\]")
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
    found = _last_answer(text, tidy or clean, whole_line)
    return None if found is None else found[1]


def answer_begins(text: str) -> int | None:
    """Return where the marker of a response's final answer begins; None: there is no answer.

    Of boxes that are one list it is the last one's.
    """
    found = _last_answer(text, clean, whole_line=False)
    return None if found is None else found[0]


def _last_answer(text: str, tidy: Callable[[str], str], whole_line: bool) -> tuple[int, str] | None:
    """Return (where its marker begins, the answer)."""
    end = len(text)
    for marker in itertools.islice(_markers_backwards(text), MAX_EMPTY_MARKERS):
        begin = marker.start()
        if marker["bare"]:
            answer = tidy(marker["bare"])
        elif marker["box"]:
            answer = tidy(_in_braces(text, marker.end()))
            if answer:
                return begin, _with_boxes_before(text, begin, answer, tidy)
        else:
            answer = tidy(_rest_of_line(text, marker.end(), end, whole_line))
        if answer:
            return begin, answer
        end = begin
    said = text.rfind(_SAID)
    if said < 0:
        return None
    answer = tidy(_rest_of_line(text, said + len(_SAID), len(text), whole_line).lstrip(": "))
    return (said, answer) if answer else None


def ground_truth(text: str, tidy: Callable[[str], str] | None = None) -> str:
    """Return the answer in a data set's column: after its last marker, or the whole text.

    Of a list it is all members, with commas. Raises ValueError: see ground_truths.members.
    """
    tidy = tidy or clean
    return ", ".join(final_answer(member, tidy) or tidy(member) for member in members(text))


def can_be_given(answer: str, tidy: Callable[[str], str] | None = None) -> bool:
    """Return whether some marker of a response can give exactly this final answer."""
    forms = (f"Answer: {answer}", f"\\boxed{{{answer}}}")
    return any(final_answer(form, tidy) == answer for form in forms)


def clean(answer: str) -> str:
    """Strip whitespace, emphasis, math delimiters, full stop and unit words around an answer."""
    answer = with_unit(answer)
    quantity = _QUANTITY.fullmatch(answer)
    if quantity and not _NO_UNIT.search(quantity[2]):
        answer = quantity[1].rstrip(".,")
    return answer


def with_unit(answer: str) -> str:
    """Strip the same as `clean`, but not the words behind a number: they may be its unit."""
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return answer
    answer = _INTRODUCTION.sub("", " ".join(answer.split()), count=1).replace("\u2212", "-")
    answer = _said(_EMPHASIS.sub("", _REASON.sub("", answer)))
    formulas = list(_MATH.finditer(answer))
    if len(formulas) == 1:
        before, behind = answer[: formulas[0].start()], answer[formulas[0].end() :]
        around = f"{before} {behind}"
        if _WORDS_ONLY.fullmatch(around) and not _NO_UNIT.search(around):
            formula = next(group for group in formulas[0].groups() if group is not None)
            is_number = _NUMBER.fullmatch(formula.strip())
            unit = _UNIT_WORDS.fullmatch(behind) if is_number else None
            answer = f"{formula.strip()} {unit[1]}" if unit else formula
    answer = _MATH_DELIMITER.sub("", answer)
    answer = answer.lstrip(' *_`"').rstrip(' *_`"')
    answer = _SPACES_AT_END.sub("", answer).rstrip(' *_`".,;:')
    scientific = _SCIENTIFIC.fullmatch(answer)
    if scientific:
        return f"{scientific[1]} \\times 10^{{{int(scientific[2])}}}"
    return answer


def _said(answer: str) -> str:
    """Return what a sentence says that something is: `The volume of $V$ is 120` -> 120."""
    sentence = _SENTENCE.fullmatch(answer.rstrip("."))
    if sentence is None:
        return answer
    value = sentence["value"]
    before = answer[: sentence.start("value")]
    if len(_SAYS.findall(before)) > 1 or _MATH.search(before) and not _HAS_VALUE.search(value):
        return answer
    return value


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


def _with_boxes_before(text: str, start: int, answer: str, tidy: Callable[[str], str]) -> str:
    """Return an answer in a box that starts here, in one list with the boxes before it."""
    found: list[tuple[str, str]] = []
    end, rest = start, answer
    for _ in range(MAX_BOXES):
        before = text.rfind("\\boxed", max(0, end - 2 * MAX_ANSWER_CHARACTERS), end)
        opening = _MARKER.match(text, before) if before >= 0 else None
        if opening is None:
            break
        inner = _in_braces(text, opening.end())
        gap = _BETWEEN_BOXES.fullmatch(text, opening.end() + len(inner) + 1, end)
        if gap is None or not (content := tidy(inner)):
            break
        found.append((gap[1] or "", rest))
        end, rest = before, content
    if not found:
        return answer
    name = _NAME_BEFORE.search(text[max(0, end - 20) : end])
    boxes = [(name[1] if name else "", rest), *reversed(found)]
    names = [name for name, _ in boxes]
    if all(names) and len(set(names)) == len(names):
        return ", ".join(f"{name}={content}" for name, content in boxes)
    return ", ".join(dict.fromkeys(content for _, content in boxes))


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
