"""Packed attention against a float64 loop over sequences, heads and positions.

Does not exercise flash attention on a GPU: of it, only how torch's function is called is tested,
with stand-ins that have the signatures of its releases.
"""

import math

import pytest
import torch
from torch.nn.attention import varlen

from vapo_megatron.models.attention import _plan, _varlen_attention, packed_attention

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


RELEASES = {
    "is_causal": lambda q, k, v, cq, ck, mq, mk, is_causal=False: (q, k, v, None, is_causal),
    "with scale": lambda q, k, v, cq, ck, mq, mk, is_causal=False, scale=None: (
        q, k, v, scale, is_causal,
    ),
    "windows": lambda q, k, v, cq, ck, mq, mk, *, scale=None, window_size=(-1, -1): (
        q, k, v, scale, window_size == (-1, 0),
    ),
    "windows and groups": (
        lambda q, k, v, cq, ck, mq, mk, *, scale=None, window_size=(-1, -1), enable_gqa=False: (
            q, k, v, scale, window_size == (-1, 0) and enable_gqa,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_of_varlen_attention_gets_the_same_problem(release, monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", RELEASES[release])
    tensors, cu_seqlens = inputs([5, 3]), bounds([5, 3])
    query, key, value, scale, is_causal = _varlen_attention(*tensors, cu_seqlens, 5, 0.3)
    assert is_causal
    assert key.size(1) == (2 if release.endswith("groups") else 4)
    scale = 16**-0.5 if scale is None else scale
    ours = packed_attention(query, key, value, cu_seqlens, scale)
    assert torch.allclose(ours, packed_attention(*tensors, cu_seqlens, 0.3), atol=1e-6)
