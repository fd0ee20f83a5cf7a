"""A function as a tool: its JSON schema, and whether arguments fit it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match


class Tool:
    """A function that a policy can call.

    Args:
        function: of named parameters, each with a type hint and a description in the docstring, as
            transformers.utils.get_json_schema has it.

    Raises:
        ValueError: what it lacks.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.schema = _schema(function)
        """As chat templates take it: {"type": "function", "function": {"name": ...}}."""
        self.name: str = self.schema["function"]["name"]
        due = {**_nullable(self.schema["function"]["parameters"]), "additionalProperties": False}
        try:
            Draft202012Validator.check_schema(due)
        except SchemaError as error:
            raise ValueError(f"a parameter has a type that JSON has not: {error.message}") from None
        self._validator = Draft202012Validator(due)

    def mistake(self, arguments: Any) -> str:
        """Return what is wrong with a call's arguments; empty: nothing."""
        error = best_match(self._validator.iter_errors(arguments))
        if error is None:
            return ""
        place = error.json_path.removeprefix("$").removeprefix(".")
        return f"{place or 'arguments'}: {error.message}"


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    if not callable(function):
        raise ValueError(f"{function!r:.80} is not a function")
    if inspect.iscoroutinefunction(function):
        raise ValueError("it is async; a tool is called, and returns its result")
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in kinds:
            raise ValueError(f"its parameter {parameter} has no name that a call could give")
    with _schemas_without_torch() as get_json_schema:
        try:
            return get_json_schema(function)
        except Exception as error:  # Also of type hints that cannot be evaluated.
            raise ValueError(str(error) or type(error).__name__) from None


@contextlib.contextmanager
def _schemas_without_torch() -> Iterator[Callable[..., dict[str, Any]]]:
    """Give get_json_schema, which imports torch to know one of its types, and need not here."""
    from transformers.utils import chat_template_utils

    before = chat_template_utils.is_torch_available
    chat_template_utils.is_torch_available = lambda: False
    try:
        yield chat_template_utils.get_json_schema
    finally:
        chat_template_utils.is_torch_available = before


def _nullable(schema: Any) -> Any:
    """Return a schema in which `nullable`, which JSON Schema has not, is a type."""
    if isinstance(schema, list):
        return [_nullable(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _nullable(part) for key, part in schema.items()}
    return {"anyOf": [found, {"type": "null"}]} if found.pop("nullable", False) is True else found
