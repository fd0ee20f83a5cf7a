"""Scores sampled responses, and checks all ground truths before a run starts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vapo_megatron.config import RewardConfig
from vapo_megatron.data.batch import Rollout, ScoredRollout
from vapo_megatron.parallel.reduce import max_over_world
from vapo_megatron.reward.shaping import shaped_reward
from vapo_megatron.reward.verifier import Verifier, unparsable_answer


def score_rollouts(
    verifier: Verifier | None,
    rollouts: Sequence[Rollout],
    reward: RewardConfig,
    max_response_tokens: int,
) -> list[ScoredRollout]:
    """Score responses on the rank that sampled them.

    Args:
        verifier: on the first rank of each vLLM replica; None elsewhere, where nothing is scored so
            that no response counts twice.
        rollouts: this replica's.
        reward: turns a verdict into a number.
        max_response_tokens: the sampling limit, for the overlong penalty.

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
                verdict.is_correct,
                rollout.truncated,
                len(rollout.token_ids),
                reward,
                max_response_tokens,
            ),
        )
        for rollout, verdict in zip(rollouts, verdicts)
    ]


def check_answers(
    verifier: Verifier | None,
    path: str,
    answers: Sequence[str],
    replica: int,
    num_replicas: int,
) -> None:
    """Refuse ground truths that the verifier cannot parse, before a run starts. Collective.

    Args:
        verifier: on the first rank of each vLLM replica, which checks its share; None elsewhere.
        path: data file, named in the error.
        answers: one per row.
        replica, num_replicas: this replica checks every num_replicas-th row, starting at `replica`.

    Raises:
        DataError: on every rank, naming the last such row of the file.
    """
    found = -1
    if verifier is not None:
        share = range(replica, len(answers), num_replicas)
        bad = verifier.unparsable_answers([answers[i] for i in share])
        found = share[bad[-1]] if bad else -1
    row = int(max_over_world(torch.tensor(float(found), dtype=torch.float64)))
    if row >= 0:
        raise unparsable_answer(path, row, answers[row])
