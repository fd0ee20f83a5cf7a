"""A training step's metrics, reduced over all ranks' responses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vapo_megatron.algorithm.agreement import Limits, LogprobsDiffer, difference_sums, excess
from vapo_megatron.algorithm.lambdas import resolve_lambdas
from vapo_megatron.algorithm.statistics import (
    explained_variance_from_moments,
    masked_sums,
    mean_and_std,
    moments,
    moments_by_label,
    value_error_from_moments,
)
from vapo_megatron.config import AlgorithmConfig
from vapo_megatron.config.metrics import METRICS, emits, metric_by
from vapo_megatron.data.batch import RolloutBatch, StepSummary
from vapo_megatron.data.labels import NO_LABELS, Labels
from vapo_megatron.data.rollout import CUTS, STATUSES
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.parallel.reduce import max_over_world, sum_over_data_parallel


@emits(
    "rollout/logprob_diff_mean",
    "rollout/logprob_diff_high_fraction",
    "rollout/logprob_diff_max",
    "rollout/effective_sample_fraction",
)
def logprob_difference(
    batch: RolloutBatch, limit: float | None, ranks: Ranks, *, is_stale: bool = False
) -> dict[str, float]:
    """Compare the inference engine's log-probabilities with the trainer's, before any update.

    The tokens and weights are the same, so only rounding differs: a stale or mis-sharded weight
    shows here at once. Not finite where a log-probability is not; such updates are skipped, so the
    limit does not apply.

    Args:
        batch: this data-parallel rank's, with old_logprobs.
        limit: rollout.max_logprob_difference, in nats; None: any difference is accepted.
        ranks: this rank's place.
        is_stale: older weights sampled; says how much the ratio r of both varies.

    Returns:
        rollout/logprob_diff_mean, _max and, with a limit, _high_fraction (of the tokens, those that
        exceed it), over all ranks' response tokens; with is_stale also effective_sample_fraction.
        Mean and maximum are not finite where one of the log-probabilities is not; that is no
        excess, because no update is made with it.

    Raises:
        LogprobsDiffer: on every rank, if the mean exceeds a tenth of the limit, or the difference
            exceeds the limit on more than 1 % of the tokens.
    """
    assert batch.old_logprobs is not None
    difference = (batch.rollout_logprobs - batch.old_logprobs).abs()
    everything = torch.ones_like(difference, dtype=torch.bool)
    limits = Limits(0.1 * limit, limit) if limit is not None else Limits(math.inf, math.inf)
    sums = difference_sums(difference, everything, limits.high)
    count, total, num_high = sum_over_data_parallel(sums, ranks).tolist()
    mean, high = total / max(count, 1), num_high / max(count, 1)
    # The zero is for a rank without response tokens.
    largest = float(max_over_world(torch.cat([difference, torch.zeros(1)]).max()))
    if math.isfinite(largest) and (found := excess(mean, high, limits)):
        raise LogprobsDiffer(
            f"inference engine and trainer differ by {found}, in nats; "
            f"rollout.max_logprob_difference={limit:g} allows a tenth of it in the mean and all of "
            "it on 99 % of the tokens: the engine has stale or wrongly sharded weights, or the "
            "limit is too tight for the dtype"
        )

    metrics = {"rollout/logprob_diff_mean": mean, "rollout/logprob_diff_max": largest}
    if is_stale:
        # Kish's effective sample size: (sum r)^2 / (n sum r^2).
        ratio = (batch.old_logprobs - batch.rollout_logprobs).double().exp()
        sums = torch.stack([ratio.sum(), ratio.square().sum()])
        first, second = sum_over_data_parallel(sums, ranks).tolist()
        metrics["rollout/effective_sample_fraction"] = first**2 / max(count * second, 1e-300)
    return metrics | ({} if limit is None else {"rollout/logprob_diff_high_fraction": high})


@emits(
    "num_tokens",
    "reward/mean",
    "reward/correct_fraction",
    "reward/unparsable_fraction",
    "reward/timed_out_fraction",
    "reward/failed_fraction",
    "rollout/response_length_mean",
    "rollout/response_length_max",
    "rollout/truncated_fraction",
    "actor/entropy",
    "algorithm/advantage_mean",
    "algorithm/advantage_std",
    "critic/explained_variance",
    "critic/value_error_mean",
    "critic/return_std",
    *(name for name in METRICS if name.startswith("critic/by_")),
    "algorithm/lambda_actor_mean",
)
def step_metrics(
    summary: StepSummary,
    batch: RolloutBatch,
    entropy: Tensor | None,
    algorithm: AlgorithmConfig,
    ranks: Ranks,
    labels: Labels = NO_LABELS,
) -> dict[str, float]:
    """Reduce a step's metrics, except those of the updates; one small all-reduce.

    Args:
        summary: of all ranks' responses; given ones have no metrics of verdicts.
        batch: this data-parallel rank's, with advantages if they are used; values only with a
            critic.
        entropy: float32 [T], nats, of the sampling policy; None: not computed.
        algorithm: for lambda.
        ranks: this rank's place.
        labels: what the values' metrics are broken down by; see metrics_by_label.
    """
    everything = torch.ones_like(batch.loss_mask, dtype=torch.bool)
    # One all-reduce of sums; means and deviations follow from it.
    parts: dict[str, Tensor] = {}
    if entropy is not None:
        parts["entropy"] = masked_sums(entropy, everything)
    if batch.advantages is not None:
        parts["advantages"] = masked_sums(batch.advantages, batch.loss_mask)
    if batch.values is not None and batch.returns is not None:
        tokens = batch.values, batch.returns, batch.loss_mask
        parts["values"] = moments(*tokens)
        for kind, names in labels.several.items():
            of_response = _label_numbers(summary, labels, kind)[batch.positions]
            of_label = moments_by_label(*tokens, batch.per_token(of_response), len(names))
            parts[kind] = of_label.flatten()
    sums = dict(zip(parts, _sums_over_data_parallel([*parts.values()], ranks), strict=True))
    lengths = summary.response_lengths
    result = {
        "num_tokens": lengths.sum(),
        **({} if summary.is_given else _verdict_metrics(summary)),
        "rollout/response_length_mean": lengths.float().mean(),
        "rollout/response_length_max": lengths.max(),
        "rollout/truncated_fraction": summary.truncated.float().mean(),
    }
    if "entropy" in sums:
        result["actor/entropy"] = mean_and_std(sums["entropy"])[0]
    if "advantages" in sums:
        advantage_mean, advantage_std = mean_and_std(sums["advantages"])
        result |= {
            "algorithm/advantage_mean": advantage_mean,
            "algorithm/advantage_std": advantage_std,
        }
    if "values" in sums:
        value_error, return_std = value_error_from_moments(sums["values"])
        result |= {
            "critic/explained_variance": explained_variance_from_moments(sums["values"]),
            "critic/value_error_mean": value_error,
            "critic/return_std": return_std,
            "algorithm/lambda_actor_mean": _mean_lambda(summary, algorithm),
        }
        for kind in labels.several:
            result |= _values_by_label(sums[kind].view(-1, 6), labels, kind)
    return {name: float(value) for name, value in result.items()}


def _sums_over_data_parallel(parts: Sequence[Tensor], ranks: Ranks) -> Sequence[Tensor]:
    """Sum each part over the data-parallel ranks, in one all-reduce."""
    if not parts:
        return ()
    return sum_over_data_parallel(torch.cat([*parts]), ranks).split([len(part) for part in parts])


def _mean_lambda(summary: StepSummary, algorithm: AlgorithmConfig) -> Tensor:
    """Return the actor's lambda, mean over the responses."""
    lengths = summary.response_lengths
    # As GAE does: a masked truncated response counts no tokens.
    if algorithm.gae_unit == "turn":
        steps = torch.ones_like(lengths) if summary.turns is None else summary.turns
    else:
        masks = algorithm.overlong_filtering and algorithm.gae_length == "action"
        steps = lengths * ~summary.truncated if masks else lengths
    lambda_actor, _ = resolve_lambdas(
        steps,
        lambda_actor=algorithm.lambda_actor,
        lambda_critic=algorithm.lambda_critic,
        length_adaptive_alpha=algorithm.length_adaptive_alpha,
    )
    return torch.as_tensor(lambda_actor).mean()


def _label_numbers(summary: StepSummary, labels: Labels, kind: str) -> Tensor:
    """Return int64 [N]: where each response's label of a kind stands in labels.several."""
    number = {name: i for i, name in enumerate(labels.several[kind])}
    indices = summary.prompt_indices.tolist()
    return torch.tensor([number[labels.of[kind][index]] for index in indices])


def _values_by_label(sums: Tensor, labels: Labels, kind: str) -> dict[str, Tensor]:
    """Return the values' metrics of each label that has tokens; sums: [L, 6] of all ranks."""
    explained, (errors, _) = explained_variance_from_moments(sums), value_error_from_moments(sums)
    found: dict[str, Tensor] = {}
    for i, name in enumerate(labels.several[kind]):
        if sums[i, 0]:
            found[metric_by("critic", kind, name, "explained_variance")] = explained[i]
            found[metric_by("critic", kind, name, "value_error_mean")] = errors[i]
    return found


def _verdict_metrics(summary: StepSummary) -> dict[str, Tensor]:
    counts = summary.statuses.bincount(minlength=len(STATUSES))
    of_status = dict(zip(STATUSES, counts / len(summary.response_lengths)))
    return {
        "reward/mean": summary.total_rewards.mean(),
        "reward/correct_fraction": of_status["correct"],
        "reward/unparsable_fraction": of_status["unparsable"],
        "reward/timed_out_fraction": of_status["timed_out"],
        "reward/failed_fraction": of_status["failed"],
    }


@emits(
    "rollout/turns_mean",
    "rollout/observation_tokens_mean",
    "rollout/turn_reward_mean",
    "rollout/environment_failed_fraction",
    "rollout/failed_calls_mean",
    "time/environment_seconds",
    "rollout/cut_by_turns_fraction",
    "rollout/cut_by_action_fraction",
)
def episode_metrics(summary: StepSummary) -> dict[str, float]:
    """Say how a step's episodes went; none without an environment. Nothing is communicated.

    Args:
        summary: of all ranks' responses.
    """
    if summary.turns is None:
        return {}
    nothing = torch.zeros(len(summary.turns))
    cuts = nothing if summary.cuts is None else summary.cuts

    def mean(numbers: Tensor | None) -> float:
        return float((nothing if numbers is None else numbers).double().mean())

    return {
        "rollout/turns_mean": mean(summary.turns),
        "rollout/observation_tokens_mean": mean(summary.inserted_lengths),
        "rollout/turn_reward_mean": mean(summary.earned) / mean(summary.turns),
        "rollout/environment_failed_fraction": mean(summary.environment_failed),
        "rollout/failed_calls_mean": mean(summary.failed_calls),
        "time/environment_seconds": mean(summary.environment_seconds),
        "rollout/cut_by_turns_fraction": mean(cuts == CUTS.index("environment.max_turns")),
        "rollout/cut_by_action_fraction": mean(cuts == CUTS.index("environment.max_action_tokens")),
    }


@emits(
    "reward/std",
    "reward/group_std_mean",
    "reward/equal_groups_fraction",
    "reward/unused_score_fraction",
)
def reward_spread(summary: StepSummary, *, uses_scores: bool) -> dict[str, float]:
    """Say how far a step's rewards differ; nothing is communicated, the same on every rank.

    Args:
        summary: of all ranks' responses. Where each group has one, there are no metrics of groups;
            of given responses there are none.
        uses_scores: reward.from_score is set.
    """
    if summary.is_given:
        return {}
    # Exactly 0 where all are equal: a mean that is subtracted would round.
    rewards = summary.total_rewards.double()
    result = {"reward/std": (rewards - rewards[0]).std(correction=0)}
    numbers = summary.groups
    sizes = numbers.bincount()
    if sizes.max() > 1:
        of_groups = torch.empty(len(sizes), dtype=rewards.dtype)
        for size in sizes.unique().tolist():
            groups = rewards[sizes[numbers] == size].view(-1, size)
            of_groups[sizes == size] = (groups - groups[:, :1]).std(1, correction=0)
        result |= {
            "reward/group_std_mean": of_groups.mean(),
            "reward/equal_groups_fraction": (of_groups == 0).double().mean(),
        }
    if summary.scores is not None and not uses_scores:
        differs = (summary.scores != summary.is_correct.float()) & ~summary.scores.isnan()
        result["reward/unused_score_fraction"] = differs.double().mean()
    return {name: float(value) for name, value in result.items()}


@emits(*(name for name in METRICS if name.startswith("reward/by_")))
def metrics_by_label(summary: StepSummary, labels: Labels) -> dict[str, float]:
    """Break a step's rewards and lengths down by verifier and by source; nothing is communicated.

    Args:
        summary: of all ranks' responses.
        labels: of the run's problems, the same on every rank.

    Returns:
        Of each name, where the run has several, its share of the responses; and where that is not
        0, the others. The same on every rank. Of given responses there are none.
    """
    if summary.is_given:
        return {}
    result: dict[str, float] = {}
    failed = [STATUSES.index(status) for status in ("failed", "timed_out")]
    columns = {
        "accuracy": summary.is_correct,
        "reward_mean": summary.total_rewards,
        "response_length_mean": summary.response_lengths,
        "failed_fraction": torch.isin(summary.statuses, torch.tensor(failed)),
    }
    for kind, names in labels.several.items():
        rows = _label_numbers(summary, labels, kind)
        counts = rows.bincount(minlength=len(names)).double()
        means = {
            what: rows.bincount(column.double(), minlength=len(names)) / counts
            for what, column in columns.items()
        }
        for i, name in enumerate(names):
            result[metric_by("reward", kind, name, "share")] = float(counts[i]) / len(rows)
            if counts[i]:
                for what, mean in means.items():
                    result[metric_by("reward", kind, name, what)] = float(mean[i])
    return result
