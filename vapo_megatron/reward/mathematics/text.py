r"""Writes formulas in one way: Unicode, spacing, brackets, plain function names, upright letters.

Nothing here decides what is equal. Imports neither torch nor anything else of the package.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from vapo_megatron.reward.mathematics.unicode import in_ascii

_ROOT = re.compile(r"\\sqrt(\[\d\])?\s*(\d+(?:\.\d+)?|[A-Za-z]|\()")

_TEXT = r"\\text\{[^{}]*\}"
_IN_TEXT = re.compile(f"({_TEXT})")
_DOUBLE = re.compile(r"\{\{([^{}]*)\}\}")
_THIN_COMMA = re.compile(r"(?<=\d),\\!\s*(?=\d)")
_UPRIGHT = re.compile(
    r"\\(?:text|math)(?:rm|bf|it|sf|tt|up|normal|md)?\s*\{([^{}]*)\}|\\(?:mbox|hbox|operatorname)\*?"
    r"\s*\{([^{}]*)\}|\{\\(?:rm|bf|it)\s+([^{}]*)\}"
)
_LAYOUT = re.compile(
    r"(?<!\\)\\(?:left|right|middle|[Bb]igg?[lr]?|displaystyle|textstyle|limits|boldsymbol|bm|phantom\{\}|!)"
    r"(?![A-Za-z])\.?"
)
_MARKUP = re.compile(
    r"\\(?:text)?color\s*(?:\[\w+\])?\s*\{[^{}]*\}|\\(?:underline|uline)(?=\s*\{)"
    r"|\\(?:tiny|(?:foot|script)?small|normalsize|[lL]arge|LARGE|huge|Huge)(?![A-Za-z])"
)
# A unit vector with its mark, which alone tells it from the imaginary i.
_UNIT_VECTOR = re.compile(
    r"\\(?:(?:wide)?hat|vec|mathbf|boldsymbol|bm)\s*\{\s*(?:\\mathbf\{\s*([ijk])\s*\}|\\?([ij])math|([ijk]))\s*\}"
)
_SPACE = re.compile(r"(?<!\\)\\(?:[,;:> ]|q?quad(?![A-Za-z])|thinspace(?![A-Za-z]))|~|\s")
_COMMANDS = (
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:leq|leqslant)(?![A-Za-z])|<=|=<"), r"\\le "),
    (re.compile(r"\\(?:geq|geqslant)(?![A-Za-z])|>="), r"\\ge "),
    (re.compile(r"\\neq(?![A-Za-z])|\\not\s*=|!="), r"\\ne "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\(?:langle|lparen)(?![A-Za-z])"), "("),
    (re.compile(r"\\(?:rangle|rparen)(?![A-Za-z])"), ")"),
    (re.compile(r"\\lbrack(?![A-Za-z])"), "["),
    (re.compile(r"\\rbrack(?![A-Za-z])"), "]"),
    (re.compile(r"\\(?:varnothing|emptyset)(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"\\lg(?![A-Za-z])"), r"\\log_{10}"),
    (re.compile(r"\\(?:imath|jmath)(?![A-Za-z])"), "i"),
    (re.compile(r"\\(?:dots|cdots|ldots)(?![A-Za-z])"), r"\\ldots "),
    (re.compile(r"\\(?:lvert|rvert|vert)(?![A-Za-z])"), "|"),
    (re.compile(r"\\degree(?![A-Za-z])"), r"^\\circ "),
    (re.compile(r"\\infin(?![A-Za-z])"), r"\\infty "),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\{\s*([^{}]+?)\s*\\choose(?![A-Za-z])\s*([^{}]+?)\s*\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"(?<=\d) \. ?(?=\d|\\overline)"), "."),
    (re.compile(r"\{\s*,\s*\}"), ","),
)
_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp"
_NAMES = "pi|theta|alpha|beta|gamma|delta|lambda|sigma|omega|infinity|infty"
_PLAIN = re.compile(
    rf"(?<![A-Za-z\\])(?:({_FUNCTIONS})(?=[\W\d_]|[a-z](?![a-z]))|({_NAMES})(?![A-Za-z])|(sqrt)(?=\s*[(\d{{]))"
)
_PERCENT = re.compile(
    r"\s*(?:\\%|%|\\text\{\s*(?:percent|percentage|pct)\s*\}|\b(?:percent(?:age)?|pct)\b)"
)
_JOINED = re.compile(r"\\text\{\s*,?\s*(and|or)\s*,?\s*\}")
_IN_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{?\d\}?)?)\s*(?P<open>[({])?\s*(\d+(?:\.\d+)?)\s*\^\s*"
    r"(?:\{\s*\\circ\s*\}|\\circ)\s*(?(open)[)}])"
)


@functools.lru_cache(maxsize=4096)
def plain(text: str) -> str:
    r"""Return a formula in one way of writing it.

    Words stand in \text{}, spaces are single, brackets have no sizes, characters are ASCII but for
    currency signs and words of other languages.
    """
    if not text.isascii():
        text = _rooted(in_ascii(text))
    if "\\" in text or "{" in text:
        text = _THIN_COMMA.sub(",", _MARKUP.sub("", text))
        text = _DOUBLE.sub(r"{\1}", text)
        vectors = [match[1] or match[2] or match[3] for match in _UNIT_VECTOR.finditer(text)]
        if set(vectors) - {"i"}:
            text = _UNIT_VECTOR.sub(_unit_vector, text)
        text = _LAYOUT.sub("", text)
        text = _UPRIGHT.sub(_upright, text)
        text = _JOINED.sub(r" \1 ", text)
    text = " ".join(_SPACE.sub(" ", text).split())
    for pattern, replacement in _COMMANDS:
        text = pattern.sub(replacement, text)
    if "\\circ" in text:
        text = _IN_DEGREES.sub(r"\1(\\frac{\3\\pi}{180})", text)
    text = "".join(
        part if part.startswith("\\text{") else _named(part) for part in _IN_TEXT.split(text)
    )
    return _PERCENT.sub(r"\\%", text).strip(" ").rstrip(",;.:").strip(" ")


def _unit_vector(match: re.Match[str]) -> str:
    name = match[1] or match[2] or match[3]
    return f" \\epsilon_{{{'ijk'.index(name) + 101}}} "


def _rooted(text: str) -> str:
    """Put braces around what stands behind a root without them."""
    while match := _ROOT.search(text):
        start, end = match.start(2), match.end(2)
        if match[2] == "(":
            end = closing(text, start)
            if end < 0:
                return text
            inner, end = text[start + 1 : end], end + 1
        else:
            inner = match[2]
        text = f"{text[: match.start()]}\\sqrt{match[1] or ''}{{{inner}}}{text[end:]}"
    return text


def _upright(match: re.Match[str]) -> str:
    word = next(group for group in match.groups() if group is not None)
    inner = word.strip()
    if match[2] is not None and re.fullmatch(f"{_FUNCTIONS}|gcd|lcm|min|max|det|lim", inner):
        return f"\\{inner} " if inner != "lcm" else match[0]
    if match[0].startswith(r"\mathbb"):
        return match[0]
    if inner in ("e", "i", "d"):
        return f" {inner} "
    if not inner:
        return " "
    if re.fullmatch("[A-Z]{2}", inner):
        return f" {inner} "
    if re.fullmatch(r"[-+]?\d+(?:[.,/]\d+)*", inner):
        return inner
    # Around letters of choices.
    inner_of_brackets = re.fullmatch(r"\(?([A-Z])\)?", inner)
    if inner_of_brackets and not match.string[: match.start()].strip():
        return f"\\text{{{inner_of_brackets[1]}}}"
    return f"\\text{{{word}}}"


def _named(part: str) -> str:
    if not any(map(str.isalpha, part)):
        return part
    part = _PLAIN.sub(_command, part)
    return _rooted(part) if "\\sqrt" in part else part


def _command(match: re.Match[str]) -> str:
    name = match[1] or match[2] or match[3]
    if name in ("infinity", "infty"):
        return "\\infty "
    return f"\\{name}" if match[3] else f"\\{name} "


OPENING, CLOSING = "([{", ")]}"


def depths(text: str) -> Iterator[tuple[int, int]]:
    r"""Yield (index, depth) of the characters outside \begin...\end and \text{}.

    A bracket has the depth around it; any bracket closes any, as in [1, 2).
    """
    depth, i, blocks = 0, 0, 0
    while i < len(text):
        if text.startswith("\\begin{", i):
            blocks += 1
        elif text.startswith("\\end{", i):
            blocks -= 1
        character = text[i]
        if character in CLOSING:
            depth -= 1
        yield i, depth + 100 * blocks
        if character in OPENING:
            depth += 1
        i += 1


def closing(text: str, start: int) -> int:
    """Return the index of the bracket that closes the one at start; -1: none does."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in OPENING) - (text[i] in CLOSING)
        if depth == 0:
            return i
    return -1
