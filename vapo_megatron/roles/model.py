"""Shared by the roles: a Megatron model with offload, its optimizer, and one update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from vapo_megatron.config import VapoConfig
from vapo_megatron.config.phases import Held
from vapo_megatron.data.microbatch import Microbatch
from vapo_megatron.models.build import Role, build_model, freeze_attention
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.parallel.minibatches import MiniBatch
from vapo_megatron.parallel.offload import ORDER, Offload
from vapo_megatron.parallel.optimizer import (
    DistributedDataParallel,
    MegatronOptimizer,
    build_ddp,
    build_optimizer,
    fill_gradients_with_nan,
    gradients_are_finite,
    optimizer_step,
    set_learning_rate,
)
from vapo_megatron.parallel.reduce import sum_over_context_parallel, sum_over_data_parallel
from vapo_megatron.parallel.schedule import forward_backward
from vapo_megatron.weights.ddp import wait_for_parameters
from vapo_megatron.weights.load_hf import load_hf_weights

LossFunction = Callable[[Tensor, Microbatch], tuple[Tensor, dict[str, Tensor]]]


class UpdatesSkipped(FloatingPointError):
    """optimizer.max_skipped_updates consecutive updates were skipped; raised on every rank."""


class PlacedModel:
    """A model with offload: `model` has one chunk per virtual pipeline stage.

    Without hf_path its weights are random until a checkpoint is loaded. After `offload` it is in
    host memory, and on the device only inside `held`.
    """

    _chunks: list[Any]
    _optimizer: MegatronOptimizer | None = None

    def __init__(
        self,
        shape: ModelShape,
        config: VapoConfig,
        ranks: Ranks,
        role: Role,
        hf_path: str | None,
    ) -> None:
        self.ranks = ranks
        self._model = build_model(
            shape, config.model, config.parallel, ranks, role, seed=config.seed
        )
        if role == "critic" and config.algorithm.freeze_critic_attention:
            freeze_attention(self._model)
        if hf_path is not None:
            load_hf_weights(self._model, shape, hf_path, ranks, role)
        self._chunks = self._model
        self._offload: Offload | None = None
        self._prepare(config, role)

    def _prepare(self, config: VapoConfig, role: Role) -> None:
        """Hook: called once the weights are loaded."""

    @property
    def model(self) -> list[Module]:
        """One chunk per virtual pipeline stage, without DDP."""
        self._require_on_device("parameters")
        return self._model

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

        `update` needs "training", a checkpoint "state". If the body raises, nothing is moved:
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

    def _move_back(self, kept: Held) -> None:
        assert self._offload is not None
        if self._offload.has_changed and kept in ("nothing", "parameters"):
            # An overlapped parameter all-gather may still be writing to memory freed below.
            wait_for_parameters(self._chunks)
        self._offload.hold(kept)

    def _require_on_device(self, part: Held) -> None:
        held = "training" if self._offload is None else self._offload.held
        assert ORDER.index(held) >= ORDER.index(part), (
            f"this needs {part!r} of the model on the device, found {held!r}: use held()"
        )


class FrozenModel(PlacedModel):
    """A model without optimizer, gradient buffers and DDP."""

    def _prepare(self, config: VapoConfig, role: Role) -> None:
        for chunk in self._model:
            chunk.requires_grad_(False)

    @property
    def chunks(self) -> list[Module]:
        """`model`; a TrainedModel has its DDP wrappers here."""
        return self.model


class TrainedModel(PlacedModel):
    """A model with DDP (`chunks`) and `optimizer`."""

    def _prepare(self, config: VapoConfig, role: Role) -> None:
        self._chunks = build_ddp(self._model, config.parallel, self._model[0].config)
        self._optimizer = build_optimizer(self._chunks, config.optimizer, role)
        self._role, self._max_skipped = role, config.optimizer.max_skipped_updates
        self.num_updates = 0
        self.num_tried = 0
        """Updates made or skipped by this process."""
        self.skipped_in_a_row = 0
        """Consecutive skipped updates."""

    @property
    def chunks(self) -> list[DistributedDataParallel]:
        """`model` wrapped in DDP."""
        self._require_on_device("parameters")
        return self._chunks

    @property
    def optimizer(self) -> MegatronOptimizer:
        """AdamW."""
        self._require_on_device("state")
        assert self._optimizer is not None
        return self._optimizer

    def compute_gradients(
        self, mini_batch: MiniBatch, loss_function: LossFunction
    ) -> dict[str, Tensor]:
        """Leave the reduced gradient of the mini-batch's loss in the DDP buffers.

        Args:
            mini_batch, loss_function: see update.

        Returns:
            The metrics summed over microbatches and data-parallel ranks, 0-d, on every rank; those
            named *_max are this data-parallel rank's maximum instead. not_finite: 0 if the loss,
            the gradient and the mini-batch's log-probabilities, values, advantages and returns are
            finite on all these ranks.
        """
        self._require_on_device("training")
        metrics = forward_backward(self.chunks, mini_batch.microbatches, loss_function)
        loss = metrics["loss"]
        found = [loss.isfinite(), gradients_are_finite(self.chunks)]
        found += [torch.tensor(m.batch.is_finite) for m in mini_batch.microbatches]
        broken = [(~ok).to(loss.device, torch.float64) for ok in found]
        metrics["not_finite"] = torch.stack(broken).sum()
        largest = {name: metrics.pop(name) for name in list(metrics) if name.endswith("_max")}
        # Context-parallel ranks have gradients of their own, and the same of everything else.
        metrics["not_finite"] = sum_over_context_parallel(metrics["not_finite"], self.ranks)
        return {**sum_over_data_parallel(metrics, self.ranks), **largest}

    def update(
        self, mini_batch: MiniBatch, loss_function: LossFunction, learning_rate: float
    ) -> dict[str, Tensor]:
        """Make one optimizer update, or skip it if a number is not finite on any rank.

        Args:
            mini_batch: this data-parallel rank's microbatches and the global counts.
            loss_function: (model output, microbatch) -> (loss divided by a global count, metrics).
            learning_rate: of this update.

        Returns:
            The metrics of compute_gradients without not_finite, and grad_norm, which is not finite
            if the update was skipped; 0-d, on every rank.

        Raises:
            UpdatesSkipped: on every rank.
        """
        set_learning_rate(self.optimizer, learning_rate)
        metrics = self.compute_gradients(mini_batch, loss_function)
        if metrics.pop("not_finite") > 0:
            # Makes the gradient norm NaN on every rank, so that all of them skip.
            fill_gradients_with_nan(self.chunks)
        grad_norm = optimizer_step(self.optimizer)
        self.num_tried += 1
        if grad_norm.isfinite():
            self.num_updates += 1
            self.skipped_in_a_row = 0
        else:
            self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self._max_skipped:
            raise UpdatesSkipped(
                f"{self.skipped_in_a_row} updates of the {self._role} in a row were skipped "
                "(optimizer.max_skipped_updates): a loss, gradient, value or log-probability is "
                "not finite"
            )
        return {**metrics, "grad_norm": grad_norm}


def mean_of_updates(updates: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Average the metrics of TrainedModel.update over the updates that were not skipped.

    Returns:
        Means over the updates that have the metric (over all updates if every one was skipped), and
        skipped_updates, their number.
    """
    made = [metrics for metrics in updates if metrics["grad_norm"].isfinite()]
    counted = made or updates
    totals: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for metrics in counted for name in metrics):
        values = [metrics[name] for metrics in counted if name in metrics]
        totals[name] = torch.stack(values).mean()
    totals["skipped_updates"] = torch.tensor(len(updates) - len(made))
    return totals
