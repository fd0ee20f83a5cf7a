"""Value pretraining: in the first steps the critic alone trains, on a policy that stands still."""

from __future__ import annotations


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
