"""A model's weights, on the device or in host memory; training is in trained.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.nn import Module

from vapo_megatron.config import VapoConfig
from vapo_megatron.config.phases import Held, Role
from vapo_megatron.models.build import build_model
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.parallel.gradient_buffers import wait_for_parameters
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.parallel.offload import ORDER, Offload
from vapo_megatron.weights.frozen import Frozen, frozen
from vapo_megatron.weights.load_hf import load_hf_weights
from vapo_megatron.weights.parameters import local_parameters


def load_model(
    shape: ModelShape, config: VapoConfig, ranks: Ranks, role: Role, hf_path: str | None
) -> list[Module]:
    """Build a role's model, one chunk per virtual pipeline stage, and load its weights.

    Without hf_path they are random until a checkpoint is loaded.
    """
    model = build_model(shape, config.model, config.parallel, ranks, role, seed=config.seed)
    if (kept := frozen(config.algorithm, config.model, role)) != Frozen(False, False):
        parameters = [p for chunk in model for p in chunk.parameters()]
        for one, parameter in zip(local_parameters(model, shape, role), parameters, strict=True):
            parameter.requires_grad_(one.row not in kept)
    if hf_path is not None:
        load_hf_weights(model, shape, hf_path, ranks, role)
    return model


class PlacedModel:
    """Model chunks, with gradient buffers and optimizer state if they are trained.

    After `offload` all of it is in host memory, and on the device only inside `held`.
    """

    def __init__(
        self, model: list[Module], chunks: list[Any] | None = None, optimizer: Any = None
    ) -> None:
        """Take what is on the device.

        Args:
            model: one chunk per virtual pipeline stage.
            chunks: the same wrapped in DDP; None: they are frozen here.
            optimizer: of these.
        """
        self._model, self._chunks, self._optimizer = model, chunks or model, optimizer
        self._offload: Offload | None = None
        if chunks is None:
            for chunk in model:
                chunk.requires_grad_(False)

    @property
    def model(self) -> list[Module]:
        """One chunk per virtual pipeline stage, without DDP."""
        self.require_on_device("parameters")
        return self._model

    @property
    def chunks(self) -> list[Any]:
        """`model` wrapped in DDP; a frozen model's are not."""
        self.require_on_device("parameters")
        return self._chunks

    @property
    def optimizer(self) -> Any:
        """megatron-core's; only a trained model has one."""
        self.require_on_device("state")
        assert self._optimizer is not None, "a frozen model has no optimizer"
        return self._optimizer

    def offload(self) -> None:
        """Move to host memory; collective over data-parallel ranks, like every later move.

        Raises:
            ConfigError: CUDA cannot pin that much host memory.
        """
        self._offload = Offload(self._chunks, self._optimizer)
        self._move_back("nothing")

    @contextlib.contextmanager
    def held(self, part: Held) -> Iterator[None]:
        """Keep at least this part of the model on the device; see parallel/offload.py.

        An update needs "training", a checkpoint "state". If the body raises, nothing is moved:
        moving is collective, and other ranks may not get there.
        """
        if self._offload is None:
            yield
            return
        before = self._offload.held
        self._offload.hold(max(part, before, key=ORDER.index))
        yield
        self._move_back(before)

    def close(self) -> None:
        """Free the offload buffers; the model must not be used afterwards."""
        if self._offload is not None:
            self._offload.close()

    def require_on_device(self, part: Held) -> None:
        """Assert that this part is on the device."""
        held = "training" if self._offload is None else self._offload.held
        assert ORDER.index(held) >= ORDER.index(part), (
            f"this needs {part!r} of the model on the device, found {held!r}: use held()"
        )

    def _move_back(self, kept: Held) -> None:
        assert self._offload is not None
        if self._offload.has_changed and kept in ("nothing", "parameters"):
            # An overlapped parameter all-gather may still be writing to memory freed below.
            wait_for_parameters(self._chunks)
        self._offload.hold(kept)
