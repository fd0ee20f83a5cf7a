"""Every rank sees the HF file's own bits, in few messages.

Does not exercise: NCCL, models larger than the default bucket.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.weights.loaded import FEW_HEADS, Layout, load, two_updates, widen
from tests.weights.tiny_hf import write_tiny_hf
from vapo_megatron.parallel import groups
from vapo_megatron.weights import gather
from vapo_megatron.weights.gather import gather_hf_tensors

LAYOUTS = [
    Layout(1, 1), Layout(2, 1), Layout(1, 2), Layout(2, 2), Layout(1, 2, 2), Layout(2, 2, 2),
    Layout(cp=2), Layout(pp=2, cp=2),
]  # fmt: skip


def _digest(named_tensors):
    """name -> (shape, dtype, bytes), for the way to the test's process."""
    return {
        n: (tuple(t.shape), t.dtype, t.contiguous().view(torch.uint8).numpy().tobytes())
        for n, t in named_tensors
    }


def _gathered(path, layout, bucket_sizes, dtype="float32"):
    loaded = load(path, layout, dtype=dtype)
    parts = (loaded.chunks, loaded.shape, loaded.ranks)
    return [_digest(gather_hf_tensors(*parts, bucket_bytes=b)) for b in bucket_sizes]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_sees_the_files_bits(workers, tmp_path, layout, tied):
    path = write_tiny_hf(tmp_path, tied=tied)
    expected = _digest(load_file(path / "model.safetensors").items())
    # Buckets of 1 byte hold one parameter each; 60,000 bytes divide the stages unevenly.
    sizes = (1, 60_000, gather.BUCKET_BYTES)
    for rank in workers.run(layout.world_size, _gathered, str(path), layout, sizes):
        for got in rank:
            assert got.keys() == expected.keys()
            assert [n for n in got if got[n] != expected[n]] == []


@pytest.mark.parametrize(("layout", "kv_heads"), FEW_HEADS, ids=str)
def test_fewer_key_value_heads_than_ranks(workers, tmp_path, layout, kv_heads):
    path = write_tiny_hf(tmp_path, kv_heads=kv_heads, dtype=torch.bfloat16)
    expected = _digest(load_file(path / "model.safetensors").items())
    arguments = (str(path), layout, (60_000,), "bfloat16")
    for (got,) in workers.run(layout.world_size, _gathered, *arguments):
        assert got == expected


def test_a_critic_of_mixed_types_is_gathered(workers, tmp_path):
    path = write_tiny_hf(tmp_path, dtype=torch.bfloat16)
    expected = _digest(load_file(path / "model.safetensors").items())
    del expected["lm_head.weight"]
    results = workers.run(4, _gathered_mixed_critic, str(path), Layout(2, 2))
    heads = [got.pop("score.weight") for got in results]
    assert heads[0][:2] == ((1, 64), torch.float32) and any(heads[0][2])
    assert heads == heads[:1] * 4
    assert all(got == expected for got in results)


def _gathered_mixed_critic(path, layout):
    loaded = load(path, layout, "critic", dtype="bfloat16", value_head_init_std=0.1)
    widen(loaded.chunks, "output_layer.weight")
    return _digest(gather_hf_tensors(loaded.chunks, loaded.shape, loaded.ranks, role="critic"))


class _CountingDist:
    """torch.distributed, counting the collectives that are called through it."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        function = getattr(dist, name)

        def call(*args, **kwargs):
            self.calls.append(name)
            return function(*args, **kwargs)

        return call


def _collectives(path, layout):
    loaded = load(path, layout)
    gather.dist = counting = _CountingDist()
    try:
        for _ in gather_hf_tensors(loaded.chunks, loaded.shape, loaded.ranks):
            pass
    finally:
        gather.dist = dist
    return counting.calls


def test_a_small_model_takes_one_collective_per_axis_and_stage(workers, tmp_path):
    path = str(write_tiny_hf(tmp_path))
    for calls in workers.run(2, _collectives, path, Layout(2, 1)):
        assert calls == ["all_gather_into_tensor"]
    for calls in workers.run(4, _collectives, path, Layout(2, 2)):
        assert calls == ["all_gather_object", *["broadcast", "all_gather_into_tensor"] * 2]


def _gathered_alone(path):
    loaded = load(path, Layout())
    groups.destroy()
    dist.destroy_process_group()
    return _digest(gather_hf_tensors(loaded.chunks, loaded.shape, loaded.ranks))


def test_one_rank_needs_no_process_group(workers, tmp_path):
    path = write_tiny_hf(tmp_path)
    (got,) = workers.run(1, _gathered_alone, str(path))
    assert got == _digest(load_file(path / "model.safetensors").items())


def test_buckets_are_bounded():
    # float32 sizes of 40, 40, 400 and 8 bytes with a limit of 80; then a change of type.
    sizes = [(10, torch.float32), (10, torch.float32), (100, torch.float32), (2, torch.float32),
             (2, torch.bfloat16)]  # fmt: skip
    shards = [gather._Shard((str(i),), "replicated", (n,), d) for i, (n, d) in enumerate(sizes)]
    assert list(gather._buckets(shards, 80)) == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert list(gather._buckets([], 80)) == []


def _updates(path, overlap, wrapped):
    """Two optimizer updates on 2 data-parallel ranks, each followed by a gathering."""
    loaded = load(path, Layout(), overlap=overlap)
    synced = []
    for chunks in two_updates(loaded):
        source = chunks if wrapped else loaded.chunks
        synced.append(_digest(gather_hf_tensors(source, loaded.shape, loaded.ranks)))
    return synced


def test_parameters_still_on_their_way_are_waited_for(workers, tmp_path):
    path = str(write_tiny_hf(tmp_path, num_layers=1, tied=True))
    expected = workers.run(2, _updates, path, False, True)
    assert expected[0] == expected[1] and expected[0][0] != expected[0][1]
    assert workers.run(2, _updates, path, True, True) == expected
    # Unwrapped chunks cannot wait for the gather: each rank sees only its own updates.
    stale = workers.run(2, _updates, path, True, False)
    assert stale[0] != stale[1]
