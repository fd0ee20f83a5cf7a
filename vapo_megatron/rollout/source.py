"""Where a step's rollouts come from: the seam between the trainer and what samples for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from vapo_megatron.data.batch import ScoredRollout


class OnProgress(Protocol):
    """Shows how far a phase is."""

    def __call__(self, done: int, total: int, part: str = "") -> None:
        """Show a count; `part` names the part of the phase that is counted."""


Decode = Callable[[Sequence[int]], str]
"""Token ids to text as it was sampled."""
Phase = Callable[[str], AbstractContextManager[OnProgress]]
"""Times and shows one of phases.PHASES."""
HasTime = Callable[[], bool]
"""Is there time to go on? Asked now and then; None: there always is."""


class RolloutSource(Protocol):
    """What the trainer asks for; every rank calls the same methods in the same order."""

    note: str
    """What a user should know of this source; empty: nothing."""
    decode: Decode | None
    """None: there is no tokenizer, on any rank."""

    def rollouts(
        self,
        step: int,
        policy_version: int,
        phase: Phase,
        *,
        trains_actor: bool,
        has_time: HasTime | None = None,
    ) -> tuple[list[ScoredRollout], dict[str, float]]:
        """Return this rank's share of a step's responses by position, and metrics of the sampling.

        It ends early on every rank, with errors.Stopped, once one of them has no time left.
        The shares are disjoint. Without trains_actor they are not chosen by their verdicts: the
        critic learns the values of all that the policy does.
        """

    def holds(self, policy_version: int) -> bool:
        """Whether it could sample from these weights without a publication."""

    def leave_device(self) -> None:
        """Make room on the device until the next publication; nothing is held afterwards."""

    def publish(self, chunks: Sequence[torch.nn.Module], policy_version: int) -> dict[str, float]:
        """Sample from the actor's weights from now on; return metrics of their way."""

    def evaluate(
        self, policy_version: int, phase: Phase, has_time: HasTime | None = None
    ) -> tuple[dict[str, float], list[int]]:
        """Return metrics of the held-out problems, and how many responses to each were right.

        Both empty: there are none. Ends early as `rollouts` does.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return where the source stands, as JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""

    def close(self) -> None:
        """Free what it holds."""
