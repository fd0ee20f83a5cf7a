"""Cuts a rank's batch into mini-batches and microbatches, and counts over all ranks.

Before: every data-parallel rank holds its own batch, in the order of the plan. After: it holds its
microbatches of every mini-batch, and every rank knows each mini-batch's global counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from vapo_megatron.algorithm.policy_loss import loss_count
from vapo_megatron.config import ParallelConfig
from vapo_megatron.data.batch import Microbatch, RolloutBatch, make_microbatch
from vapo_megatron.parallel import backend
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.parallel.reduce import sum_over_data_parallel

FP8_MULTIPLE = 16
"""Every dimension of a matrix product in FP8 is a multiple of this (cuBLAS; megatron-core's
get_fp8_align_size)."""


@dataclasses.dataclass(frozen=True)
class MiniBatch:
    """One optimizer update. Counts are over all its microbatches and all data-parallel ranks."""

    microbatches: Sequence[Microbatch]
    num_tokens: Tensor
    """0-d float32: tokens that loss_mask keeps."""
    num_positive_tokens: Tensor
    """0-d float32: tokens of correct responses that it keeps."""
    num_policy_tokens: Tensor
    """0-d float32: tokens with a weight in the policy loss (RolloutBatch.policy_weights)."""
    num_policy_responses: Tensor
    """0-d float32: responses with such a token."""


def local_plan(microbatches: Sequence[Sequence[Sequence[int]]]) -> list[list[list[int]]]:
    """Renumber a rank's plan: [mini-batch][microbatch] of step positions -> of local indices.

    The local batch holds the responses in the order of the plan, so the indices count up.
    """
    plan: list[list[list[int]]] = []
    start = 0
    for mini_batch in microbatches:
        plan.append([])
        for positions in mini_batch:
            plan[-1].append(list(range(start, start + len(positions))))
            start += len(positions)
    return plan


def packed_multiple(parallel: ParallelConfig, fp8: str | None) -> int:
    """Return what S, the tokens of a packed forward pass, must be a multiple of.

    Sequence parallelism gives each of TP ranks S / TP tokens; FP8 multiplies what a rank has.
    """
    ranks = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return ranks * (FP8_MULTIPLE if fp8 else 1)


def make_microbatches(
    batch: RolloutBatch, plan: Sequence[Sequence[int]], *, multiple_of: int
) -> list[Microbatch]:
    """Build packed microbatches of local indices, padded to packed_multiple."""
    return [make_microbatch(batch.select(part), multiple_of=multiple_of) for part in plan]


def make_mini_batches(
    batch: RolloutBatch,
    plan: Sequence[Sequence[Sequence[int]]],
    ranks: Ranks,
    *,
    multiple_of: int,
) -> list[MiniBatch]:
    """Build every mini-batch of a step; one all-reduce for all their counts.

    Args:
        batch: this data-parallel rank's, complete with advantages and returns.
        plan: [mini-batch][microbatch][response] local indices.
        ranks: this rank's place.
        multiple_of: from packed_multiple.
    """
    mini_batches = [make_microbatches(batch, part, multiple_of=multiple_of) for part in plan]
    counts = torch.stack(
        [torch.stack([_counts(m.batch) for m in part]).sum(0) for part in mini_batches]
    )
    counts = sum_over_data_parallel(counts.to(backend.device()), ranks).float()
    return [MiniBatch(part, *count.unbind()) for part, count in zip(mini_batches, counts)]


def _counts(batch: RolloutBatch) -> Tensor:
    """float64 [4]: this rank's part of a MiniBatch's counts, in their order."""
    mask, weights, bounds = batch.loss_mask, batch.policy_weights, batch.cu_seqlens
    positive = mask * batch.per_token(batch.is_correct)
    return torch.stack(
        [
            loss_count(mask, bounds, "token"),
            loss_count(positive, bounds, "token"),
            loss_count(weights, bounds, "token"),
            loss_count(weights, bounds, "sample"),
        ]
    ).double()
