"""What the files of a run directory must hold for the report, checked line by line.

Only fields that the report reads are checked; other versions may write others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from vapo_megatron.config.help import explain_errors
from vapo_megatron.config.metrics import describe
from vapo_megatron.config.schema import VapoConfig
from vapo_megatron.errors import DataError

_Strict = ConfigDict(strict=True)
_Number = Annotated[float, Field(allow_inf_nan=False)]
LARGEST = 2**63
"""Whole numbers of a file are below it."""
_Count = Annotated[int, Field(ge=0, lt=LARGEST)]
_Size = Annotated[int, Field(ge=1, lt=LARGEST)]


def _as_span(span: list[Any]) -> list[Any]:
    """JSON has no tuples, so the type cannot say it."""
    phase, *numbers = span or [None]
    are_numbers = all(type(number) in (int, float) and _is_finite(number) for number in numbers)
    if not (isinstance(phase, str) and len(numbers) == 3 and are_numbers):
        raise ValueError("[phase, step, begin, end]")
    return span


_Span = Annotated[list[Any], AfterValidator(_as_span)]


class ProblemsRow(TypedDict):
    """A line of problems.jsonl or held_out.jsonl."""

    __pydantic_config__ = _Strict  # type: ignore[misc]
    group_size: _Size | list[_Size]
    problems: list[_Count]
    correct: list[_Count]


class TimelineRow(TypedDict):
    """A line of timeline.jsonl: phase, step, begin and end of each span."""

    __pydantic_config__ = _Strict  # type: ignore[misc]
    trainer: list[_Span]
    sampler: list[_Span]


class Tokens(TypedDict):
    """Of a response: one entry per kept token."""

    __pydantic_config__ = _Strict  # type: ignore[misc]
    pieces: list[str]
    entropy: NotRequired[list[_Number | None]]
    advantages: NotRequired[list[_Number | None]]
    values: NotRequired[list[_Number | None]]


def _as_long(tokens: Tokens) -> Tokens:
    lengths = {len(numbers) for numbers in tokens.values()}  # type: ignore[arg-type]
    if len(lengths) > 1:
        raise ValueError("lists of one length")
    return tokens


class EpisodeTurn(TypedDict):
    """Of a response that an environment answers."""

    __pydantic_config__ = _Strict  # type: ignore[misc]
    action: str
    observation: str
    reward: _Number
    end: _Size


class Response(TypedDict):
    """A response of a Group."""

    __pydantic_config__ = _Strict  # type: ignore[misc]
    status: str
    reward: _Number
    num_tokens: _Count
    truncated: bool
    text: str
    tokens: NotRequired[Annotated[Tokens, AfterValidator(_as_long)]]
    note: NotRequired[str]
    cut_by: NotRequired[str]
    begin: NotRequired[str]
    turns: NotRequired[list[EpisodeTurn]]


class Group(TypedDict):
    """A line of rollouts/step_*.jsonl."""

    __pydantic_config__ = _Strict  # type: ignore[misc]
    prompt: str
    answer: str
    responses: list[Response]


_ADAPTERS = {kind: TypeAdapter(kind) for kind in (ProblemsRow, TimelineRow, Group)}


def check_line(found: Mapping[str, Any], kind: Any, where: str) -> None:
    """Refuse a line whose fields have other types.

    Args:
        found: a line's object.
        kind: ProblemsRow, TimelineRow or Group.
        where: the file and the line.

    Raises:
        DataError: names the field.
    """
    try:
        _ADAPTERS[kind].validate_python(found)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        rule = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        wrong = f"is {first['input']!r:.60}, but must be {rule}"
        if first["type"] == "missing":
            wrong = "is missing"
        raise DataError(f"{where}: {field} {wrong}; remove the line") from None


def check_metrics(row: Mapping[str, Any], where: str) -> None:
    """Refuse a row of metrics.jsonl with a metric that is neither a finite number nor null."""
    for name, value in row.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if describe(name) and value is not None and not (is_number and _is_finite(value)):
            raise DataError(
                f"{where}: {name} is {value!r:.60}, neither a finite number nor null; remove the "
                "line"
            )


def _is_finite(number: int | float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # a whole number that no float holds
        return False


def check_config(file: Path, config: Mapping[str, Any]) -> None:
    """Refuse a config.yaml with fields of other types; fields of other versions may stay.

    Raises:
        DataError: names the field.
    """
    known: dict[str, Any] = {}
    for name, value in config.items():
        info = VapoConfig.model_fields.get(name)
        fields = getattr(info and info.annotation, "model_fields", None)
        if fields is not None and not isinstance(value, dict | None):
            raise DataError(f"{file}: {name}={value!r:.60} must be a section of fields; restore it")
        if fields is not None:
            known[name] = {n: v for n, v in (value or {}).items() if n in fields}
        elif info is not None:
            known[name] = value
    try:
        VapoConfig.model_validate(known, strict=True)
    except ValidationError as error:
        # Values out of today's range may have been in it.
        wrong = [e for e in error.errors() if e["type"].endswith(("_type", "_parsing"))]
        if wrong:
            raise DataError(f"{file}: {explain_errors(wrong)[0]}") from None
