"""Value pretraining: in the first steps the critic alone trains, on a policy that stands still."""

from __future__ import annotations

import math
from collections.abc import Sequence


def actor_is_trained(step: int, value_pretraining_steps: int) -> bool:
    """Tell whether the actor trains in this step.

        step >= value_pretraining_steps

    Source: VAPO (arXiv 2504.05118) and VC-PPO (arXiv 2503.01491), value pretraining.

    Args:
        step: rollout step, counted from 0.
        value_pretraining_steps: number of leading rollout steps in which the critic alone trains; 0
            switches value pretraining off.

    Returns:
        False in steps 0 .. value_pretraining_steps - 1, True from then on.
    """
    return step >= value_pretraining_steps


def critic_has_settled(explained_variances: Sequence[float], patience: int) -> bool:
    """Tell whether the explained variance has stopped rising.

        0 < max of all steps, and max of the last `patience` <= max of those before them

    Source: VAPO (arXiv 2504.05118) pretrains values until value loss and explained variance are
    good; VC-PPO (arXiv 2503.01491) finds that too many steps are worse than fewer. The rule for
    stopping is ours.

    Args:
        explained_variances: of the steps of value pretraining so far, oldest first; NaN counts as
            no rise.
        patience: steps without a new maximum after which the critic has settled, at least 1.

    Returns:
        False as long as there are no more than `patience` steps to look at, and as long as no step
        was above 0: until then the critic knows less than a constant does.

    Raises:
        ValueError: patience below 1.
    """
    if patience < 1:
        raise ValueError(f"value_pretraining_patience={patience} must be at least 1")
    known = [-math.inf if math.isnan(x) else x for x in explained_variances]
    if len(known) <= patience:
        return False
    return max(known) > 0 and max(known[-patience:]) <= max(known[:-patience])
