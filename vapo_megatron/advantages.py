"""From rewards and values to advantages and returns, for one data-parallel rank's batch."""

from __future__ import annotations

import torch
from torch import Tensor

from vapo_megatron.algorithm.gae import decoupled_gae, length_adaptive_lambda, whiten
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
    lambda_actor = actor_lambda(batch.response_lengths, algorithm)
    advantages, returns = decoupled_gae(
        token_rewards(batch),
        batch.values,
        batch.cu_seqlens,
        lambda_actor=lambda_actor,
        lambda_critic=(
            lambda_actor
            if algorithm.lambda_critic == "same_as_actor"
            else float(algorithm.lambda_critic)
        ),
        gamma=algorithm.gamma,
    )
    if algorithm.advantage_whitening:
        mask = batch.loss_mask.bool()
        a = advantages[mask].double()
        sums = torch.stack([a.new_tensor(a.numel()), a.sum(), a.square().sum()])
        count, total, squares = sum_over_data_parallel(sums, groups).unbind()
        mean = total / count.clamp(min=1)
        std = (squares / count.clamp(min=1) - mean.square()).clamp(min=0).sqrt()
        advantages = whiten(advantages, mean=mean.float(), std=std.float())
    return batch.replace(advantages=advantages, returns=returns)


def actor_lambda(lengths: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """Lambda of each response's advantages, float32 [B]; lengths: int64 [B], in tokens."""
    if algorithm.lambda_actor == "adaptive":
        return length_adaptive_lambda(lengths, algorithm.length_adaptive_alpha)
    return torch.full(lengths.shape, float(algorithm.lambda_actor))


def token_rewards(batch: RolloutBatch) -> Tensor:
    """Put each response's reward on its last token: float32 [T]."""
    rewards = torch.zeros(int(batch.cu_seqlens[-1]))
    some = batch.response_lengths > 0
    rewards[batch.cu_seqlens[1:].long()[some] - 1] = batch.rewards[some]
    return rewards
