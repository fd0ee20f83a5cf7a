"""Asks a model behind an OpenAI-compatible endpoint, such as `vllm serve`, many things at once.

An endpoint that is gone is asked again for a while, so that a run survives its restart. Answers are
kept on disk by content. The key is read from the environment and never written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from vapo_megatron.errors import ConfigError

LONGEST_PAUSE_SECONDS = 10.0
"""Between two tries; the first pause is half a second, and each next one twice as long."""


class Answer(NamedTuple):
    """What the model said, or why it did not."""

    text: str = ""
    first_token: dict[str, float] = {}
    """Log-probabilities of the most likely first tokens, where they were asked for."""
    problem: str = ""
    """Not empty: there is no answer, because of this."""


class Endpoint:
    """A model by name at an address.

    Args:
        base_url: such as http://127.0.0.1:8000/v1.
        model: as the server names it.
        chat: ask for a chat completion; False: for a completion of the bare text.
        concurrency: requests at a time.
        timeout_seconds: limit for one try.
        outage_seconds: how long a request is tried again while the server fails or is away. Once
            it has been away for so long, each further request is tried once.
        cache: directory of the answers; None: none are kept.
        key_variable: environment variable with the key; unset: no key is sent.
        body: what each request has besides, such as max_tokens.

    Raises:
        ConfigError: base_url is no address, or has a password; cache cannot be written.
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
        self._identity = {"model": model, "chat": chat, **body}
        self._chat, self._model, self._body = chat, model, body
        self._outage_seconds = outage_seconds
        self._away_since = math.inf
        self._options: dict[str, Any] = {
            "base_url": base_url,
            "api_key": os.environ.get(key_variable) or "none",
            "timeout": timeout_seconds,
            "max_retries": 0,
        }
        self._client: Any = None
        self._cache = None if cache is None else _Cache(Path(cache))
        self._threads = ThreadPoolExecutor(concurrency, "judge")
        self._closed = threading.Event()
        self._lock = threading.Lock()

    def ask(self, prompts: Sequence[str]) -> Iterator[Answer]:
        """Begin to ask everything -> the answers, in order, for which the iteration waits."""
        return self._threads.map(self._ask, prompts)

    def close(self) -> None:
        """Stop asking; what is under way is given up."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ask(self, prompt: str) -> Answer:
        key = _digest({**self._identity, "prompt": prompt})
        if self._cache is not None and (kept := self._cache.get(key)) is not None:
            return Answer(*kept)
        answer = self._try(prompt)
        if self._cache is not None and not answer.problem:
            self._cache.put(key, answer)
        return answer

    def _try(self, prompt: str) -> Answer:
        import openai

        again = (openai.APIConnectionError, openai.RateLimitError, openai.InternalServerError)
        began, pause = time.monotonic(), 0.5
        while True:
            try:
                answer = self._request(prompt)
                self._away_since = math.inf
                return answer
            except again as error:
                now = time.monotonic()
                self._away_since = min(self._away_since, now)
                deadline = min(began, self._away_since) + self._outage_seconds
                if now + pause > deadline or self._closed.is_set():
                    reason = " ".join(str(error).split())[:200]
                    return Answer(problem=f"no answer for {self._outage_seconds:g} s: {reason}")
                # Not all at the same moment once it is back.
                self._closed.wait(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            except openai.APIError as error:
                self._away_since = math.inf
                return Answer(problem=" ".join(str(error).split())[:200])

    def _request(self, prompt: str) -> Answer:
        import openai

        with self._lock:
            if self._client is None:
                self._client = openai.OpenAI(**self._options)
        body = dict(self._body)
        names = ("max_tokens", "temperature", "logprobs")
        known: dict[str, Any] = {name: body.pop(name) for name in names if name in body}
        if not self._chat:
            done = self._client.completions.create(
                model=self._model, prompt=prompt, extra_body=body, **known
            )
            choice = done.choices[0]
            most_likely = choice.logprobs.top_logprobs[0] if choice.logprobs else {}
            return Answer(choice.text, dict(most_likely))
        if "logprobs" in known:
            known |= {"top_logprobs": known["logprobs"], "logprobs": True}
        messages = [{"role": "user", "content": prompt}]
        done = self._client.chat.completions.create(
            model=self._model, messages=messages, extra_body=body, **known
        )
        choice, first = done.choices[0], {}
        if choice.logprobs and choice.logprobs.content:
            first = {t.token: t.logprob for t in choice.logprobs.content[0].top_logprobs}
        return Answer(choice.message.content or "", first)


def _check_address(base_url: str, key_variable: str) -> None:
    address = urlsplit(base_url)
    if address.username or address.password or address.query:
        # Not shown: it is written to config.yaml as it is.
        raise ConfigError(
            "the judge's base_url has a user, a password or a query; give the address alone, and "
            f"the key in the environment variable {key_variable}"
        )
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ConfigError(
            f"the judge's base_url={base_url} must be an address such as http://127.0.0.1:8000/v1; "
            "correct it"
        )


class _Cache:
    """Answers by digest, in a file of this rank's: SQLite's locks do not span nodes."""

    def __init__(self, directory: Path) -> None:
        path = directory / f"rank_{int(os.environ.get('RANK', '0')):05d}.sqlite"
        self._lock = threading.Lock()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, check_same_thread=False, timeout=60)
            self._file.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, value)")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"the judge's cache={directory} cannot be written: {error}; give another directory"
            ) from None

    def get(self, key: str) -> list[Any] | None:
        with self._lock:
            row = self._file.execute("SELECT value FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def put(self, key: str, answer: Answer) -> None:
        # A full disk loses the cache's benefit, not the run.
        with self._lock, contextlib.suppress(sqlite3.Error), self._file:
            self._file.execute(
                "INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, json.dumps(answer))
            )


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
