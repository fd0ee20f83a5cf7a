"""Versions of the weights that arrived while the rollout worker samples with older ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from vapo_megatron.weights.reshard.plan import LiveWeight
from vapo_megatron.weights.reshard.sync import Engine


class _Versioned(Engine, Protocol):
    policy_version: int | None


class Staging:
    """Stands in for the engine in the weight sync; holds versions in host memory until loaded."""

    def __init__(self, engine: _Versioned) -> None:
        """Hold nothing yet."""
        self._engine = engine
        self._inbox = {
            name: LiveWeight(torch.empty_like(weight.tensor, device="cpu"), weight.padding_rows)
            for name, weight in engine.live_weights().items()
        }
        self._held: dict[int, dict[str, Tensor]] = {}

    def live_weights(self) -> dict[str, LiveWeight]:
        """Return where the next version arrives."""
        return self._inbox

    @contextlib.contextmanager
    def weights_replaced(self, policy_version: int) -> Iterator[None]:
        """Hold what has arrived in the body."""
        yield
        self._held[policy_version] = {n: w.tensor.clone() for n, w in self._inbox.items()}

    def load(self, policy_version: int) -> None:
        """Let the engine sample with a version that is held, unless it does already."""
        if self._engine.policy_version == policy_version:
            return
        held = self._held[policy_version]
        with self._engine.weights_replaced(policy_version), torch.no_grad():
            for name, weight in self._engine.live_weights().items():
                weight.tensor.copy_(held[name])

    def forget_before(self, policy_version: int) -> None:
        """Drop older versions."""
        self._held = {v: held for v, held in self._held.items() if v >= policy_version}
