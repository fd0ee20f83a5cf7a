"""Episodes of a user's environment, each in a process of its own: text in, text out.

Whatever an episode's environment does costs that episode alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from vapo_megatron.data.problems import Problem
from vapo_megatron.environments.step import Observation, Step, checked, text
from vapo_megatron.errors import tell
from vapo_megatron.reward.functions import WrongReturn
from vapo_megatron.reward.user_code import failure, loading, sendable
from vapo_megatron.reward.verifier import Verdict
from vapo_megatron.sandbox.channel import DIED, OUT_OF_MEMORY, OVER_TIME, Reply
from vapo_megatron.sandbox.sessions import Sessions

MAX_FAILURE_CHARACTERS = 300


class Played(NamedTuple):
    """What an environment made of an action; the first one of an episode is its beginning."""

    observation: Observation = ""
    reward: float = 0.0
    done: bool = False
    """The episode is over, and its key free."""
    verdict: Verdict | None = None
    note: str = ""
    failed_calls: int = 0
    """Calls of tools that were wrong."""
    seconds: float = 0.0
    """From when the process was asked until the answer was seen."""
    failed: bool = False
    """It ended without an answer, and so is done; the note says why, in one line."""


class Play:
    """Plays episodes, many at a time.

    Args:
        name: in messages.
        environment: "package.module:NAME" or "path/to/file.py:NAME" of a class with reset and step
            (step.py), or of a function that returns one; or the object itself, which is pickled by
            value where it is not importable.
        options: keyword arguments of the class or function.
        at_once: calls under way at a time; more wait for these.
        timeout_seconds: limit for one call.
        memory_bytes: what an episode's process may take beyond what loading the class took.
        max_characters: of an observation; longer ones are cut there.
        full_score: the least score of a verdict that is a correct one; None: scores are refused.
    """

    def __init__(
        self,
        name: str,
        environment: object,
        options: Mapping[str, Any],
        *,
        at_once: int,
        timeout_seconds: float,
        memory_bytes: int,
        max_characters: int = 1 << 20,
        full_score: float | None = None,
    ) -> None:
        self._name = name
        self._limits = timeout_seconds, memory_bytes
        self._rules = max_characters, full_score
        self._has_told = False
        handler_options = {
            "environment": sendable("environment", environment, "play"),
            "options": dict(options),
            "max_characters": max_characters,
            "full_score": full_score,
        }
        self._sessions = Sessions(
            "vapo_megatron.environments.playing:make_handler",
            handler_options,
            at_once,
            timeout_seconds,
            memory_bytes,
        )
        self._numbers = itertools.count()
        # A key is free before its session has closed.
        self._number_of: dict[Hashable, int] = {}
        self._key_of: dict[int, Hashable] = {}
        self._asked = set[int]()

    def start(self) -> None:
        """Begin to load the environment; returns immediately."""
        self._sessions.start()

    def check(self) -> None:
        """Wait until the environment has loaded.

        Raises:
            ConfigError: it does not; each method below raises that, too.
        """
        self.schemas()

    def schemas(self) -> list[dict[str, Any]]:
        """Return the JSON schemas of the tools, for the chat template, once it has loaded.

        Empty: there are none. Raises as `check` does.
        """
        with self._loading():
            return self._sessions.describe()["schemas"]

    def begin(self, key: Hashable, problem: Problem, seed: int) -> None:
        """Begin an episode, by a key that no other has now; its first answer is what reset says."""
        assert key not in self._number_of, f"{key} is being played"
        number = next(self._numbers)
        self._number_of[key], self._key_of[number] = number, key
        self._sessions.open(number)
        self._ask(number, "reset", problem, seed)

    def act(self, key: Hashable, action: str) -> None:
        """Take an action in an episode that has answered all before, and is not done."""
        self._ask(self._number_of[key], "step", action)

    def end(self, key: Hashable) -> None:
        """End an episode that is not done, and free its key; no answer of it comes any more."""
        number = self._number_of.get(key)
        if number is not None:
            self._let_go(number, may_close=number not in self._asked)

    def answers(self, wait_seconds: float) -> list[tuple[Hashable, Played]]:
        """Return those that have come; wait for the first so long at most."""
        until = time.monotonic() + wait_seconds
        while True:
            with self._loading():
                answered = self._sessions.wait(max(until - time.monotonic(), 0.0))
            found = []
            for number, reply, seconds in answered:
                assert isinstance(number, int), "these are the keys"
                if number in self._key_of:
                    found.append((self._key_of[number], self._played(number, reply, seconds)))
                else:
                    self._sessions.end(number)  # It has closed, or should have.
            if found or not answered:
                return found

    def close(self) -> None:
        """Kill every process, without closing the environments."""
        self._sessions.close()
        self._number_of.clear()
        self._key_of.clear()
        self._asked.clear()

    def _ask(self, number: int, *request: Any) -> None:
        self._asked.add(number)
        with self._loading():
            self._sessions.ask(number, request)

    def _played(self, number: int, reply: Reply, seconds: float) -> Played:
        self._asked.discard(number)
        played = self._answer(reply)
        if played.done:
            self._let_go(number, may_close=reply not in (DIED, OVER_TIME, OUT_OF_MEMORY))
        return played._replace(seconds=seconds)

    def _answer(self, reply: Reply) -> Played:
        """Read what a process has sent; the environment's code may have written to its pipe."""
        try:
            fields = reply["result"]
            verdict = fields["verdict"] and Verdict(**fields["verdict"])
            step = checked(Step(**{**fields, "verdict": verdict}), *self._rules)
            return Played(*(getattr(step, field.name) for field in dataclasses.fields(step)))
        except (KeyError, TypeError, ValueError, WrongReturn):
            return Played(done=True, note=self._failure(reply), failed=True)

    def _failure(self, reply: Reply) -> str:
        """Say in one line why there is no step, the first time to the user, too."""
        said = {k: v for k, v in reply.items() if isinstance(v, str) and v.strip()}
        if reply in (DIED, OVER_TIME, OUT_OF_MEMORY):
            note = failure(reply, *self._limits)
        elif said.keys() & {"error", "returned"}:
            note = failure(said, *self._limits)
        else:
            note = "its process sent something else than a step"
        note = text(" ".join(note.split()), MAX_FAILURE_CHARACTERS)
        if reply != OVER_TIME and not self._has_told:
            self._has_told = True
            detail = said.get("error", "").rstrip()
            tell(
                f"warning: the environment {self._name} failed: {note}; such episodes end as "
                "failed, and later failures are only counted" + (f"\n{detail}" if detail else "")
            )
        return note

    def _let_go(self, number: int, *, may_close: bool) -> None:
        del self._number_of[self._key_of.pop(number)]
        self._asked.discard(number)
        if may_close:
            with self._loading():
                self._sessions.ask(number, ("close",))
        else:
            self._sessions.end(number)

    def _loading(self) -> contextlib.AbstractContextManager[None]:
        return loading(
            f"the environment {self._name}",
            "environment.use: package.module:NAME or path/to/file.py:NAME, with the options of "
            "environment.options",
        )
