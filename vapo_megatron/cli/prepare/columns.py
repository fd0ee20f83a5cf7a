"""The shapes in which people have math problems: which columns hold problem and answer, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vapo_megatron.data.problems import Problem, answer_text, prompt_text
from vapo_megatron.errors import DataError

ANSWER_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
ANSWER_SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'
"""DAPO's instructions (arXiv 2503.14476, its published data) around the problem."""

_STEPS = "Let's think step by step and output the final answer"
INSTRUCTIONS = (
    (ANSWER_PREFIX, ANSWER_SUFFIX),
    ("", f' {_STEPS} after "####".'),
    ("", f" {_STEPS} within \\boxed{{}}."),
    ("", "\nPlease reason step by step, and put your final answer within \\boxed{}."),
)
"""What published data sets put before and behind a problem: DAPO-Math-17k and its AIME; GSM8K and
MATH as verl converts them; Qwen's math prompt."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Where a row holds its problem and its answer."""

    prompt_column: str
    answer_column: str


SHAPES = {
    "verl": Shape("prompt", "reward_model"),
    "gsm8k": Shape("question", "answer"),
    "aime": Shape("problem", "answer"),
    "plain": Shape("prompt", "answer"),
}
"""verl: one user message in `prompt`, `reward_model.ground_truth`; DAPO-Math-17k is an example.
gsm8k: a worked solution whose answer stands behind ####. aime, plain: text and answer."""


def choose_shape(columns: Sequence[str], name: str | None, where: str) -> tuple[str, Shape]:
    """Find the shape that fits a file's columns; upper and lower case are alike.

    Args:
        columns: of the file.
        name: of the shape that it must be; None: the only one that fits.
        where: the file, for messages.

    Returns:
        The shape's name, and the columns as the file writes them.

    Raises:
        DataError: none fits, several do, or the named one does not.
    """
    fitting = {n: found for n, shape in SHAPES.items() if (found := _found(shape, columns))}
    present = f"it has {', '.join(columns) or 'none'}"
    if name is not None:
        if name not in fitting:
            wanted = " and ".join(dataclasses.astuple(SHAPES[name]))
            raise DataError(
                f"{where}: shape {name} needs the columns {wanted}, {present}; give another "
                "--shape, or --prompt-column and --answer-column"
            )
        return name, fitting[name]
    if len(fitting) == 1:
        return next(iter(fitting.items()))
    if fitting:
        raise DataError(
            f"{where} could have the shape {' or '.join(fitting)}: {present}; give --shape"
        )
    known = "; ".join(f"{n}: {s.prompt_column}, {s.answer_column}" for n, s in SHAPES.items())
    raise DataError(
        f"{where}: its columns fit no known shape ({known}), {present}; give --prompt-column and "
        "--answer-column"
    )


def choose_columns(
    columns: Sequence[str], prompt: str | None, answer: str | None, where: str
) -> tuple[str, Shape]:
    """Take two columns as they are named: the shape plain.

    Args:
        columns: of the file.
        prompt, answer: the two that are wanted.
        where: the file, for messages.

    Raises:
        DataError: one of them is not given, or not there.
    """
    if prompt is None or answer is None:
        raise DataError("--prompt-column and --answer-column belong together; give both")
    for option, column in (("--prompt-column", prompt), ("--answer-column", answer)):
        if column not in columns:
            raise DataError(
                f"{where} has no column {column!r}; give {option} as one of those it has: "
                f"{', '.join(columns) or 'none'}"
            )
    return "plain", Shape(prompt, answer)


def _found(shape: Shape, columns: Sequence[str]) -> Shape | None:
    """Return the shape with the columns as they are written, None when one is missing."""
    written = {c.lower(): c for c in reversed(columns)} | {c: c for c in columns}
    try:
        return Shape(written[shape.prompt_column], written[shape.answer_column])
    except KeyError:
        return None


def read_problem(name: str, shape: Shape, row: Mapping[str, Any], where: str) -> Problem:
    """Return a row's problem and its answer, as they stand there.

    Args:
        name: of the shape, a key of SHAPES.
        shape: its columns in this file.
        row: their values.
        where: file and line or row.

    Raises:
        DataError: a value is missing or of another kind.
    """
    for column in dataclasses.astuple(shape):
        if column not in row:
            raise DataError(
                f"{where} has no column {column!r}, which the file's other rows have: it has "
                f"{', '.join(row) or 'none'}; correct or remove the row"
            )
    prompt, answer = row[shape.prompt_column], row[shape.answer_column]
    if name == "verl":
        prompt = _user_message(prompt, shape.prompt_column, where)
        answer = _ground_truth(answer, shape.answer_column, where)
    problem = prompt_text(prompt, shape.prompt_column, where)
    if name == "gsm8k":
        answer = _behind_mark(answer, shape, where)
    return Problem(problem, answer_text(answer, shape.answer_column, where))


def strip_instructions(prompt: str) -> str:
    """Return the problem alone: without one of INSTRUCTIONS and without blanks around it."""
    text = prompt.strip()
    for prefix, suffix in INSTRUCTIONS:
        before, behind = prefix.strip(), suffix.strip()
        if text.startswith(before) and text.endswith(behind):
            return text[len(before) : len(text) - len(behind)].strip()
    return text


def _user_message(value: Any, column: str, where: str) -> Any:
    """The text of the only message; a text that is no list of messages stays."""
    if isinstance(value, str):
        return value
    roles = [m.get("role") for m in value if isinstance(m, dict)] if isinstance(value, list) else []
    if not isinstance(value, list) or roles != ["user"] or len(value) != 1:
        raise DataError(
            f"{where}: {column} must be a text or one message of the role user, found "
            f"{_shown(roles or value)}; correct or remove the row"
        )
    return value[0].get("content")


def _ground_truth(value: Any, column: str, where: str) -> Any:
    if not isinstance(value, dict) or "ground_truth" not in value:
        raise DataError(
            f"{where}: {column} must hold ground_truth, found {_shown(value)}; correct or remove "
            "the row"
        )
    return value["ground_truth"]


def _behind_mark(value: Any, shape: Shape, where: str) -> str:
    solution, mark, answer = str(value).rpartition("####")
    if not mark:
        raise DataError(
            f"{where}: {shape.answer_column}={_shown(value)} has no '####', behind which the shape "
            "gsm8k has its answer; where the whole column is the answer, give "
            f"--prompt-column {shape.prompt_column} --answer-column {shape.answer_column}"
        )
    return answer


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
