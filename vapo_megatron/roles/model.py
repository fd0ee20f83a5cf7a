"""What the roles share: a Megatron model and its place, its optimizer, one optimizer update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from vapo_megatron.config import VapoConfig
from vapo_megatron.config.phases import Held
from vapo_megatron.data.batch import Microbatch
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
from vapo_megatron.parallel.reduce import sum_over_data_parallel
from vapo_megatron.parallel.schedule import forward_backward
from vapo_megatron.weights.load_hf import load_hf_weights
from vapo_megatron.weights.mapping import wait_for_parameters

LossFunction = Callable[[Tensor, Microbatch], tuple[Tensor, dict[str, Tensor]]]


class UpdatesSkipped(FloatingPointError):
    """As many updates in a row as optimizer.max_skipped_updates were skipped, on every rank."""


class PlacedModel:
    """A model that computes: `model`, a chunk per virtual stage.

    Without hf_path it has random weights, until a checkpoint brings others. After `offload` it is
    in host memory, and on the device only while it is `held`.
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
        """Make the loaded model ready for what it is for."""

    @property
    def model(self) -> list[Module]:
        """A chunk for each virtual stage, without DDP."""
        self._check("parameters")
        return self._model

    def offload(self) -> None:
        """Move to host memory; collective over data-parallel ranks, as every turn is.

        Raises:
            ConfigError: CUDA cannot pin so much.
        """
        self._offload = Offload(self._chunks, self._optimizer)
        self._put_away("nothing")

    @contextlib.contextmanager
    def held(self, part: Held) -> Iterator[None]:
        """Have this much of the model on the device in the body, or more; see parallel/offload.py.

        "training" is needed by `update`, "state" by a checkpoint. A body that fails ends the run:
        nothing is moved then, for other ranks may not come along.
        """
        if self._offload is None:
            yield
            return
        before = self._offload.held
        self._offload.hold(max(part, before, key=ORDER.index))
        yield
        self._put_away(before)

    def close(self) -> None:
        """Give back what offload moves; the model must not be used any more."""
        if self._offload is not None:
            self._offload.close()

    def _put_away(self, kept: Held) -> None:
        assert self._offload is not None
        if self._offload.has_changed and kept in ("nothing", "parameters"):
            # Nothing may be on its way into memory that is about to go.
            wait_for_parameters(self._chunks)
        self._offload.hold(kept)

    def _check(self, part: Held) -> None:
        held = "training" if self._offload is None else self._offload.held
        assert ORDER.index(held) >= ORDER.index(part), (
            f"of this model {held!r} is on the device, and {part!r} is used: see held()"
        )


class FrozenModel(PlacedModel):
    """A model that never learns: no optimizer, no gradient buffers, no DDP."""

    def _prepare(self, config: VapoConfig, role: Role) -> None:
        for chunk in self._model:
            chunk.requires_grad_(False)

    @property
    def chunks(self) -> list[Module]:
        """`model`, where a TrainedModel has it with DDP."""
        return self.model


class TrainedModel(PlacedModel):
    """A model that learns: `model`; `chunks`, the same with DDP; `optimizer`."""

    def _prepare(self, config: VapoConfig, role: Role) -> None:
        self._chunks = build_ddp(self._model, config.parallel, self._model[0].config)
        self._optimizer = build_optimizer(self._chunks, config.optimizer, role)
        self._role, self._max_skipped = role, config.optimizer.max_skipped_updates
        self.num_updates = 0
        self.num_tried = 0
        """Updates made or skipped by this process."""
        self.skipped_in_a_row = 0
        """Updates skipped since the last one that was made."""

    @property
    def chunks(self) -> list[DistributedDataParallel]:
        """The same as `model` with DDP."""
        self._check("parameters")
        return self._chunks

    @property
    def optimizer(self) -> MegatronOptimizer:
        """AdamW."""
        self._check("state")
        assert self._optimizer is not None
        return self._optimizer

    def compute_gradients(
        self, mini_batch: MiniBatch, loss_function: LossFunction
    ) -> dict[str, Tensor]:
        """Leave the finished gradient of the mini-batch's loss in the chunks' buffers.

        Args:
            mini_batch, loss_function: see update.

        Returns:
            The metrics summed over microbatches and data-parallel ranks; 0-d, on every rank. One
            whose name ends in _max is this data-parallel rank's own maximum. And
            not_finite: 0 where the loss, the gradient, and what the mini-batch brought of
            log-probabilities, values, advantages and returns are finite on all of these ranks.
        """
        self._check("training")
        metrics = forward_backward(self.chunks, mini_batch.microbatches, loss_function)
        loss = metrics["loss"]
        found = [loss.isfinite(), gradients_are_finite(self.chunks)]
        found += [torch.tensor(m.batch.is_finite) for m in mini_batch.microbatches]
        broken = [(~ok).to(loss.device, torch.float64) for ok in found]
        metrics["not_finite"] = torch.stack(broken).sum()
        largest = {name: metrics.pop(name) for name in list(metrics) if name.endswith("_max")}
        return {**sum_over_data_parallel(metrics, self.ranks), **largest}

    def update(
        self, mini_batch: MiniBatch, loss_function: LossFunction, learning_rate: float
    ) -> dict[str, Tensor]:
        """Make one optimizer update, or skip it: nothing changes where a number is not finite.

        Every rank decides alike: what one of them finds spoils the norm of the gradient for all.

        Args:
            mini_batch: this data-parallel rank's microbatches and the global counts.
            loss_function: (model output, microbatch) -> (loss divided by a global count, metrics).
            learning_rate: of this update.

        Returns:
            The metrics summed over microbatches and data-parallel ranks, and grad_norm, which is
            not finite where the update was skipped; 0-d, on every rank.

        Raises:
            UpdatesSkipped: on every rank.
        """
        set_learning_rate(self.optimizer, learning_rate)
        metrics = self.compute_gradients(mini_batch, loss_function)
        if metrics.pop("not_finite") > 0:
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
                f"{self.skipped_in_a_row} updates of the {self._role} in a row were skipped, as "
                "many as optimizer.max_skipped_updates allows: a loss, gradient, value or "
                "log-probability is not finite"
            )
        return {**metrics, "grad_norm": grad_norm}


def mean_of_updates(updates: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Average what TrainedModel.update returned, over the updates that were made.

    Returns:
        The means, of all where none was made, each over the updates that have the metric; and
        skipped_updates, how many were not.
    """
    made = [metrics for metrics in updates if metrics["grad_norm"].isfinite()]
    counted = made or updates
    totals: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for metrics in counted for name in metrics):
        values = [metrics[name] for metrics in counted if name in metrics]
        totals[name] = torch.stack(values).mean()
    totals["skipped_updates"] = torch.tensor(len(updates) - len(made))
    return totals
