"""How a model's forward passes are cut: to what length, and over context-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vapo_megatron.config import ModelConfig, ParallelConfig
from vapo_megatron.data.context_parallel import rows_of_rank
from vapo_megatron.models.layer_spec import uses_transformer_engine
from vapo_megatron.parallel.backend import device as this_device
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.parallel.minibatches import packed_multiple


def microbatch_options(
    model: ModelConfig, parallel: ParallelConfig, ranks: Ranks
) -> dict[str, Any]:
    """Return the keywords of make_microbatches, of this rank.

    Transformer Engine's attention decides itself which tokens a context-parallel rank holds.
    """
    of_engine = ranks.cp_size > 1 and uses_transformer_engine(model)
    return {
        "multiple_of": packed_multiple(parallel, model.fp8),
        "cp_size": ranks.cp_size,
        "cp_rank": ranks.cp_rank,
        "partition": _rows_of_transformer_engine if of_engine else rows_of_rank,
    }


def _rows_of_transformer_engine(
    cu_seqlens: Tensor, size: int, cp_size: int, cp_rank: int
) -> Tensor:
    # Called directly: megatron-core 0.18 and newer have no helper around it.
    import transformer_engine_torch as kernels

    # A kernel on the GPU: the bounds go there, and the rows come back.
    there = cu_seqlens.to(this_device())
    rows = kernels.thd_get_partitioned_indices(there, size, cp_size, cp_rank)
    return rows.to(cu_seqlens.device, torch.int64)
