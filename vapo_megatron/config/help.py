"""Describes configuration fields for --help and explains validation errors."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from vapo_megatron.config.schema import VapoConfig


def describe_fields() -> str:
    """Return every field's default, symbol in the paper, accepted values and description."""
    lines = []
    for name, top in VapoConfig.model_fields.items():
        section = top.annotation
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            lines += [_describe(name, top), ""]
            continue
        lines.append(f"{name}: {(section.__doc__ or '').strip()}")
        lines += [_describe(f"{name}.{f}", info) for f, info in section.model_fields.items()]
        lines.append("")
    return "\n".join(lines)


def _describe(name: str, info: Any) -> str:
    extra = info.json_schema_extra
    symbol = f" [{extra['symbol']}]" if isinstance(extra, dict) else ""
    return f"  {name}={_default(info)}{symbol}  ({_kind(info)})\n      {info.description}"


def _default(info: Any) -> str:
    return yaml.safe_dump(info.get_default(call_default_factory=True)).splitlines()[0]


_KIND_NAMES = {int: "integer", float: "number", str: "text", bool: "true | false"}
_KIND_NAMES |= {type(None): "null", list[int]: "list of integers", list[float]: "[number, number]"}
_KIND_NAMES |= {dict[str, dict[str, Any]]: "NAME.OPTION=VALUE"}
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def _kind(info: Any) -> str:
    """The values that a field accepts, such as `number > 0 | null`."""
    members = get_args(info.annotation) if _is_union(info.annotation) else (info.annotation,)
    bounds = [
        f"{sign} {getattr(rule, key):g}"
        for rule in info.metadata
        for key, sign in _SIGNS.items()
        if getattr(rule, key, None) is not None
    ]
    names = []
    for member in members:
        if get_origin(member) is Literal:
            names += [str(choice) for choice in get_args(member)]
        else:
            numeric = member in (int, float)
            names.append(
                " ".join([_KIND_NAMES[member], ", ".join(bounds) if numeric else ""]).strip()
            )
    return " | ".join(names)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def explain_errors(errors: Sequence[Any]) -> list[str]:
    """Return one line per field from pydantic's `ValidationError.errors()`.

    For a union, pydantic reports one error per member; they are merged into one line.
    """
    by_field: dict[tuple[str, ...], list[Any]] = {}
    for error in errors:
        by_field.setdefault(_field_path(error["loc"]), []).append(error)
    return [_explain_field(path, found) for path, found in by_field.items()]


def _field_path(loc: Sequence[Any]) -> tuple[str, ...]:
    top = VapoConfig.model_fields[str(loc[0])].annotation
    is_section = isinstance(top, type) and issubclass(top, BaseModel)
    depth = 2 if is_section else 1
    # Below the field, strings name members of a union and integers are list indices.
    index = [f"[{p}]" for p in loc[depth:] if isinstance(p, int)]
    return tuple(str(p) for p in loc[:depth]) + tuple(index)


def _explain_field(path: tuple[str, ...], errors: Sequence[Any]) -> str:
    rules = [e["msg"].removeprefix("Input should be ").split(", unable to ")[0] for e in errors]
    if len(rules) > 1:
        rules = [rule.split(",")[0] for rule in rules]
    names = [p for p in path if not p.startswith("[")]
    fields = VapoConfig.model_fields
    for name in names[:-1]:
        fields = fields[name].annotation.model_fields  # type: ignore[union-attr]
    info = fields[names[-1]]
    name = ".".join(names) + "".join(p for p in path if p.startswith("["))
    return (
        f"{name}={errors[0]['input']!r} must be {' or '.join(dict.fromkeys(rules))}; change it, or "
        f"leave it out for the default {_default(info)} ({info.description})"
    )
