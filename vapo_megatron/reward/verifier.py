"""The verifier protocol: a verdict on each response, kept apart from its reward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol

from vapo_megatron.errors import DataError

Status = Literal["correct", "wrong", "unparsable", "timed_out"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verifier's judgement. Reward shaping never changes it."""

    status: Status
    """timed_out: judging it exceeded the time or memory limit."""
    extracted: str | None = None
    """The final answer as it was compared; None: there is none."""

    @property
    def is_correct(self) -> bool:
        """True for "correct" only."""
        return self.status == "correct"


class Verifier(Protocol):
    """Judges responses, such as math_verifier.MathVerifier."""

    def score(self, responses: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        """Judge responses[i] against the ground truth answers[i] -> verdicts in the same order.

        Args:
            responses: their text, without the prompts.
            answers: ground truths, which unparsable_answers has accepted.
        """

    def unparsable_answers(self, answers: Sequence[str]) -> list[int]:
        """Return the indices of ground truths that cannot be parsed: a run refuses them."""

    def forget(self) -> None:
        """Forget verdicts: a new step judges again what was, perhaps, only too slow."""

    def close(self) -> None:
        """End its processes."""


def unparsable_answer(path: str, row: int, answer: str) -> DataError:
    """Return the error for a row of a data file that is one of unparsable_answers."""
    return DataError(
        f"{path}: row {row} (from 0) has the answer {answer!r}, which the verifier cannot parse; "
        "correct or remove the row"
    )
