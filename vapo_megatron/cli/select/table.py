"""Writes the prompts that are kept: the rows of their file, and columns of what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vapo_megatron.cli.select.rules import Measured
from vapo_megatron.config import DataConfig
from vapo_megatron.data.problems import Problem, jsonl_rows, parquet_file
from vapo_megatron.data.storage import replacing
from vapo_megatron.errors import DataError

METADATA_KEY = b"vapo_megatron.select"
"""Key of the rules and counts, as JSON, in the parquet file's metadata."""


def check_out(out: Path) -> None:
    """Refuse to replace what is no selection.

    Raises:
        DataError: names the file.
    """
    if out.suffix != ".parquet":
        raise DataError(f"--out={out} must end in .parquet; change it")
    if out.exists():
        with parquet_file(out) as file:
            if METADATA_KEY not in (file.schema_arrow.metadata or {}):
                raise DataError(f"--out={out} exists and is no selection; give another file")


def write_selection(
    out: Path,
    data: Path,
    columns: DataConfig,
    problems: Sequence[Problem],
    kept: Sequence[int],
    measured: Mapping[int, Measured],
    about: Mapping[str, Any],
) -> None:
    """Write the kept rows with all their columns; the same rows and numbers give the same bytes.

    Columns of the names of those that are added are replaced. The columns of a parquet file keep
    their types; of a JSONL file the ground truths become text, which they are read as anyway.

    Args:
        out: replaced atomically.
        data: the file that problems were read from, with columns.answer_column.
        problems: all of them.
        kept: indices of rows.
        measured: of all kept rows.
        about: JSON values for the file's metadata.

    Raises:
        DataError: a column of a JSONL file has values of different types.
    """
    import pyarrow
    import pyarrow.parquet

    if data.suffix == ".parquet":
        with parquet_file(data) as file:
            table = file.read().take(pyarrow.array(kept, pyarrow.int64()))
    else:
        table = _jsonl_table(data, columns.answer_column, problems, kept)
    of_kept = [measured[index] for index in kept]
    added = {
        "pass_rate": pyarrow.array([m.pass_rate for m in of_kept], pyarrow.float64()),
        "score_mean": pyarrow.array([m.score_mean for m in of_kept], pyarrow.float64()),
        "scores": pyarrow.array([m.scores for m in of_kept], pyarrow.list_(pyarrow.float64())),
        "length_mean": pyarrow.array([m.length_mean for m in of_kept], pyarrow.float64()),
        "lengths": pyarrow.array([m.lengths for m in of_kept], pyarrow.list_(pyarrow.int32())),
        "truncated_fraction": pyarrow.array(
            [m.truncated_fraction for m in of_kept], pyarrow.float64()
        ),
    }
    table = table.drop_columns([name for name in table.column_names if name in added])
    for name, values in added.items():
        table = table.append_column(name, values)
    table = table.replace_schema_metadata({METADATA_KEY: json.dumps(about).encode()})
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as target:
        pyarrow.parquet.write_table(table, target)


def _jsonl_table(
    data: Path, answer_column: str | None, problems: Sequence[Problem], kept: Sequence[int]
) -> Any:
    import pyarrow

    chosen = set(kept)
    rows = [row for index, (_, row) in enumerate(jsonl_rows(data)) if index in chosen]
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        if name == answer_column:
            values = [problems[index].answer for index in kept]
        try:
            columns[name] = pyarrow.array(values)
        except (pyarrow.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise DataError(
                f"{data}: column {name!r} cannot be a column of a parquet file "
                f"({' '.join(str(error).split())}); give all rows values of one type there"
            ) from None
    return pyarrow.table(columns)
