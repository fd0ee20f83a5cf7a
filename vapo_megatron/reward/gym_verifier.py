"""The verifier `reasoning_gym`: the scorer of a problem's own task.

It runs in the killable processes of isolated.py: a scorer that raises or hangs costs one verdict.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from typing import Any

from vapo_megatron.reward import gym
from vapo_megatron.reward.extraction import final_answer
from vapo_megatron.reward.verifier import Problem, Verdict

COLUMN = "reasoning_gym"
"""Of a row: what gym.write_row writes."""
FORMS = ("Answer: {}", "<answer>{}</answer>")
"""Of an answer in a response; the first holds one line."""
MAX_ANSWER_CHARACTERS = 10_000
"""Longer answers are not judged."""

_OPENING, _CLOSING = "<answer>", "</answer>"
_IN_TEXT = re.compile(r"\\text\s?\{([^{}]*)\}")
_NONSENSE = "?"


class ReasoningGymVerifier:
    """A Verifier.

    Args:
        correct_from: the least score of a correct response.
        last_line: a response without a marker is judged by its last line.
    """

    def __init__(self, correct_from: float = 1.0, last_line: bool = False) -> None:
        if isinstance(correct_from, bool) or not isinstance(correct_from, int | float):
            raise ValueError(f"correct_from={correct_from!r} must be a number, such as 1.0")
        if not isinstance(last_line, bool):
            raise ValueError(f"last_line={last_line!r} must be true or false")
        self._correct_from = correct_from
        self._last_line = last_line
        gym.load()

    def check(self, problem: Problem) -> str | None:
        """Return why a problem cannot be judged, or None."""
        value = problem.metadata.get(COLUMN)
        if value is None:
            return f"has no column {COLUMN}, which vapo prepare --reasoning-gym writes"
        try:
            row = gym.read_row(value)
        except ValueError as error:
            return f"has a column {COLUMN} that {error}"
        try:
            return mistake(row, self._correct_from)
        except Exception as error:  # Whatever a task raises.
            return f"is refused by its task {row.task}: {type(error).__name__}: {error}"[:300]

    def score(self, responses: Sequence[str], problems: Sequence[Problem]) -> list[Verdict]:
        """Judge; see Verifier. Raises what the task's scorer raises."""
        return [self._judge(r, p) for r, p in zip(responses, problems, strict=True)]

    def _judge(self, response: str, problem: Problem) -> Verdict:
        answer = find_answer(response, last_line=self._last_line)
        if answer is None:
            return Verdict("unparsable", note="no final answer")
        row = gym.read_row(problem.metadata[COLUMN])
        score, note = gym.score(scorer(row), row.task, answer, row.entry)
        status = "correct" if score >= self._correct_from else "wrong"
        return Verdict(status, score=score, answer=answer, note=note)  # type: ignore[arg-type]


def scorer(row: gym.Row) -> Any:
    """Return the data set that scores a row, the same for the same task and config."""
    return _scorer(row.task, json.dumps(row.config, sort_keys=True))


@functools.lru_cache(maxsize=128)
def _scorer(task: str, config: str) -> Any:
    return gym.create(task, json.loads(config), seed=0)


def mistake(row: gym.Row, correct_from: float) -> str | None:
    """Return what is wrong with a row: its own answer is not correct, or nonsense is; else None.

    A row of a task that gives no answer is taken as it is. Raises whatever the task does.
    """
    answer = row.entry["answer"]
    if answer is not None and not best_forms(row, correct_from):
        return f"has the answer {answer!r:.80}, which its task {row.task} does not score as correct"
    try:
        is_loose = gym.score(scorer(row), row.task, _NONSENSE, row.entry)[0] >= correct_from
    except Exception:  # Some scorers raise on text that is no number.
        is_loose = False
    if is_loose and answer != _NONSENSE:
        return f"has the task {row.task}, which scores {_NONSENSE!r} as correct"
    return None


def best_forms(row: gym.Row, correct_from: float) -> list[str]:
    """Return those FORMS in which the row's own answer is correct."""
    found = []
    for form in FORMS:
        given = find_answer(form.format(row.entry["answer"]))
        if given is not None:
            score, _ = gym.score(scorer(row), row.task, given, row.entry)
            found += [form] if score >= correct_from else []
    return found


def find_answer(response: str, *, last_line: bool = False) -> str | None:
    r"""Return the final answer of a response, or None.

    The last of `<answer>X</answer>`, which may have several lines, `\boxed{X}`, `Answer: X` and
    `#### X` counts, each as extraction.final_answer finds it.

    Args:
        response: the text without its prompt.
        last_line: where none of them is there, its last line.
    """
    end = response.rfind(_CLOSING)
    start = response.rfind(_OPENING, 0, max(end, 0))
    answer = None
    if start >= 0:
        rest = response[end + len(_CLOSING) :]
        inner = response[start + len(_OPENING) : end].strip()
        answer = _marked(rest) or _marked(inner) or inner
    else:
        answer = _marked(response)
    if answer is None and last_line:
        answer = _tidy(response.rstrip().rpartition("\n")[2])
    return answer if answer and len(answer) <= MAX_ANSWER_CHARACTERS else None


def _marked(text: str) -> str | None:
    return final_answer(text, _tidy, whole_line=True)


def _tidy(text: str) -> str:
    """Strip emphasis, math delimiters and a full stop around an answer."""
    return _IN_TEXT.sub(r"\1", text).strip(" \t\r\n*`$").removesuffix(".").rstrip(" *`$")
