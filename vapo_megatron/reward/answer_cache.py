"""Keeps a judge's answers on disk, by the content of what was asked."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
from pathlib import Path
from typing import Any

from vapo_megatron.errors import ConfigError
from vapo_megatron.reward.replies import Answer


class AnswerCache:
    """Answers by digest, in a file of this rank's: SQLite's locks do not span nodes.

    Used by one thread at a time. Raises ConfigError: the directory cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / f"rank_{int(os.environ.get('RANK', '0')):05d}.sqlite"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, check_same_thread=False, timeout=60)
            self._file.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, value)")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"the judge's cache={directory} cannot be written: {error}; give another directory"
            ) from None

    def get(self, key: str) -> Answer | None:
        """Return a kept answer; None: there is none, or the file is damaged."""
        with contextlib.suppress(sqlite3.Error, ValueError, TypeError):
            found = self._file.execute("SELECT value FROM answers WHERE key = ?", (key,))
            row = found.fetchone()
            return None if row is None else Answer(*json.loads(row[0]))
        return None

    def put(self, key: str, answer: Answer) -> None:
        """Keep an answer. A full disk loses the cache's benefit, not the run."""
        with contextlib.suppress(sqlite3.Error), self._file:
            self._file.execute(
                "INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, json.dumps(answer))
            )


def digest(content: dict[str, Any]) -> str:
    """Return the key of what was asked."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
