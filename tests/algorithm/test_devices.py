"""Every function on the meta device: none waits for the device's data or mixes in a CPU tensor.

Not exercised: numbers on a GPU. Meta tensors hold no data, so that reading any of it raises.
"""

import torch

from vapo_megatron.algorithm.gae import decoupled_gae, gae_lengths, length_adaptive_lambda
from vapo_megatron.algorithm.group_advantages import group_advantages, group_sums
from vapo_megatron.algorithm.off_policy_loss import dis_policy_loss, dppo_tv_policy_loss
from vapo_megatron.algorithm.overlong_filtering import without_truncated
from vapo_megatron.algorithm.policy_loss import (
    clipped_policy_loss,
    loss_count,
    ratio_difference,
    token_weights,
)
from vapo_megatron.algorithm.positive_lm_loss import positive_lm_loss
from vapo_megatron.algorithm.reference_kl import reference_kl
from vapo_megatron.algorithm.sampler_correction import icepop_mask, truncated_importance_mask
from vapo_megatron.algorithm.statistics import (
    explained_variance,
    explained_variance_from_moments,
    masked_sums,
    mean_and_std,
    moments,
    whiten,
)
from vapo_megatron.algorithm.value_loss import ranged_values, value_loss

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
    for aggregation in ("token", "sample", "constant"):
        weights = token_weights(mask, cu_seqlens, aggregation, max_response_tokens=700)
        count = loss_count(mask, cu_seqlens, aggregation)
        loss, metrics = clipped_policy_loss(
            floats(700), floats(700), floats(700), weights,
            clip_low=0.2, clip_high=0.28, num_tokens=count,
        )  # fmt: skip
        critic_loss, critic_metrics = value_loss(
            floats(700), floats(700), weights, num_tokens=count, old_values=floats(700), clip=0.2
        )
        of_sampler = floats(700), floats(700), floats(700), weights
        dis, dis_metrics = dis_policy_loss(*of_sampler, low=0.3, high=5.0, num_tokens=count)
        dppo, dppo_metrics = dppo_tv_policy_loss(
            *of_sampler, max_difference=0.15, ratio_cap=20.0, num_tokens=count
        )
        imitation = positive_lm_loss(floats(700), weights, mask, num_positive_tokens=count)
        kl, kl_metrics = reference_kl(floats(700), floats(700), weights, num_tokens=count)
        (loss + dis + dppo + critic_loss + imitation + kl).backward()
        assert on_meta(loss, dis, dppo, critic_loss, imitation, kl)
        assert on_meta(*dis_metrics.values(), *dppo_metrics.values())
        assert on_meta(*metrics.values(), *critic_metrics.values(), *kl_metrics.values())
    found = ratio_difference(floats(700), floats(700), mask, high=0.1, num_tokens=count)
    assert all(map(on_meta, found.values()))


def test_masks_and_ranged_values():
    cu_seqlens = torch.zeros(6, dtype=torch.int32, device=META)
    mask = torch.ones(700, dtype=torch.bool, device=META)
    assert on_meta(without_truncated(mask, mask[:5], cu_seqlens))
    assert on_meta(ranged_values(floats(700), -1.0, 1.0))
    for gae_length in ("response", "action"):
        assert on_meta(gae_lengths(mask, cu_seqlens, gae_length))
    tensors = floats(700), floats(700), mask
    for policy_mask, metrics in (
        truncated_importance_mask(*tensors, cap=2.0, num_tokens=mask.sum()),
        icepop_mask(*tensors, low=0.5, high=5.0, num_tokens=mask.sum()),
    ):
        assert on_meta(policy_mask, *metrics.values())


def test_group_advantages():
    rewards, groups = floats(64), torch.zeros(64, dtype=torch.int64, device=META)
    sums = group_sums(rewards, groups, 4)
    for estimator in ("grpo", "dr_grpo"):
        assert on_meta(sums, group_advantages(rewards, groups, sums, estimator))
