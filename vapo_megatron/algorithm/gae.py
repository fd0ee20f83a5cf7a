"""Advantages and returns: decoupled, length-adaptive GAE over packed responses."""

from __future__ import annotations

import torch
from torch import Tensor

from vapo_megatron.algorithm.lambdas import length_adaptive_lambda, resolve_lambdas
from vapo_megatron.algorithm.reduction import require_mask, require_wide, trained_lengths
from vapo_megatron.algorithm.segmented_scan import cache_slices, reverse_scan_, scan_buffer

__all__ = ["decoupled_gae", "gae_lengths", "length_adaptive_lambda", "resolve_lambdas"]


def gae_lengths(loss_mask: Tensor, cu_seqlens: Tensor, gae_length: str) -> Tensor:
    """Lengths that length_adaptive_lambda is given.

        response: l_i = |o_i|        action: l_i = the tokens of response i whose mask is not 0

    They differ where tokens are masked: of a response that overlong filtering masks, "action" makes
    l 0, and with it lambda.

    Source: VAPO (arXiv 2504.05118) has the response's length; "action", what the policy did and is
    trained on, is ours.

    Args:
        loss_mask: [T] bool, or float weights; used only by "action".
        cu_seqlens: integer [B+1], boundaries of the responses in T; responses may be empty.
        gae_length: "response" or "action".

    Returns:
        int64 [B].

    Raises:
        ValueError: an unknown gae_length, an invalid dtype of loss_mask.
    """
    if gae_length == "response":
        return cu_seqlens.diff().long()
    if gae_length != "action":
        raise ValueError(f'gae_length={gae_length!r} must be "response" or "action"')
    require_mask(loss_mask)
    return trained_lengths(loss_mask, cu_seqlens)


@torch.no_grad()
def decoupled_gae(
    token_rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    *,
    lambda_actor: float | Tensor,
    lambda_critic: float | Tensor = 1.0,
    gamma: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute the actor's advantages and the critic's returns with separate lambdas.

        delta_t = r_t + gamma * V_{t+1} - V_t            V = 0 after a response's last token
        A_t     = delta_t + gamma * lambda_actor * A_{t+1}
        return_t = V_t + the same with lambda_critic;    at 1.0: sum_k gamma^k r_{t+k}

    Source: VAPO (arXiv 2504.05118) and VC-PPO (arXiv 2503.01491), decoupled GAE; GAE is arXiv
    1506.02438, eq. 16.

    Args:
        token_rewards: [T] float32 or float64, r.
        values: [T], V of the state before each response token.
        cu_seqlens: integer [B+1] from 0 to T, boundaries of the responses; they may be empty.
        lambda_actor: in [0, 1]; a float, or [B] float32 or float64, one per response.
        lambda_critic: same. The float 1.0 computes Monte-Carlo returns, which ignore the values.
        gamma: discount per token, in [0, 1].

    Returns:
        (advantages [T], returns [T]) in the wider of the inputs' dtypes, without gradient;
        computed in float64.

    Raises:
        ValueError: a dtype below float32, a float outside [0, 1], inconsistent shapes.
    """
    require_wide(token_rewards=token_rewards, values=values)
    _require_shapes(token_rewards, values, cu_seqlens)
    num_responses = cu_seqlens.numel() - 1
    actor = _checked_lambda("lambda_actor", lambda_actor, num_responses)
    # Equal lambdas need one scan instead of two.
    same = lambda_critic is lambda_actor
    critic = actor if same else _checked_lambda("lambda_critic", lambda_critic, num_responses)
    same = same or (isinstance(actor, float) and isinstance(critic, float) and actor == critic)
    _require_fraction("gamma", gamma)

    dtype = torch.promote_types(token_rewards.dtype, values.dtype)
    # The value targets use lambda_critic (1.0 in VAPO), the advantages lambda_actor.
    returns = _lambda_returns(token_rewards, values, cu_seqlens, critic, gamma)
    if same:
        advantages = returns.sub(values)
    else:
        advantages = _lambda_advantages(token_rewards, values, cu_seqlens, actor, gamma)
    return advantages.to(dtype), returns.to(dtype)


def _lambda_advantages(
    token_rewards: Tensor, values: Tensor, cu_seqlens: Tensor, lam: float | Tensor, gamma: float
) -> Tensor:
    """float64 [T]."""
    num_tokens = token_rewards.numel()
    buffer = scan_buffer(num_tokens, token_rewards.device)
    deltas = buffer[:num_tokens]
    if num_tokens == 0:
        return deltas
    for part in cache_slices(num_tokens, buffer.device):
        deltas[part].copy_(token_rewards[part]).sub_(values[part])
        with_next = slice(part.start, min(part.stop, num_tokens - 1))
        following = values[part.start + 1 : with_next.stop + 1]
        deltas[with_next].add_(following, alpha=gamma)
    # For an empty response this is the last token of the previous one, or -1, the last token of
    # all: both are response ends anyway.
    last = cu_seqlens.long()[1:] - 1
    deltas[last] = token_rewards[last].double() - values[last]
    reverse_scan_(buffer, cu_seqlens, gamma * lam)
    return deltas


def _lambda_returns(
    token_rewards: Tensor, values: Tensor, cu_seqlens: Tensor, lam: float | Tensor, gamma: float
) -> Tensor:
    """float64 [T]."""
    if isinstance(lam, float) and lam == 1.0:
        num_tokens = token_rewards.numel()
        buffer = scan_buffer(num_tokens, token_rewards.device)
        sums = buffer[:num_tokens].copy_(token_rewards)
        if num_tokens > 0:
            reverse_scan_(buffer, cu_seqlens, gamma)
        return sums
    return _lambda_advantages(token_rewards, values, cu_seqlens, lam, gamma).add_(values)


def _checked_lambda(name: str, lam: float | Tensor, num_responses: int) -> float | Tensor:
    if not isinstance(lam, Tensor):
        _require_fraction(name, lam)
        return float(lam)
    require_wide(**{name: lam})
    if lam.shape != (num_responses,):
        raise ValueError(
            f"{name}.shape={tuple(lam.shape)} must be (B,) = ({num_responses},), or pass a float"
        )
    return lam.double()


def _require_fraction(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value} must lie in [0, 1]")


def _require_shapes(token_rewards: Tensor, values: Tensor, cu_seqlens: Tensor) -> None:
    if token_rewards.ndim != 1 or token_rewards.shape != values.shape:
        raise ValueError(
            f"token_rewards.shape={tuple(token_rewards.shape)} and values.shape="
            f"{tuple(values.shape)} must both be (T,)"
        )
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() == 0 or cu_seqlens.is_floating_point():
        raise ValueError(
            f"cu_seqlens: shape {tuple(cu_seqlens.shape)}, dtype {cu_seqlens.dtype}; "
            "must be (B+1,) integers"
        )
    # Not on a GPU, where reading the values would synchronise.
    if cu_seqlens.device.type == "cpu":
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        if (first, last) != (0, token_rewards.numel()):
            raise ValueError(
                f"cu_seqlens runs from {first} to {last}; it must run from 0 to "
                f"T={token_rewards.numel()}"
            )
