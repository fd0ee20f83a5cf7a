"""Finds the calls of tools in an action's text.

Written here, because the libraries that parse them do not fit an environment's process, which has
text, no tokenizer, and must start quickly: vLLM's parsers import all of vLLM and torch, and take an
action with one bad call for one without calls; those of `renderers` read token ids. The tests
compare with both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn


class Call(NamedTuple):
    """A call of a tool, or what was meant to be one."""

    name: str = ""
    arguments: Any = None
    """An object of JSON, as a dict."""
    id: str = ""
    """What the result's message names as its tool_call_id; empty: nothing."""
    wrong: str = ""
    """Why it cannot be read, in words for the policy; empty: it can."""


class Tagged(NamedTuple):
    """A call or an answer in a pair of tags."""

    tag: str
    content: str
    """Without the space around it; never empty."""
    end: int
    """Where its text ends in the action."""


Parser = Callable[[str], Iterable[Call]]
"""An action's text -> its calls, in order."""

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_END_OF_THINKING = "</think>"
_PYTHON_TAG = "<|python_tag|>"
_SPACE = re.compile(r"\s*")
_BETWEEN = re.compile(r"\s*;?\s*")
_MEANT_AS_CALL = re.compile(r'\{\s*"(?:name|type|function|parameters|arguments)"')


def hermes(action: str) -> Iterator[Call]:
    """Read the form of Hermes, Qwen2.5 and Qwen3: <tool_call>{"name": ..., "arguments": ...}
    </tool_call>, each in tags of its own, with any text around them.

    Tags count wherever they stand, in a fenced block too; only what a thinking model drafts before
    </think> does not.
    """
    text = _after_thinking(action)
    at = text.find(_OPENING)
    while at >= 0:
        start = at + len(_OPENING)
        call, end = _read(text, start, ("arguments",))
        closed = text.startswith(_CLOSING, end)
        if not closed:
            end = text.find(_CLOSING, start)
            if end < 0:
                yield Call(wrong=call.wrong or f"{_CLOSING} is missing")
                return
            call = Call(wrong=call.wrong or f"there is more than one object before {_CLOSING}")
        yield call
        at = text.find(_OPENING, end + len(_CLOSING))


def llama3_json(action: str) -> Iterator[Call]:
    """Read the form of Llama 3: the action is {"name": ..., "parameters": ...}, perhaps more of
    these with a semicolon between, and nothing else.

    An object of JSON without a name is an answer, not a call.
    """
    text = _after_thinking(action).strip()
    tagged = text.startswith(_PYTHON_TAG)
    text = text.removeprefix(_PYTHON_TAG).lstrip()
    if not (tagged or text.startswith("{")):
        return
    at = 0
    while at < len(text):
        call, end = _read(text, at, ("parameters", "arguments"))
        if call.wrong:
            if tagged or at or _MEANT_AS_CALL.match(text):
                yield call
            return
        yield call
        between = _BETWEEN.match(text, end)
        assert between is not None, "it matches nothing too"
        at = between.end()


def first_tagged(action: str, tags: Collection[str]) -> Tagged | None:
    """Return the first of these tags that is closed and has content: <search>a query</search>.

    Of one tag within another the inner one counts. What the policy writes behind it is not its
    turn any more, as nobody has answered yet.

    Args:
        action: the policy's text; what it drafts before </think> does not count.
        tags: their names, of calls and of the answer.

    Returns:
        None: there is none, so that the action is malformed.
    """
    names = "|".join(map(re.escape, tags))
    pair = re.compile(rf"<({names})>((?:(?!</?(?:{names})>).)*)</\1>", re.DOTALL)
    for found in pair.finditer(action, len(action) - len(_after_thinking(action))):
        if content := found[2].strip():
            return Tagged(found[1], content, found.end())
    return None


PARSERS: dict[str, Parser] = {"hermes": hermes, "llama3_json": llama3_json}
"""By the names that vLLM has for them."""


def _after_thinking(action: str) -> str:
    _, end, rest = action.partition(_END_OF_THINKING)
    return rest if end else action


def _read(text: str, start: int, keys: tuple[str, ...]) -> tuple[Call, int]:
    """Read one object -> the call, and where the object ends with the space behind it.

    Args:
        text: with the object.
        start: where it begins, perhaps with space.
        keys: names that its arguments may have; without any of them there are none.
    """
    start = _after_space(text, start)
    try:
        found, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        return Call(wrong=f"it is not JSON: {error.msg} at character {error.pos - start}"), start
    except (ValueError, RecursionError) as error:  # A number too long, or nesting too deep.
        return Call(wrong=f"it is not JSON that can be read: {error}"), start
    end = _after_space(text, end)
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not found["name"]:
        return Call(wrong=f'it must be {{"name": the tool\'s name, "{keys[0]}": {{...}}}}'), end
    arguments: Any = next((found[key] for key in keys if key in found), {})
    id = found.get("id")
    return Call(found["name"], arguments, id if isinstance(id, str) else ""), end


def _after_space(text: str, start: int) -> int:
    space = _SPACE.match(text, start)
    assert space is not None, "it matches nothing too"
    return space.end()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
