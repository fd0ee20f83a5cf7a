"""The reward model: a frozen model that scores whole responses, read at their last token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vapo_megatron.config import VapoConfig
from vapo_megatron.data.batch import StepSummary
from vapo_megatron.data.microbatch import Microbatch, make_microbatch
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.models.partition import microbatch_options
from vapo_megatron.models.value_head import values_of
from vapo_megatron.parallel.context import gather_rows
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.parallel.reduce import sum_over_world
from vapo_megatron.parallel.schedule import forward_only
from vapo_megatron.roles.placed import PlacedModel, load_model


class RewardModel:
    """model.reward_hf_path: a model with one label, sharded like the actor and never trained.

    It has no optimizer, gradient buffers and DDP, and is not part of checkpoints; a resumed run
    reads model.reward_hf_path again.
    """

    def __init__(self, shape: ModelShape, config: VapoConfig, ranks: Ranks) -> None:
        """Build it; shape: its own, from read_reward_shape."""
        self._ranks = ranks
        self._options = microbatch_options(config.model, config.parallel, ranks)
        path = config.model.reward_hf_path
        self.placed = PlacedModel(load_model(shape, config, ranks, "reward_model", path))

    def compute_scores(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Return each response's score, the output at its last token; float32 [B], CPU.

        A response without tokens is scored at the end of its prompt.
        """

        def head(output: Tensor, microbatch: Microbatch) -> Tensor:
            return gather_rows(values_of(output), self._ranks)[microbatch.ends]

        found = forward_only(self.placed.model, microbatches, head, per_response=True)
        return torch.cat([torch.empty(0), *(scores.cpu() for scores in found)])

    def score_pending(self, summary: StepSummary, microbatches: Sequence[Microbatch]) -> Tensor:
        """Score the pending responses; one all-reduce shares all scores.

        Args:
            summary: of all ranks' responses.
            microbatches: everything that this data-parallel rank trains on. Only what is pending of
                each goes through the model.

        Returns:
            float32 [P*G] by position, the same on every rank; 0 where nothing is pending.
        """
        waiting = []
        for microbatch in microbatches:
            chosen = summary.is_pending[microbatch.batch.positions]
            if chosen.all():
                waiting.append(microbatch)
            elif chosen.any():
                batch = microbatch.batch.picked(chosen)
                waiting.append(make_microbatch(batch, **self._options))
        scores, own = torch.zeros(len(summary.rewards)), self.compute_scores(waiting)
        # One rank of each replica speaks for all, so that no rounding can make ranks disagree.
        here = self._ranks
        if waiting and here.tp_rank == here.cp_rank == 0 and here.is_first_stage:
            scores[torch.cat([m.batch.positions for m in waiting])] = own
        return sum_over_world(scores)
