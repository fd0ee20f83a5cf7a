"""The critic: V of the state before each response token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from vapo_megatron.algorithm.value_loss import ranged_values, value_loss
from vapo_megatron.config import VapoConfig
from vapo_megatron.config.metrics import emits
from vapo_megatron.data.microbatch import Microbatch
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.models.value_head import ValueHead, values_of
from vapo_megatron.parallel.context import gather_tokens
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.parallel.minibatches import MiniBatch
from vapo_megatron.parallel.optimizer import learning_rate
from vapo_megatron.parallel.schedule import forward_only
from vapo_megatron.roles.base import Base
from vapo_megatron.roles.placed import load_model
from vapo_megatron.roles.trained import TrainedModel, mean_of_updates


class Critic:
    """Value model with its optimizer; `trained.num_updates` counts its updates."""

    def __init__(
        self,
        shape: ModelShape,
        config: VapoConfig,
        ranks: Ranks,
        hf_path: str | None,
        shared: Base | None = None,
    ) -> None:
        """Build it.

        Args:
            hf_path: initial weights; None: a checkpoint is loaded later.
            shared: the actor's frozen weights, which it then computes with.
        """
        self.config, self.ranks = config, ranks
        loaded = load_model(shape, config, ranks, "critic", hf_path, shared)
        self.trained = TrainedModel(loaded, shape, config, ranks, "critic")
        self.placed = self.trained.placed

    def compute_values(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Return V before each response token, no gradient; float32 [T], CPU."""
        return torch.cat(forward_only(self.placed.chunks, microbatches, self._values)).cpu()

    def shift(self, bias: float) -> None:
        """Add a constant to the value head's output from now on."""
        for head in self.placed.chunks[-1].modules():
            if isinstance(head, ValueHead):
                known = torch.zeros(1) if head.bias is None else head.bias
                head.set_bias(known + bias)

    @emits(
        "critic/loss",
        "critic/value_mean",
        "critic/return_mean",
        "critic/value_clip_fraction",
        "critic/grad_norm",
        "critic/skipped_updates",
        "critic/learning_rate",
    )
    def update(self, mini_batches: Sequence[MiniBatch]) -> dict[str, float]:
        """Pass over the mini-batches critic_updates_per_step times, one update each.

        Returns:
            Metrics averaged over the updates, see mean_of_updates.

        Raises:
            UpdatesSkipped: on every rank.
        """
        updates = []
        for mini_batch in list(mini_batches) * self.config.algorithm.critic_updates_per_step:
            rate = learning_rate(self.trained.num_updates, self.config.optimizer, "critic")
            loss_function = partial(self._loss, mini_batch)
            updates.append(self.trained.update(mini_batch, loss_function, rate))
        totals = mean_of_updates(updates)
        totals["learning_rate"] = torch.tensor(rate, dtype=torch.float64)
        return {f"critic/{name}": float(value) for name, value in totals.items()}

    def compute_gradients(self, mini_batch: MiniBatch) -> dict[str, Tensor]:
        """Leave one mini-batch's reduced gradient in the DDP buffers; return metrics."""
        return self.trained.compute_gradients(mini_batch, partial(self._loss, mini_batch))

    def _loss(
        self, mini_batch: MiniBatch, output: Tensor, microbatch: Microbatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        batch = microbatch.batch
        assert batch.returns is not None
        loss, metrics = value_loss(
            self._values(output, microbatch),
            batch.returns,
            batch.loss_mask,
            num_tokens=mini_batch.counts["tokens"],
            old_values=batch.values,
            clip=self.config.algorithm.value_clip,
        )
        return loss, {**metrics, "loss": loss.detach()}

    def _values(self, output: Tensor, microbatch: Microbatch) -> Tensor:
        """V at the positions that predict the response tokens; temperature does not apply."""
        own, algorithm = values_of(output)[microbatch.predicting], self.config.algorithm
        values = gather_tokens(own, microbatch, self.ranks)
        if algorithm.value_range is not None:
            return ranged_values(values, *algorithm.value_range)
        return values
