"""From sampled responses to scored ones: the one path for training and for evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from vapo_megatron.batch import Rollout, ScoredRollout
from vapo_megatron.config import RewardConfig
from vapo_megatron.reward.math_verifier import MathVerifier
from vapo_megatron.reward.shaping import shaped_reward


def score_rollouts(
    verifier: MathVerifier | None,
    rollouts: Sequence[Rollout],
    reward: RewardConfig,
    max_response_tokens: int,
) -> list[ScoredRollout]:
    """Judge responses on the rank that sampled them.

    Args:
        verifier: on the first rank of each vLLM replica; None elsewhere, where nothing is scored so
            that no response counts twice.
        rollouts: this replica's.
        reward: from a verdict to a number.
        max_response_tokens: the sampling limit, for the overlong punishment.

    Returns:
        The scored rollouts in the same order; an empty list without a verifier.
    """
    if verifier is None:
        return []
    verdicts = verifier.score([r.text for r in rollouts], [r.prompt.answer for r in rollouts])
    return [
        ScoredRollout(
            rollout,
            verdict.status,
            shaped_reward(
                verdict.status == "correct",
                rollout.truncated,
                len(rollout.token_ids),
                reward,
                max_response_tokens,
            ),
        )
        for rollout, verdict in zip(rollouts, verdicts)
    ]
