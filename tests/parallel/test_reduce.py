"""Reductions over real gloo ranks.

Not exercised: NCCL, tensors on a GPU. Results of the last stage are in test_schedule.py.
"""

import torch

from tests.parallel.training import Layout, make_config


def _reductions(layout):
    from vapo_megatron.parallel import groups
    from vapo_megatron.parallel.reduce import (
        any_rank,
        gather_objects,
        gather_objects_on,
        max_over_world,
        sum_over_data_parallel,
        sum_over_world,
    )

    here = groups.initialize(make_config(layout).parallel)
    value = torch.tensor([1.0, 10.0]) * (here.rank + 1)
    metrics = {"b": torch.tensor(here.rank + 1), "a": torch.tensor(0.5)}
    nan_on_one = torch.tensor([torch.nan if here.rank == 0 else 1.0, -5.0, torch.inf])
    results = (
        sum_over_data_parallel(value, here).tolist(),
        {k: v.item() for k, v in sum_over_data_parallel(metrics, here).items()},
        sum_over_world(value).tolist(),
        max_over_world(value).tolist(),
        max_over_world(nan_on_one),
        sum_over_data_parallel({}, here),
        [any_rank(here.rank in ranks) for ranks in ([], [0], [1], [0, 1])],
        gather_objects(f"rank {here.rank}"),
        gather_objects_on(1, "x" * here.rank),
    )
    assert value.tolist() == [here.rank + 1, 10 * (here.rank + 1)], "the input was changed"
    return results


def test_over_data_parallel_ranks(workers):
    results = workers.run(2, _reductions, Layout(dp=2))
    for total, metrics, world, largest, with_nan, empty, flags, objects, _ in results:
        assert total == world == [3.0, 30.0]  # (1, 10) + (2, 20)
        assert metrics == {"b": 3, "a": 1.0}
        assert largest == [2.0, 20.0]
        assert with_nan[0].isnan() and with_nan[1:].tolist() == [-5, torch.inf]
        assert empty == {}
        assert flags == [False, True, True, True]
        assert objects == ["rank 0", "rank 1"]
    assert [on[-1] for on in results] == [[], ["", "x"]]


def test_tensor_parallel_ranks_are_not_summed(workers):
    results = workers.run(2, _reductions, Layout(tp=2))
    for rank, (total, metrics, world, *_) in enumerate(results):
        assert total == [rank + 1.0, 10.0 * (rank + 1)]
        assert metrics == {"b": rank + 1, "a": 0.5}
        assert world == [3.0, 30.0]
