"""Layouts of published math data sets: which columns hold problem and answer, and in what form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vapo_megatron.data.chat import (
    Message,
    from_text,
    read_messages,
    refuse_options,
    template_options,
)
from vapo_megatron.data.ground_truths import answer_text, excerpt
from vapo_megatron.data.problems import prompt_text
from vapo_megatron.errors import DataError
from vapo_megatron.reward.extraction import MAX_ANSWER_CHARACTERS, final_answer
from vapo_megatron.reward.hybrid import is_prose

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
    answer_column: str | None
    """None: of messages the last turn, of others there is none."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Those that it has."""
        return tuple(column for column in self[1:] if column is not None)


SHAPES = {
    "verl": Shape("verl", "prompt", "reward_model"),
    "gsm8k": Shape("gsm8k", "question", "answer"),
    "aime": Shape("aime", "problem", "answer"),
    "plain": Shape("plain", "prompt", "answer"),
    "messages": Shape("messages", "messages", None),
    "sharegpt": Shape("sharegpt", "conversations", None),
}
"""verl: chat messages in `prompt`, `reward_model.ground_truth`, for example DAPO-Math-17k.
gsm8k: a worked solution with the answer after ####. aime, plain: text and answer. Any column of
prompts may hold chat messages. messages, sharegpt: chats that may end with the assistant's turn,
whose final answer is the answer unless there is a column `answer`; taken where no other fits."""
_CHATS = ("messages", "sharegpt")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
"""ShareGPT's `from` that is not the role's own name."""


class Question(NamedTuple):
    """A row's problem and answer, unchanged."""

    prompt: str
    """The text, or the last message's."""
    answer: str
    """Empty: there is none."""
    earlier: tuple[Message, ...] = ()
    """The messages before it."""


class NoAnswer(DataError):
    """A row's answer is missing or cannot be read."""


def choose_shape(
    columns: Sequence[str],
    where: str,
    *,
    name: str | None = None,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    needs_answers: bool = True,
) -> Shape:
    """Choose the shape of a file: plain if its columns are given, else by name, else what fits.

    Args:
        columns: of the file.
        where: the file, for messages.
        name: key of SHAPES.
        prompt_column, answer_column: given together, spelled as in the file; the first alone unless
            needs_answers.
        needs_answers: a file without a column of answers has no shape.

    Returns:
        The shape, its columns spelled as in the file; those of SHAPES match regardless of case.

    Raises:
        DataError: none fits, several do, or the requested one does not.
    """
    present = ", ".join(columns) or "none"
    if prompt_column or answer_column:
        if prompt_column is None or (answer_column is None and needs_answers):
            raise DataError(
                "--prompt-column and --answer-column belong together; give both, or "
                "--without-answers"
            )
        for option, column in (
            ("--prompt-column", prompt_column),
            ("--answer-column", answer_column),
        ):
            if column is not None and column not in columns:
                raise DataError(
                    f"{where} has no column {column!r}; give {option} as one of those it has: "
                    f"{present}"
                )
        return Shape("plain", prompt_column, answer_column)
    # An exact match wins over one that differs in case, and of several such the first wins.
    spelled = {c.lower(): c for c in reversed(columns)} | {c: c for c in columns}
    fitting = _fitting(spelled, name, needs_answers=needs_answers)
    if name is not None and name not in fitting:
        raise DataError(
            f"{where}: shape {name} needs the columns {' and '.join(SHAPES[name].columns)}, it has "
            f"{present}; give another --shape, or --prompt-column and --answer-column"
        )
    if name is not None or len(fitting) == 1:
        return fitting[name or next(iter(fitting))]
    if fitting:
        raise DataError(
            f"{where} could have the shape {' or '.join(fitting)}: it has {present}; give --shape"
        )
    known = "; ".join(f"{s.name}: {', '.join(s.columns)}" for s in SHAPES.values())
    raise DataError(
        f"{where}: its columns fit no known shape ({known}), it has {present}; give "
        "--prompt-column and --answer-column, or --without-answers where there are none"
    )


def _fitting(
    spelled: Mapping[str, str], name: str | None, *, needs_answers: bool
) -> dict[str, Shape]:
    """Return the shapes that fit columns, by lower case; several only where none is the best."""
    found = {
        shape.name: Shape(shape.name, spelled[shape.prompt_column], spelled[shape.answer_column])
        for shape in SHAPES.values()
        if shape.answer_column is not None and all(c in spelled for c in shape.columns)
    }
    chats = {
        chat: Shape(chat, spelled[SHAPES[chat].prompt_column], spelled.get("answer"))
        for chat in _CHATS
        if SHAPES[chat].prompt_column in spelled
    }
    if name in chats:
        return chats
    if found or chats or needs_answers:
        return found or chats
    # The same column of prompts may be that of several shapes.
    prompts = {s.prompt_column: s.name for s in SHAPES.values() if s.prompt_column in spelled}
    return {name: Shape("plain", spelled[column], None) for column, name in prompts.items()}


def read_problem(
    shape: Shape, row: Mapping[str, Any], where: str, *, needs_answers: bool = True
) -> Question:
    """Return the problem and answer of a row, unchanged; `where` names file and row in errors.

    Raises:
        DataError: a value is missing or has the wrong type; NoAnswer where it is the answer's.
    """
    for column in shape.columns:
        if column not in row:
            raise DataError(
                f"{where} has no column {column!r}, which the file's other rows have: it has "
                f"{', '.join(row) or 'none'}; correct or remove the row"
            )
    prompt, response = from_text(row[shape.prompt_column], shape.prompt_column, where), None
    earlier: list[Message] = []
    if isinstance(prompt, list):
        turns = list(map(_of_sharegpt, prompt)) if shape.name == "sharegpt" else prompt
        if shape.name in _CHATS and turns and _role(turns[-1]) == "assistant":
            *turns, response = turns
        *earlier, last = read_messages(turns, shape.prompt_column, where)
        prompt = last["content"]
        if last["role"] != "user":
            raise DataError(
                f"{where}: {shape.prompt_column} ends with a message of role {last['role']}, and a "
                "problem is the user's; train on the file as it is, without vapo prepare"
            )
    else:
        refuse_options(template_options(row, where), shape.prompt_column, where)
    problem = prompt_text(prompt, shape.prompt_column, where)
    try:
        answer = _answer(shape, row, response, where)
    except DataError as error:
        raise NoAnswer(f"{error}, or leave such rows out with --skip-unusable") from None
    if needs_answers and not answer:
        column = shape.answer_column or shape.prompt_column
        raise NoAnswer(
            f"{where}: {column}={excerpt(row[column])} has no answer; correct or remove the row, "
            "or accept such rows with --without-answers, for a verifier that needs none, or leave "
            "them out with --skip-unusable"
        )
    return Question(problem, answer, tuple(earlier))


def _answer(shape: Shape, row: Mapping[str, Any], response: Any, where: str) -> str:
    """Return a row's answer, or nothing; response: the last turn of the assistant, if any."""
    if shape.answer_column is None:
        return "" if response is None else _final_answer(response, shape.prompt_column, where)
    value = row[shape.answer_column]
    if shape.name == "verl":
        value = _ground_truth(value, shape.answer_column, where)
    if shape.name == "gsm8k" and value not in (None, ""):
        value = _after_mark(value, shape, where)
    return answer_text(value, shape.answer_column, where)


def _final_answer(response: Any, column: str, where: str) -> str:
    """Return the marked answer of an assistant's turn, or the turn itself where it is no prose."""
    text = answer_text(response.get("content"), column, where)
    found = final_answer(text)
    if found is None and (len(text) > MAX_ANSWER_CHARACTERS or is_prose(text)):
        raise DataError(
            f"{where}: the last message of {column}, {excerpt(text)}, has no final answer behind "
            "\\boxed, 'Answer:' or ####; name a column with --prompt-column and --answer-column"
        )
    return found or text


def _of_sharegpt(turn: Any) -> Any:
    """Return a turn with the names of a chat message."""
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    return {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn.get("value")}


def _role(turn: Any) -> Any:
    return turn.get("role") if isinstance(turn, dict) else None


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
            f"{where}: {column} must hold ground_truth, found {excerpt(value)}; correct or remove "
            "the row"
        )
    return value["ground_truth"]


def _after_mark(value: Any, shape: Shape, where: str) -> str:
    _, mark, answer = str(value).rpartition("####")
    if not mark:
        raise DataError(
            f"{where}: {shape.answer_column}={excerpt(value)} has no '####', behind which the "
            "shape gsm8k has its answer; where the whole column is the answer, give "
            f"--prompt-column {shape.prompt_column} --answer-column {shape.answer_column}"
        )
    return answer
