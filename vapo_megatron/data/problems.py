"""Reads problems (a prompt and its answer) from JSONL and parquet files."""

from __future__ import annotations

import dataclasses
import decimal
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vapo_megatron.errors import DataError


@dataclasses.dataclass(frozen=True)
class Problem:
    """One row of a data set."""

    prompt: str
    answer: str
    """Ground truth."""


def load_problems(
    path: str | Path, prompt_column: str = "prompt", answer_column: str = "answer"
) -> list[Problem]:
    """Read every row of a `.jsonl` or `.parquet` file, in the file's order, duplicates included.

    Prompts are text; answers are text or numbers, which become text.

    Raises:
        DataError: names the file, the line (from 1) or row (from 0), what is wrong and the remedy.
    """
    path = Path(path)
    readers = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise DataError(
            f"data file {path}: files end in {' or '.join(readers)}, found {path.suffix!r}; "
            "convert it with tools/prepare_prompts.py"
        )
    if not path.is_file():
        raise DataError(f"data file {path} does not exist; give the path of an existing file")
    columns = (prompt_column, answer_column)
    problems = [
        Problem(_prompt(row[prompt_column], prompt_column, where), _answer(row, columns, where))
        for where, row in readers[path.suffix](path, columns)
    ]
    if not problems:
        raise DataError(f"data file {path} holds no problems; give a file with at least one row")
    return problems


def _jsonl_rows(path: Path, columns: tuple[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{where} is not UTF-8 ({error.reason}); save it as UTF-8"
                ) from None
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{where} is not JSON ({error}); each line must be one JSON object"
                ) from None
            if not isinstance(row, dict):
                raise DataError(
                    f"{where} holds a {type(row).__name__}; each line must be one JSON object"
                )
            _check_columns(columns, row, where)
            yield where, row


def _parquet_rows(path: Path, columns: tuple[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_columns(columns, file.schema_arrow.names, str(path))
            row = 0
            for batch in file.iter_batches(columns=list(columns)):
                for values in batch.to_pylist():
                    yield f"{path}, row {row}", values
                    row += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"data file {path} is not a readable parquet file ({error}); write it again"
        ) from None


def _check_columns(columns: tuple[str, str], present: Iterable[str], where: str) -> None:
    fields = ("data.prompt_column", "data.answer_column")
    for field, column in zip(fields, columns):
        if column not in present:
            raise DataError(
                f"{where} has no column {column!r}; set {field} to one of those it has: "
                f"{', '.join(present) or 'none'}"
            )


def _prompt(value: Any, column: str, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise DataError(f"{where}: {column}={value!r} must be a text that is not empty; correct it")
    return value


def _answer(row: dict[str, Any], columns: tuple[str, str], where: str) -> str:
    value = row[columns[1]]
    answer = ""
    if isinstance(value, str):
        answer = value.strip()
    elif isinstance(value, float) and math.isfinite(value):
        answer = f"{decimal.Decimal(repr(value)):f}"  # no exponent: 1e-07 would read as 1*e - 7
    elif isinstance(value, int) and not isinstance(value, bool):
        answer = str(value)
    if not answer:
        raise DataError(
            f"{where}: {columns[1]}={value!r} must be a number or a text that is not empty; "
            "correct or remove the row"
        )
    return answer
