"""Every function on the meta device: none waits for the device's data or mixes in a CPU tensor.

Not exercised: numbers on a GPU. Meta tensors hold no data, so that reading any of it raises.
"""

import torch

from vapo_megatron.algorithm.gae import (
    decoupled_gae,
    explained_variance,
    explained_variance_from_moments,
    length_adaptive_lambda,
    masked_sums,
    mean_and_std,
    moments,
    whiten,
)
from vapo_megatron.algorithm.policy_loss import (
    clipped_policy_loss,
    loss_count,
    ratio_deviation,
    token_weights,
)
from vapo_megatron.algorithm.positive_lm_loss import positive_lm_loss
from vapo_megatron.algorithm.value_loss import value_loss

META = torch.device("meta")


def floats(*shape):
    return torch.zeros(*shape, device=META, requires_grad=True)


def on_meta(*tensors):
    return all(t.device == META for t in tensors)


def test_gae_and_statistics():
    rewards, values = floats(700), floats(700)
    cu_seqlens = torch.zeros(6, dtype=torch.int32, device=META)
    mask = torch.ones(700, dtype=torch.bool, device=META)
    lam = length_adaptive_lambda(cu_seqlens.diff(), 0.05)
    for lambda_actor in (0.5, 1.0, lam):
        for lambda_critic in (1.0, 0.5, lam):
            results = decoupled_gae(
                rewards,
                values,
                cu_seqlens,
                lambda_actor=lambda_actor,
                lambda_critic=lambda_critic,
            )
            assert on_meta(*results) and all(x.shape == (700,) for x in results)
    mean, std = mean_and_std(masked_sums(values, mask))
    assert on_meta(whiten(values, mean=mean, std=std), explained_variance(values, rewards))
    assert on_meta(explained_variance_from_moments(moments(values, rewards, mask)))


def test_losses():
    cu_seqlens = torch.zeros(6, dtype=torch.int32, device=META)
    mask = torch.ones(700, dtype=torch.bool, device=META)
    for aggregation in ("token", "sample"):
        weights = token_weights(mask, cu_seqlens, aggregation)
        count = loss_count(mask, cu_seqlens, aggregation)
        loss, metrics = clipped_policy_loss(
            floats(700), floats(700), floats(700), weights,
            clip_low=0.2, clip_high=0.28, num_tokens=count,
        )  # fmt: skip
        critic_loss, critic_metrics = value_loss(
            floats(700), floats(700), weights, num_tokens=count, old_values=floats(700), clip=0.2
        )
        imitation = positive_lm_loss(floats(700), weights, mask, num_positive_tokens=count)
        (loss + critic_loss + imitation).backward()
        assert on_meta(loss, critic_loss, imitation, *metrics.values(), *critic_metrics.values())
    assert on_meta(ratio_deviation(floats(700), floats(700), mask))
