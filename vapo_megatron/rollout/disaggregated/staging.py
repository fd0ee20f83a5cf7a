"""Weight versions received in host memory while the engine still samples with an older one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from vapo_megatron.parallel import backend
from vapo_megatron.parallel.offload import HostBuffer
from vapo_megatron.weights.reshard.plan import LiveWeight
from vapo_megatron.weights.reshard.sync import Engine

_ALIGNMENT = 64
"""Bytes: a view in another data type must start at a multiple of its size."""


class _Versioned(Engine, Protocol):
    policy_version: int | None


class Staging:
    """Stands in for the engine in the weight sync; holds versions in host memory until loaded.

    Each version is one pinned buffer, so that copies run at PCIe's full rate; pinning takes
    seconds, so that a buffer is used again once its version is forgotten.
    """

    def __init__(self, engine: _Versioned) -> None:
        """Hold nothing yet."""
        self._engine = engine
        live = engine.live_weights()
        self._like = {name: weight.tensor for name, weight in live.items()}
        self._free: list[dict[str, Tensor]] = []
        self._inbox = {
            name: LiveWeight(tensor, live[name].padding_rows)
            for name, tensor in self._buffer().items()
        }
        self._held: dict[int, dict[str, Tensor]] = {}
        self.has_weights = False
        """Whether any version has arrived."""

    def live_weights(self) -> dict[str, LiveWeight]:
        """Return where the next version arrives."""
        return self._inbox

    @contextlib.contextmanager
    def weights_replaced(self, policy_version: int) -> Iterator[None]:
        """Hold what has arrived in the body."""
        yield
        held = self._free.pop() if self._free else self._buffer()
        for name, weight in self._inbox.items():
            held[name].copy_(weight.tensor)
        self._held[policy_version] = held
        self.has_weights = True

    def load(self, policy_version: int) -> None:
        """Let the engine sample with a version that is held, unless it does already."""
        if self._engine.policy_version == policy_version:
            return
        held = self._held[policy_version]
        with self._engine.weights_replaced(policy_version), torch.no_grad():
            for name, weight in self._engine.live_weights().items():
                weight.tensor.copy_(held[name], non_blocking=True)
            backend.synchronize()

    def forget_before(self, policy_version: int) -> None:
        """Drop older versions."""
        for version in [v for v in self._held if v < policy_version]:
            self._free.append(self._held.pop(version))

    def _buffer(self) -> dict[str, Tensor]:
        """Return uninitialised host memory for every weight."""
        sizes = [-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for t in self._like.values()]
        parts = HostBuffer(sum(sizes), "rollout.lag above 0", "rollout.lag=0").tensor.split(sizes)
        return {
            name: part[: like.nbytes].view(like.dtype).view(like.shape)
            for (name, like), part in zip(self._like.items(), parts, strict=True)
        }
