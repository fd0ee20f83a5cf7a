"""The verifier protocol: a verdict on each response, kept apart from its reward.

A verifier of your own is a function, or a class with one method and no base class; docs/reward.md
has an example of each.
Imports no torch, so that a verifier's process starts quickly.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

from vapo_megatron.data.problems import Problem

Status = Literal["correct", "wrong", "unparsable", "timed_out", "failed"]

__all__ = ["Problem", "RunningVerifier", "Status", "Verdict", "Verifier"]

_NAME = re.compile(r"[\w.:-]+")
"""config.metrics.LABEL, which takes too long to import for a verifier's process."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A verifier's judgement of one response. Reward shaping never changes it.

    Raises:
        ValueError: a field is not what its comment says.
    """

    status: Status
    """unparsable: the response has no answer that can be judged; timed_out: judging it exceeded
    the limit; failed: the verifier gave no verdict."""
    score: float | None = None
    """A finite number, for rewards that are not just right or wrong (reward.from_score)."""
    answer: str | None = None
    """The final answer as it was compared; None: there is none. Votes of majority@k count it."""
    note: str = ""
    """A short explanation for people."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    """Numbers of the verifier's own, whose means become the metrics reward/own/NAME."""

    def __post_init__(self) -> None:
        # Scorers compute with numpy and torch, whose scalars would not pass as Python's.
        object.__setattr__(self, "score", python_value(self.score))
        numbers = {name: python_value(value) for name, value in self.metrics.items()}
        object.__setattr__(self, "metrics", numbers)
        if self.status not in get_args(Status):
            raise ValueError(f"status={self.status!r} must be one of {', '.join(get_args(Status))}")
        if self.score is not None and not is_finite(self.score):
            raise ValueError(f"score={self.score!r} must be a finite number or None")
        if not isinstance(self.answer, str | None):
            raise ValueError(f"answer={self.answer!r} must be text or None")
        if not isinstance(self.note, str):
            raise ValueError(f"note={self.note!r} must be text")
        for name, value in self.metrics.items():
            if not (isinstance(name, str) and _NAME.fullmatch(name)):
                raise ValueError(
                    f"metrics: the name {name!r} must have letters, digits and the characters "
                    "_ . : - alone"
                )
            if not (isinstance(value, bool) or is_finite(value)):
                raise ValueError(f"metrics[{name!r}]={value!r} must be a finite number")

    @property
    def is_correct(self) -> bool:
        """True for "correct" only."""
        return self.status == "correct"


def python_value(value: Any) -> Any:
    """Return a scalar of numpy or torch as a value of Python's, anything else as it is."""
    return value.item() if getattr(value, "shape", None) == () else value


def is_finite(value: object) -> bool:
    """Return whether a value is a finite number that a float can be; True and False are none."""
    try:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:
        return False


class Verifier(Protocol):
    """Judges responses. What a class of your own must have; the rest below is optional.

    Optional methods: `check(problem) -> str | None` says what is wrong with a problem (a run
    refuses it before it starts); `same_answer(first, second, problem) -> bool` says whether two
    final answers that differ as text are equal, for the votes of majority@k. With the attribute
    `sees_group = True` a call has all responses to one prompt.
    """

    def score(self, responses: Sequence[str], problems: Sequence[Problem]) -> Sequence[Verdict]:
        """Judge responses[i], the text without its prompt, to problems[i] -> one verdict each."""


class RunningVerifier(Protocol):
    """What a run needs of its verifiers; Verifiers has it for any of them.

    A subclass that has nothing to start, refuse, compare, clear or end leaves that out.
    """

    def start(self) -> None:
        """Start its processes; returns immediately."""
        return

    def score(self, responses: Sequence[str], problems: Sequence[Problem]) -> Iterable[Verdict]:
        """Judge; see Verifier. What takes too long or fails is a verdict, too.

        Verdicts that are only waited for, as a server's are, may be so in the iteration, which goes
        once over them: all are under way when this returns, and more responses may be given.
        """

    def unusable(self, problems: Sequence[Problem]) -> dict[int, str]:
        """Return index -> what is wrong, for the problems that a run refuses."""
        return {}

    def same_answers(self, pairs: Sequence[tuple[Problem, str, str]]) -> list[bool]:
        """Return whether the two final answers are equal, for each pair that differs as text."""
        return [False] * len(pairs)

    def forget(self) -> None:
        """Clear cached verdicts, so that responses that timed out are judged again."""
        return

    def close(self) -> None:
        """End its processes."""
        return
