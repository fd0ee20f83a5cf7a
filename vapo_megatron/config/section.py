"""What every section of the configuration is made of: strict fields with a sentence for --help."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """Frozen; unknown keys, NaN, infinity, and true or false for a number are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic would read as 0 or 1."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        members = get_args(annotation) or (annotation,)
        if isinstance(value, bool) and (int in members or float in members):
            raise PydanticCustomError("truth", "Input should be a number")
        return value


def field(default: Any, description: str, symbol: str | None = None, **rules: Any) -> Any:
    """Declare a field with its sentence for --help and, where there is one, the paper's symbol."""
    extra: Any = {"symbol": symbol} if symbol else None
    if isinstance(default, list):
        rules["default_factory"] = lambda: list(default)
    else:
        rules["default"] = default
    return Field(description=description, json_schema_extra=extra, **rules)
