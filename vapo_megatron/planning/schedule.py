"""Seconds of a step where some GPUs train and others sample, event by event over many steps.

The rules are those of rollout/disaggregated: steps are sampled in order, step k once step k - lag
has started; it is trained on once its responses are finished; then its weights are sent, which
pauses both trainers and rollout workers, and the next step begins. The first steps use the weights
of step 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ROUNDS = 16
"""Times that the given steps are repeated. The second half is averaged; in the first the rollout
workers get as far ahead as the lag allows."""


class Timeline(NamedTuple):
    """Means over steps, once they have become regular."""

    step_seconds: float
    trainer_idle_seconds: float
    """The trainers wait for responses."""
    sampler_idle_seconds: float
    """The rollout workers may not sample yet, or wait for weights to be sent."""


def steady_state(
    generation: Sequence[float], training: Sequence[float], *, sync: float, lag: int
) -> Timeline:
    """Return the mean step of a run whose steps repeat the given ones.

    Args:
        generation: seconds in which the rollout workers sample a step.
        training: seconds of everything that the trainers do with it, for as many steps.
        sync: seconds in which a version is sent; sampling pauses meanwhile.
        lag: rollout.lag.
    """
    period = len(training)
    count = ROUNDS * (lag + 1) * period
    started = [0.0]  # of step k; one more than there are steps
    sent: list[float] = []  # when the weights that follow step k are there to be sent
    waited, idle = [], []
    free = 0.0  # the rollout workers, since then
    for k in range(count):
        start = max(free, started[max(0, k - lag)])
        idle.append(start - free - sync * sum(free <= at < start for at in sent[-lag - 2 :]))
        free = start + generation[k % period]
        for at in sent[-lag - 2 :]:
            free += sync if start <= at < free else 0.0
        waited.append(max(0.0, free - started[k]))
        sent.append(started[k] + waited[k] + training[k % period])
        started.append(sent[k] + sync)
    half = count // 2
    return Timeline(
        step_seconds=(started[count] - started[half]) / (count - half),
        trainer_idle_seconds=sum(waited[half:]) / (count - half),
        sampler_idle_seconds=sum(idle[half:]) / (count - half),
    )
