"""The rows of a parquet file's batches as Python values."""

from __future__ import annotations

from typing import Any


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
