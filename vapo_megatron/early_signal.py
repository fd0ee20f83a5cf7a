"""A cluster's early signal, SIGUSR1: a run stops after the step that it is in, with a checkpoint.

It is blocked from the recipe's start on, before there are threads, in all that the recipe starts:
nothing dies of it, nothing is interrupted, and it stays pending where the trainer looks for it. A
handler would be lost in every child that is another program, which the signal would then end.
"""

from __future__ import annotations

import signal


def hold_back() -> None:
    """Keep the signal pending in this process and its children."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


def is_heard() -> bool:
    """Has it reached this process since it was held back?"""
    return signal.SIGUSR1 in signal.sigpending()
