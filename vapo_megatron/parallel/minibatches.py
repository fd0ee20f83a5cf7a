"""Cuts a rank's batch into mini-batches and microbatches, and counts over all ranks.

Before: every data-parallel rank holds its own batch, in the order of the plan. After: it holds its
microbatches of every mini-batch, and every rank knows each mini-batch's global counts.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vapo_megatron.algorithm.policy_loss import loss_count
from vapo_megatron.config import ParallelConfig
from vapo_megatron.data.batch import RolloutBatch
from vapo_megatron.data.microbatch import Microbatch, make_microbatch
from vapo_megatron.parallel import backend
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.parallel.reduce import sum_over_data_parallel

FP8_MULTIPLE = 16
"""Every dimension of a matrix product in FP8 is a multiple of this (cuBLAS; megatron-core's
get_fp8_align_size)."""


COUNTED: dict[str, tuple[Callable[[RolloutBatch], Tensor], str]] = {
    "tokens": (lambda b: b.loss_mask, "token"),
    "positive_tokens": (lambda b: b.loss_mask * b.is_positive, "token"),
    "policy_tokens": (lambda b: b.policy_weights, "token"),
    "policy_responses": (lambda b: b.policy_weights, "sample"),
}
"""Denominators of the losses: name -> ([T] weights, what of those that are not 0 is counted)."""


@dataclasses.dataclass(frozen=True)
class MiniBatch:
    """One optimizer update."""

    microbatches: Sequence[Microbatch]
    counts: Mapping[str, Tensor]
    """0-d float32 each, by name in COUNTED: over all its microbatches and all data-parallel
    ranks."""


def packed_multiple(parallel: ParallelConfig, fp8: str | None) -> int:
    """Return what S', the tokens of a packed forward pass on a rank, must be a multiple of.

    Sequence parallelism gives each of TP ranks S' / TP tokens; FP8 multiplies what a rank has.
    """
    ranks = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return ranks * (FP8_MULTIPLE if fp8 else 1)


def make_microbatches(
    batch: RolloutBatch, sizes: Iterable[int], **options: Any
) -> list[Microbatch]:
    """Cut this rank's batch into packed forward passes, each of the next so many responses.

    The keywords are those of make_microbatch, from models/partition.py's microbatch_options.
    """
    return [
        dataclasses.replace(make_microbatch(part, **options), number=number)
        for number, part in enumerate(_consecutive(batch, sizes))
    ]


def filled_in(microbatches: Sequence[Microbatch], batch: RolloutBatch) -> list[Microbatch]:
    """Return all forward passes of a batch, in order, with the fields that it has by now."""
    parts = _consecutive(batch, (m.batch.num_responses for m in microbatches))
    return [dataclasses.replace(m, batch=part) for m, part in zip(microbatches, parts)]


def make_mini_batches(
    microbatches: Sequence[Microbatch], counts: Iterable[int], ranks: Ranks
) -> list[MiniBatch]:
    """Put a step's microbatches into mini-batches; one all-reduce for all their token counts.

    Args:
        microbatches: of all mini-batches, complete with advantages and returns.
        counts: microbatches of each mini-batch.
    """
    rest = iter(microbatches)
    parts = [list(itertools.islice(rest, count)) for count in counts]
    tokens = torch.stack([torch.stack([_counts(m.batch) for m in part]).sum(0) for part in parts])
    tokens = sum_over_data_parallel(tokens.to(backend.device()), ranks).float()
    return [MiniBatch(part, dict(zip(COUNTED, row))) for part, row in zip(parts, tokens)]


def with_microbatches(
    mini_batches: Sequence[MiniBatch], microbatches: Sequence[Microbatch]
) -> list[MiniBatch]:
    """Return mini-batches of the same counts with other forward passes of the same responses."""
    rest = iter(microbatches)
    return [
        dataclasses.replace(m, microbatches=list(itertools.islice(rest, len(m.microbatches))))
        for m in mini_batches
    ]


def _consecutive(batch: RolloutBatch, sizes: Iterable[int]) -> Iterator[RolloutBatch]:
    first = 0
    for size in sizes:
        yield batch.narrow(first, size)
        first += size
    assert first == batch.num_responses, f"{first} of {batch.num_responses} responses are cut"


def _counts(batch: RolloutBatch) -> Tensor:
    """float64: this rank's part of each count in COUNTED."""
    counts = [loss_count(of(batch), batch.cu_seqlens, what) for of, what in COUNTED.values()]
    return torch.stack(counts).double()
