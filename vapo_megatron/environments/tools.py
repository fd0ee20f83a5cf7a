"""The environment `tools`: functions that the policy calls; an action without a call is the last.

Each episode has a process of its own, so what a tool keeps in its module is kept for that episode.
"""

from __future__ import annotations

import functools
import itertools
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vapo_megatron.environments.calculator import calculator
from vapo_megatron.environments.python_tool import PythonTool
from vapo_megatron.environments.step import MAX_MESSAGES, Step, text
from vapo_megatron.environments.tool_calls import PARSERS, Call, Parser
from vapo_megatron.environments.tool_schemas import Tool
from vapo_megatron.reward.user_code import load
from vapo_megatron.reward.verifier import python_value

BUILT_IN = ("calculator", "python")
MAX_ERROR_CHARACTERS = 300
_WRONG = "error:"
"""What the result of a call begins with that went wrong."""


class Tools:
    """An environment; see step.py.

    Args:
        tools: names of BUILT_IN, "package.module:function" or "path/to/file.py:function", or
            functions; see tool_schemas.Tool.
        parser: a name of tool_calls.PARSERS, or a function of that kind as tools are named.
        max_calls: of one action; further ones are not made.
        max_result_characters: of one call; longer results are cut there.
        python: options of the built-in tool `python`; see python_tool.PythonTool.

    Raises:
        ValueError: one of these is not what it must be, or a function lacks a type hint or a
            description; or whatever importing it raises.
    """

    def __init__(
        self,
        tools: Sequence[str | Callable[..., Any]],
        parser: str | Parser = "hermes",
        max_calls: int = 8,
        max_result_characters: int = 1 << 14,
        python: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(tools, str) or not tools:
            raise ValueError(f"tools={tools!r} must be a list of one tool at least")
        for name, value, highest in (
            ("max_calls", max_calls, MAX_MESSAGES - 1),
            ("max_result_characters", max_result_characters, 1 << 30),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= highest:
                raise ValueError(f"{name}={value!r} must be a whole number from 1 to {highest}")
        if python and "python" not in tools:
            raise ValueError("python has options, but tools does not name python")
        self._parse = _parser(parser)
        self._max_calls, self._max_characters = max_calls, max_result_characters
        options = json.dumps(python or {}, sort_keys=True)
        self._tools: dict[str, Tool] = {}
        for given in tools:
            tool = _tool(given, options)
            if tool.name in self._tools:
                raise ValueError(f"tools has two tools of the name {tool.name}")
            self._tools[tool.name] = tool

    def schemas(self) -> list[dict[str, Any]]:
        """Return the tools as JSON schemas, for the chat template."""
        return [tool.schema for tool in self._tools.values()]

    def reset(self, problem: Any, seed: int) -> None:
        """Begin; the prompt is all that there is."""

    def step(self, action: str) -> Step:
        """Make an action's calls -> a message for each, in order."""
        calls = list(itertools.islice(self._parse(action), self._max_calls + 1))
        if not calls:
            return Step(done=True)
        messages = [self._message(call) for call in calls[: self._max_calls]]
        if len(calls) > self._max_calls:
            missing = f"{_WRONG} only the first {self._max_calls} calls of an action are made"
            messages.append({"role": "tool", "content": missing})
        failed = sum(message["content"].startswith(_WRONG) for message in messages)
        return Step(messages, failed_calls=failed)

    def _message(self, call: Call) -> dict[str, str]:
        message = {"role": "tool"}
        if call.name in self._tools:
            message["name"] = call.name
        if call.id:
            message["tool_call_id"] = call.id
        return message | {"content": self._result(call)}

    def _result(self, call: Call) -> str:
        if call.wrong:
            return _error(f"the call cannot be read: {call.wrong}")
        tool = self._tools.get(call.name)
        if tool is None:
            return _error(f"there is no tool {call.name!r:.80}; there are {', '.join(self._tools)}")
        try:
            if mistake := tool.mistake(call.arguments):
                return _error(f"{tool.name} was not called: {mistake}")
            return text(result_text(tool.function(**call.arguments)), self._max_characters)
        except MemoryError:
            raise  # The process's own limit: what is left of it cannot go on.
        except BaseException as error:
            return _error("".join(traceback.format_exception_only(error)))


def result_text(value: Any) -> str:
    """Return a tool's result as text.

    Text is itself, bytes are read as UTF-8; lists, tuples, dicts, numbers, truth values and None
    are JSON, what is in them and is none of these is its str; so is anything else.
    """
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode(errors="replace")
    value = _plain(value)
    if isinstance(value, list | tuple | dict | int | float | None):
        return json.dumps(value, ensure_ascii=False, default=_plain_or_text)
    return str(value)


def _plain(value: Any) -> Any:
    """Return an array or a scalar of numpy or torch as values of Python's."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else python_value(value)


def _plain_or_text(value: Any) -> Any:
    plain = _plain(value)
    return str(value) if plain is value else plain


def _error(message: str) -> str:
    return text(" ".join(f"{_WRONG} {message}".split()), MAX_ERROR_CHARACTERS)


def _parser(given: str | Parser) -> Parser:
    if not isinstance(given, str):
        return given
    if given in PARSERS:
        return PARSERS[given]
    if ":" not in given:
        raise ValueError(
            f"parser={given} must be one of {', '.join(PARSERS)}, or module:function or "
            "file.py:function of your own"
        )
    return _loaded(given)


@functools.cache  # Loaded once, in the process that each episode's is forked from.
def _tool(given: str | Callable[..., Any], python_options: str) -> Tool:
    try:
        return Tool(_function(given, python_options))
    except ValueError as error:
        name = given if isinstance(given, str) else getattr(given, "__name__", repr(given))
        raise ValueError(f"the tool {name}: {error}") from None


def _function(given: str | Callable[..., Any], python_options: str) -> Callable[..., Any]:
    if not isinstance(given, str):
        return given
    if given == "calculator":
        return calculator
    if given == "python":
        python = PythonTool(**json.loads(python_options))
        python.check()
        return python.python
    if ":" not in given:
        raise ValueError(
            f"it is none of {', '.join(BUILT_IN)}, nor module:function or file.py:function"
        )
    return _loaded(given)


@functools.cache
def _loaded(name: str) -> Any:
    return load(name)
