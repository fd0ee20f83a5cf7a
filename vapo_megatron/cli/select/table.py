"""The table of a selection: the rows of the data that are kept, and columns of what was measured.

The rows become a table before anything is sampled, because not every JSONL file can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vapo_megatron.cli.select.rules import Measured
from vapo_megatron.config import DataConfig
from vapo_megatron.data.parquet import storable_array, write_table
from vapo_megatron.data.problems import Problem, jsonl_rows, parquet_file
from vapo_megatron.errors import DataError

METADATA_KEY = b"vapo_megatron.select"
"""Key of the rules and counts, as JSON, in the parquet file's metadata."""
MEASURED = (
    "pass_rate", "score_mean", "scores", "length_mean", "lengths", "truncated_fraction",
)  # fmt: skip
"""Columns that a selection adds, each of that name in Measured."""


def check_out(out: Path, key: bytes = METADATA_KEY, kind: str = "selection") -> None:
    """Refuse to replace what is no file of this kind; key: what such a file's metadata has.

    Raises:
        DataError: names the file.
    """
    if out.suffix != ".parquet":
        raise DataError(f"--out={out} must end in .parquet; change it")
    if out.exists():
        with parquet_file(out) as file:
            if key not in (file.schema_arrow.metadata or {}):
                raise DataError(f"--out={out} exists and is no {kind}; give another file")


def source_table(data: Path, columns: DataConfig, problems: Sequence[Problem]) -> Any:
    """Return all rows of the data with all their columns, as a table that parquet can hold.

    The columns of a parquet file keep their types; of a JSONL file the ground truths become text,
    which they are read as anyway.

    Args:
        data: the file that problems were read from, with columns.answer_column.
        columns: names the column of ground truths.
        problems: all of them.

    Raises:
        DataError: a column of a JSONL file cannot be a parquet file's; names it and its lines.
    """
    if data.suffix == ".parquet":
        with parquet_file(data) as file:
            return file.read()
    import pyarrow

    values: dict[str, list[Any]] = {}
    lines = []
    for index, (line, row) in enumerate(jsonl_rows(data)):
        lines.append(line)
        for name, value in row.items():
            column = values.setdefault(name, [])
            column += [None] * (index - len(column))
            column.append(value)
    for column in values.values():
        column += [None] * (len(lines) - len(column))
    if columns.answer_column is not None:
        values[columns.answer_column] = [problem.answer for problem in problems]
    places = [f"line {line}" for line in lines]
    return pyarrow.table(
        {name: storable_array(name, of, places, str(data)) for name, of in values.items()}
    )


def write_selection(
    out: Path,
    table: Any,
    kept: Sequence[int],
    measured: Mapping[int, Measured],
    about: Mapping[str, Any],
    texts: Mapping[str, Sequence[str]],
) -> None:
    """Write the kept rows with all their columns; the same rows and numbers give the same bytes.

    Columns of the names of those that are added are replaced.

    Args:
        out: replaced atomically.
        table: from source_table.
        kept: indices of rows.
        measured: of all kept rows.
        about: JSON values for the file's metadata.
        texts: further columns of the kept rows, by name.
    """
    import pyarrow

    table = table.take(pyarrow.array(kept, pyarrow.int64()))
    of_kept = [measured[index] for index in kept]
    kinds = {"scores": pyarrow.list_(pyarrow.float64()), "lengths": pyarrow.list_(pyarrow.int32())}
    added = {
        name: pyarrow.array([getattr(m, name) for m in of_kept], kinds.get(name, pyarrow.float64()))
        for name in MEASURED
    }
    added |= {name: pyarrow.array(of, pyarrow.string()) for name, of in texts.items()}
    table = table.drop_columns([name for name in table.column_names if name in added])
    for name, values in added.items():
        table = table.append_column(name, values)
    write_table(out, table, METADATA_KEY, about)
