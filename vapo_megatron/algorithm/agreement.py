"""Whether two computations of the same log-probabilities differ by rounding alone.

Before a step's first update three forward passes see the same weights and tokens: the inference
engine's, the one of old_logprobs, and the update's. Their results need not be equal bit by bit: a
GPU's reductions may change their order from call to call (NCCL's NVLS and tree reductions,
atomics), and one unit in the last place of a bfloat16 logit between 16 and 32 is 0.125. Single
tokens may therefore differ a lot while the mean and nearly all tokens stay close. Wrong weights,
inputs or masks move all of them, so these two are judged and the largest difference is only
reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from vapo_megatron.algorithm.reduction import keep, require_mask, require_wide


class LogprobsDiffer(RuntimeError):
    """Log-probabilities that should be equal differ by more than rounding; on every rank."""


class Limits(NamedTuple):
    """What rounding explains."""

    mean: float
    """Largest mean difference."""
    high: float
    """Difference that at most HIGH_FRACTION of the tokens exceed."""


HIGH_FRACTION = 0.01
"""1 minus the quantile that is judged."""

RATIO_LIMITS = {"float32": Limits(mean=1e-5, high=1e-4), "bfloat16": Limits(mean=2e-2, high=0.2)}
"""Of |ratio - 1| in a step's first mini-batch, by model.dtype. One-ulp changes of 1 % of the hidden
elements with bfloat16 logits near 18 give a mean of 3e-4 on sampled tokens, and up to 1e-2 on
random ones, whose probability is small (tests/roles/test_ratio_check.py)."""


def difference_sums(difference: Tensor, mask: Tensor, high: float) -> Tensor:
    """Tokens, their summed difference, and those above `high`, to be summed over ranks.

    Args:
        difference: [T] float32 or float64, at least 0.
        mask: [T] bool, or float weights: any weight but 0 counts once.
        high: see Limits.

    Returns:
        float64 [3]. A NaN difference makes the sum NaN.
    """
    require_wide(difference=difference)
    require_mask(mask)
    kept = keep(difference.detach().double(), mask)
    count = keep(torch.ones_like(kept), mask).sum()
    return torch.stack([count, kept.sum(), (kept > high).sum()])


def excess(mean: float, high_fraction: float, limits: Limits) -> str | None:
    """Say which limit is exceeded and by what; None: rounding explains the differences.

    Args:
        mean: difference over all tokens of all ranks.
        high_fraction: of these tokens, those that differ by more than limits.high.
        limits: what to allow. Numbers that are not finite exceed none.
    """
    if mean > limits.mean:
        return f"{mean:.3g} in the mean (limit {limits.mean:g})"
    if high_fraction > HIGH_FRACTION:
        return (
            f"more than {limits.high:g} on {high_fraction:.1%} of the tokens "
            f"(limit {HIGH_FRACTION:.0%} of them)"
        )
    return None


def far_maximum(
    metrics: Mapping[str, float], dtype: str, max_logprob_difference: float | None
) -> str:
    """Say which maximum is far above what is allowed on most tokens; "" if none is.

    Args:
        metrics: of a step.
        dtype: model.dtype.
        max_logprob_difference: rollout.max_logprob_difference.
    """
    limits = {
        "actor/first_ratio_diff_max": 10 * RATIO_LIMITS[dtype].high,
        "rollout/logprob_diff_max": 10 * max_logprob_difference
        if max_logprob_difference
        else math.inf,
    }
    far = [f"{name} {metrics[name]:.3g}" for name, limit in limits.items()
           if metrics.get(name, 0) > limit]  # fmt: skip
    return f"{' and '.join(far)}: single tokens differ by far more than most" if far else ""
