"""The package reasoning_gym: its tasks, its scorers, and its entries as JSON.

Loaded in worker processes alone: it takes seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import math
import re
import sys
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

from vapo_megatron.errors import ConfigError
from vapo_megatron.sandbox.plain_values import decode, encode

NEEDED_BY = {
    "pycosat": ("zebra_puzzles",),
    "cellpylib": ("game_of_life", "game_of_life_halting"),
    "zss": ("codeio",),
}
"""Packages that these tasks alone need, and that are not wheels: others work without them."""
NO_TASKS = ("composite",)
"""Registered, but made of other tasks."""

_LIST = re.compile(r"[^(]*")
"""Without a call, evaluating does nothing but compute."""
_BITS = re.compile(r"[0-9a-fx\s()+*/<>&|^~-]*")
_FORMULA = re.compile(
    r"(?:(?<![a-z])(?:[a-z]|a?(?:sin|cos|tan)h?|sec|csc|cot|exp|log|ln|sqrt|pi|erf)(?![a-z])"
    r"|[0-9\s+*/^().,-])*",
    re.IGNORECASE | re.ASCII,
)
"""Names of one letter, and functions: no other function of Python's or sympy's can be called."""
_EVALUATED: dict[str, tuple[re.Pattern[str], tuple[str, ...]]] = {
    "binary_matrix": (_LIST, ()),
    "n_queens": (_LIST, ()),
    "spiral_matrix": (_LIST, ()),
    "string_insertion": (_LIST, ()),
    "number_sorting": (_LIST, ("answer",)),
    "bitwise_arithmetic": (_BITS, ("problem",)),
    "countdown": (_FORMULA, ()),
    "puzzle24": (_FORMULA, ()),
    "polynomial_multiplication": (_FORMULA, ("answer",)),
    "simple_integration": (_FORMULA, ("integrand",)),
    "intermediate_integration": (_FORMULA, ("integrand",)),
}
"""Tasks whose scorers run text as Python, with `eval` or sympy's parser: what may be run of an
answer, and the entry's texts that are run too."""


class Row(NamedTuple):
    """What a scorer needs of a problem."""

    task: str
    config: Mapping[str, Any]
    entry: dict[str, Any]


def check_installed(field: str) -> None:
    """Raise ConfigError if the package is missing; does not import it."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError(
            f"{field} needs the package reasoning-gym, which is not installed; "
            "pip install 'vapo-megatron[reasoning-gym]'"
        )


@functools.cache
def load() -> dict[str, tuple[type, type]]:
    """Import the package -> name of a task -> (its data set, its configuration).

    Raises:
        ModuleNotFoundError: it is missing, or a package that many tasks need.
    """
    missing = [name for name in NEEDED_BY if importlib.util.find_spec(name) is None]
    # All tasks are imported at once, so one package that is missing would cost all of them.
    sys.modules.update({name: types.ModuleType(name) for name in missing})
    try:
        from reasoning_gym.factory import DATASETS
    finally:
        for name in missing:
            del sys.modules[name]
    left_out = {*NO_TASKS, *(task for name in missing for task in NEEDED_BY[name])}
    return {name: DATASETS[name] for name in sorted(DATASETS) if name not in left_out}


def create(task: str, config: Mapping[str, Any], **more: Any) -> Any:
    """Return a task's data set.

    Args:
        task: its name.
        config: settings that differ from its defaults.
        more: seed and size.

    Raises:
        ValueError: there is no such task, or it has no such setting; or what the task raises of a
            value.
    """
    if task not in load():
        package = next((name for name in NEEDED_BY if task in NEEDED_BY[name]), None)
        reason = f"needs the package {package}" if package else "is no task of reasoning_gym"
        raise ValueError(f"{task!r} {reason}")
    made, settings = load()[task]
    fields = dataclasses.fields(settings)
    known = [name for name in (f.name for f in fields) if name not in ("seed", "size")]
    if unknown := [name for name in config if name not in known]:
        raise ValueError(f"{task} has no setting {unknown[0]}; it has {', '.join(known)}")
    return made(settings(**config, **more))


def score(scorer: Any, task: str, answer: str, entry: Mapping[str, Any]) -> tuple[float, str]:
    """Return (a task's score of an answer, a note).

    Raises:
        ValueError: the entry has text that the scorer would run, and that is more than an
            expression.
        TypeError: the scorer returned no finite number; or whatever else it raises.
    """
    allowed, fields = _EVALUATED.get(task, (None, ()))
    if allowed is not None:
        for field in fields:
            text = str({**entry["metadata"], "answer": entry["answer"]}[field])
            if not allowed.fullmatch(text):
                raise ValueError(f"{field}={text!r:.80} is no plain expression, so it is not run")
        if not allowed.fullmatch(answer):
            return 0.0, "no plain expression, so it is not run"
    found = scorer.score_answer(answer, entry)
    value = found.item() if getattr(found, "shape", None) == () else found
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"score_answer of {task} returned {found!r:.80}, no finite number")
    return float(value), ""


def write_row(row: Row) -> str:
    """Return a row as JSON. What is no plain value in the metadata becomes text."""
    metadata = {name: _plain(value) for name, value in row.entry["metadata"].items()}
    entry = {**row.entry, "metadata": metadata}
    return json.dumps({"task": row.task, "config": row.config, "entry": entry}, allow_nan=True)


def _plain(value: Any) -> Any:
    try:
        return encode(value)
    except TypeError:
        return str(value)


def read_row(value: Any) -> Row:
    """Return what write_row wrote; value: its text, or the object.

    Raises:
        ValueError: it is something else.
    """
    try:
        found = json.loads(value) if isinstance(value, str) else value
        row = Row(found["task"], found["config"], dict(found["entry"]))
        row.entry["metadata"] = {k: decode(v) for k, v in row.entry["metadata"].items()}
        if not {"question", "answer"} <= row.entry.keys():
            raise ValueError("its entry has no question or no answer")
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"is no task, config and entry: {error!r:.200}") from None
    return row
