"""The cut over context-parallel ranks, against Transformer Engine's, token by token; its balance.

Does not exercise Transformer Engine itself: tests/gpu/test_context_parallel.py does, on a GPU.
"""

import numpy as np
import pytest
import torch

from tests.cut import batch_of
from tests.data.test_batch import make_batch
from vapo_megatron.data.batch import bounds
from vapo_megatron.data.context_parallel import places_of_tokens, ranks_order, rows_of_rank
from vapo_megatron.data.microbatch import make_microbatch

LENGTHS = ([8], [16, 8, 0, 40, 8], [8] * 7, [0, 24])


def transformer_engine(lengths, cp_size, cp_rank):
    """The loop of its kernel thd_partition_indices_kernel, token by token (2.x, thd_utils.cuh)."""
    bounds = np.cumsum([0, *lengths]) // cp_size
    rows = []
    for token in range(bounds[-1]):
        sequence = int(np.searchsorted(bounds, token, side="right")) - 1
        length = bounds[sequence + 1] - bounds[sequence]
        index = token - bounds[sequence]
        offset = cp_rank if index < length // 2 else (cp_size - 1) * 2 - cp_rank
        rows.append(int(index + bounds[sequence] * cp_size + length // 2 * offset))
    return rows


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_the_cut_is_transformer_engines(lengths, cp_size):
    cu_seqlens = bounds(torch.tensor(lengths))
    size = sum(lengths)
    rows = [rows_of_rank(cu_seqlens, size, cp_size, rank) for rank in range(cp_size)]
    for rank, own in enumerate(rows):
        assert own.tolist() == transformer_engine(lengths, cp_size, rank)
    order = ranks_order(cu_seqlens, size, cp_size)
    assert torch.equal(torch.stack(order.chunk(cp_size)), torch.stack(rows))
    places = places_of_tokens(order)
    assert torch.cat(rows)[places].tolist() == list(range(size))


def test_two_ranks_share_a_sequence_by_hand():
    """8 tokens: chunks of 2, rank 0 holds the first and the last. Then 4 tokens: chunks of 1."""
    cu_seqlens = torch.tensor([0, 8, 12]).int()
    assert rows_of_rank(cu_seqlens, 12, 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert rows_of_rank(cu_seqlens, 12, 2, 1).tolist() == [2, 3, 4, 5, 9, 10]


@pytest.mark.parametrize("cp_size", [2, 4])
@pytest.mark.parametrize("multiple_of", [1, 2, 3, 16])
def test_every_response_token_is_predicted_once(cp_size, multiple_of):
    batch = make_batch()
    whole = make_microbatch(batch)
    parts = [
        make_microbatch(batch, multiple_of=multiple_of, cp_size=cp_size, cp_rank=rank)
        for rank in range(cp_size)
    ]
    own_size = parts[0].tokens.numel()
    assert own_size % multiple_of == 0 and own_size * cp_size == parts[0].model_cu_seqlens[-1]
    assert all(length % (2 * cp_size) == 0 for length in parts[0].model_cu_seqlens.diff())
    # What each rank would compute of a token: where it stands, what it is, what it must predict.
    rows = torch.full((cp_size * own_size, 3), -1)
    for rank, part in enumerate(parts):
        own = rows[rank * own_size : (rank + 1) * own_size]
        own[:, 0], own[:, 1] = part.position_ids, part.tokens
        own[part.predicting, 2] = part.targets
        assert part.batch is batch
    predicted = whole.predicting
    expected = torch.stack(
        [whole.position_ids[predicted], whole.tokens[predicted], whole.tokens[predicted + 1]], 1
    )
    for part in parts:
        assert torch.equal(rows[part.outputs], expected)
        ends = batch.sequence_cu_seqlens[1:].long() - 1
        assert torch.equal(rows[part.ends, 1], batch.tokens[ends])


def test_ranks_share_the_work_within_three_percent():
    """Responses of 1k to 131k tokens, log-normal: tokens, causal pairs, and predicted tokens."""
    generator = np.random.default_rng(0)
    responses = np.clip(np.exp(generator.normal(10, 1.4, 32)), 1_000, 131_072).astype(int)
    assert responses.min() < 4_000 and responses.max() == 131_072
    prompts = generator.integers(50, 500, 32)
    for cp_size in (2, 4, 8):
        for prompt, response in zip(prompts, responses):
            batch = _one(int(prompt), int(response))
            work = []
            for rank in range(cp_size):
                part = make_microbatch(batch, cp_size=cp_size, cp_rank=rank)
                work.append([part.tokens.numel(), (part.position_ids + 1).sum()])
            assert np.ptp(np.array(work), axis=0).tolist() == [0, 0]
        batch = _several(prompts.tolist(), responses.tolist())
        parts = [
            make_microbatch(batch, cp_size=cp_size, cp_rank=rank).predicting.numel()
            for rank in range(cp_size)
        ]
        assert max(parts) <= 1.03 * np.mean(parts), parts


def _one(prompt, response):
    return _several([prompt], [response])


def _several(prompts, responses):
    prompts, responses = torch.tensor(prompts), torch.tensor(responses)
    tokens = torch.zeros(int((prompts + responses).sum())).long()
    return batch_of(tokens, prompts + responses, responses)
