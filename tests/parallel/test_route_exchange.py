"""The sampler's routes reach the ranks that replay them: their sequences, their stage's layers.

Over real gloo processes. Does not exercise NCCL.
"""

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.parallel.test_exchange import NUM, WANTED, of_turns
from vapo_megatron.config import ParallelConfig
from vapo_megatron.data.rollout import UNKNOWN_ROUTE
from vapo_megatron.parallel import groups
from vapo_megatron.parallel.exchange import exchange, gather_summary
from vapo_megatron.parallel.route_exchange import exchange_routes

LAYERS, PER_TOKEN = 5, 2
STAGES = ([0, 3], [1, 2, 4])
"""Of two pipeline stages with interleaved chunks; they have different numbers of layers."""

WITHOUT = 7
"""A response that has none, as an episode that failed at once."""


def route(position, token, layer, k):
    return (7 * position + 5 * token + 3 * layer + k) % 251


def with_routes(position):
    """Response `position`, some with turns, and routes of all tokens but the last one."""
    item = of_turns(position)
    rows = len(item.rollout.sequence) - 1
    sizes = np.meshgrid(*map(range, (rows, LAYERS, PER_TOKEN)), indexing="ij")
    routes = route(position, *sizes).reshape(rows, -1).astype(np.uint8)
    routes = None if position == WITHOUT else routes
    return dataclasses.replace(item, rollout=dataclasses.replace(item.rollout, routes=routes))


def run(dp_size, pp_size):
    place = groups.initialize(
        ParallelConfig(world_size=dp_size * pp_size, pipeline_model_parallel_size=pp_size)
    )
    layers = STAGES[place.pp_rank] if pp_size > 1 else list(range(LAYERS))
    world = dist.get_world_size()
    local = [with_routes(p) for p in range(NUM) if (p * p + 1) % world == dist.get_rank()]
    summary = gather_summary(local, NUM)
    batch = exchange(local, summary, WANTED[dp_size], place)
    routes = exchange_routes(local, summary, WANTED[dp_size], layers, PER_TOKEN, place)
    return place.dp_rank, layers, batch.tokens, routes


@pytest.mark.parametrize(("dp_size", "pp_size"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_each_rank_has_its_own(workers, dp_size, pp_size):
    for dp_rank, layers, tokens, routes in workers.run(dp_size * pp_size, run, dp_size, pp_size):
        assert routes.dtype == torch.uint8
        assert routes.shape == (len(layers), len(tokens), PER_TOKEN)
        first = 0
        for position in WANTED[dp_size][dp_rank]:
            rows = len(of_turns(position).rollout.sequence)
            for own, layer in enumerate(layers):
                expected = [
                    [route(position, t, layer, k) for k in range(PER_TOKEN)]
                    for t in range(rows - 1)
                ]
                expected.append([UNKNOWN_ROUTE] * PER_TOKEN)
                if position == WITHOUT:
                    expected = [[UNKNOWN_ROUTE] * PER_TOKEN] * rows
                assert routes[own, first : first + rows].tolist() == expected
            first += rows
        assert first == len(tokens)
