"""What each token weighs in the policy loss, for one data-parallel rank's batch."""

from __future__ import annotations

from vapo_megatron.algorithm.policy_loss import loss_count
from vapo_megatron.algorithm.sampler_correction import icepop_mask, truncated_importance_mask
from vapo_megatron.config import AlgorithmConfig
from vapo_megatron.data.batch import RolloutBatch
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.parallel.reduce import sum_over_data_parallel


def with_policy_mask(
    batch: RolloutBatch, algorithm: AlgorithmConfig, ranks: Ranks
) -> tuple[RolloutBatch, dict[str, float]]:
    """Return the batch with `policy_mask` set as algorithm.sampler_correction says; and metrics.

    Needs `old_logprobs`. Two small all-reduces; without a correction neither they nor metrics.
    """
    if algorithm.sampler_correction == "none":
        return batch, {}
    assert batch.old_logprobs is not None
    logprobs = batch.old_logprobs, batch.rollout_logprobs
    count = sum_over_data_parallel(loss_count(batch.loss_mask, batch.cu_seqlens, "token"), ranks)
    if algorithm.sampler_correction == "tis":
        mask, metrics = truncated_importance_mask(
            *logprobs, batch.loss_mask, cap=algorithm.sampler_tis_cap, num_tokens=count
        )
    else:
        mask, metrics = icepop_mask(
            *logprobs,
            batch.loss_mask,
            low=algorithm.sampler_icepop_low,
            high=algorithm.sampler_icepop_high,
            num_tokens=count,
        )
    sums = sum_over_data_parallel(metrics, ranks)
    return batch.replace(policy_mask=mask), {
        "rollout/sampler_ratio_mean": float(sums["sampler_ratio"]),
        "rollout/sampler_corrected_fraction": float(sums["sampler_corrected_fraction"]),
    }
