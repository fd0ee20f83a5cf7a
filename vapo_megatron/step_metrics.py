"""The numbers that describe a training step, over all ranks' responses."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vapo_megatron.advantages import actor_lambda
from vapo_megatron.algorithm.gae import explained_variance_from_moments, moments
from vapo_megatron.batch import RolloutBatch, StepSummary
from vapo_megatron.config import AlgorithmConfig
from vapo_megatron.parallel.groups import ParallelGroups
from vapo_megatron.parallel.reduce import max_over_world, sum_over_data_parallel


def step_metrics(
    summary: StepSummary,
    batch: RolloutBatch,
    entropy: Tensor,
    actor: Mapping[str, float],
    critic: Mapping[str, float],
    algorithm: AlgorithmConfig,
    groups: ParallelGroups,
) -> dict[str, float]:
    """Name and reduce a step's metrics; two small all-reduces.

    Args:
        summary: of all ranks' responses.
        batch: this data-parallel rank's, complete.
        entropy: float32 [T], nats, of the policy that sampled.
        actor: the actor's update metrics, empty while only the critic trains.
        critic: the critic's update metrics.
        algorithm: for lambda.
        groups: this rank's place.
    """
    assert batch.old_logprobs is not None and batch.values is not None
    assert batch.returns is not None
    difference = (batch.rollout_logprobs - batch.old_logprobs).abs()
    mask = batch.loss_mask.bool()
    sums = torch.stack(
        [
            torch.tensor(float(difference.numel()), dtype=torch.float64),
            difference.double().sum(),
            entropy.double().sum(),
            *moments(batch.values, batch.returns, mask),
        ]
    )
    count, difference_sum, entropy_sum, *of_values = sum_over_data_parallel(sums, groups).unbind()
    largest = max_over_world(torch.cat([difference, torch.zeros(1)]).max())
    lengths = summary.response_lengths
    result = {
        "reward/mean": summary.rewards.mean(),
        "reward/accuracy": summary.is_correct.float().mean(),
        "rollout/response_length_mean": lengths.float().mean(),
        "rollout/response_length_max": lengths.max(),
        "rollout/truncated_fraction": summary.truncated.float().mean(),
        "rollout/logprob_diff_mean": difference_sum / count,
        "rollout/logprob_diff_max": largest,
        "actor/entropy": entropy_sum / count,
        "critic/explained_variance": explained_variance_from_moments(torch.stack(of_values)),
        "algorithm/lambda_actor_mean": actor_lambda(lengths, algorithm).mean(),
        **{f"critic/{name}": value for name, value in critic.items()},
        **{f"actor/{name}": value for name, value in actor.items()},
    }
    return {name: float(value) for name, value in result.items()}
