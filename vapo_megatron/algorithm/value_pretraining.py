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


def critic_has_settled(explained_variances: Sequence[float], patience: int) -> bool:
    """Return whether the explained variance has stopped rising.

        0 < max of all steps, and max of the last `patience` <= max of those before them

    Source: VAPO (arXiv 2504.05118) pretrains until value loss and explained variance are good
    enough; VC-PPO (arXiv 2503.01491) finds that too many steps hurt. The stopping rule is ours.

    Args:
        explained_variances: one per step so far, oldest first; NaN never counts as a rise.
        patience: steps without a new maximum after which the critic has settled, at least 1.

    Returns:
        Always False in the first `patience` steps, and while no step was above 0, which means that
        the critic is worse than a constant.

    Raises:
        ValueError: patience below 1.
    """
    if patience < 1:
        raise ValueError(f"value_pretraining_patience={patience} must be at least 1")
    known = [-math.inf if math.isnan(x) else x for x in explained_variances]
    if len(known) <= patience:
        return False
    return max(known) > 0 and max(known[-patience:]) <= max(known[:-patience])
