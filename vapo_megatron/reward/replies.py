"""Reads what a server answered, which may be anything."""

from __future__ import annotations

import email.utils
import json
import re
import zlib
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

LARGEST_REPLY_BYTES = 4 << 20
"""Of one reply, also decompressed; a hundred thousand tokens take a tenth of it."""

_ENDED = (None, "stop", "eos_token", "stop_sequence", "end_turn")
"""finish_reason of a whole answer, as different servers name it."""
_TRUNCATED = "length"


class Answer(NamedTuple):
    """What the model said, or why it did not."""

    text: str = ""
    first_token: dict[str, float] = {}
    """Log-probabilities of the most likely first tokens, where they were asked for."""
    problem: str = ""
    """Not empty: there is no answer, because of this."""
    is_truncated: bool = False
    """It ended at max_tokens."""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


# Not above 0 but for rounding, and so not NaN; minus infinity is a probability of 0.
_LogProbability = Annotated[float, Field(le=0.01)]


class _Token(_Part):
    token: str
    logprob: _LogProbability


class _FirstTokens(_Part):
    top_logprobs: list[_Token] = []


class _ChatLogProbabilities(_Part):
    content: list[_FirstTokens] | None = None


class _Message(_Part):
    content: str


class _ChatChoice(_Part):
    finish_reason: str | None = None
    logprobs: _ChatLogProbabilities | None = None
    message: _Message


class _Chat(_Part):
    choices: list[_ChatChoice] = Field(min_length=1, max_length=1)


class _TextLogProbabilities(_Part):
    top_logprobs: list[dict[str, _LogProbability] | None] | None = None


class _TextChoice(_Part):
    finish_reason: str | None = None
    logprobs: _TextLogProbabilities | None = None
    text: str


class _Completion(_Part):
    choices: list[_TextChoice] = Field(min_length=1, max_length=1)


def answer(body: bytes, *, chat: bool) -> Answer:
    """Read the body of a chat completion, or of a completion of a text."""
    try:
        reply = (_Chat if chat else _Completion).model_validate_json(body)
    except ValidationError as error:
        if message := error_message(body):
            return Answer(problem=f"it answered an error: {message}")
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        return Answer(problem=f"it answered no completion: {where}: {first['msg']}")
    choice = reply.choices[0]
    if choice.finish_reason not in (*_ENDED, _TRUNCATED):
        return Answer(problem=f"its answer ended with finish_reason={choice.finish_reason!r}")
    is_truncated = choice.finish_reason == _TRUNCATED
    if isinstance(choice, _TextChoice):
        listed = choice.logprobs.top_logprobs if choice.logprobs else None
        return Answer(choice.text, (listed or [None])[0] or {}, is_truncated=is_truncated)
    content = choice.logprobs.content if choice.logprobs else None
    first_tokens = content[0].top_logprobs if content else []
    found = {token.token: token.logprob for token in first_tokens}
    return Answer(choice.message.content, found, is_truncated=is_truncated)


def error_message(body: bytes) -> str:
    """Return what a body that is an error object says; "": it is none."""
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    said: Any = None
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and name in found:
            said = found = found[name]
    return said if isinstance(said, str) else ""


def one_line(text: str) -> str:
    """Return what can be printed of a text, on one line."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def decompressed(body: bytes, encoding: str) -> bytes:
    """Undo a Content-Encoding, up to one byte more than a reply may have.

    Raises:
        ValueError: the encoding is not gzip or deflate, or the body is damaged.
    """
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise ValueError("its answer has a Content-Encoding, which none asked for")
    reader = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        found = reader.decompress(body, LARGEST_REPLY_BYTES + 1)
    except zlib.error as error:
        raise ValueError(f"its answer is no {encoding}: {error}") from None
    if not reader.eof and len(found) <= LARGEST_REPLY_BYTES:
        raise ValueError(f"its answer is {encoding} that is cut")
    return found


def retry_after(value: str, now: float) -> float:
    """Return the seconds that a header Retry-After asks to wait; 0: it asks nothing readable.

    Args:
        value: seconds, or a date.
        now: seconds since the epoch.
    """
    value = value.strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - now)
    except (ValueError, TypeError, OverflowError, IndexError):
        return 0.0
