"""Value pretraining: in the first steps only the critic trains, on a fixed policy."""

from __future__ import annotations

import math
from collections.abc import Sequence


def actor_is_trained(step: int, value_pretraining_steps: int) -> bool:
    """Return whether the actor trains in this step.

        step >= value_pretraining_steps

    Source: VAPO (arXiv 2504.05118) and VC-PPO (arXiv 2503.01491), value pretraining.

    Args:
        step: rollout step, counted from 0.
        value_pretraining_steps: initial steps in which only the critic trains; 0: no value
            pretraining.
    """
    return step >= value_pretraining_steps


LARGE_ERROR = 0.5
"""Mean error of the values, in standard deviations of the returns, from which on it is large.

The choice is ours. With V = R + c everywhere only the last token's delta has the error, -c, and
GAE hands it back as -c * lambda^k to the token k places before: where lambda is below 1, values
that are too low pay for ending a response, and values that are too high for going on."""


def error_is_large(mean_error: float, return_std: float) -> bool:
    """Return whether |mean(values - returns)| > LARGE_ERROR * std(returns); NaN: False."""
    return abs(mean_error) > LARGE_ERROR * return_std


def bias_to_mean_return(
    mean_value: float, mean_return: float, value_range: Sequence[float] | None = None
) -> float:
    """Return what to add to a value head's output so that values start at the mean return.

        b = head(mean_return) - head(mean_value)
        head(v) = v; with a value_range [low, high] = tan(pi * ((v - low) / (high - low) - 1/2))

    Exact for a head whose values are all alike, as those of a new one are. With a range, a mean
    closer to its ends than a hundredth of it counts as that far: the ends are at infinity.

    Source: ours. VAPO (arXiv 2504.05118) and VC-PPO (arXiv 2503.01491) let pretraining learn it.

    Args:
        mean_value, mean_return: over the trained tokens of all ranks, in units of reward.
        value_range: algorithm.value_range; see value_loss.ranged_values.
    """
    if value_range is None:
        return mean_return - mean_value
    low, high = value_range

    def head(value: float) -> float:
        share = min(max((value - low) / (high - low), 0.01), 0.99)
        return math.tan(math.pi * (share - 0.5))

    return head(mean_return) - head(mean_value)


def critic_has_settled(
    explained_variances: Sequence[float], patience: int, is_off: bool = False
) -> bool:
    """Return whether the explained variance has stopped rising, and values are right in the mean.

        0 < max of all steps, and max of the last `patience` <= max of those before them

    Source: VAPO (arXiv 2504.05118) pretrains until value loss and explained variance are good
    enough; VC-PPO (arXiv 2503.01491) finds that too many steps hurt. The stopping rule is ours.

    Args:
        explained_variances: one per step so far, oldest first; NaN never counts as a rise.
        patience: steps without a new maximum after which the critic has settled, at least 1.
        is_off: error_is_large of the last step; explained variance does not see a constant error.

    Returns:
        Always False in the first `patience` steps, while no step was above 0, which means that the
        critic is worse than a constant, and while the mean error is large.

    Raises:
        ValueError: patience below 1.
    """
    if patience < 1:
        raise ValueError(f"value_pretraining_patience={patience} must be at least 1")
    known = [-math.inf if math.isnan(x) else x for x in explained_variances]
    if len(known) <= patience or is_off:
        return False
    return max(known) > 0 and max(known[-patience:]) <= max(known[:-patience])
