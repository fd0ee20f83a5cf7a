"""Columns of parquet files as Python values, and such values as columns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vapo_megatron.data.disk_errors import describe_write_error
from vapo_megatron.data.storage import replacing
from vapo_megatron.errors import DataError


def own_digits(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of a pyarrow.RecordBatch, floats with the shortest digits of their type.

    pyarrow widens: 0.1 of a column of float32 would become 0.10000000149011612.
    """
    rows: list[dict[str, Any]] = batch.to_pylist()
    for field in batch.schema:
        if not _has_short_floats(field.type):
            continue
        for row in rows:
            row[field.name] = _shortened(row[field.name], field.type)
    return rows


def _parts(kind: Any) -> dict[str | None, Any]:
    """Return the types within a type, by the name of a struct's field."""
    import pyarrow
    from pyarrow import types

    if isinstance(kind, pyarrow.BaseExtensionType):
        return {None: kind.storage_type}
    if types.is_struct(kind):
        return {field.name: field.type for field in kind}
    if types.is_map(kind):
        return {"key": kind.key_type, "value": kind.item_type}
    if types.is_dictionary(kind) or hasattr(kind, "value_type"):
        return {None: kind.value_type}
    return {}


def _has_short_floats(kind: Any) -> bool:
    from pyarrow import types

    if types.is_float16(kind) or types.is_float32(kind):
        return True
    return any(map(_has_short_floats, _parts(kind).values()))


def _shortened(value: Any, kind: Any) -> Any:
    import numpy
    from pyarrow import types

    if value is None:
        return None
    if types.is_float16(kind) or types.is_float32(kind):
        short = numpy.float16 if types.is_float16(kind) else numpy.float32
        return float(str(short(value)))
    parts = _parts(kind)
    if not any(map(_has_short_floats, parts.values())):
        return value
    if types.is_struct(kind):
        return {name: _shortened(item, parts[name]) for name, item in value.items()}
    if types.is_map(kind):
        return [(_shortened(k, parts["key"]), _shortened(v, parts["value"])) for k, v in value]
    if isinstance(value, list):
        return [_shortened(item, parts[None]) for item in value]
    return _shortened(value, parts[None])


def write_table(out: Path, table: Any, key: bytes, about: Mapping[str, Any]) -> None:
    """Replace a parquet file atomically; its metadata has one key, with JSON values.

    Raises:
        DataError: it cannot be written; names it and the remedy.
    """
    import pyarrow.parquet

    table = table.replace_schema_metadata({key: json.dumps(about).encode()})
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as file:
            pyarrow.parquet.write_table(table, file)
    except OSError as error:
        raise DataError(describe_write_error(out, error)) from None


def storable_array(name: str, values: Sequence[Any], places: Sequence[str], data: str) -> Any:
    """Return a column's pyarrow array, which a parquet file can hold.

    Args:
        name: the column's.
        values: None: the row has none.
        places: of each value, such as a line.
        data: which has them.

    Raises:
        DataError: names the first place that does not fit, and one that it does not fit to.
    """
    try:
        return _storable(name, values)
    except _refusals():
        pass
    fits, fails = 0, len(values)  # How many of the first values fit, and how many do not.
    while fails - fits > 1:
        middle = (fits + fails) // 2
        try:
            _storable(name, values[:middle])
            fits = middle
        except _refusals():
            fails = middle
    try:
        own = _storable(name, [values[fits]]).type
    except _refusals() as error:
        raise DataError(
            f"{data}, {places[fits]}: column {name!r} cannot be stored in a parquet file "
            f"({' '.join(str(error).split())}); correct it there"
        ) from None
    others = _storable(name, values[:fits]).type
    first = next(place for place, value in zip(places, values) if value is not None)
    raise DataError(
        f"{data}: column {name!r} is {str(others):.80} in {first} and {str(own):.80} in "
        f"{places[fits]}, but a column of a parquet file has one type; make all its values one, "
        "such as text"
    )


def _storable(name: str, values: Sequence[Any]) -> Any:
    """Return a pyarrow array that can be written; raises one of _refusals."""
    import pyarrow
    import pyarrow.parquet

    array = pyarrow.array(values)
    # Not all that is an array can be written, such as objects without fields.
    pyarrow.parquet.write_table(pyarrow.table({name: array[:0]}), pyarrow.BufferOutputStream())
    return array


def _refusals() -> tuple[type[Exception], ...]:
    """Return what pyarrow raises for values that it cannot store."""
    import pyarrow

    return (pyarrow.ArrowException, TypeError, ValueError, OverflowError)
