"""Frozen weights below adapters (LoRA), which several roles share: one copy, moved by itself.

Before: a model is built and its weights are loaded. A Base freezes its parameters, but for a value
head. After `give` another role's model has these in place of its own, so that both compute with the
same storage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch.nn import Module, Parameter

from vapo_megatron.config.phases import Held
from vapo_megatron.parallel.offload import ORDER, Offload
from vapo_megatron.weights.table import OUTPUT_LAYER


class Base:
    """Frozen parameters, on the device or in host memory."""

    def __init__(self, model: Sequence[Module], *, keeps_head: bool) -> None:
        """Freeze a model's parameters.

        Args:
            model: one chunk per virtual pipeline stage, without adapters.
            keeps_head: leave the output layer, a critic's value head, to its role.
        """
        self._chunks = [dict(chunk.named_parameters()) for chunk in model]
        for chunk in self._chunks if keeps_head else []:
            chunk.pop(OUTPUT_LAYER[0], None)
        for parameter in self.parameters:
            parameter.requires_grad_(False)
            parameter.is_base = True  # type: ignore[attr-defined]
        self._offload: Offload | None = None

    @property
    def parameters(self) -> list[Parameter]:
        """All of them, in the model's order."""
        return [p for chunk in self._chunks for p in chunk.values()]

    def give(self, model: Sequence[Module], *, keeps_head: bool) -> None:
        """Replace a model's parameters by these; its own are freed.

        Args:
            model: another role's chunks on this rank.
            keeps_head: not its output layer, a critic's value head.
        """
        for chunk, shared in zip(model, self._chunks, strict=True):
            for name, own in list(chunk.named_parameters()):
                if keeps_head and name == OUTPUT_LAYER[0]:
                    continue
                assert own.shape == shared[name].shape, f"{name} is of another model"
                path, _, last = name.rpartition(".")
                setattr(chunk.get_submodule(path), last, shared[name])

    def offload(self) -> None:
        """Move to host memory; does nothing where it is already done for another role."""
        if self._offload is None:
            self._offload = Offload(self.parameters, None)
            self._offload.hold("nothing")

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep it on the device; a role in whose phase another one has it there finds it there."""
        if self._offload is None:
            yield
            return
        before = self._offload.held
        self._offload.hold(max("parameters", before, key=ORDER.index))
        yield
        self._offload.hold(before)

    @property
    def level(self) -> Held:
        """What is on the device."""
        return "training" if self._offload is None else self._offload.held

    def close(self) -> None:
        """Free its memory; may be called for each role."""
        if self._offload is not None:
            self._offload.close()
            self._offload = None
