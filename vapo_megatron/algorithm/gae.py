"""Advantages and returns: decoupled, length-adaptive GAE over packed responses; statistics."""

from __future__ import annotations

import torch
from torch import Tensor

from vapo_megatron.algorithm.reduction import keep, require_mask, require_wide
from vapo_megatron.algorithm.segmented_scan import cache_slices, reverse_scan_, scan_buffer


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """GAE's lambda for responses of these lengths: its horizon is a fixed multiple of the length.

        1 / (1 - lambda) = alpha * l,   lambda = max(0, 1 - 1 / (alpha * l))

    Source: VAPO (arXiv 2504.05118), length-adaptive GAE; alpha 0.05.

    Args:
        lengths: [B] integer or float, response lengths l in tokens, the stop token included.
        alpha: above 0.

    Returns:
        float64 [B] in [0, 1): in float32 the horizon of a long response would lose its fifth digit.
        Lambda is 0 for l <= 1/alpha, and for an empty response.

    Raises:
        ValueError: alpha not above 0, or lengths of a float type below float32.
    """
    if lengths.is_floating_point():
        require_wide(lengths=lengths)
    if not alpha > 0:
        raise ValueError(f"length_adaptive_alpha={alpha} must be above 0")
    return (1 - 1 / (alpha * lengths.double())).clamp(min=0)


def resolve_lambdas(
    lengths: Tensor,
    *,
    lambda_actor: float | str,
    lambda_critic: float | str,
    length_adaptive_alpha: float,
) -> tuple[float | Tensor, float | Tensor]:
    """Turn the configuration's lambdas into those of decoupled_gae.

    Args:
        lengths: [B] integer, response lengths in tokens, the stop token included.
        lambda_actor: in [0, 1], or "adaptive".
        lambda_critic: in [0, 1], or "same_as_actor".
        length_adaptive_alpha: read only where lambda_actor is "adaptive".

    Returns:
        (lambda_actor, lambda_critic), each a float or float64 [B]; the same object for
        "same_as_actor".

    Raises:
        ValueError: any other string.
    """
    if lambda_actor == "adaptive":
        actor: float | Tensor = length_adaptive_lambda(lengths, length_adaptive_alpha)
    elif isinstance(lambda_actor, str):
        raise ValueError(f'lambda_actor={lambda_actor!r} must be a number or "adaptive"')
    else:
        actor = float(lambda_actor)
    if lambda_critic == "same_as_actor":
        return actor, actor
    if isinstance(lambda_critic, str):
        raise ValueError(f'lambda_critic={lambda_critic!r} must be a number or "same_as_actor"')
    return actor, float(lambda_critic)


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
    """Advantages for the actor with one lambda, returns for the critic with another.

        delta_t = r_t + gamma * V_{t+1} - V_t            V = 0 after a response's last token
        A_t     = delta_t + gamma * lambda_actor * A_{t+1}
        return_t = V_t + the same with lambda_critic;    at 1.0: sum_k gamma^k r_{t+k}

    Source: VAPO (arXiv 2504.05118) and VC-PPO (arXiv 2503.01491), decoupled GAE; GAE is arXiv
    1506.02438, eq. 16.

    Args:
        token_rewards: [T] float32 or float64, r.
        values: [T], V of the state before each response token.
        cu_seqlens: integer [B+1] from 0 to T, bounds of the responses; responses may be empty.
        lambda_actor: in [0, 1]; a float, or [B] float32 or float64, one per response.
        lambda_critic: likewise. The float 1.0 takes Monte-Carlo returns, into which the values do
            not enter.
        gamma: discount per token, in [0, 1].

    Returns:
        (advantages [T], returns [T]) in the wider of the inputs' dtypes, without gradient. Inside
        it is float64.

    Raises:
        ValueError: a dtype below float32, a float out of [0, 1], shapes that do not belong
            together.
    """
    require_wide(token_rewards=token_rewards, values=values)
    _require_shapes(token_rewards, values, cu_seqlens)
    num_responses = cu_seqlens.numel() - 1
    actor = _checked_lambda("lambda_actor", lambda_actor, num_responses)
    same = lambda_critic is lambda_actor
    critic = actor if same else _checked_lambda("lambda_critic", lambda_critic, num_responses)
    same = same or (isinstance(actor, float) and isinstance(critic, float) and actor == critic)
    _require_fraction("gamma", gamma)

    dtype = torch.promote_types(token_rewards.dtype, values.dtype)
    returns = _lambda_returns(token_rewards, values, cu_seqlens, critic, gamma)
    if same:
        advantages = returns.sub(values)
    else:
        advantages = _lambda_advantages(token_rewards, values, cu_seqlens, actor, gamma)
    return advantages.to(dtype), returns.to(dtype)


def whiten(advantages: Tensor, *, mean: Tensor, std: Tensor) -> Tensor:
    """Normalise advantages with statistics of the whole step.

        (A - mean) / max(std, 1e-8)

    Source: common PPO practice; VAPO prints nothing of it, and the default is off.

    Args:
        advantages: [T] float32 or float64.
        mean, std: 0-d tensors over all data-parallel ranks (see masked_sums and mean_and_std).

    Returns:
        [T], advantages' dtype; all 0 where they do not vary.
    """
    require_wide(advantages=advantages)
    return ((advantages - mean) / std.clamp(min=1e-8)).to(advantages.dtype)


def masked_sums(x: Tensor, loss_mask: Tensor) -> Tensor:
    """Count, sum and sum of squares of the tokens that are trained on; add them up over ranks.

    Args:
        x: [T] float32 or float64.
        loss_mask: [T] bool, or float weights: any weight but 0 counts once.

    Returns:
        float64 [3].
    """
    require_wide(x=x)
    require_mask(loss_mask)
    kept = keep(x.detach().double(), loss_mask)
    count = keep(torch.ones_like(kept), loss_mask).sum()
    return torch.stack([count, kept.sum(), kept.square().sum()])


def mean_and_std(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and (population) standard deviation from masked_sums, both 0 where the count is 0.

    Args:
        sums: float64 [3], already summed over ranks.

    Returns:
        (mean, std), float64 0-d tensors. A variance below rounding (1e-12 of the mean square) is 0.
    """
    count, total, squares = sums.unbind()
    mean, mean_square = total / count.clamp(min=1), squares / count.clamp(min=1)
    variance = mean_square - mean.square()
    return mean, torch.where(variance > 1e-12 * mean_square, variance, 0).sqrt()


def moments(values: Tensor, returns: Tensor, loss_mask: Tensor) -> Tensor:
    """What explained_variance needs of one rank, as a sum.

    These are the masked_sums of the returns and of their distance to the values.

    Args:
        values, returns: [T] float32 or float64.
        loss_mask: [T] bool, or float weights: any weight but 0 counts once.

    Returns:
        float64 [6]; add them up over microbatches and data-parallel ranks.
    """
    require_wide(values=values, returns=returns)
    error = returns.double() - values.double()
    return torch.cat([masked_sums(returns, loss_mask), masked_sums(error, loss_mask)])


def explained_variance_from_moments(sums: Tensor) -> Tensor:
    """Explained variance over everything that was added up.

    Args:
        sums: float64 [6] from moments, summed over microbatches and ranks.

    Returns:
        float64 0-d tensor; see explained_variance.
    """
    _, std = mean_and_std(sums[:3])
    _, error_std = mean_and_std(sums[3:])
    explained = 1 - (error_std / torch.where(std > 0, std, 1)).square()
    return torch.where(std > 0, explained, 0)


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """Share of the returns' variance that the values explain.

        1 - Var(returns - values) / Var(returns)

    1: the values are the returns up to a constant; 0: no better than a constant; below 0: worse
    than that.

    Args:
        values, returns: [T] float32 or float64.

    Returns:
        float64 0-d tensor; 0 where the returns do not vary, so that there is nothing to explain.

    Raises:
        ValueError: a dtype below float32.
    """
    everywhere = torch.ones_like(returns, dtype=torch.bool)
    return explained_variance_from_moments(moments(values, returns, everywhere))


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
    # An empty response names the end of the one before it or, where there is none, the last token
    # (-1): ends in any case.
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
    # On a GPU this would wait for the device.
    if cu_seqlens.device.type == "cpu":
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        if (first, last) != (0, token_rewards.numel()):
            raise ValueError(
                f"cu_seqlens runs from {first} to {last}; it must run from 0 to "
                f"T={token_rewards.numel()}"
            )
