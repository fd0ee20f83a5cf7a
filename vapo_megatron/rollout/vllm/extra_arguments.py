"""Checks rollout.vllm_args against the installed vLLM's engine arguments, without importing vLLM.

vLLM takes seconds to import and may initialise a GPU; the names and annotations of its class
EngineArgs are read from its source.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union

from pydantic import ConfigDict, TypeAdapter, ValidationError

from vapo_megatron.errors import ConfigError

_PLAIN: dict[str, Any] = {
    "bool": bool, "int": int, "float": float, "str": str, "dict": dict, "list": list, "Any": Any,
    "Literal": Literal,
    "set": list,  # YAML has no sets.
}  # fmt: skip


def check_extra_arguments(given: Mapping[str, Any]) -> None:
    """Refuse names that vLLM's engine does not take, and values of another type.

    Types that vLLM defines itself are left to it, except that their value must be a mapping or
    text. Where vLLM is not installed nothing is checked: no run starts there.

    Args:
        given: rollout.vllm_args, which config/vllm_args.py has accepted.

    Raises:
        ConfigError: the name, its value, and the most similar name or the type.
    """
    known = engine_fields() if given else {}
    for name, value in given.items() if known else ():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "remove it"
            raise ConfigError(
                f"rollout.vllm_args: the installed vLLM's engine has no argument {name}; {hint}"
            )
        if not _is_of(value, known[name]):
            raise ConfigError(
                f"rollout.vllm_args: {name}={value!r} must be of type {known[name]}; change it"
            )


@functools.lru_cache(maxsize=1)
def engine_fields() -> dict[str, str]:
    """Return the annotation of each public field of vLLM's EngineArgs; empty without vLLM."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return {}
    file = Path(spec.submodule_search_locations[0], "engine", "arg_utils.py")
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            fields = (n for n in node.body if isinstance(n, ast.AnnAssign))
            named = ((ast.unparse(n.target), n.annotation) for n in fields)
            return {name: _text(kind) for name, kind in named if not name.startswith("_")}
    raise AssertionError(f"{file} has no class EngineArgs")


def _text(annotation: ast.expr) -> str:
    """An annotation, which may stand as text, as text."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    return ast.unparse(annotation)


def _is_of(value: Any, annotation: str) -> bool:
    try:
        kind = _type(ast.parse(annotation, mode="eval").body)
    except KeyError:  # a type of vLLM's own
        return isinstance(value, dict | str) or value is None and "None" in annotation
    try:
        TypeAdapter(kind, config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError:
        return False
    return True


def _type(node: ast.AST) -> Any:
    """Return the type that an annotation of plain types means; KeyError: it names another."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return _PLAIN[node.id]
        case ast.BinOp():
            return Union[_type(node.left), _type(node.right)]  # noqa: UP007
        case ast.Tuple():
            return tuple(map(_type, node.elts))
        case ast.Subscript():
            return _type(node.value)[_type(node.slice)]
        case _:
            raise KeyError(ast.unparse(node))
