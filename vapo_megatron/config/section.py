"""Base class of the configuration sections: strict fields with a description for --help."""

from __future__ import annotations

from typing import Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """Frozen; rejects unknown keys, NaN, infinity, and booleans for numbers."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic would coerce true and false to 1 and 0, in lists too."""
        is_numeric = _is_numeric(cls.model_fields[str(info.field_name)].annotation)
        if is_numeric and _has_bool(value):
            rule = (
                "Input should be a number" if isinstance(value, bool) else "Input should be numbers"
            )
            raise PydanticCustomError("bool_as_number", rule)
        return value

    @field_validator("*")
    @classmethod
    def _reject_what_64_bits_do_not_hold(cls, value: Any) -> Any:
        """Python's integers have no end, torch's do."""
        if isinstance(value, int) and value >= 2**63:
            raise PydanticCustomError("too_large", "Input should be below 2**63")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _take_false_for_off(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML takes a bare `off` for false, also where "off" is among the choices."""
        choices = get_args(cls.model_fields[str(info.field_name)].annotation)
        return "off" if value is False and "off" in choices else value


def _is_numeric(annotation: Any) -> bool:
    """Whether a field takes a number, or a list of numbers."""
    return annotation in (int, float) or any(map(_is_numeric, get_args(annotation)))


def _has_bool(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, list) and any(map(_has_bool, value)))


def field(default: Any, description: str, symbol: str | None = None, **rules: Any) -> Any:
    """Declare a field with its description for --help and, if any, its symbol in the paper."""
    extra: Any = {"symbol": symbol} if symbol else None
    if isinstance(default, list | dict):
        rules["default_factory"] = default.copy
    else:
        rules["default"] = default
    return Field(description=description, json_schema_extra=extra, **rules)


def sections_by_name(annotation: Any) -> type[Section] | None:
    """Return the section of a field that holds several by name, dict[str, Section]; else None."""
    value = get_args(annotation)[1] if get_origin(annotation) is dict else None
    return value if isinstance(value, type) and issubclass(value, Section) else None
