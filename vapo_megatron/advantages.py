"""From rewards and values to advantages and returns, for one data-parallel rank's batch."""

from __future__ import annotations

import torch
from torch import Tensor

from vapo_megatron.algorithm.gae import (
    decoupled_gae,
    masked_sums,
    mean_and_std,
    resolve_lambdas,
    whiten,
)
from vapo_megatron.batch import RolloutBatch
from vapo_megatron.config import AlgorithmConfig
from vapo_megatron.parallel.groups import ParallelGroups
from vapo_megatron.parallel.reduce import sum_over_data_parallel


def with_advantages(
    batch: RolloutBatch, algorithm: AlgorithmConfig, groups: ParallelGroups
) -> RolloutBatch:
    """Return the batch with `advantages` and `returns` [T] set; needs `values`.

    The whole reward stands on a response's last token. Local to a data-parallel rank, except that
    whitening, when on, uses the mean and standard deviation over all ranks' trained tokens.
    """
    assert batch.values is not None
    lambda_actor, lambda_critic = lambdas(batch.response_lengths, algorithm)
    advantages, returns = decoupled_gae(
        token_rewards(batch),
        batch.values,
        batch.cu_seqlens,
        lambda_actor=lambda_actor,
        lambda_critic=lambda_critic,
        gamma=algorithm.gamma,
    )
    if algorithm.advantage_whitening:
        sums = sum_over_data_parallel(masked_sums(advantages, batch.loss_mask), groups)
        mean, std = mean_and_std(sums)
        advantages = whiten(advantages, mean=mean, std=std)
    return batch.replace(advantages=advantages, returns=returns)


def lambdas(lengths: Tensor, algorithm: AlgorithmConfig) -> tuple[float | Tensor, float | Tensor]:
    """(lambda_actor, lambda_critic) of responses of these lengths [B], as configured."""
    return resolve_lambdas(
        lengths,
        lambda_actor=algorithm.lambda_actor,
        lambda_critic=algorithm.lambda_critic,
        length_adaptive_alpha=algorithm.length_adaptive_alpha,
    )


def token_rewards(batch: RolloutBatch) -> Tensor:
    """Put each response's reward on its last token: float32 [T]."""
    rewards = torch.zeros(int(batch.cu_seqlens[-1]))
    some = batch.response_lengths > 0
    rewards[batch.cu_seqlens[1:].long()[some] - 1] = batch.rewards[some]
    return rewards
