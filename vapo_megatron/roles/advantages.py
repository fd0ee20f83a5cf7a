"""Verdicts, loss masks, advantages and returns of one data-parallel rank's batch."""

from __future__ import annotations

import torch
from torch import Tensor

from vapo_megatron.algorithm.gae import decoupled_gae, gae_lengths
from vapo_megatron.algorithm.group_advantages import group_advantages, group_sums
from vapo_megatron.algorithm.lambdas import resolve_lambdas
from vapo_megatron.algorithm.overlong_filtering import without_truncated
from vapo_megatron.algorithm.policy_loss import loss_count
from vapo_megatron.algorithm.positive_lm_loss import imitation_weights
from vapo_megatron.algorithm.sampler_correction import icepop_mask, truncated_importance_mask
from vapo_megatron.algorithm.statistics import masked_sums, mean_and_std, whiten
from vapo_megatron.algorithm.turn_gae import turn_gae, turn_layout
from vapo_megatron.config import AlgorithmConfig, RolloutConfig
from vapo_megatron.config.metrics import emits
from vapo_megatron.data.batch import RolloutBatch, StepSummary
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.parallel.reduce import sum_over_data_parallel


def with_loss_mask(batch: RolloutBatch, algorithm: AlgorithmConfig) -> RolloutBatch:
    """Return the batch with truncated responses masked out, if overlong_filtering is on."""
    if not algorithm.overlong_filtering:
        return batch
    mask = without_truncated(batch.loss_mask, batch.truncated, batch.cu_seqlens)
    return batch.replace(loss_mask=mask)


def with_verdicts(batch: RolloutBatch, summary: StepSummary) -> RolloutBatch:
    """Return the batch with the rewards and verdicts that the summary has by now."""
    return batch.replace(
        rewards=summary.rewards[batch.positions], is_correct=summary.is_correct[batch.positions]
    )


@emits(
    "rollout/sampler_ratio_mean",
    "rollout/sampler_corrected_fraction",
)
def with_policy_mask(
    batch: RolloutBatch, algorithm: AlgorithmConfig, ranks: Ranks
) -> tuple[RolloutBatch, dict[str, float]]:
    """Return the batch with `policy_mask` set by algorithm.sampler_correction, and metrics.

    Needs `old_logprobs`. Two small all-reduces; none, and no metrics, without a correction.
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


def with_positive_examples(batch: RolloutBatch, algorithm: AlgorithmConfig) -> RolloutBatch:
    """Return the batch with the tokens that the LM loss imitates, all of the correct responses.

    With algorithm.positive_lm_weight=advantage it needs `values` and `returns`.
    """
    batch = batch.replace(is_positive=batch.per_token(batch.is_correct))
    if algorithm.positive_lm_weight == "advantage":
        return batch.replace(positive_weights=imitation_weights(batch.returns, batch.values))
    return batch


def with_behaviour(batch: RolloutBatch, rollout: RolloutConfig) -> RolloutBatch:
    """Let old_logprobs be those of the policy that the ratio is to; see rollout.behaviour."""
    if rollout.behaviour == "sampler":
        return batch.replace(old_logprobs=batch.rollout_logprobs)
    return batch


def with_advantages(
    summary: StepSummary, batch: RolloutBatch, algorithm: AlgorithmConfig, ranks: Ranks
) -> RolloutBatch:
    """Return the batch with `advantages` [T] set, and with GAE also `returns` [T].

    With algorithm.advantage_estimator=none it is returned as it is.

    With GAE each reward is on its token, the verdict's on a response's last. Otherwise all tokens
    of a response share the advantage of its rewards' sum relative to all responses of its group,
    masked ones included. Whitening uses
    the mean and standard deviation over the trained tokens of all data-parallel ranks.
    """
    if algorithm.advantage_estimator == "gae":
        batch = _from_values(batch, algorithm)
    elif algorithm.advantage_estimator == "none":
        return batch
    else:
        batch = _from_groups(summary, batch, algorithm)
    if algorithm.advantage_whitening:
        assert batch.advantages is not None
        sums = sum_over_data_parallel(masked_sums(batch.advantages, batch.loss_mask), ranks)
        mean, std = mean_and_std(sums)
        batch = batch.replace(advantages=whiten(batch.advantages, mean=mean, std=std))
    return batch


def _from_values(batch: RolloutBatch, algorithm: AlgorithmConfig) -> RolloutBatch:
    assert batch.values is not None
    if algorithm.gae_unit == "turn":
        layout = turn_layout(batch.turn_starts, batch.cu_seqlens)
        lengths = layout.cu_turns.diff()
    else:
        lengths = gae_lengths(batch.loss_mask, batch.cu_seqlens, algorithm.gae_length)
    lambda_actor, lambda_critic = resolve_lambdas(
        lengths,
        lambda_actor=algorithm.lambda_actor,
        lambda_critic=algorithm.lambda_critic,
        length_adaptive_alpha=algorithm.length_adaptive_alpha,
    )
    settings = {
        "lambda_actor": lambda_actor, "lambda_critic": lambda_critic, "gamma": algorithm.gamma
    }  # fmt: skip
    rewards, values = token_rewards(batch), batch.values
    if algorithm.gae_unit == "turn":
        advantages, returns = turn_gae(rewards, values, layout, **settings)
    else:
        advantages, returns = decoupled_gae(rewards, values, batch.cu_seqlens, **settings)
    return batch.replace(advantages=advantages, returns=returns)


def _from_groups(
    summary: StepSummary, batch: RolloutBatch, algorithm: AlgorithmConfig
) -> RolloutBatch:
    """Every rank has the rewards of all responses."""
    rewards, groups = summary.total_rewards, summary.groups
    sums = group_sums(rewards, groups, int(groups.max()) + 1)
    own = batch.positions
    estimator = algorithm.advantage_estimator
    of_responses = group_advantages(rewards[own], groups[own], sums, estimator)
    return batch.replace(advantages=batch.per_token(of_responses))


def means_of_values_and_returns(
    batch: RolloutBatch, gamma: float, ranks: Ranks
) -> tuple[float, float]:
    """Return both means over the trained tokens of all ranks; returns are Monte-Carlo ones."""
    assert batch.values is not None
    _, returns = decoupled_gae(
        token_rewards(batch), torch.zeros_like(batch.values), batch.cu_seqlens,
        lambda_actor=1.0, lambda_critic=1.0, gamma=gamma,
    )  # fmt: skip
    sums = [masked_sums(each, batch.loss_mask) for each in (batch.values, returns)]
    value, returned = mean_and_std(sum_over_data_parallel(torch.stack(sums), ranks))[0].tolist()
    return value, returned


def token_rewards(batch: RolloutBatch) -> Tensor:
    """Return float32 [T]: the verdict's reward on the last token, and what was earned before it."""
    earned = batch.token_rewards
    rewards = torch.zeros(batch.num_tokens) if earned is None else earned.clone()
    some = batch.response_lengths > 0
    rewards[batch.cu_seqlens[1:].long()[some] - 1] += batch.rewards[some]
    return rewards
