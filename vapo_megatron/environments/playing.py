"""A user's environment in a session's process: plays one episode; play.py asks it.

("reset", problem, seed)    {"result": {the fields of a Step}}, or
("step", action)            {"returned": what is wrong with what was returned}
("close",)                  {"result": {}}
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

from vapo_megatron.data.problems import Problem
from vapo_megatron.environments.step import Step, checked, checked_observation
from vapo_megatron.reward.functions import WrongReturn
from vapo_megatron.reward.user_code import load

_METHODS = {"reset": "reset(problem, seed)", "step": "step(action)"}


def make_handler(
    environment: str | bytes,
    options: Mapping[str, Any],
    max_characters: int,
    full_score: float | None = None,
) -> tuple[Callable[[tuple[Any, ...]], dict[str, Any]], dict[str, Any]]:
    """Load the environment; return what plays an episode, and {"schemas": its tools'}.

    Runs in the template: the class is built in each session, and here too if it has tools. An
    object, or what a function returns, is an environment, too.

    Args:
        environment: see user_code.sendable.
        options: keyword arguments of the class or function.
        max_characters: of an observation.
        full_score: see step.checked.

    Raises:
        TypeError: it has not the methods, does not take the options, or has schemas of no JSON.
        Exception: importing it raises, or asking for its tools does.
    """
    given = load(environment)
    if isinstance(given, type) or not callable(given):
        _check_methods(given)
    if not _is_environment(given):
        with contextlib.suppress(ValueError):  # Some classes of C have no signature.
            inspect.signature(given).bind(**options)
    elif options:
        raise TypeError(f"{type(given).__name__} is built already, and takes no options")
    about = {"schemas": _schemas(given, options)}
    return _Episode(given, options, max_characters, full_score).answer, about


def _schemas(given: Any, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    if not hasattr(given, "schemas"):
        return []
    environment = given if _is_environment(given) else given(**options)
    found = environment.schemas()
    if not isinstance(found, list) or not all(isinstance(schema, dict) for schema in found):
        raise TypeError(f"schemas returned {found!r:.200}, not a list of dicts")
    json.dumps(found)  # Raises what the message says if they cannot be sent.
    return found


def _is_environment(given: Any) -> bool:
    return not isinstance(given, type) and hasattr(given, "step")


def _check_methods(environment: Any) -> None:
    kind = environment if isinstance(environment, type) else type(environment)
    for name, call in _METHODS.items():
        if not callable(getattr(environment, name, None)):
            raise TypeError(f"{kind.__name__} has no method {call}")


class _Episode:
    """One, in the process that plays it."""

    def __init__(
        self,
        given: Any,
        options: Mapping[str, Any],
        max_characters: int,
        full_score: float | None,
    ) -> None:
        self._given, self._options = given, options
        self._max_characters, self._full_score = max_characters, full_score
        self._environment: Any = None

    def answer(self, request: tuple[Any, ...]) -> dict[str, Any]:
        what, *arguments = request
        try:
            return {"result": getattr(self, f"_{what}")(*arguments)}
        except WrongReturn as wrong:
            return {"returned": str(wrong)}

    def _reset(self, problem: Problem, seed: int) -> dict[str, Any]:
        # For what draws from these rather than from the seed; a fork's are like its parent's.
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        if _is_environment(self._given):
            self._environment = self._given
        else:
            self._environment = self._given(**self._options)
            _check_methods(self._environment)
        found = self._environment.reset(problem, seed)
        observation = "" if found is None else found
        return dataclasses.asdict(
            Step(checked_observation("reset's observation", observation, self._max_characters))
        )

    def _step(self, action: str) -> dict[str, Any]:
        step = self._environment.step(action)
        return dataclasses.asdict(checked(step, self._max_characters, self._full_score))

    def _close(self) -> dict[str, Any]:
        if callable(close := getattr(self._environment, "close", None)):
            close()
        return {}
