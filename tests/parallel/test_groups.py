"""Where each rank stands in every kind of layout; groups can be made, dropped and made again.

Does not exercise NCCL.
"""

import pytest
import torch
import torch.distributed as dist

from vapo_megatron.config import ParallelConfig
from vapo_megatron.errors import ConfigError
from vapo_megatron.parallel import groups


def place(fields):
    """Return this rank's numbers, and the sum of ranks over each of its groups."""
    mine = groups.initialize(ParallelConfig(**fields))
    assert groups.current() is mine
    sums = []
    for group in (mine.tp_group, mine.pp_group, mine.dp_group):
        total = torch.tensor(mine.rank)
        dist.all_reduce(total, group=group)
        sums.append(total.item())
    return {
        "sizes": (mine.tp_size, mine.pp_size, mine.dp_size, mine.vpp_size),
        "ranks": (mine.tp_rank, mine.pp_rank, mine.dp_rank),
        "sums": tuple(sums),
        "last stage": mine.last_stage_rank,
        "ends": (mine.is_first_stage, mine.is_last_stage),
    }


def test_one_process(workers):
    (only,) = workers.run(1, place, {})
    assert only["sizes"] == (1, 1, 1, 1) and only["ranks"] == (0, 0, 0)
    assert only["ends"] == (True, True) and only["last stage"] == 0


def test_tensor_parallel_is_fastest(workers):
    """4 ranks, TP 2, DP 2: tensor-parallel pairs (0, 1), (2, 3), data-parallel (0, 2), (1, 3)."""
    fields = {"world_size": 4, "tensor_model_parallel_size": 2}
    results = workers.run(4, place, fields)
    assert [r["ranks"] for r in results] == [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1)]
    # tp: 0+1, 2+3; pp: alone; dp: 0+2, 1+3.
    assert [r["sums"] for r in results] == [
        (1, 0, 2), (1, 1, 4), (5, 2, 2), (5, 3, 4),
    ]  # fmt: skip


def test_the_pipeline_is_slowest(workers):
    """4 ranks, TP 2, PP 2: stages (0, 2) and (1, 3)."""
    fields = {
        "world_size": 4,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    }
    results = workers.run(4, place, fields)
    assert {r["sizes"] for r in results} == {(2, 2, 1, 2)}
    assert [r["ranks"] for r in results] == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)]
    assert [r["last stage"] for r in results] == [2, 3, 2, 3]
    assert [r["ends"] for r in results] == [(True, False)] * 2 + [(False, True)] * 2
    # tp: 0+1, 2+3; pp: 0+2, 1+3; dp: alone.
    assert [r["sums"] for r in results] == [
        (1, 2, 0), (1, 4, 1), (5, 2, 2), (5, 4, 3),
    ]  # fmt: skip


def test_replicas_of_a_pipeline(workers):
    """4 ranks, PP 2, DP 2: data-parallel pairs (0, 1) and (2, 3), pipelines (0, 2) and (1, 3)."""
    fields = {"world_size": 4, "pipeline_model_parallel_size": 2}
    results = workers.run(4, place, fields)
    assert [r["ranks"] for r in results] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert [r["last stage"] for r in results] == [2, 3, 2, 3]


def test_context_parallel_ranks_are_between_tensor_and_data_parallel_ones(workers):
    """8 ranks, TP 2, CP 2, DP 2: sequences are shared by (0, 2), (1, 3), (4, 6), (5, 7)."""
    fields = {"world_size": 8, "tensor_model_parallel_size": 2, "context_parallel_size": 2}
    results = workers.run(8, shared, fields)
    assert [r["cp"] for r in results] == [[0, 2], [1, 3]] * 2 + [[4, 6], [5, 7]] * 2
    assert [r["dp"] for r in results] == [[0, 4], [1, 5], [2, 6], [3, 7]] * 2
    assert [r["replicas"] for r in results] == [[0, 2, 4, 6], [1, 3, 5, 7]] * 4
    assert [r["replica_rank"] for r in results] == [0, 0, 1, 1, 2, 2, 3, 3]


def shared(fields):
    """Return the ranks of this rank's groups, which number themselves in this order."""
    mine = groups.initialize(ParallelConfig(**fields))
    assert (mine.cp_size, mine.dp_size, mine.replica_size) == (2, 2, 4)
    assert mine.replica_rank == mine.cp_rank + mine.cp_size * mine.dp_rank
    for name, axis in mine.axes.items():
        assert axis == tuple(getattr(mine, f"{name}_{field}") for field in axis._fields)
        assert (axis.size, axis.rank) == (axis.group.size(), axis.group.rank())
    of = {"cp": mine.cp_group, "dp": mine.dp_group, "replicas": mine.replica_group}
    return {
        "replica_rank": mine.replica_rank,
        **{name: dist.get_process_group_ranks(group) for name, group in of.items()},
    }


def again(first, second):
    groups.destroy()
    groups.initialize(ParallelConfig(**first))
    with pytest.raises(AssertionError, match="called twice"):
        groups.initialize(ParallelConfig(**first))
    groups.destroy()
    groups.destroy()
    with pytest.raises(AssertionError, match="has not been called"):
        groups.current()
    return place(second)["sizes"]


def test_groups_can_be_replaced(workers):
    first = {"world_size": 2, "tensor_model_parallel_size": 2}
    second = {"world_size": 2, "pipeline_model_parallel_size": 2}
    assert workers.run(2, again, first, second) == [(1, 2, 1, 1)] * 2


def wrong_size():
    with pytest.raises(ConfigError) as error:
        groups.initialize(ParallelConfig(world_size=3))
    groups.initialize(ParallelConfig(world_size=2))
    return str(error.value)


def test_the_world_size_must_be_the_configs(workers):
    for message in workers.run(2, wrong_size):
        assert message.startswith(
            "parallel.world_size=3 must be the number of processes started, 2"
        )


def draws(seed):
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    groups.initialize(ParallelConfig(world_size=2, tensor_model_parallel_size=2), seed=seed)
    with get_cuda_rng_tracker().fork():
        split = torch.randn(4)
    return split, torch.randn(4)


def test_seeds(workers):
    """Tensor-parallel ranks draw different numbers for split matrices, the same ones outside."""
    (split, whole), (other_split, other_whole) = workers.run(2, draws, 3)
    assert torch.equal(whole, other_whole) and not torch.equal(split, other_split)
    (repeated, _), _ = workers.run(2, draws, 3)
    (reseeded, _), _ = workers.run(2, draws, 4)
    assert torch.equal(split, repeated) and not torch.equal(split, reseeded)
