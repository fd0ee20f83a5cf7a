"""Layouts of published math data sets: which columns hold problem and answer, and in what form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vapo_megatron.data.chat import Message, read_messages
from vapo_megatron.data.ground_truths import answer_text, shown
from vapo_megatron.data.problems import prompt_text
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
"""(prefix, suffix) around a problem in published data sets: DAPO-Math-17k and its AIME; GSM8K and
MATH as verl converts them; Qwen's math prompt."""


class Shape(NamedTuple):
    """A layout of columns."""

    name: str
    prompt_column: str
    answer_column: str


SHAPES = {
    "verl": Shape("verl", "prompt", "reward_model"),
    "gsm8k": Shape("gsm8k", "question", "answer"),
    "aime": Shape("aime", "problem", "answer"),
    "plain": Shape("plain", "prompt", "answer"),
}
"""verl: chat messages in `prompt`, `reward_model.ground_truth`, for example DAPO-Math-17k.
gsm8k: a worked solution with the answer after ####. aime, plain: text and answer. Any column of
prompts may hold chat messages."""


class Question(NamedTuple):
    """A row's problem and answer, unchanged."""

    prompt: str
    """The text, or the last message's."""
    answer: str
    earlier: tuple[Message, ...] = ()
    """The messages before it."""


def choose_shape(
    columns: Sequence[str],
    where: str,
    *,
    name: str | None = None,
    prompt_column: str | None = None,
    answer_column: str | None = None,
) -> Shape:
    """Choose the shape of a file: plain if its columns are given, else by name, else what fits.

    Args:
        columns: of the file.
        where: the file, for messages.
        name: key of SHAPES.
        prompt_column, answer_column: given together, spelled as in the file.

    Returns:
        The shape, its columns spelled as in the file; those of SHAPES match regardless of case.

    Raises:
        DataError: none fits, several do, or the requested one does not.
    """
    present = ", ".join(columns) or "none"
    if prompt_column or answer_column:
        if prompt_column is None or answer_column is None:
            raise DataError("--prompt-column and --answer-column belong together; give both")
        for option, column in (
            ("--prompt-column", prompt_column),
            ("--answer-column", answer_column),
        ):
            if column not in columns:
                raise DataError(
                    f"{where} has no column {column!r}; give {option} as one of those it has: "
                    f"{present}"
                )
        return Shape("plain", prompt_column, answer_column)
    # An exact match wins over one that differs in case, and of several such the first wins.
    spelled = {c.lower(): c for c in reversed(columns)} | {c: c for c in columns}
    fitting = {
        shape.name: Shape(shape.name, spelled[shape.prompt_column], spelled[shape.answer_column])
        for shape in SHAPES.values()
        if shape.prompt_column in spelled and shape.answer_column in spelled
    }
    if name is not None and name not in fitting:
        raise DataError(
            f"{where}: shape {name} needs the columns {' and '.join(SHAPES[name][1:])}, it has "
            f"{present}; give another --shape, or --prompt-column and --answer-column"
        )
    if name is not None or len(fitting) == 1:
        return fitting[name or next(iter(fitting))]
    if fitting:
        raise DataError(
            f"{where} could have the shape {' or '.join(fitting)}: it has {present}; give --shape"
        )
    known = "; ".join(f"{s.name}: {s.prompt_column}, {s.answer_column}" for s in SHAPES.values())
    raise DataError(
        f"{where}: its columns fit no known shape ({known}), it has {present}; give "
        "--prompt-column and --answer-column"
    )


def read_problem(shape: Shape, row: Mapping[str, Any], where: str) -> Question:
    """Return the problem and answer of a row, unchanged; `where` names file and row in errors.

    Raises:
        DataError: a value is missing or has the wrong type.
    """
    for column in shape[1:]:
        if column not in row:
            raise DataError(
                f"{where} has no column {column!r}, which the file's other rows have: it has "
                f"{', '.join(row) or 'none'}; correct or remove the row"
            )
    prompt, answer = row[shape.prompt_column], row[shape.answer_column]
    earlier: list[Message] = []
    if isinstance(prompt, list):
        *earlier, last = read_messages(prompt, shape.prompt_column, where)
        prompt = last["content"]
    problem = prompt_text(prompt, shape.prompt_column, where)
    if shape.name == "verl":
        answer = _ground_truth(answer, shape.answer_column, where)
    if shape.name == "gsm8k":
        answer = _after_mark(answer, shape, where)
    text = answer_text(answer, shape.answer_column, where)
    if not text:
        raise DataError(
            f"{where}: {shape.answer_column}={shown(answer)} must be a number or a text; correct "
            "or remove the row"
        )
    return Question(problem, text, tuple(earlier))


def strip_instructions(prompt: str) -> str:
    """Return the problem without INSTRUCTIONS and surrounding whitespace."""
    text = prompt.strip()
    for prefix, suffix in INSTRUCTIONS:
        before, after = prefix.strip(), suffix.strip()
        if text.startswith(before) and text.endswith(after):
            return text[len(before) : len(text) - len(after)].strip()
    return text


def _ground_truth(value: Any, column: str, where: str) -> Any:
    if not isinstance(value, dict) or "ground_truth" not in value:
        raise DataError(
            f"{where}: {column} must hold ground_truth, found {shown(value)}; correct or remove "
            "the row"
        )
    return value["ground_truth"]


def _after_mark(value: Any, shape: Shape, where: str) -> str:
    _, mark, answer = str(value).rpartition("####")
    if not mark:
        raise DataError(
            f"{where}: {shape.answer_column}={shown(value)} has no '####', behind which the shape "
            "gsm8k has its answer; where the whole column is the answer, give "
            f"--prompt-column {shape.prompt_column} --answer-column {shape.answer_column}"
        )
    return answer
