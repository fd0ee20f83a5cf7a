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
        """Pydantic would coerce true and false to 1 and 0."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        members = get_args(annotation) or (annotation,)
        if isinstance(value, bool) and (int in members or float in members):
            raise PydanticCustomError("bool_as_number", "Input should be a number")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _take_false_for_off(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML takes a bare `off` for false, also where "off" is among the choices."""
        choices = get_args(cls.model_fields[str(info.field_name)].annotation)
        return "off" if value is False and "off" in choices else value


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
