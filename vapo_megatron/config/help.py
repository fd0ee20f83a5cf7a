"""Describes configuration fields for --help and explains validation errors."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from vapo_megatron.config.data import FileConfig, SourceConfig
from vapo_megatron.config.reward import ScaleConfig
from vapo_megatron.config.schema import VapoConfig
from vapo_megatron.config.section import sections_by_name


def describe_fields() -> str:
    """Return every field's default, symbol in the paper, accepted values and description."""
    lines = []
    for name, top in VapoConfig.model_fields.items():
        section = top.annotation
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            lines += [_describe(name, top), ""]
            continue
        lines.append(f"{name}: {(section.__doc__ or '').strip()}")
        for field, info in section.model_fields.items():
            lines += _describe_all(f"{name}.{field}", info)
        lines.append("")
    return "\n".join(lines)


def _describe_all(name: str, info: Any) -> list[str]:
    """Describe a field, and those of the sections that it holds by name; or an inner section's."""
    if (own := getattr(info.annotation, "model_fields", None)) is not None:
        return [_describe(f"{name}.{field}", of_field) for field, of_field in own.items()]
    named = sections_by_name(info.annotation)
    fields = named.model_fields if named else {}
    each = [_describe(f"{name}.NAME.{option}", of_option) for option, of_option in fields.items()]
    return [_describe(name, info), *each]


def _describe(name: str, info: Any) -> str:
    extra = info.json_schema_extra
    symbol = f" [{extra['symbol']}]" if isinstance(extra, dict) else ""
    return f"  {name}={_default(info)}{symbol}  ({_kind(info)})\n      {info.description}"


def _default(info: Any) -> str:
    value = info.get_default(call_default_factory=True)
    return yaml.safe_dump(value, default_flow_style=True).splitlines()[0]


_KIND_NAMES = {int: "integer", float: "number", str: "text", bool: "true | false"}
_KIND_NAMES |= {type(None): "null", list[int]: "list of integers", list[float]: "[number, number]"}
_KIND_NAMES |= {dict[str, dict[str, Any]]: "NAME.OPTION=VALUE"}
_NAMED = (FileConfig, SourceConfig, ScaleConfig)
_KIND_NAMES |= {dict[str, section]: "NAME.FIELD=VALUE" for section in _NAMED}  # type: ignore
_KIND_NAMES |= {list[str]: "list of texts", dict[str, Any]: "NAME=VALUE"}
_KIND_NAMES |= {list[list[float]]: "[[number, number], ...]"}
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
        elif get_origin(member) is list and get_origin(get_args(member)[0]) is Literal:
            names.append(f"list of {', '.join(get_args(get_args(member)[0]))}")
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
        by_field.setdefault(_field_path(error["loc"])[0], []).append(error)
    return [_explain_field(path, found) for path, found in by_field.items()]


def _field_path(loc: Sequence[Any]) -> tuple[tuple[str, ...], Any]:
    """Return the names that lead to a field, with the index in a list, and the field."""
    section: Any = VapoConfig
    path: list[str] = []
    rest = [*loc]
    while section is not None and rest:
        path.append(str(rest.pop(0)))
        info = section.model_fields[path[-1]]
        section = info.annotation if hasattr(info.annotation, "model_fields") else None
        if (named := sections_by_name(info.annotation)) and len(rest) > 1:
            path.append(str(rest.pop(0)))
            section = named
    # Below the field, strings name members of a union and integers are list indices.
    return (*path, *(f"[{p}]" for p in rest if isinstance(p, int))), info


def _explain_field(path: tuple[str, ...], errors: Sequence[Any]) -> str:
    rules = [e["msg"].removeprefix("Input should be ").split(", unable to ")[0] for e in errors]
    rules = [r.replace("List should have", "a list of").split(" after valid")[0] for r in rules]
    if len(rules) > 1:
        rules = [rule.split(",")[0] for rule in rules]
    _, info = _field_path(errors[0]["loc"])
    name = ".".join(p for p in path if not p.startswith("["))
    name += "".join(p for p in path if p.startswith("["))
    if hasattr(info.annotation, "model_fields"):
        return f"{name}={errors[0]['input']!r:.60} must be a section; set {name}.FIELD=VALUE"
    return (
        f"{name}={errors[0]['input']!r} must be {' or '.join(dict.fromkeys(rules))}; change it, or "
        f"leave it out for the default {_default(info)} ({info.description})"
    )
