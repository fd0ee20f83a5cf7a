"""Prompts that are chat messages, and texts that can be encoded: what a row may hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vapo_megatron.errors import DataError

Message = dict[str, str]
"""Its role, one of ROLES, and its content."""
Render = Callable[[Sequence[Message]], str]
"""Messages to the text of a prompt; raises DataError: what a tokenizer has against them."""
ROLES = ("system", "user", "assistant")


def read_messages(value: Sequence[Any], column: str, where: str) -> list[Message]:
    """Return a row's messages: the system's, if any, then turns, the last of them the user's.

    Args:
        value: of the row's column, from JSONL or parquet, whose missing keys are None.
        column, where: named in errors.

    Raises:
        DataError: a message has more or less than a role and a text, or an order as above is not
            kept.
    """
    messages = [_message(item, f"{column}[{i}]", where) for i, item in enumerate(value)]
    roles = [message["role"] for message in messages]
    if not roles or roles[-1] != "user" or "system" in roles[1:]:
        raise DataError(
            f"{where}: {column} has messages of {', '.join(roles) or 'nobody'}; at most the first "
            "may be the system's, and the last must be the user's; correct or remove the row"
        )
    if not messages[-1]["content"]:
        raise DataError(f"{where}: {column} ends with an empty message; correct or remove the row")
    return messages


def _message(item: Any, name: str, where: str) -> Message:
    known = {k: v for k, v in item.items() if v is not None} if isinstance(item, dict) else {}
    if (
        set(known) != {"role", "content"}
        or known["role"] not in ROLES
        or not isinstance(known["content"], str)
    ):
        shown = repr(item)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        raise DataError(
            f"{where}: {name}={shown} must be a message with a role ({', '.join(ROLES)}), a "
            "text as content and nothing else; correct or remove the row"
        )
    return {"role": known["role"], "content": encodable(known["content"], name, where)}


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
