"""Who cuts a batch over context-parallel ranks: Transformer Engine where it attends, else we do.

Transformer Engine's kernel is a stand-in with another cut than ours, so that one sees whose was
used. Does not exercise the kernel: tests/gpu/test_context_parallel.py does, on a GPU.
"""

import dataclasses
import sys
import types
from unittest import mock

import pytest
import torch

from tests.data.test_batch import make_batch
from vapo_megatron.data.microbatch import make_microbatch


def cut_by(uses_engine, cp_size):
    """Return (every rank's part of a batch, how often the kernel was called); one process's job."""
    from vapo_megatron.config import ModelConfig, ParallelConfig
    from vapo_megatron.models import partition

    model = ModelConfig(layer_spec="transformer_engine", fp8="hybrid")
    parallel = ParallelConfig(sequence_parallel=True, tensor_model_parallel_size=2, world_size=2)
    module = types.ModuleType("transformer_engine_torch")
    module.thd_get_partitioned_indices = mock.Mock(side_effect=consecutive)
    parts = []
    with (
        mock.patch.dict(sys.modules, {module.__name__: module}),
        mock.patch.object(partition, "uses_transformer_engine", lambda model: uses_engine),
    ):
        for rank in range(cp_size):
            ranks = types.SimpleNamespace(cp_size=cp_size, cp_rank=rank)
            parts.append(
                make_microbatch(
                    make_batch(), **partition.microbatch_options(model, parallel, ranks)
                )
            )
    return parts, module.thd_get_partitioned_indices.call_count


def consecutive(cu_seqlens, size, cp_size, cp_rank):
    """The stand-in: a rank holds the next S / cp_size tokens; int32 in and out, as the kernel."""
    assert cu_seqlens.dtype == torch.int32 and int(cu_seqlens[-1]) == size
    return torch.arange(size).int().chunk(cp_size)[cp_rank]


@pytest.mark.parametrize("cp_size", [2, 4])
def test_transformer_engine_cuts_what_it_attends_to(workers, cp_size):
    ((parts, calls),) = workers.run(1, cut_by, True, cp_size)
    # Each rank asks for every rank's rows, once: its outputs come back in their order.
    assert calls == cp_size**2
    # In the stand-in's cut the ranks' parts, one after the other, are the whole.
    whole = make_microbatch(make_batch())
    tokens = torch.cat([part.tokens for part in parts])
    assert len(tokens) == int(parts[0].model_cu_seqlens[-1]) and len(tokens) % (32 * cp_size) == 0
    assert tokens[tokens > 0].tolist() == whole.tokens[whole.tokens > 0].tolist()
    assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)
    own = len(tokens) // cp_size
    predicting = torch.cat([part.predicting + rank * own for rank, part in enumerate(parts)])
    assert all(torch.equal(part.outputs, predicting) for part in parts)


@pytest.mark.parametrize("uses_engine, cp_size", [(False, 2), (True, 1)])
def test_our_function_cuts_elsewhere(workers, uses_engine, cp_size):
    ((parts, calls),) = workers.run(1, cut_by, uses_engine, cp_size)
    assert not calls
    for rank, part in enumerate(parts):
        ours = make_microbatch(make_batch(), multiple_of=32, cp_size=cp_size, cp_rank=rank)
        for field in dataclasses.fields(part):
            found = getattr(part, field.name)
            if isinstance(found, torch.Tensor):
                assert torch.equal(found, getattr(ours, field.name))
