"""Prompts that are chat messages, and texts that can be encoded: what a row may hold.

Messages may stand as text, as CSV has them: JSON, or what Python prints of a list.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vapo_megatron.errors import DataError

Message = dict[str, Any]
"""Its role, one of ROLES, and its content; of an assistant maybe tool_calls, see read_messages."""
Render = Callable[..., str]
"""Messages, and a row's tools and variables as keywords, to the text of a prompt; raises DataError:
what a tokenizer has against them."""
ROLES = ("system", "user", "assistant", "tool")
OPTION_COLUMNS = {"tools": "tools", "chat_template_kwargs": "variables"}
"""What a row may have for the chat template beside its messages, and Render's keyword for it."""
_FURTHER = {"assistant": {"tool_calls", "prefix"}, "tool": {"name", "tool_call_id"}}
"""Keys that a role's messages may have beside role and content."""
_LIKE_MESSAGES = re.compile(r"\[\s*\{\s*(['\"])(role|content|from|value)\1\s*:")


def read_prompt(
    row: Mapping[str, Any], column: str, where: str
) -> tuple[list[Message] | None, dict[str, Any]]:
    """Return (a row's messages, a list or the text of one; None: its prompt is a text, and Render's
    keywords: `tools` and `variables`).

    Raises:
        DataError: see read_messages and template_options; or a text begins as messages do and
            cannot be read, or the row has something for a chat template beside a text.
    """
    value, options = from_text(row[column], column, where), template_options(row, where)
    if isinstance(value, list):
        return read_messages(value, column, where), options
    refuse_options(options, column, where)
    return None, {}


def refuse_options(options: Mapping[str, Any], column: str, where: str) -> None:
    """Raise DataError if a row whose prompt is a text has something for a chat template."""
    if options:
        names = " and ".join(
            column for column in OPTION_COLUMNS if OPTION_COLUMNS[column] in options
        )
        raise DataError(
            f"{where}: {names} are for a chat template, but {column} is a text, which has none; "
            f"remove {names}, or give {column} as chat messages"
        )


def from_text(value: Any, column: str, where: str) -> Any:
    """Return the list of messages that a text writes down; other prompts as they are.

    Raises:
        DataError: the text begins as messages do and cannot be read.
    """
    messages = _in_text(value, column, where) if isinstance(value, str) else None
    return value if messages is None else messages


def _in_text(text: str, column: str, where: str) -> list[Any] | None:
    """Return the list of messages that a text writes down; None: it is something else."""
    text = text.strip()
    if text.startswith("array("):  # As numpy prints what pandas reads from parquet.
        text = re.sub(r"^array\(|(,\s*dtype=object)?\)$", "", text)
    if text[:1] not in ("[", "{", '"'):
        return None
    value, is_read = parse_literal(text)
    if is_read:
        if isinstance(value, str) and value != text:
            return _in_text(value, column, where)
        items = value if isinstance(value, list) else [value]
        return items if items and all(map(_is_message, items)) else None
    if not _LIKE_MESSAGES.match(text) or _is_followed(text):
        return None
    raise DataError(
        f"{where}: {column} is a text that looks like chat messages, but is neither JSON nor a "
        f"list of Python's: {text[:60]!r}...; write the messages as JSON"
    )


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and ({"role", "content"} <= set(item) or "from" in item)


def _is_followed(text: str) -> bool:
    """Return whether a text goes on behind its JSON, as a question about it does."""
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return end < len(text)


def parse_literal(text: str) -> tuple[Any, bool]:
    """Return (what a text says in JSON or as a Python literal, True), or (None, False)."""
    try:
        return json.loads(text, strict=False), True
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings(action="ignore"):  # Of backslashes in its strings.
            return ast.literal_eval(text), True
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None, False


def read_messages(value: Sequence[Any], column: str, where: str) -> list[Message]:
    """Return a row's messages: the system's, if any, then turns.

    The last is the user's or a tool's, or an assistant's that the response continues, which says so
    with `prefix`; a whole conversation is not taken for a prompt.

    Args:
        value: of the row's column, from JSONL or parquet, whose missing keys are None.
        column, where: named in errors.

    Returns:
        Without `prefix`. The arguments of tool_calls are objects, as templates want them, also
        where they were JSON.

    Raises:
        DataError: a message has more or less than a role and a text, or an order as above is not
            kept.
    """
    messages = [_message(item, f"{column}[{i}]", where) for i, item in enumerate(value)]
    roles = [message["role"] for message in messages]
    continued = [message.pop("prefix", False) for message in messages]
    last = ("assistant",) if any(continued) else ("user", "tool")
    if (
        not roles
        or roles[-1] not in last
        or "system" in roles[1:]
        or any(continued[:-1])
        or "tool_calls" in messages[-1]
    ):
        raise DataError(
            f"{where}: {column} has messages of {', '.join(roles) or 'nobody'}; at most the first "
            "may be the system's, and the last must be the user's, a tool's, or an assistant's "
            "text with prefix=true, which the response continues; correct or remove the row"
        )
    if not messages[-1]["content"]:
        raise DataError(f"{where}: {column} ends with an empty message; correct or remove the row")
    return messages


def _message(item: Any, name: str, where: str) -> Message:
    known = without_nulls(item) if isinstance(item, dict) else {}
    role = known.get("role")
    if role == "assistant":
        if not known.get("tool_calls"):
            known.pop("tool_calls", None)
        else:
            known = {"content": "", **known, "tool_calls": _calls(known["tool_calls"])}
    further = set(known) - {"role", "content"}
    if (
        not {"role", "content"} <= set(known)
        or role not in ROLES
        or not further <= _FURTHER.get(role, set())
        or not isinstance(known["content"], str)
        or known.get("tool_calls", True) is None
        or not isinstance(known.get("prefix", False), bool)
    ):
        raise DataError(
            f"{where}: {name}={_quoted(item)} must be a message with a role (system, user, "
            "assistant, tool), a text as content, of an assistant maybe tool_calls or prefix, of "
            "a tool maybe name and tool_call_id, and nothing else; correct or remove the row"
        )
    encodable(json.dumps(known, ensure_ascii=False), name, where)
    return known


def _calls(value: Any) -> list[Any] | None:
    """Return calls of functions with their arguments as objects; None: they are none."""
    if not isinstance(value, list):
        return None
    calls = []
    for call in value:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return None
        function = dict(function)
        if isinstance(function.get("arguments"), str):
            arguments, is_read = parse_literal(function["arguments"])
            if is_read and isinstance(arguments, dict):
                function["arguments"] = arguments
        calls.append({**call, "function": function} if "function" in call else function)
    return calls


def template_options(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what a row gives its chat template beside messages: JSON schemas, and an object.

    Either column may be a text that says so; one that is missing or empty is left out.

    Raises:
        DataError: names the column.
    """
    options: dict[str, Any] = {}
    tools = without_nulls(_parsed(row.get("tools")))
    if tools:
        tools = [_parsed(tool) for tool in tools] if isinstance(tools, list) else tools
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise _wrong("tools", row, where, "a list of JSON schemas")
        options["tools"] = tools
    variables = without_nulls(_parsed(row.get("chat_template_kwargs")))
    if variables:
        if not isinstance(variables, dict):
            raise _wrong("chat_template_kwargs", row, where, "an object of a template's variables")
        options["variables"] = variables
    for column, keyword in OPTION_COLUMNS.items():  # A template may write them.
        encodable(json.dumps(options.get(keyword), ensure_ascii=False, default=str), column, where)
    return options


def _wrong(column: str, row: Mapping[str, Any], where: str, what: str) -> DataError:
    return DataError(
        f"{where}: {column}={_quoted(row[column])} must be {what}; correct or remove the column"
    )


def _parsed(value: Any) -> Any:
    if not isinstance(value, str) or not value.strip():
        return value or None
    parsed, is_read = parse_literal(value)
    return parsed if is_read else value


def without_nulls(value: Any) -> Any:
    """Return a value without the null fields that parquet gives structs; lists keep theirs."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def encodable(text: str, column: str, where: str) -> str:
    """Return a text. DataError: it has lone surrogates, which JSON allows and tokenizers do not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{where}: {column} contains half of a surrogate pair, which is not valid Unicode; "
            "correct or remove the row"
        ) from None
    return text


def _quoted(value: Any) -> str:
    """Return a value as Python writes it, up to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
