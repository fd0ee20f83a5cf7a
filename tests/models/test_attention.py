"""Packed attention against a float64 loop over sequences, heads and positions.

Does not exercise flash attention on a GPU: of it, only how torch's function is called is tested,
with a stand-in of its signature, and the function itself on tensors without values. Where kernels
for float32 lack groups on a GPU is from torch's source.
"""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen

from vapo_megatron.errors import ConfigError
from vapo_megatron.models import attention
from vapo_megatron.models.attention import (
    _plan,
    check_flash_attention,
    packed_attention,
    uses_flash_attention,
)
from vapo_megatron.models.context_attention import varlen_attention

LENGTHS = {
    "one": [7],
    "empty sequences": [0, 5, 0, 0, 3, 0],
    "short, batched": [3, 9, 4, 1, 9, 2],
    "short and long": [200, 3, 190, 5, 1],
}


def bounds(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def inputs(lengths, heads=4, groups=2, size=16):
    total = sum(lengths)
    return [torch.randn(total, n, size, requires_grad=True) for n in (heads, groups, groups)]


def reference(query, key, value, cu_seqlens, scale):
    """softmax(scale * q k^T) v over the positions up to one's own, in float64."""
    query, key, value = (x.double() for x in (query, key, value))
    repeats = query.size(1) // key.size(1)
    rows = []
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        for t in range(start, stop):
            heads = []
            for h in range(query.size(1)):
                k, v = key[start : t + 1, h // repeats], value[start : t + 1, h // repeats]
                heads.append((scale * k @ query[t, h]).softmax(0) @ v)
            rows.append(torch.stack(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_equals_the_float64_loop(lengths):
    tensors, cu_seqlens = inputs(lengths), bounds(lengths)
    ours = packed_attention(*tensors, cu_seqlens, 0.3)
    expected = reference(*tensors, cu_seqlens, 0.3)
    assert (ours - expected).abs().max() < 2e-6
    weights = torch.randn_like(ours)
    grads = torch.autograd.grad((ours * weights).sum(), tensors)
    expected_grads = torch.autograd.grad((expected * weights).sum(), tensors)
    for grad, expected_grad in zip(grads, expected_grads):
        assert (grad - expected_grad).abs().max() < 1e-5


def test_a_sequence_does_not_see_another():
    lengths = [5, 6, 4]
    tensors, cu_seqlens = inputs(lengths), bounds(lengths)
    before = packed_attention(*tensors, cu_seqlens, 0.25)
    changed = [x.detach().clone() for x in tensors]
    for x in changed:
        x[5:11] += 1
    after = packed_attention(*changed, cu_seqlens, 0.25)
    same = (before == after).flatten(1).all(1)
    assert same.tolist() == [True] * 5 + [False] * 6 + [True] * 4


def test_a_later_token_is_not_seen():
    tensors, cu_seqlens = inputs([5, 6]), bounds([5, 6])
    out = packed_attention(*tensors, cu_seqlens, 0.25)
    for x in torch.autograd.grad(out[7].sum(), tensors[1:]):
        seen = x.abs().flatten(1).sum(1) > 0
        assert seen.tolist() == [t in (5, 6, 7) for t in range(11)]


def test_an_overflow_stays_in_its_sequence():
    """A masked weight of 0 times NaN is NaN: padding must not hold another sequence's tokens."""
    tensors, cu_seqlens = inputs([4, 2, 3]), bounds([4, 2, 3])
    poisoned = [x.detach().clone() for x in tensors]
    poisoned[2][0] = math.nan
    out = packed_attention(*poisoned, cu_seqlens, 0.25)
    assert out[:4].isnan().all()
    assert torch.equal(out[4:], packed_attention(*tensors, cu_seqlens, 0.25)[4:])


def test_no_tokens():
    tensors = inputs([0, 0])
    assert packed_attention(*tensors, bounds([0, 0]), 0.25).shape == (0, 4, 16)


def test_bounds_must_cover_the_tokens():
    with pytest.raises(AssertionError, match="cu_seqlens end at 6, but there are 7 tokens"):
        packed_attention(*inputs([7]), bounds([6]), 0.25)


def test_short_sequences_share_a_call_and_long_ones_do_not():
    """Two heads of 32: a call costs 5,000 of one channel's units, so 78 of all 64 channels' units.

    20 beside 30: 10 + .04 * (900 - 400) = 30 -> joins; 400 beside 450: 50 + .04 * 42,500 -> alone.
    """
    assert _plan((0, 20, 50), 64, torch.device("cpu")).batches == [2]
    assert _plan((0, 400, 850), 64, torch.device("cpu")).batches == [1, 1]


def of(cu_seqlens):
    return dict(cu_q=cu_seqlens, cu_k=cu_seqlens, max_q=5, max_k=5, scale=0.3)


def test_varlen_attention_gets_the_same_problem(monkeypatch):
    def stand_in(
        q, k, v, cq, ck, mq, mk, *, scale=None, window_size=(-1, -1), enable_gqa=False
    ):  # fmt: skip
        assert window_size == (-1, 0) and enable_gqa and cq is ck and mq == mk == 5
        return packed_attention(q, k, v, cq, scale)

    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    tensors, cu_seqlens = inputs([5, 3]), bounds([5, 3])
    ours = varlen_attention(*tensors, **of(cu_seqlens))
    assert torch.equal(ours, packed_attention(*tensors, cu_seqlens, 0.3))


@pytest.mark.parametrize("heads", [4, 2])
def test_the_installed_release_takes_the_call_and_has_a_gradient(heads):
    """torch's own function, forward and backward, on tensors that have shapes alone."""
    with FakeTensorMode():
        tensors = [
            torch.randn(8, n, 16, dtype=torch.bfloat16, requires_grad=True) for n in (heads, 2, 2)
        ]
        cu_seqlens = torch.tensor([0, 5, 8], dtype=torch.int32)
        out = varlen_attention(*tensors, **of(cu_seqlens))
        assert out.shape == tensors[0].shape and out.dtype is torch.bfloat16
        grads = torch.autograd.grad(out.sum(), tensors)
        assert [g.shape for g in grads] == [x.shape for x in tensors]


def test_float32_and_a_cpu_take_plain_attention(monkeypatch):
    assert not uses_flash_attention(torch.bfloat16)
    monkeypatch.setattr(attention.backend, "device", lambda: torch.device("cuda", 0))
    assert uses_flash_attention(torch.bfloat16) and not uses_flash_attention(torch.float32)


@pytest.mark.parametrize("head_dim", [60, 264])
def test_widths_that_flash_attention_lacks(head_dim):
    message = f"head_dim={head_dim} must be a multiple of 8 and at most 256.*model.dtype=float32"
    with pytest.raises(ConfigError, match=message):
        check_flash_attention(head_dim)
    check_flash_attention(head_dim // 8 * 8 if head_dim < 256 else 256)


def test_the_bounds_are_read_once_for_all_layers(monkeypatch):
    reads = []
    plain = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: reads.append(1) or plain(x))
    tensors, cu_seqlens = inputs([5, 3]), bounds([5, 3])
    for _ in range(3):
        packed_attention(*tensors, cu_seqlens, 0.3)
    assert len(reads) == 1
    packed_attention(*tensors, bounds([5, 3]), 0.3)
    assert len(reads) == 2
