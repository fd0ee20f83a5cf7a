"""Transformer Engine's own function cuts a batch over context-parallel ranks, and as ours would."""

import types

import pytest
import torch

from tests.data.test_batch import make_batch
from vapo_megatron.config import ModelConfig, ParallelConfig
from vapo_megatron.data.batch import bounds
from vapo_megatron.data.context_parallel import rows_of_rank
from vapo_megatron.data.microbatch import make_microbatch


@pytest.mark.gpu
@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_transformer_engine_cuts_as_we_do(cp_size):
    pytest.importorskip("transformer_engine.pytorch")
    from vapo_megatron.models.partition import microbatch_options

    model = ModelConfig(layer_spec="transformer_engine")
    lengths = torch.tensor([64, 16, 4096, 16, 131_072])
    arguments = bounds(lengths), int(lengths.sum()), cp_size
    for rank in range(cp_size):
        ranks = types.SimpleNamespace(cp_size=cp_size, cp_rank=rank)
        cut = microbatch_options(model, ParallelConfig(), ranks)
        assert cut["partition"] is not rows_of_rank
        assert torch.equal(cut["partition"](*arguments, rank), rows_of_rank(*arguments, rank))
        microbatch, ours = make_microbatch(make_batch(), **cut), {**cut, "partition": rows_of_rank}
        assert torch.equal(microbatch.tokens, make_microbatch(make_batch(), **ours).tokens)
