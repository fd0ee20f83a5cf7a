"""Streams rows of JSONL, CSV and parquet files, local or from the Hugging Face hub."""

from __future__ import annotations

import csv
import itertools
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from vapo_megatron.cli.prepare.columns import Shape
from vapo_megatron.data.problems import file_rows, parquet_file
from vapo_megatron.errors import DataError

ALL = "all"
"""In place of the names of all columns."""
ENDINGS = (".jsonl", ".csv", ".parquet")
_HUB_ID = re.compile(r"(?P<id>[\w-][\w.-]*/[\w-][\w.-]*)(:(?P<file>[\w./ -]+))?")

Row = tuple[str, dict[str, Any]]
"""(file and line or row, for messages; columns and values)."""
Choose = Callable[[Sequence[str], str], Shape]
"""(columns, file) -> shape; see columns.choose_shape."""


def find_file(source: str) -> Path:
    """Return the path of a local file, or download a data set's file from the Hugging Face hub.

    Args:
        source: a path, OWNER/NAME or OWNER/NAME:PATH/IN/IT.

    Raises:
        DataError: it does not exist, has an unknown ending or cannot be downloaded, or the data set
            has several files, which the message lists.
    """
    path = Path(source)
    if path.is_file():
        if path.suffix not in ENDINGS:
            raise DataError(
                f"data file {path}: files end in {', '.join(ENDINGS)}, found {path.suffix!r}; "
                "convert or rename it"
            )
        return path
    if path.is_dir():
        raise DataError(f"data file {source} is a directory; give its files by their names")
    hub_id = _HUB_ID.fullmatch(source)
    if path.exists() or hub_id is None or (path.suffix in ENDINGS and hub_id["file"] is None):
        raise DataError(
            f"data file {source} does not exist; give an existing file, or OWNER/NAME of a data "
            "set on the Hugging Face hub"
        )
    return _fetch(hub_id["id"], hub_id["file"])


def _fetch(hub_id: str, file: str | None) -> Path:
    import huggingface_hub

    try:
        if file is None:
            names = huggingface_hub.list_repo_files(hub_id, repo_type="dataset")
            file = only_data_file(hub_id, names)
        return Path(huggingface_hub.hf_hub_download(hub_id, file, repo_type="dataset"))
    except DataError:
        raise
    except Exception as error:  # The hub's own errors, its HTTP library's, the system's.
        raise DataError(
            f"--data={hub_id} cannot be fetched from the Hugging Face hub: "
            f"{' '.join(str(error).split())[:300]}; check the name and the network, or give a "
            "local file"
        ) from None


def only_data_file(hub_id: str, names: Sequence[str]) -> str:
    """Return the only readable file of a data set. DataError: there are several, or none."""
    files = [name for name in names if name.endswith(ENDINGS)]
    if len(files) != 1:
        found = ", ".join(files[:20]) or "none"
        raise DataError(
            f"--data={hub_id} must have one file that ends in {', '.join(ENDINGS)}, found {found}; "
            f"name it: --data {hub_id}:{files[0] if files else 'FILE'}"
        )
    return files[0]


def count_rows(path: Path) -> int:
    """Return a file's number of rows; for a text file an upper bound, its number of lines."""
    if path.suffix == ".parquet":
        with parquet_file(path) as file:
            return file.metadata.num_rows
    with path.open("rb") as text:
        return sum(block.count(b"\n") for block in iter(lambda: text.read(1 << 20), b""))


def read_rows(
    path: Path, choose: Choose, dropped: Collection[str] = (), seen: set[str] | None = None
) -> tuple[Shape, Iterator[Row]]:
    """Return a file's shape and an iterator over its rows, which are read in batches.

    Args:
        path: the file.
        choose: chooses its shape.
        dropped: columns beside the shape's that are not read; ALL: none is.
        seen: gets the names of all columns, by the time that the rows have been read.

    Raises:
        DataError: here or while iterating; names the file and the line or row.
    """
    seen = set() if seen is None else seen
    if path.suffix == ".parquet":
        with parquet_file(path) as file:
            shape = choose(file.schema_arrow.names, str(path))
            names = [n for n in file.schema_arrow.names if _is_read(n, shape, dropped)]
            seen.update(file.schema_arrow.names)
        return shape, file_rows(path, names)
    rows = file_rows(path) if path.suffix == ".jsonl" else _csv(path)
    first = next(rows, None)
    if first is None:
        raise DataError(f"data file {path} holds no rows; give a file with at least one")
    shape = choose(list(first[1]), str(path))
    return shape, _without(itertools.chain([first], rows), shape, dropped, seen)


def _without(
    rows: Iterator[Row], shape: Shape, dropped: Collection[str], seen: set[str]
) -> Iterator[Row]:
    for where, row in rows:
        seen.update(row)
        yield where, {name: v for name, v in row.items() if _is_read(name, shape, dropped)}


def _is_read(name: str, shape: Shape, dropped: Collection[str]) -> bool:
    return name in shape.columns or not (ALL in dropped or name in dropped)


def _csv(path: Path) -> Iterator[Row]:
    """Yield rows, named by their last line: quoted fields may contain line breaks."""
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, None)
            if not header or len(set(header)) != len(header):
                raise DataError(
                    f"{path}, line 1 must name each column once, found {header or 'nothing'}; "
                    "write a header"
                )
            for values in reader:
                where = f"{path}, line {reader.line_num}"
                if not values:
                    continue
                if len(values) != len(header):
                    raise DataError(
                        f"{where} has {len(values)} fields, the header {len(header)}; fields with "
                        "commas, quotes or line ends stand in double quotes"
                    )
                yield where, dict(zip(header, values))
        except csv.Error as error:
            raise DataError(
                f"{path}, line {reader.line_num} is not CSV ({error}); fields with commas, quotes "
                "or line ends stand in double quotes"
            ) from None
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} is not UTF-8 behind line {reader.line_num} ({error.reason}); save it as "
                "UTF-8"
            ) from None
