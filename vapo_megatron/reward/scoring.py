"""Scores sampled responses, and checks all ground truths before a run starts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from vapo_megatron.config import RewardConfig
from vapo_megatron.data.batch import Rollout, ScoredRollout
from vapo_megatron.data.prompts import PromptDataset
from vapo_megatron.parallel.reduce import max_over_world
from vapo_megatron.reward.math_verifier import MathVerifier
from vapo_megatron.reward.shaping import shaped_reward
from vapo_megatron.reward.verifier import Verifier, unparsable_answer


def score_rollouts(
    verifier: Verifier | None,
    rollouts: Sequence[Rollout],
    reward: RewardConfig,
    max_response_tokens: int,
) -> list[ScoredRollout]:
    """Score this replica's responses, in their order, on its first rank.

    Args:
        verifier: None on the replica's other ranks, which return an empty list so that no response
            counts twice.
        rollouts: this replica's.
        reward: turns a verdict into a number.
        max_response_tokens: the sampling limit, for the overlong penalty.
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


def start_verifier(
    reward: RewardConfig, datasets: Sequence[PromptDataset | None], tp_size: int
) -> MathVerifier | None:
    """Start the verifier, and refuse ground truths that it cannot parse. Collective.

    Args:
        reward: the verifier's settings.
        datasets: each replica checks its share of every one.
        tp_size: ranks of a vLLM replica.

    Returns:
        On the first rank of each replica a verifier, to be closed; None elsewhere.

    Raises:
        DataError: on every rank, naming the last such row of a file.
    """
    replica, rank_in_replica = divmod(dist.get_rank(), tp_size)
    verifier = None
    if rank_in_replica == 0:
        verifier = MathVerifier(reward.num_workers, reward.timeout_seconds)
        verifier.start()
    for dataset in filter(None, datasets):
        answers = dataset.answers
        found = -1
        if verifier is not None:
            share = range(replica, len(answers), dist.get_world_size() // tp_size)
            bad = verifier.unparsable_answers([answers[i] for i in share])
            found = share[bad[-1]] if bad else -1
        row = int(max_over_world(torch.tensor(float(found), dtype=torch.float64)))
        if row >= 0:
            raise unparsable_answer(dataset.path, row, answers[row])
    return verifier
