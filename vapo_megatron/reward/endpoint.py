"""Asks a model behind an OpenAI-compatible endpoint, such as `vllm serve`, many things at once.

An endpoint that is gone is asked again for a while, so that a run survives its restart. Whatever it
answers costs one answer: each try has a limit of time for all of it, and each reply one of bytes.
Answers are kept on disk by content. The key is read from the environment and never written.

All requests are coroutines of one event loop, so that each can be given up at any moment, such as
in the middle of a header.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import math
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from vapo_megatron.errors import ConfigError
from vapo_megatron.reward import replies
from vapo_megatron.reward.answer_cache import AnswerCache, digest
from vapo_megatron.reward.redaction import redactor
from vapo_megatron.reward.replies import Answer
from vapo_megatron.reward.request_loop import RequestLoop

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 10.0
"""Between two tries; each pause is twice as long as the one before."""
AGAIN = (408, 409, 425, 429)
"""Status codes that are tried again, as all from 500 on are."""
LONGEST_PROBLEM = 200
"""Characters of what is said of a request that failed."""
_CLOSED = "closed before it answered"


class _Away(NamedTuple):
    """Why a request is tried again, and after how many seconds the server asks for it."""

    reason: str
    seconds: float = 0.0


class Endpoint:
    """A model by name at an address.

    Args:
        base_url: such as http://127.0.0.1:8000/v1.
        model: as the server names it.
        chat: ask for a chat completion; False: for a completion of the bare text.
        concurrency: requests at a time.
        timeout_seconds: limit for one try, from its beginning to the answer's last byte.
        outage_seconds: how long a request is tried again while the server fails or is away. Once
            it has been away for so long, each further request is tried once.
        cache: directory of the answers; None: none are kept.
        key_variable: environment variable with the key; unset: no key is sent.
        body: what each request has besides, such as max_tokens.

    Raises:
        ConfigError: base_url is no address, or has a password; a limit is none; the key cannot be
            sent; cache cannot be written.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        chat: bool,
        concurrency: int,
        timeout_seconds: float,
        outage_seconds: float,
        cache: str | None,
        key_variable: str,
        body: dict[str, Any],
    ) -> None:
        _check_address(base_url, key_variable)
        _check_limits(concurrency, timeout_seconds, outage_seconds)
        key = _key(key_variable)
        self._redacted = redactor(key)
        self._identity = {"model": model, "chat": chat, "reply": 2, **body}
        self._chat, self._model, self._body = chat, model, body
        self._url = base_url.rstrip("/") + ("/chat/completions" if chat else "/completions")
        self._headers = {
            "Content-Type": "application/json",
            # Compressed, a small reply may be endless.
            "Accept-Encoding": "identity",
            **({"Authorization": f"Bearer {key}"} if key else {}),
        }
        self._concurrency, self._timeout_seconds = concurrency, timeout_seconds
        self._outage_seconds, self._away_since = outage_seconds, math.inf
        self._cache = None if cache is None else AnswerCache(Path(cache))
        self._lock = threading.Lock()
        self._running: RequestLoop | None = None

    def ask(self, prompts: Sequence[str]) -> Iterator[Answer]:
        """Begin to ask everything -> the answers, in order, for which the iteration waits."""
        with self._lock:
            if self._running is None:
                self._running = RequestLoop(self._concurrency)
            running = self._running
            asked = [running.begin(self._ask(prompt, running)) for prompt in prompts]
        return map(_answer, asked)

    def close(self) -> None:
        """Stop asking; what is under way is given up. Asking again starts over."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.close()

    async def _ask(self, prompt: str, running: RequestLoop) -> Answer:
        key = digest({**self._identity, "prompt": prompt})
        if self._cache is not None and (kept := self._cache.get(key)) is not None:
            return kept
        async with running.slots:
            text, first_token, problem, is_truncated = await self._try(prompt, running.client)
        hidden = {self._redacted(token): value for token, value in first_token.items()}
        problem = self._redacted(replies.one_line(problem))[:LONGEST_PROBLEM]
        answer = Answer(self._redacted(text), hidden, problem, is_truncated)
        if self._cache is not None and not answer.problem:
            self._cache.put(key, answer)
        return answer

    async def _try(self, prompt: str, client: Any) -> Answer:
        began, pause = time.monotonic(), FIRST_PAUSE_SECONDS
        while True:
            found = await self._once(prompt, client)
            if isinstance(found, Answer):
                self._away_since = math.inf
                return found
            now = time.monotonic()
            self._away_since = min(self._away_since, now)
            left = min(began, self._away_since) + self._outage_seconds - now
            if left < pause:
                seconds = f"{self._outage_seconds:g} s"
                return Answer(problem=f"no answer for {seconds}: {found.reason}")
            # Not all at the same moment once it is back.
            due = max(pause * random.uniform(0.5, 1.0), found.seconds * random.uniform(1.0, 1.1))
            await asyncio.sleep(min(due, left))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _once(self, prompt: str, client: Any) -> Answer | _Away:
        import httpx

        try:
            async with asyncio.timeout(self._timeout_seconds):
                status, headers, body = await self._post(prompt, client)
        except TimeoutError:
            return _Away(f"no whole answer within {self._timeout_seconds:g} s")
        except httpx.TransportError as error:
            return _Away(f"{type(error).__name__}: {error}")
        except Exception as error:  # Nobody can list what a reply may do to a library.
            return Answer(problem=f"{type(error).__name__}: {error}")
        try:
            body = replies.decompressed(body, headers.get("Content-Encoding", "").strip().lower())
        except ValueError as error:
            body, problem = b"", str(error)
        else:
            is_long = len(body) > replies.LARGEST_REPLY_BYTES
            problem = f"it answered over {replies.LARGEST_REPLY_BYTES} bytes" if is_long else ""
        is_good = 200 <= status < 300
        if is_good:
            return Answer(problem=problem) if problem else replies.answer(body, chat=self._chat)
        said = "" if problem else replies.error_message(body)
        reason = f"HTTP {status}" + (f": {said}" if said else "")
        if status in AGAIN or status >= 500:
            seconds = replies.retry_after(headers.get("Retry-After", ""), time.time())
            return _Away(reason, seconds)
        moved = "; base_url must be the address that it redirects to" if status < 400 else ""
        return Answer(problem=reason + moved)

    async def _post(self, prompt: str, client: Any) -> tuple[int, Any, bytes]:
        """Return the status, the headers, and the body up to its limit and a little more."""
        content, size = self._content(prompt), 0
        parts: list[bytes] = []
        async with client.stream(
            "POST", self._url, content=content, headers=self._headers
        ) as reply:
            async for part in reply.aiter_raw():
                parts.append(part)
                size += len(part)
                if size > replies.LARGEST_REPLY_BYTES:
                    break
            return reply.status_code, reply.headers, b"".join(parts)

    def _content(self, prompt: str) -> bytes:
        body = {"model": self._model, **self._body}
        if self._chat:
            body["messages"] = [{"role": "user", "content": prompt}]
            if "logprobs" in body:
                body |= {"top_logprobs": body["logprobs"], "logprobs": True}
        else:
            body["prompt"] = prompt
        return json.dumps(body).encode()


def _answer(asked: concurrent.futures.Future[Answer]) -> Answer:
    try:
        return asked.result()
    except concurrent.futures.CancelledError:
        return Answer(problem=_CLOSED)


def _check_address(base_url: str, key_variable: str) -> None:
    if set("@?#") & set(base_url):
        # Not shown: it is written to config.yaml as it is.
        raise ConfigError(
            "the judge's base_url has a user, a password or a query; give the address alone, and "
            f"the key in the environment variable {key_variable}"
        )
    try:
        address = urlsplit(base_url)
        is_address = address.scheme in ("http", "https") and address.hostname and address.port != 0
    except ValueError:
        is_address = False
    if not is_address or not base_url.isprintable() or " " in base_url:
        raise ConfigError(
            f"the judge's base_url={base_url} must be an address such as http://127.0.0.1:8000/v1; "
            "correct it"
        )


def _check_limits(concurrency: int, timeout_seconds: float, outage_seconds: float) -> None:
    if not isinstance(concurrency, int) or isinstance(concurrency, bool) or concurrency < 1:
        raise ConfigError(f"the judge's concurrency={concurrency!r} must be 1 or more; change it")
    for name, value, least in (
        ("timeout_seconds", timeout_seconds, 1e-3),
        ("outage_seconds", outage_seconds, 0.0),
    ):
        is_number = isinstance(value, int | float) and math.isfinite(value)
        if not is_number or value < least:
            raise ConfigError(f"the judge's {name}={value!r} must be {least:g} or more; change it")


def _key(variable: str) -> str:
    """Return the key, which is "" where the variable is unset. ConfigError: it cannot be sent."""
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(
            f"the environment variable {variable} has a character that no key has; it must be "
            "printable ASCII without spaces; set it again"
        )
    return key
