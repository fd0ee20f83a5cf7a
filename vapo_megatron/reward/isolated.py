"""Runs a user's verifier in worker processes: whatever it does costs a verdict, not the run.

The upper half runs in the trainer, the lower half in a worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vapo_megatron.data.problems import Problem
from vapo_megatron.errors import tell
from vapo_megatron.reward.functions import FunctionVerifier, WrongReturn
from vapo_megatron.reward.user_code import failure, last_line, load, loading, sendable
from vapo_megatron.reward.verifier import RunningVerifier, Verdict
from vapo_megatron.sandbox.channel import OVER_TIME, Reply
from vapo_megatron.sandbox.pool import WorkerPool


class IsolatedVerifier(RunningVerifier):
    """A RunningVerifier over a class, an instance or a function, in processes that can be killed.

    Args:
        name: in messages.
        verifier: "package.module:NAME" or "path/to/file.py:NAME"; or the object itself, which is
            pickled by value where it is not importable.
        options: keyword arguments of the class or function.
        num_workers: processes.
        timeout_seconds: limit for one response, or for a group where it sees groups, counted from
            when a worker receives it.
        memory_bytes: what a process may take beyond what loading the verifier took.
        full_score: see FunctionVerifier.
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
        full_score: float | None = None,
    ) -> None:
        self._name = name
        self._limits = timeout_seconds, memory_bytes
        self._has_told = False
        verifier = sendable("verifier", verifier, "judge")
        self._pool = WorkerPool(
            "vapo_megatron.reward.isolated:make_handler",
            {"verifier": verifier, "options": dict(options), "full_score": full_score},
            num_workers,
            timeout_seconds,
            memory_bytes,
        )

    def start(self) -> None:
        """Start the workers; returns immediately."""
        self._pool.start()

    def score(self, responses: Sequence[str], problems: Sequence[Problem]) -> list[Verdict]:
        """Judge each response in a process, or each group; see Verifier.

        Responses with the same Problem object are a group.
        """
        groups: dict[int, list[int]] = {}
        for i, problem in enumerate(problems):
            groups.setdefault(id(problem) if self.sees_group else i, []).append(i)
        asked = [
            ("score", ([responses[i] for i in group], problems[group[0]]))
            for group in groups.values()
        ]
        found: dict[int, Verdict] = {}
        for group, reply in zip(groups.values(), self._ask(asked), strict=True):
            found |= zip(group, self._verdicts(reply, len(group)), strict=True)
        return [found[i] for i in range(len(problems))]

    def try_out(self, responses: Sequence[str], problem: Problem) -> list[Verdict] | str:
        """Judge made-up responses to a problem -> verdicts, or what went wrong."""
        [reply] = self._ask([("score", (list(responses), problem))])
        if "result" in reply:
            return [Verdict(**fields) for fields in reply["result"]]
        if "returned" in reply:
            return reply["returned"]
        if "error" not in reply:
            return f"gave no verdict: {self._failure(reply)}"
        last, place = last_line(reply["error"])
        return f"raised {last}{place}"

    @property
    def sees_group(self) -> bool:
        """Whether a call has all responses to a prompt; waits for a worker that has loaded it."""
        return self._describe()["sees_group"]

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

    def close(self) -> None:
        """Kill the workers."""
        self._pool.close()

    def _ask(self, requests: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Reply]:
        with self._loading():
            return self._pool.run(requests)

    def _describe(self) -> dict[str, bool]:
        with self._loading():
            return self._pool.describe()

    def _verdicts(self, reply: Reply, count: int) -> list[Verdict]:
        if "result" in reply:
            return [Verdict(**fields) for fields in reply["result"]]
        note = self._failure(reply)
        if reply != OVER_TIME and not self._has_told:
            self._has_told = True
            detail = reply.get("error", "").rstrip()
            tell(
                f"warning: the verifier {self._name} failed: {note}; such responses have the "
                "status failed, and later failures are only counted"
                + (f"\n{detail}" if detail else "")
            )
        return [Verdict("timed_out" if reply == OVER_TIME else "failed", note=note)] * count

    def _failure(self, reply: Reply) -> str:
        return failure(reply, *self._limits)

    def _loading(self) -> contextlib.AbstractContextManager[None]:
        return loading(
            f"the verifier {self._name}",
            "reward.verifier: a built-in name, a name of reward.verifiers, package.module:NAME or "
            "path/to/file.py:NAME, with the options of reward.verifiers.NAME",
        )


def make_handler(
    verifier: str | bytes, options: Mapping[str, Any], full_score: float | None = None
) -> tuple[Callable[[tuple[str, tuple[Any, ...]]], dict[str, Any]], dict[str, bool]]:
    """Build the verifier; return what answers (method, arguments), and which it has.

    Runs in a worker. Raises whatever importing or building it raises.
    """
    built = load(verifier)
    if isinstance(built, type):
        built, options = built(**options), {}
    if not callable(getattr(built, "score", None)):
        if not callable(built):
            raise TypeError(
                f"{type(built).__name__} has no method score(responses, problems), and is no "
                "function"
            )
        built = FunctionVerifier(built, options, full_score)

    def handle(request: tuple[str, tuple[Any, ...]]) -> dict[str, Any]:
        method, arguments = request
        if method != "score":
            return {"result": getattr(built, method)(*arguments)}
        responses, problem = arguments
        try:
            found = built.score(responses, [problem] * len(responses))
            verdicts = list(found) if isinstance(found, Iterable) else found
        except WrongReturn as wrong:
            return {"returned": str(wrong)}
        if not _are_verdicts(verdicts, len(responses)):
            text = f"returned {verdicts!r}"[:200]
            return {"returned": f"{text} for {len(responses)} responses, not a Verdict for each"}
        return {"result": [dataclasses.asdict(verdict) for verdict in verdicts]}

    has = {
        "checks": hasattr(built, "check"),
        "compares": hasattr(built, "same_answer"),
        "sees_group": bool(getattr(built, "sees_group", False)),
    }
    return handle, has


def _are_verdicts(found: Any, count: int) -> bool:
    is_list = isinstance(found, list)
    return is_list and len(found) == count and all(isinstance(v, Verdict) for v in found)
