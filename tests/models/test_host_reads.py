"""Passes as on a GPU without Transformer Engine, on meta tensors, which have shapes alone.

Reading a value from such a tensor (item, tolist, a copy to the host, a branch on it) raises: what
passes here never synchronizes with a GPU. torch's own varlen
attention takes part, with its gradient. Not exercised: the kernels, what NCCL waits for, and
Transformer Engine's layers.
"""

from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tests.models.built import Layout, build, call, write_hf
from vapo_megatron.models.attention import packed_attention
from vapo_megatron.models.build import gather_hidden, output_weight

LENGTHS = [9, 30]
TOKENS, LAYERS, HIDDEN = 39, 4, 64


def saved_bytes(hf_path, recompute):
    """Bytes that the forward pass keeps for the backward pass, each storage once; no parameters."""
    (chunk,) = build(hf_path, Layout(recompute=recompute), dtype="bfloat16").chunks
    own = {p.untyped_storage()._cdata for p in chunk.parameters()}
    kept = {}
    with FakeTensorMode(allow_non_fake_inputs=True):

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = (storage.nbytes(), tensor)  # alive, or its place is reused
            return tensor

        for layer in chunk.decoder.layers:
            layer.self_attention.core_attention.flash = True
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = call(chunk, [torch.arange(n) for n in LENGTHS])
        hidden = gather_hidden(output, sequence_parallel=False)
        (hidden @ output_weight(chunk).t()).logsumexp(-1).sum().backward()
        assert all(p.grad is not None for p in chunk.parameters())
    return Counter(size for size, _ in kept.values())


def saved_by_setting(hf_path):
    return [saved_bytes(hf_path, recompute) for recompute in ("none", "selective", "full")]


def test_no_layer_reads_from_the_device_and_recompute_keeps_less(tmp_path, workers):
    """Every setting of parallel.recompute passes without a read; what each keeps, in bytes.

    Selective leaves out, in each layer, the rotated key 39 * 2 * 16 * 2 = 2496, the scores'
    logarithmic sums 39 * 4 * 4 = 624 and flash attention's random state 16, and for all layers
    cosine and sine 2 * 39 * 8 * 2 = 1248 and the bounds 12; it keeps the query before instead of
    after the rotation, and a number of 4 bytes: 4 * (2496 + 624 + 16 - 4) + 1248 + 12 = 13788. So
    little, because flash attention keeps no scores. Full keeps each layer's input, 39 * 64 * 2.
    """
    ((none, selective, full),) = workers.run(1, saved_by_setting, write_hf(tmp_path))
    total, of_selective, of_full = (
        sum(n * k for n, k in c.items()) for c in (none, selective, full)
    )
    assert total - of_selective == 13788
    assert full[TOKENS * HIDDEN * 2] == LAYERS and of_full < total / 10


def test_a_read_would_raise():
    with FakeTensorMode():
        tensors = [torch.randn(8, 2, 16) for _ in range(3)]
        with pytest.raises(DataDependentOutputException):
            packed_attention(*tensors, torch.tensor([0, 5, 8]).int(), 0.25)
