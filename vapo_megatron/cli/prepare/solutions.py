"""Runs the reference solutions of programming problems against the rows' own tests.

A row that its own solution does not pass would be wrong for every response.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vapo_megatron.cli.command import ProgressBar
from vapo_megatron.cli.prepare.summary import Summary
from vapo_megatron.data.problems import Problem
from vapo_megatron.errors import DataError
from vapo_megatron.reward.code_tests import LANGUAGES, parsed
from vapo_megatron.reward.fenced import last_block
from vapo_megatron.reward.verifier import RunningVerifier

_CHUNK = 20
"""Programs between two updates of the progress bar."""
MAX_SOLUTIONS = 5
"""Of a row with many, the first are run."""
_PYTHON_3 = (3, "PYTHON3", "PYTHON", "python", "python3", "py")
"""In CodeContests' column `language`, and in others like it."""


class Solved(NamedTuple):
    """A row with solutions."""

    where: str
    problem: Problem
    """With its tests."""
    responses: Sequence[str]
    """Of which one must pass."""


def solution_responses(value: Any, prompt: str) -> list[str]:
    """Return a row's reference solutions as responses; none: it has none in Python.

    Args:
        value: a program, a response with one, the body of the prompt's function, a list of these
            (also as JSON), or {"language": [...], "solution": [...]}.
        prompt: of the row, unchanged.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{") and parsed(value) is not None:
        try:
            value = json.loads(value)
        except ValueError:
            pass
    if isinstance(value, Mapping):
        programs, languages = value.get("solution") or [], value.get("language") or []
        value = [p for p, language in zip(programs, languages) if language in _PYTHON_3]
    found = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    texts = [text for text in found if isinstance(text, str) and text.strip()]
    return [_response(text, prompt) for text in texts[:MAX_SOLUTIONS]]


def _response(text: str, prompt: str) -> str:
    program = text
    if parsed(text) is None:
        code = last_block(prompt, LANGUAGES) or prompt
        whole = f"{code.rstrip()}\n{text}"
        if parsed(whole) is not None:
            program = whole
        elif last_block(text, LANGUAGES, parsed) is not None:
            return text
    longest = max(map(len, re.findall("`+", program)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}python\n{program}\n{marks}"


def unsolved(
    rows: Sequence[Solved], verifier: RunningVerifier, column: str, skip: bool, summary: Summary
) -> dict[int, str]:
    """Return index -> what is wrong, of rows whose own solutions do not pass; count them.

    Args:
        rows: that have solutions.
        verifier: `code`.
        column: of the solutions.
        skip: they are left out.
        summary: gets the counts.

    Raises:
        DataError: names the rows, unless `skip`; or there are none with solutions.
    """
    if not rows:
        raise DataError(
            f"--solution-column={column}: no problem has a program of Python there; give the "
            "column of the reference solutions"
        )
    bad: dict[int, str] = {}
    with ProgressBar("solutions run") as bar:
        for start in range(0, len(rows), _CHUNK):
            part = rows[start : start + _CHUNK]
            for i, reason in _failed(part, verifier, column).items():
                bad[start + i] = f"{part[i].where} {reason}"
            bar.show(start + len(part), len(rows))
    named = list(bad.values())[:5]
    if bad and not skip:
        raise DataError(
            f"{len(bad)} of {len(rows)} problems are not solved by their own solutions "
            f"({'; '.join(named)}); correct the rows, or leave them out with --skip-unusable"
        )
    summary.solved, summary.unsolved = len(rows) - len(bad), len(bad)
    summary.unsolved_example = "".join(named[:1])
    return bad


def _failed(rows: Sequence[Solved], verifier: RunningVerifier, column: str) -> dict[int, str]:
    failed = verifier.unusable([row.problem for row in rows])
    left = [i for i in range(len(rows)) if i not in failed]
    for number in range(MAX_SOLUTIONS):
        asked = [i for i in left if number < len(rows[i].responses)]
        responses = [rows[i].responses[number] for i in asked]
        verdicts = list(verifier.score(responses, [rows[i].problem for i in asked]))
        for i, verdict in zip(asked, verdicts):
            if verdict.is_correct:
                left.remove(i)
                failed.pop(i, None)
            elif number == 0:
                count = len(rows[i].responses)
                what = "a solution that does" if count == 1 else f"{count} solutions that do"
                failed[i] = f"has {what} not pass its tests, in {column}: {verdict.note}"
    return dict(sorted(failed.items()))
