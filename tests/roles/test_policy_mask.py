"""Corrections for the sampler over real data-parallel ranks: metrics and counts, by hand.

The weights themselves are in tests/algorithm/test_sampler_correction.py, the losses with them in
tests/roles/test_roles.py and, in every layout, in tests/distributed.
"""

import math

import pytest

from tests.cut import mini_batches
from tests.run.test_step_metrics import SHARES, batch_of

# k = exp(DIFFERENCES) of tests/run/test_step_metrics.py: of six tokens the third, in the second
# response, and the sixth, which is the third response, are more than 1.015.
RATIO = (1 + math.exp(0.01) + math.exp(0.02) + 1 + 1 + math.exp(0.04)) / 6
FIELDS = {"sampler_icepop_low": 0.99, "sampler_icepop_high": 1.015, "sampler_tis_cap": 1.015}


def on_rank(correction):
    import torch.distributed as dist

    from vapo_megatron.config import AlgorithmConfig, ParallelConfig
    from vapo_megatron.parallel import groups
    from vapo_megatron.roles.advantages import with_policy_mask

    place = groups.initialize(ParallelConfig(world_size=dist.get_world_size()))
    share = SHARES[place.world_size][place.rank]
    algorithm = AlgorithmConfig(sampler_correction=correction, **FIELDS)
    batch, metrics = with_policy_mask(batch_of(share), algorithm, place)
    plan = [[[i] for i in range(len(share))]]
    (mini_batch,) = mini_batches(batch, plan, place)
    counts = [int(count) for count in mini_batch.counts.values()]
    weights = None if batch.policy_mask is None else batch.policy_mask.tolist()
    return weights, metrics, counts


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("correction,counts", [("tis", [6, 3, 6, 3]), ("icepop", [6, 3, 4, 2])])
def test_all_ranks_count_what_is_left(workers, world_size, correction, counts):
    results = workers.run(world_size, on_rank, correction)
    for _, metrics, found in results:
        assert metrics["rollout/sampler_ratio_mean"] == pytest.approx(RATIO, rel=1e-6)
        assert metrics["rollout/sampler_corrected_fraction"] == pytest.approx(2 / 6)
        assert found == counts
    by_response = {0: [1, math.exp(0.01)], 1: [1.015, 1, 1], 2: [1.015]}
    if correction == "icepop":
        by_response |= {1: [0, 1, 1], 2: [0]}
    for share, (weights, _, _) in zip(SHARES[world_size], results, strict=True):
        assert weights == pytest.approx([w for r in share for w in by_response[r]], rel=1e-6)


def test_without_a_correction_nothing_is_made(workers):
    ((weights, metrics, counts),) = workers.run(1, on_rank, "none")
    assert weights is None and metrics == {} and counts == [6, 3, 6, 3]
