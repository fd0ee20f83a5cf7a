"""A model's weights, on the device or in host memory; training is in trained.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.nn import Module

from vapo_megatron.config import VapoConfig
from vapo_megatron.config.phases import Held, Role
from vapo_megatron.models.build import build_model
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.parallel.gradient_buffers import wait_for_parameters
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.parallel.offload import ORDER, Offload
from vapo_megatron.roles.base import Base
from vapo_megatron.weights.adapters import attach_adapters
from vapo_megatron.weights.frozen import Frozen, frozen
from vapo_megatron.weights.load_hf import load_hf_weights
from vapo_megatron.weights.parameters import local_parameters
from vapo_megatron.weights.peft import load_adapters


class Loaded(NamedTuple):
    """A role's model."""

    model: list[Module]
    """One chunk per virtual pipeline stage."""
    base: Base | None = None
    """Its frozen weights, below adapters; None: it has none."""


def load_model(
    shape: ModelShape,
    config: VapoConfig,
    ranks: Ranks,
    role: Role,
    hf_path: str | None,
    shared: Base | None = None,
) -> Loaded:
    """Build a role's model and load its weights; freeze what it does not train; add adapters.

    Args:
        role: a reference policy is built as the actor is.
        hf_path: initial weights; None: random until a checkpoint is loaded.
        shared: weights of another role to compute with; hf_path is then not read.
    """
    lora, built_as = config.model.lora, "actor" if role == "reference" else role
    model = build_model(shape, config.model, config.parallel, ranks, built_as, seed=config.seed)
    if shared is not None:
        shared.give(model, keeps_head=role == "critic")
    elif hf_path is not None:
        load_hf_weights(model, shape, hf_path, ranks, built_as)
    if not lora.of(role):
        _freeze(model, shape, config, role)
        return Loaded(model, shared)
    base = shared or Base(model, keeps_head=role == "critic")
    attach_adapters(
        model, shape, ranks, lora, built_as, seed=config.seed,
        sequence_parallel=config.parallel.sequence_parallel,
    )  # fmt: skip
    if lora.path is not None and role != "critic":
        load_adapters(model, shape, lora.path, ranks, lora)
    return Loaded(model, base)


def _freeze(model: list[Module], shape: ModelShape, config: VapoConfig, role: Role) -> None:
    """Freeze what a role without adapters does not train."""
    if (kept := frozen(config.algorithm, config.model, role)) != Frozen(False, False):
        parameters = [p for chunk in model for p in chunk.parameters()]
        for one, parameter in zip(local_parameters(model, shape, role), parameters, strict=True):
            parameter.requires_grad_(one.row not in kept)


class PlacedModel:
    """Model chunks, with gradient buffers and optimizer state if they are trained.

    After `offload` all of it is in host memory, and on the device only inside `held`.
    """

    def __init__(
        self, loaded: Loaded, chunks: list[Any] | None = None, optimizer: Any = None
    ) -> None:
        """Take what is on the device.

        Args:
            loaded: from load_model.
            chunks: its model wrapped in DDP; None: it is frozen here.
            optimizer: of these.
        """
        self._model, self.base = loaded
        self._chunks, self._optimizer = chunks or self._model, optimizer
        self._offload: Offload | None = None
        if chunks is None:
            for chunk in self._model:
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
        of_base = set() if self.base is None else {id(p) for p in self.base.parameters}
        own = [p for chunk in self._chunks for p in chunk.parameters() if id(p) not in of_base]
        self._offload = Offload(own, self._optimizer)
        self._move_back("nothing")
        if self.base is not None:
            self.base.offload()

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
        with contextlib.nullcontext() if self.base is None else self.base.held():
            self._offload.hold(max(part, before, key=ORDER.index))
            yield
            self._move_back(before)

    def close(self) -> None:
        """Free the offload buffers; the model must not be used afterwards."""
        if self._offload is not None:
            self._offload.close()
        if self.base is not None:
            self.base.close()

    def require_on_device(self, part: Held) -> None:
        """Assert that this part is on the device."""
        held: Held = "training" if self._offload is None else self._offload.held
        if self.base is not None and self.base.level == "nothing":
            held = "nothing"
        assert ORDER.index(held) >= ORDER.index(part), (
            f"this needs {part!r} of the model on the device, found {held!r}: use held()"
        )

    def _move_back(self, kept: Held) -> None:
        assert self._offload is not None
        if self._offload.has_changed and kept in ("nothing", "parameters"):
            # An overlapped parameter all-gather may still be writing to memory freed below.
            wait_for_parameters(self._chunks)
        self._offload.hold(kept)
