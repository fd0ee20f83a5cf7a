"""The actor's whole loss: policy loss, positive-example LM loss, KL and entropy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from vapo_megatron.algorithm.off_policy_loss import dis_policy_loss, dppo_tv_policy_loss
from vapo_megatron.algorithm.policy_loss import clipped_policy_loss, ratio_difference, token_weights
from vapo_megatron.algorithm.positive_lm_loss import positive_lm_loss
from vapo_megatron.algorithm.reference_kl import reference_kl


class PolicyLoss(NamedTuple):
    """A value of algorithm.policy_loss."""

    function: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    """Of logprobs, other log-probabilities, advantages, weights; and by name of the bounds,
    num_tokens and num_trained_tokens."""
    relative_to: str
    """Field of LossTokens: the other log-probabilities, which the ratio is to."""
    bounds: Mapping[str, str]
    """Argument -> field of LossSettings."""


POLICY_LOSSES: dict[str, PolicyLoss | None] = {
    "ppo_clip": PolicyLoss(
        clipped_policy_loss, "old_logprobs", {"clip_low": "clip_low", "clip_high": "clip_high"}
    ),
    "dis": PolicyLoss(
        dis_policy_loss, "rollout_logprobs", {"low": "dis_clip_low", "high": "dis_clip_high"}
    ),
    "dppo_tv": PolicyLoss(
        dppo_tv_policy_loss,
        "rollout_logprobs",
        {"max_difference": "dppo_max_difference", "ratio_cap": "dppo_ratio_cap"},
    ),
    "none": None,
}
"""None: the loss has no policy term, and no metrics of a ratio."""


class LossTokens(NamedTuple):
    """The loss's inputs for the T response tokens of a microbatch; [T] unless stated otherwise."""

    old_logprobs: Tensor | None
    """From the policy before this step's updates; None: there is no policy loss."""
    rollout_logprobs: Tensor | None
    """From the inference engine; None: no policy loss is relative to it."""
    advantages: Tensor | None
    """None: there is no policy loss."""
    reference_logprobs: Tensor | None
    """From the reference policy; None: kl_coef is 0."""
    cu_seqlens: Tensor
    """Integer [B+1], boundaries of the responses in T."""
    loss_mask: Tensor
    """Bool, or float weights: tokens that are trained on."""
    policy_weights: Tensor
    """loss_mask times the sampler correction; for policy loss, KL and entropy."""
    is_positive: Tensor
    """Bool: token is in the positive-example loss, of a correct response."""
    positive_weights: Tensor | None = None
    """Of the tokens in that loss; None: all 1."""


class LossCounts(NamedTuple):
    """Denominators, 0-d, summed over the microbatches and data-parallel ranks of a mini-batch."""

    policy_tokens: Tensor
    """Tokens whose policy weight is not 0."""
    policy_responses: Tensor
    """Responses with at least one such token."""
    positive_tokens: Tensor
    """Tokens in the positive-example loss whose loss_mask is not 0."""


class LossSettings(NamedTuple):
    """The fields of `algorithm` and `rollout` that the loss depends on."""

    policy_loss: str
    """A name in POLICY_LOSSES."""
    loss_aggregation: str
    max_response_tokens: int
    clip_low: float
    clip_high: float
    dis_clip_low: float
    dis_clip_high: float
    dppo_max_difference: float
    dppo_ratio_cap: float
    positive_lm_coef: float
    kl_coef: float
    entropy_coef: float
    high_ratio_difference: float
    """|ratio - 1| above which a token counts in ratio_diff_high_fraction, see agreement.py."""


def actor_loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    tokens: LossTokens,
    counts: LossCounts,
    settings: LossSettings,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of the actor's losses, each divided by its own count over the whole mini-batch.

        L = L_policy + positive_lm_coef * L_NLL + kl_coef * KL - entropy_coef * H

    With policy_loss "none" L_policy is 0: on given responses, which all count as correct, that is
    supervised fine-tuning; on sampled ones, fine-tuning on the correct ones.

    Source: VAPO (arXiv 2504.05118), section 4.3; KL and entropy belong to related algorithms.

    Args:
        logprobs: [T] float32 or float64, of the policy being trained; carries the gradient.
        entropy: [T], same, in nats; None: entropy_coef is 0.
        tokens: of the microbatch.
        counts: of the whole mini-batch.

    Returns:
        The loss, 0-d: this microbatch's term of the global mean. Metrics, detached, 0-d, to be
        summed over microbatches and ranks, except ratio_diff_max: take its maximum.
    """
    by_token = settings.loss_aggregation == "token"
    count = counts.policy_tokens if by_token else counts.policy_responses
    weights = token_weights(
        tokens.policy_weights,
        tokens.cu_seqlens,
        settings.loss_aggregation,
        max_response_tokens=settings.max_response_tokens,
    )
    of_policy = {"num_tokens": count, "num_trained_tokens": counts.policy_tokens}
    policy_loss, metrics = None, dict[str, Tensor]()
    if (chosen := POLICY_LOSSES[settings.policy_loss]) is not None:
        policy_loss, metrics = _policy_loss(
            chosen, logprobs, tokens, weights, settings, **of_policy
        )
    nll = positive_lm_loss(
        logprobs,
        tokens.loss_mask,
        tokens.is_positive,
        num_positive_tokens=counts.positive_tokens,
        weights=tokens.positive_weights,
    )
    loss = settings.positive_lm_coef * nll
    if policy_loss is not None:
        loss = policy_loss + loss
    if entropy is not None:
        total = (entropy * weights).sum()
        loss = loss - settings.entropy_coef * total / count.clamp(min=1)
    if tokens.reference_logprobs is not None:
        kl, of_kl = reference_kl(logprobs, tokens.reference_logprobs, weights, **of_policy)
        loss = loss + settings.kl_coef * kl
        metrics |= of_kl
    return loss, {**metrics, "positive_lm_loss": nll.detach(), "loss": loss.detach()}


def _policy_loss(
    chosen: PolicyLoss,
    logprobs: Tensor,
    tokens: LossTokens,
    weights: Tensor,
    settings: LossSettings,
    *,
    num_tokens: Tensor,
    num_trained_tokens: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the policy loss and its metrics, those of the ratio to old_logprobs among them."""
    # The loss's own ratio is to old_logprobs or, for DIS and DPPO, to rollout_logprobs.
    others, old_logprobs = getattr(tokens, chosen.relative_to), tokens.old_logprobs
    assert others is not None and old_logprobs is not None and tokens.advantages is not None
    loss, metrics = chosen.function(
        logprobs,
        others,
        tokens.advantages,
        weights,
        **{name: getattr(settings, field) for name, field in chosen.bounds.items()},
        num_tokens=num_tokens,
        num_trained_tokens=num_trained_tokens,
    )
    of_ratio = ratio_difference(
        logprobs,
        old_logprobs,
        tokens.policy_weights,
        high=settings.high_ratio_difference,
        num_tokens=num_trained_tokens,
    )
    return loss, {**metrics, "policy_loss": loss.detach(), **of_ratio}
