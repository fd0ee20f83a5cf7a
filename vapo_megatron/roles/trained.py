"""What trains a model: its gradients, its optimizer, and one update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from vapo_megatron.config import VapoConfig
from vapo_megatron.config.phases import Role
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.parallel.gradient_buffers import fill_gradients_with_nan, gradients_are_finite
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.parallel.minibatches import MiniBatch
from vapo_megatron.parallel.optimizer import (
    build_ddp,
    build_optimizer,
    optimizer_step,
    set_learning_rate,
)
from vapo_megatron.parallel.reduce import sum_over_context_parallel, sum_over_data_parallel
from vapo_megatron.parallel.schedule import Before, LossFunction, forward_backward
from vapo_megatron.roles.placed import Loaded, PlacedModel
from vapo_megatron.weights.matrices import trained_weights


class UpdatesSkipped(FloatingPointError):
    """optimizer.max_skipped_updates consecutive updates were skipped; raised on every rank."""


def wrap(model: list[Module], config: VapoConfig, role: Role) -> list[Any]:
    """Wrap a role's chunks in DDP; an optimizer of matrices needs whole gradients."""
    whole = config.optimizer.method(role) != "adamw"
    return build_ddp(model, config.parallel, model[0].config, whole_gradients=whole)


def optimizer_of(
    chunks: list[Any], model: list[Module], shape: ModelShape, config: VapoConfig, ranks: Ranks,
    role: Role,
) -> Any:  # fmt: skip
    """Build a role's optimizer of what `wrap` returns, which is told what its matrices are."""
    has_matrices = config.optimizer.method(role) != "adamw"
    weights = trained_weights(model, shape, ranks, role) if has_matrices else None
    return build_optimizer(chunks, config.optimizer, role, weights, config.seed)


class TrainedModel:
    """Gradient buffers and an optimizer for the parameters of a model that require a gradient."""

    def __init__(
        self, loaded: Loaded, shape: ModelShape, config: VapoConfig, ranks: Ranks, role: Role
    ) -> None:
        """Wrap the chunks of load_model; from here on they are moved by `placed` alone."""
        chunks = wrap(loaded.model, config, role)
        optimizer = optimizer_of(chunks, loaded.model, shape, config, ranks, role)
        self.placed = PlacedModel(loaded, chunks, optimizer)
        self._ranks, self._role = ranks, role
        self._max_skipped = config.optimizer.max_skipped_updates
        self.num_updates = 0
        self.num_tried = 0
        """Updates made or skipped by this process."""
        self.skipped_in_a_row = 0
        """Consecutive skipped updates."""

    def compute_gradients(
        self, mini_batch: MiniBatch, loss_function: LossFunction, before: Before | None = None
    ) -> dict[str, Tensor]:
        """Leave the reduced gradient of the mini-batch's loss in the DDP buffers.

        Args:
            mini_batch, loss_function, before: see update.

        Returns:
            The metrics summed over microbatches and data-parallel ranks, 0-d, on every rank; those
            named *_max are this data-parallel rank's maximum instead. not_finite: 0 if the loss,
            the gradient and the mini-batch's log-probabilities, values, advantages and returns are
            finite on all these ranks.
        """
        self.placed.require_on_device("training")
        metrics = forward_backward(
            self.placed.chunks, mini_batch.microbatches, loss_function, before
        )
        loss = metrics["loss"]
        found = [loss.isfinite(), gradients_are_finite(self.placed.chunks)]
        found += [torch.tensor(m.batch.is_finite) for m in mini_batch.microbatches]
        broken = [(~ok).to(loss.device, torch.float64) for ok in found]
        metrics["not_finite"] = torch.stack(broken).sum()
        largest = {name: metrics.pop(name) for name in list(metrics) if name.endswith("_max")}
        # Context-parallel ranks have gradients of their own, and the same of everything else.
        metrics["not_finite"] = sum_over_context_parallel(metrics["not_finite"], self._ranks)
        return {**sum_over_data_parallel(metrics, self._ranks), **largest}

    def update(
        self,
        mini_batch: MiniBatch,
        loss_function: LossFunction,
        learning_rate: float,
        before: Before | None = None,
    ) -> dict[str, Tensor]:
        """Make one optimizer update, or skip it if a number is not finite on any rank.

        Args:
            mini_batch: this data-parallel rank's microbatches and the global counts.
            loss_function: (model output, microbatch) -> (loss divided by a global count, metrics).
            learning_rate: of this update.
            before: called before each forward pass; see schedule.py.

        Returns:
            The metrics of compute_gradients without not_finite, and grad_norm, which is not finite
            if the update was skipped; 0-d, on every rank.

        Raises:
            UpdatesSkipped: on every rank.
        """
        set_learning_rate(self.placed.optimizer, learning_rate)
        metrics = self.compute_gradients(mini_batch, loss_function, before)
        if metrics.pop("not_finite") > 0:
            # Makes the gradient norm NaN on every rank, so that all of them skip.
            fill_gradients_with_nan(self.placed.chunks)
        grad_norm = optimizer_step(self.placed.optimizer)
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
