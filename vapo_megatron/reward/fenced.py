"""Finds fenced blocks of Markdown in a response, in time linear in its length."""

from __future__ import annotations

from collections.abc import Collection


def last_block(text: str, languages: Collection[str]) -> str | None:
    """Return the content of the last closed block in one of the languages, or None.

    A block that names no language counts where none names one of these.

    Args:
        text: a response.
        languages: as behind the opening fence, in lower case.
    """
    labelled = unlabelled = None
    fence = indent = language = ""
    lines: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        marks = len(stripped) - len(stripped.lstrip("`"))
        if fence and marks >= len(fence) and marks == len(stripped):
            if language in languages:
                labelled = "\n".join(lines)
            elif not language:
                unlabelled = "\n".join(lines)
            fence = ""
        elif fence:
            lines.append(line.removeprefix(indent))
        elif marks >= 3 and "`" not in stripped[marks:]:
            fence, indent = "`" * marks, line[: len(line) - len(line.lstrip())]
            language, lines = stripped[marks:].partition(" ")[0].lower(), []
    return unlabelled if labelled is None else labelled
