"""Attention over sequences that ranks share, against the float64 loop of test_attention.py.

Does not exercise flash attention on a GPU: of it, only how torch's function is called is tested,
with a stand-in that computes what its documentation says.
"""

from unittest.mock import patch

import pytest
import torch
from torch.nn.attention import varlen

from tests.models.test_attention import bounds, inputs, reference

LENGTHS = {
    "one": [24],
    "short": [8, 16, 8, 8],
    "empty sequences": [0, 16, 0, 8],
    "short and long": [8, 200, 8, 8, 96],
}


def attended(lengths, max_pairs, is_varlen):
    """Return (this rank's rows, its output, its gradients, the largest block)."""
    from vapo_megatron.config import ParallelConfig
    from vapo_megatron.data.context_parallel import rows_of_rank
    from vapo_megatron.models import context_attention as module
    from vapo_megatron.parallel import groups

    world_size = torch.distributed.get_world_size()
    group = groups.initialize(
        ParallelConfig(world_size=world_size, context_parallel_size=world_size)
    ).cp_group
    whole, cu_seqlens, weights = problem(lengths)
    rows = rows_of_rank(cu_seqlens, sum(lengths), group.size(), group.rank())
    own = [x.detach()[rows].requires_grad_() for x in whole]
    shards = module.ContextShards(group, 0.3, varlen=is_varlen)
    with (
        patch.object(module, "MAX_PAIRS", max_pairs),
        patch.object(varlen, "varlen_attn", bottom_right),
    ):
        cut = shards.of(own[0], cu_seqlens, max(lengths))
        assert shards.of(own[0], cu_seqlens, max(lengths)) is cut, "once for all layers"
        output = module.context_attention(*own, cut, group)
        gradients = torch.autograd.grad((output * weights[rows]).sum(), own)
    assert torch.equal(cut.rows, rows)
    count = 0
    if not is_varlen:
        blocks = [(p.queries.stop - p.queries.start, p.keys.stop - p.keys.start) for p in cut.parts]
        count = max(queries * keys for queries, keys in blocks)
    return rows, output.detach(), [g.detach() for g in gradients], count


def problem(lengths):
    torch.manual_seed(3)
    whole = inputs(lengths)
    return whole, bounds(lengths), torch.randn_like(whole[0])


def bottom_right(
    q, k, v, cq, ck, mq, mk, *, scale=None, window_size=(-1, -1), enable_gqa=False
):  # fmt: skip
    """varlen_attn: with a causal window the last query of a sequence sees its last key."""
    assert window_size == (-1, 0) and enable_gqa
    assert mq == cq.diff().max() and mk == ck.diff().max()
    rows, group = [], q.size(1) // k.size(1)
    for a, b, c, d in zip(cq[:-1].tolist(), cq[1:].tolist(), ck[:-1].tolist(), ck[1:].tolist()):
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        keys, values = (x[c:d].repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[a:b], keys) * scale
        scores = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        rows.append(torch.einsum("hqk,khd->qhd", scores, values))
    return torch.cat(rows)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(
    "cp_size,max_pairs,is_varlen",
    [(1, 1 << 22, False), (2, 1 << 22, False), (4, 1 << 22, False), (2, 500, False), (4, 0, True)],
    ids=["CP1", "CP2", "CP4", "CP2, small blocks", "CP4, varlen"],
)
def test_equals_the_float64_loop(workers, lengths, cp_size, max_pairs, is_varlen):
    ranks = workers.run(cp_size, attended, lengths, max_pairs, is_varlen)
    whole, cu_seqlens, weights = problem(lengths)
    expected = reference(*whole, cu_seqlens, 0.3)
    gradients = torch.autograd.grad((expected * weights).sum(), whole)
    for rows, output, own, largest in ranks:
        assert (output - expected[rows]).abs().max() < 2e-6
        for found, gradient in zip(own, gradients):
            assert (found - gradient[rows]).abs().max() < 1e-5
        assert max_pairs != 500 or largest <= 500, "a block exceeds its bound"


def test_short_sequences_share_a_block(workers):
    """Of 4 * 16 channels: two more calls cost as much as 3,906 masked pairs."""
    for rank in workers.run(2, parts, [8] * 12 + [4000] + [8] * 3):
        assert rank[0] == (0, 48) and len(rank) < 12


def parts(lengths):
    from vapo_megatron.data.context_parallel import rows_of_rank
    from vapo_megatron.models.context_attention import _block_parts

    rank, cu_seqlens = torch.distributed.get_rank(), bounds(lengths)
    rows = rows_of_rank(cu_seqlens, sum(lengths), 2, rank)
    found = _block_parts(cu_seqlens, rows, 2, rank, 64, 0.3)
    return [(p.queries.start, p.queries.stop) for p in found]
