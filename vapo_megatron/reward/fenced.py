"""Finds fenced blocks of Markdown in a response, also where a fence was never closed."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Collection
from typing import NamedTuple

_FENCE = re.compile(
    r"(?P<before>\s*(?:(?:[-*+>]|\d{1,9}[.)])\s+)*)(?P<marks>`{3,}|~{3,})(?P<info>.*)"
)
_LANGUAGE = re.compile(r"[{\[.=\s]*([a-z][a-z+#]*)[\d.]*(?=[\s,:;=})\]]|$)")
_WRAPPERS = ("markdown", "md")
"""What is in a block of these is read as if the block were not there."""
_END_OF_THINKING = "</think>"
_DEEPER = 4
"""A fence that is indented by so much more than the one before it is part of the block."""


class _Fence(NamedTuple):
    line: int
    before: str
    marks: str
    info: str

    @property
    def language(self) -> str:
        """The label's language without its version; "" if there is no label, "?" if it is none."""
        info = self.info.strip().lower()
        found = _LANGUAGE.match(info)
        return found[1] if found else "?" if info else ""

    def ends(self, opening: _Fence) -> bool:
        """Return whether this ends a block: closes it, or shows that it was never closed."""
        is_deeper = len(self.before) >= len(opening.before) + _DEEPER
        return self.marks.startswith(opening.marks) and not is_deeper


def last_block(
    text: str, languages: Collection[str], is_whole: Callable[[str], object] | None = None
) -> str | None:
    """Return the content of the last closed block in one of the languages, or None.

    A block that names no language counts where none names one of these, and one in the thinking
    where the answer behind it has none.

    Args:
        text: a response.
        languages: as behind the opening fence, in lower case and without a version.
        is_whole: tells a block from the prose between two; decides where a fence without a label is
            left open at the end: another one before it may be the one that was never closed.
    """
    thinking, mark, answer = text.rpartition(_END_OF_THINKING)
    found = _last_block(answer, languages, is_whole)
    # The mark may also stand in the program.
    return _last_block(text, languages, is_whole) if found is None and mark else found


def _last_block(
    text: str, languages: Collection[str], is_whole: Callable[[str], object] | None
) -> str | None:
    lines = text.split("\n")
    fences = [
        _Fence(number, match["before"], match["marks"], match["info"])
        for number, line in enumerate(lines)
        if (match := _FENCE.fullmatch(line.rstrip()))
        and not (match["marks"][0] == "`" and "`" in match["info"])
    ]
    fences = [fence for fence in fences if fence.language not in _WRAPPERS]
    labelled = unlabelled = None
    start = 0
    while start < len(fences):
        opening = None
        for number, fence in enumerate(fences[start:], start):
            if opening is None or (fence.info.strip() and fence.ends(opening)):
                opening, start = fence, number
            elif fence.ends(opening):
                content = _content(lines, opening, fence)
                if opening.language in languages:
                    labelled = content
                elif not opening.language:
                    unlabelled = content
                opening = None
        if opening is None:
            break
        before = fences[start - 1] if start else None
        if before and is_whole and not opening.info.strip() and opening.ends(before):
            content = _content(lines, before, opening)
            if content.strip() and is_whole(content):
                return content
        # It is never closed: read on behind it.
        start += 1
    return unlabelled if labelled is None else labelled


def _content(lines: list[str], opening: _Fence, closing: _Fence) -> str:
    indent = opening.before if opening.before.isspace() else " " * len(opening.before)
    content = "\n".join(
        line.removeprefix(opening.before if line.startswith(opening.before) else indent)
        for line in lines[opening.line + 1 : closing.line]
    )
    return textwrap.dedent(content) if content[:1].isspace() else content
