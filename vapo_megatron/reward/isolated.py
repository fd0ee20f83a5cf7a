"""Runs a verifier class in worker processes: whatever it does costs one verdict, not the run.

The upper half runs in the trainer, the lower half in a worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vapo_megatron.data.problems import Problem
from vapo_megatron.errors import ConfigError, tell
from vapo_megatron.reward.pool import (
    DIED,
    OUT_OF_MEMORY,
    OVER_TIME,
    HandlerRefused,
    Reply,
    WorkerPool,
)
from vapo_megatron.reward.verifier import Verdict


class IsolatedVerifier:
    """A RunningVerifier over a class, or an instance, in processes that are killed when it hangs.

    Args:
        name: in messages.
        verifier: "package.module:Class"; or an instance or a class, which is pickled by value
            where it is not importable.
        options: keyword arguments of the class.
        num_workers: processes.
        timeout_seconds: limit for one response, counted from when a worker receives it.
        memory_bytes: what a process may take beyond what loading the class took.
    """

    def __init__(
        self,
        name: str,
        verifier: object,
        options: Mapping[str, Any],
        *,
        num_workers: int,
        timeout_seconds: float,
        memory_bytes: int,
    ) -> None:
        self._name = name
        self._limits = f"{timeout_seconds:g} seconds", f"{memory_bytes / 1e9:.3g} GB of memory"
        self._has_told = False
        if not isinstance(verifier, str):
            import cloudpickle

            try:
                verifier = cloudpickle.dumps(verifier)
            except Exception as error:
                raise ConfigError(
                    f"verifier={verifier!r} cannot be sent to the processes that judge: {error}; "
                    "open files, locks and connections in a method, when first needed"
                ) from None
        self._pool = WorkerPool(
            "vapo_megatron.reward.isolated:make_handler",
            {"verifier": verifier, "options": dict(options)},
            num_workers,
            timeout_seconds,
            memory_bytes,
        )

    def start(self) -> None:
        """Start the workers; returns immediately."""
        self._pool.start()

    def score(self, responses: Sequence[str], problems: Sequence[Problem]) -> list[Verdict]:
        """Judge each response in a process; see Verifier."""
        asked = [("score", pair) for pair in zip(responses, problems, strict=True)]
        return [self._verdict(reply) for reply in self._ask(asked)]

    def unusable(self, problems: Sequence[Problem]) -> dict[int, str]:
        """Return what the class's `check` says, if it has one; a failure of it counts, too."""
        if not self._describe()["checks"]:
            return {}
        replies = self._ask([("check", (problem,)) for problem in problems])
        reasons = {}
        for i, reply in enumerate(replies):
            reason = reply["result"] if "result" in reply else self._failure(reply)
            if reason is not None:
                reasons[i] = f"is refused by the verifier {self._name}: {reason}"
        return reasons

    def same_answers(self, pairs: Sequence[tuple[Problem, str, str]]) -> list[bool]:
        """Return what the class's `same_answer` says; without one, and where it fails, False."""
        if not pairs or not self._describe()["compares"]:
            return [False] * len(pairs)
        asked = [("same_answer", (first, second, problem)) for problem, first, second in pairs]
        return [reply.get("result") is True for reply in self._ask(asked)]

    def forget(self) -> None:
        """Nothing: every response is judged each time."""

    def close(self) -> None:
        """Kill the workers."""
        self._pool.close()

    def _ask(self, requests: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Reply]:
        with _loading(self._name):
            return self._pool.run(requests)

    def _describe(self) -> dict[str, bool]:
        with _loading(self._name):
            return self._pool.describe()

    def _verdict(self, reply: Reply) -> Verdict:
        if "result" in reply:
            return Verdict(**reply["result"])
        note = self._failure(reply)
        if reply != OVER_TIME and not self._has_told:
            self._has_told = True
            detail = reply.get("error", "").rstrip()
            tell(
                f"warning: the verifier {self._name} failed: {note}; such responses have the "
                "status failed, and later failures are only counted"
                + (f"\n{detail}" if detail else "")
            )
        return Verdict("timed_out" if reply == OVER_TIME else "failed", note=note)

    def _failure(self, reply: Reply) -> str:
        if reply == OVER_TIME:
            return f"more than {self._limits[0]}"
        if reply == OUT_OF_MEMORY:
            return f"more than {self._limits[1]}"
        if reply == DIED:
            return "its process died"
        return reply["error"].rstrip().rpartition("\n")[2]


@contextlib.contextmanager
def _loading(name: str) -> Iterator[None]:
    """Turn a class that does not load into the user's mistake."""
    try:
        yield
    except HandlerRefused as error:
        *trace, last = str(error).rstrip().splitlines()
        place = next((line.strip() for line in reversed(trace) if line.startswith("  File ")), "")
        raise ConfigError(
            f"the verifier {name} cannot be loaded: {last} ({place}); correct it, or "
            "reward.verifier: a built-in name, a name of reward.verifiers, or package.module:Class "
            "with the options of reward.verifiers.NAME"
        ) from None


def make_handler(
    verifier: str | bytes, options: Mapping[str, Any]
) -> tuple[Callable[[tuple[str, tuple[Any, ...]]], dict[str, Any]], dict[str, bool]]:
    """Build the verifier; return what answers (method, arguments), and which it has.

    Runs in a worker. Raises whatever importing or building the class raises.
    """
    # A class beside the user's own files, also where an installed command was started.
    sys.path.insert(0, os.getcwd())
    if isinstance(verifier, bytes):
        built = pickle.loads(verifier)
    else:
        module, _, name = verifier.partition(":")
        built = getattr(importlib.import_module(module), name)
    if isinstance(built, type):
        built = built(**options)
    if not callable(getattr(built, "score", None)):
        raise TypeError(f"{type(built).__name__} has no method score(responses, problems)")

    def handle(request: tuple[str, tuple[Any, ...]]) -> dict[str, Any]:
        method, arguments = request
        if method != "score":
            return {"result": getattr(built, method)(*arguments)}
        response, problem = arguments
        verdicts = list(built.score([response], [problem]))
        if len(verdicts) != 1 or not isinstance(verdicts[0], Verdict):
            raise TypeError(f"score of one response returned {verdicts!r}, not one Verdict"[:300])
        return {"result": dataclasses.asdict(verdicts[0])}

    has = {"checks": hasattr(built, "check"), "compares": hasattr(built, "same_answer")}
    return handle, has
