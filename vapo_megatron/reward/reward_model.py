"""The reward model as a verifier: its verdicts are pending until the trainer has its scores.

While vLLM samples, the reward model is not on the device. Its responses are marked as pending, move
to the ranks that train on them, are scored there (roles/reward_model.py), and get their verdict
from scoring.with_scores. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from vapo_megatron.config import RewardConfig
from vapo_megatron.config.reward import HYBRID, REWARD_MODEL
from vapo_megatron.data.problems import Problem
from vapo_megatron.errors import ConfigError
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


def reward_model_refusals(*, has_reward_model: bool) -> tuple[str | None, str | None]:
    """Return why the reward model judges no (training, held-out) row; None: it does."""
    return (
        None if has_reward_model else f"is judged by {REWARD_MODEL}, but model.reward_hf_path=null",
        f"is judged by {REWARD_MODEL}, which scores training responses only: an evaluation needs "
        "another verifier, in the row's column `verifier`",
    )


def check_reward_model_judges(
    reward: RewardConfig, rows: Sequence[Problem], path: str, reward_hf_path: str | None
) -> None:
    """Refuse a reward model that would judge nothing.

    Args:
        reward: of the configuration.
        rows: of the training data; hybrid may give a row to any that it chooses among.
        path: of the data.
        reward_hf_path: of the model; None: there is none.

    Raises:
        ConfigError: names model.reward_hf_path.
    """
    names = {row.verifier or reward.verifier for row in rows}
    able = {*names, *(reward.hybrid if HYBRID in names else ())}
    if reward_hf_path is not None and not any(reward.use_of(n) == REWARD_MODEL for n in able):
        raise ConfigError(
            f"model.reward_hf_path={reward_hf_path} would score nothing: all rows of {path} are "
            f"judged by {', '.join(sorted(names))}; set reward.verifier={REWARD_MODEL} or a row's "
            "column `verifier`, or reward_hf_path=null"
        )
