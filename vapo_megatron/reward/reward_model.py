"""The reward model as a verifier: its verdicts are pending until the trainer has its scores.

While vLLM samples, the reward model is not on the device. Its responses are marked as pending, move
to the ranks that train on them, are scored there (roles/reward_model.py), and get their verdict
from scoring.with_scores. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from vapo_megatron.data.problems import Problem
from vapo_megatron.reward.verifier import RunningVerifier, Status, Verdict


@dataclasses.dataclass(frozen=True)
class Pending(Verdict):
    """Stands for a verdict until there is a score; counts as failed where it is taken for one."""

    status: Status = "failed"
    note: str = "the reward model has not scored it"


class RewardModelVerifier(RunningVerifier):
    """Leaves every response to the reward model; whether there is one: see Verifiers."""

    def score(self, responses: Sequence[str], problems: Sequence[Problem]) -> list[Verdict]:
        """Return a pending verdict for each response."""
        return [Pending() for _ in responses]


def reward_model_verdict(score: float) -> Verdict:
    """Return the verdict on a response: correct from a score of 0 on, before reward.correct_from.

    A reward model of pairs (Bradley and Terry) gives 0 to what is as likely to win as to lose.
    """
    if not math.isfinite(score):
        return Verdict("failed", note=f"the reward model's score is {score}")
    return Verdict("correct" if score >= 0 else "wrong", score=score)
