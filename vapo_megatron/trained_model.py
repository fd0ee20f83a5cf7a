"""What actor and critic share: a Megatron model, its optimizer, and one optimizer update."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from vapo_megatron.batch import MicroBatch
from vapo_megatron.config import VapoConfig
from vapo_megatron.models.build import Role, build_model
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.parallel.groups import ParallelGroups
from vapo_megatron.parallel.minibatches import MiniBatch
from vapo_megatron.parallel.optimizer import (
    build_ddp,
    build_optimizer,
    optimizer_step,
    set_learning_rate,
)
from vapo_megatron.parallel.reduce import sum_over_data_parallel
from vapo_megatron.parallel.schedule import forward_backward
from vapo_megatron.weights.hf import load_hf_weights

LossFunction = Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]


class TrainedModel:
    """A model that learns: `model`, a chunk per virtual stage; `chunks`, with DDP; `optimizer`.

    Without hf_path, which every run's configuration has, it keeps its random weights.
    """

    def __init__(
        self,
        shape: ModelShape,
        config: VapoConfig,
        groups: ParallelGroups,
        role: Role,
        hf_path: str | None,
    ) -> None:
        self.groups = groups
        self.model = build_model(shape, config, groups, role)
        if hf_path is not None:
            load_hf_weights(self.model, shape, hf_path, groups, role)
        self.chunks = build_ddp(self.model, config, self.model[0].config)
        self.optimizer = build_optimizer(self.chunks, config, role)
        self.num_updates = 0

    def compute_gradients(
        self, mini_batch: MiniBatch, loss_function: LossFunction
    ) -> dict[str, Tensor]:
        """Leave the finished gradient of the mini-batch's loss in the chunks' buffers.

        Args:
            mini_batch, loss_function: see update.

        Returns:
            The metrics summed over micro-batches and data-parallel ranks; 0-d, on every rank.
        """
        metrics = forward_backward(self.chunks, mini_batch.micro_batches, loss_function)
        return sum_over_data_parallel(metrics, self.groups)

    def update(
        self, mini_batch: MiniBatch, loss_function: LossFunction, learning_rate: float
    ) -> dict[str, Tensor]:
        """Make one optimizer update.

        Args:
            mini_batch: this data-parallel rank's micro-batches and the global counts.
            loss_function: (model output, micro-batch) -> (loss divided by a global count, metrics).
            learning_rate: of this update.

        Returns:
            The metrics summed over micro-batches and data-parallel ranks, and grad_norm; 0-d, on
            every rank.
        """
        set_learning_rate(self.optimizer, learning_rate)
        metrics = self.compute_gradients(mini_batch, loss_function)
        grad_norm = optimizer_step(self.optimizer)
        self.num_updates += 1
        return {**metrics, "grad_norm": grad_norm}
