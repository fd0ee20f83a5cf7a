"""Moves models and vLLM on and off the device, phase by phase.

config/phases.py lists the models of each phase. vLLM has its weights and KV cache on the device in
generation and evaluation, and its weights next to the actor's parameters in the weight sync.
Without parallel.offload everything stays on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from vapo_megatron.config.phases import PHASES, Role
from vapo_megatron.parallel.offload import expandable_segments
from vapo_megatron.roles.placed import PlacedModel


class DeviceSchedule:
    """Moves models and vLLM between the device and the host."""

    def __init__(self, sleep_engine: Callable[[], None], *, is_on: bool) -> None:
        """Put vLLM to sleep, to make room for building the models. Collective.

        Args:
            sleep_engine: puts vLLM to sleep unless it already is.
            is_on: offload models that a phase does not need; False: all stay on the device.
        """
        self._sleep_engine, self.is_on = sleep_engine, is_on
        self._models: dict[str, PlacedModel] = {}
        if is_on:
            sleep_engine()

    def join(self, role: Role, model: PlacedModel) -> None:
        """Register a newly built model, and offload it."""
        if self.is_on:
            model.offload()
        self._models[role] = model

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Bring the phase's models to the device, and offload them again on exit."""
        held = PHASES[phase].device
        if held is None:
            yield
            return
        if self.is_on:
            self._sleep_engine()
        with contextlib.ExitStack() as stack:
            stack.enter_context(expandable_segments())
            for role, part in held.items():
                stack.enter_context(self._models[role].held(part))
            yield

    def close(self) -> None:
        """Free the models' offload buffers; the models must not be used afterwards."""
        for model in self._models.values():
            model.close()
