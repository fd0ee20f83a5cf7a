"""Who holds the device in which phase: the actor, the critic, the reference policy, or vLLM.

config/phases.py says what each phase holds. In generation and evaluation vLLM has its weights and
KV cache there, in the weight sync its weights beside the actor's parameters. Without
parallel.offload everything is on the device all the time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from vapo_megatron.config.phases import PHASES, Role
from vapo_megatron.parallel.offload import expandable_segments
from vapo_megatron.roles.model import PlacedModel


class DeviceSchedule:
    """Moves models and vLLM between the device and the host."""

    def __init__(self, leave_sampler: Callable[[], None], *, is_on: bool) -> None:
        """Let the sampler leave the device: the models are built next. Collective.

        Args:
            leave_sampler: puts vLLM's weights and cache away, if they are not already.
            is_on: models leave the device while they are not needed; False: all stay there.
        """
        self._leave_sampler, self.is_on = leave_sampler, is_on
        self._models: dict[str, PlacedModel] = {}
        if is_on:
            leave_sampler()

    def join(self, role: Role, model: PlacedModel) -> PlacedModel:
        """Let a model that was just built take turns from now on, and return it."""
        if self.is_on:
            model.offload()
        self._models[role] = model
        return model

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Give the device to whom the phase needs, and take it back."""
        held = PHASES[phase].device
        if held is None:
            yield
            return
        if self.is_on:
            self._leave_sampler()
        with contextlib.ExitStack() as stack:
            stack.enter_context(expandable_segments())
            for role, part in held.items():
                stack.enter_context(self._models[role].held(part))
            yield

    def close(self) -> None:
        """Give back the memory of models that take turns; they must not be used any more."""
        for model in self._models.values():
            model.close()
