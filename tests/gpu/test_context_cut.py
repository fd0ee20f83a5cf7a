"""Our cut over context-parallel ranks is the one that Transformer Engine's attention expects."""

import pytest
import torch

from vapo_megatron.data.batch import bounds
from vapo_megatron.data.context_cut import rows_of_rank


@pytest.mark.gpu
@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_the_cut_is_transformer_engines(cp_size):
    extension = pytest.importorskip("transformer_engine_torch")
    lengths = torch.tensor([64, 16, 4096, 16, 131_072])
    cu_seqlens, size = bounds(lengths).cuda(), int(lengths.sum())
    for rank in range(cp_size):
        theirs = extension.thd_get_partitioned_indices(cu_seqlens, size, cp_size, rank)
        assert torch.equal(rows_of_rank(cu_seqlens, size, cp_size, rank), theirs.long())
