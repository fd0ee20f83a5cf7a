"""Mean, standard deviation and explained variance over the tokens of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from vapo_megatron.algorithm.reduction import keep, require_mask, require_wide, trained_on


def whiten(advantages: Tensor, *, mean: Tensor, std: Tensor) -> Tensor:
    """Normalise advantages with the whole step's mean and std.

        (A - mean) / max(std, 1e-8)

    Source: common PPO practice; VAPO does not mention it, and it is off by default.

    Args:
        advantages: [T] float32 or float64.
        mean, std: 0-d tensors over all data-parallel ranks (see masked_sums and mean_and_std).

    Returns:
        [T], advantages' dtype; all 0 if they do not vary.
    """
    require_wide(advantages=advantages)
    return ((advantages - mean) / std.clamp(min=1e-8)).to(advantages.dtype)


def masked_sums(x: Tensor, loss_mask: Tensor) -> Tensor:
    """Count, sum and sum of squares over the tokens that are trained on, to be summed over ranks.

    Args:
        x: [T] float32 or float64.
        loss_mask: [T] bool, or float weights: any weight but 0 counts once.

    Returns:
        float64 [3].
    """
    require_wide(x=x)
    require_mask(loss_mask)
    kept = keep(x.detach().double(), loss_mask)
    count = trained_on(loss_mask).sum().double()
    return torch.stack([count, kept.sum(), kept.square().sum()])


def mean_and_std(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and (population) standard deviation from masked_sums, both 0 if the count is 0.

    Args:
        sums: float64 [3], already summed over ranks.

    Returns:
        (mean, std), float64 0-d tensors. A variance below rounding (1e-12 of the mean square) is 0.
    """
    mean, variance = mean_and_variance(sums)
    return mean, variance.sqrt()


def mean_and_variance(sums: Tensor) -> tuple[Tensor, Tensor]:
    """The same with the variance, of sums [..., 3]."""
    count, total, squares = sums.unbind(-1)
    mean, mean_square = total / count.clamp(min=1), squares / count.clamp(min=1)
    variance = mean_square - mean.square()
    return mean, torch.where(variance > 1e-12 * mean_square, variance, 0)


def moments(values: Tensor, returns: Tensor, loss_mask: Tensor) -> Tensor:
    """One rank's partial sums for explained_variance.

    The masked_sums of the returns and of returns - values.

    Args:
        values, returns: [T] float32 or float64.
        loss_mask: [T] bool, or float weights: any weight but 0 counts once.

    Returns:
        float64 [6], to be summed over microbatches and data-parallel ranks.
    """
    require_wide(values=values, returns=returns)
    error = returns.double() - values.double()
    return torch.cat([masked_sums(returns, loss_mask), masked_sums(error, loss_mask)])


def moments_by_label(
    values: Tensor, returns: Tensor, loss_mask: Tensor, labels: Tensor, num_labels: int
) -> Tensor:
    """The same of the tokens of each label, such as those of one task's responses.

    Args:
        values, returns, loss_mask: as for moments.
        labels: int64 [T], 0..num_labels-1.
        num_labels: L.

    Returns:
        float64 [L, 6].
    """
    require_wide(values=values, returns=returns)
    require_mask(loss_mask)
    kept = trained_on(loss_mask)
    labels, of_returns = labels[kept], returns[kept].double()
    columns = []
    for x in (of_returns, of_returns - values[kept].double()):
        weights = (torch.ones_like(x), x, x.square())
        columns += [labels.bincount(weight, minlength=num_labels) for weight in weights]
    return torch.stack(columns, dim=-1)


def explained_variance_from_moments(sums: Tensor) -> Tensor:
    """Explained variance from summed moments.

    Args:
        sums: float64 [..., 6] from moments, summed over microbatches and ranks.

    Returns:
        float64 [...]; see explained_variance.
    """
    _, std = mean_and_std(sums[..., :3])
    _, error_std = mean_and_std(sums[..., 3:])
    explained = 1 - (error_std / torch.where(std > 0, std, 1)).square()
    return torch.where(std > 0, explained, 0)


def value_error_from_moments(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Mean error of the values, which explained variance does not see, and the returns' spread.

        mean(values - returns), std(returns)

    Args:
        sums: float64 [..., 6] from moments, summed over microbatches and ranks.

    Returns:
        float64 [...] each, both in units of reward.
    """
    return -mean_and_std(sums[..., 3:])[0], mean_and_std(sums[..., :3])[1]


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """Fraction of the returns' variance that the values explain.

        1 - Var(returns - values) / Var(returns)

    1: values equal returns up to a constant; 0: no better than a constant; below 0: worse than a
    constant.

    Args:
        values, returns: [T] float32 or float64.

    Returns:
        float64 0-d tensor; 0 if the returns do not vary.

    Raises:
        ValueError: a dtype below float32.
    """
    everywhere = torch.ones_like(returns, dtype=torch.bool)
    return explained_variance_from_moments(moments(values, returns, everywhere))
