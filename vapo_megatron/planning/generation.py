"""Predicted seconds of a step's generation: continuous batching, simulated event by event.

A decode step of n sequences on one rank of a replica of t ranks takes

    max(weights / bandwidth, n * 2 * parameters / t / FLOP/s) + KV cache of all n / bandwidth
    + two all-reduces of n H elements in each layer + the host's time per step

so between two events (a sequence ends, the next starts) the time is quadratic in the number of
steps. The batch is limited by rollout.max_num_sequences and by the KV cache, which holds as many
sequences as fit at the average length of a running one. The last sequences leave the batch partly
empty: the tail.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq

import numpy as np

from vapo_megatron.config import VapoConfig
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.planning import flops
from vapo_megatron.planning.cluster import Cluster
from vapo_megatron.planning.memory import kv_cache_bytes_per_token
from vapo_megatron.planning.model_bytes import DTYPE_BYTES, sampler_weight_bytes
from vapo_megatron.planning.workload import Workload, response_lengths
from vapo_megatron.rollout.requests import assign


@dataclasses.dataclass(frozen=True)
class Generation:
    """A step's generation on the slowest replica."""

    seconds: float
    prefill_seconds: float
    batch: int
    """Most sequences that a replica decodes at once."""
    tail: float
    """Share of the decode seconds with fewer than half of `batch` running."""


@dataclasses.dataclass(frozen=True)
class _Rank:
    """Cost of a decode step on one rank of a replica."""

    weight_seconds: float
    """Reading the weights, once for the whole batch."""
    token_seconds: float
    """Matrix multiplications, per sequence."""
    cached_seconds: float
    """Reading keys and values, per cached token."""
    sequence_seconds: float
    """Tensor-parallel communication, per sequence."""
    step_seconds: float
    """Host and latencies."""

    def seconds(self, sequences: int, steps: int, cached: int) -> float:
        """Time of `steps` steps that start with `cached` tokens in the cache."""
        each = max(self.weight_seconds, sequences * self.token_seconds)
        each += sequences * self.sequence_seconds + self.step_seconds
        reads = steps * cached + sequences * steps * (steps + 1) / 2
        return steps * each + reads * self.cached_seconds


def generation(
    shape: ModelShape,
    config: VapoConfig,
    cluster: Cluster,
    workload: Workload,
    kv_cache_tokens: int,
) -> Generation:
    """Predict a step's generation.

    Args:
        shape: the model.
        config: model and rollout are used; rollout.num_processes sample if there are any.
        cluster: what the job runs on.
        workload: of a step.
        kv_cache_tokens: capacity of a replica's cache.
    """
    lengths = response_lengths(workload).astype(float)
    # Longer sequences run longer and weigh more in a running sequence's mean length.
    running = workload.prompt_tokens + float((lengths * lengths).sum() / (2 * lengths.sum()))
    batch = min(config.rollout.max_num_sequences, max(1, int(kv_cache_tokens // running)))
    tp_size = config.rollout.tensor_model_parallel_size
    # One prompt's; the group's other requests hit the prefix cache.
    products = flops.forward_flops(shape, [workload.prompt_tokens], role="actor", num_outputs=1)
    prompt_seconds = products / tp_size / cluster.rate("matmul")
    rank = _rank(shape, config, cluster)
    num_gpus = config.rollout.num_processes or cluster.num_gpus
    return _replay(rank, prompt_seconds, num_gpus // tp_size, workload, batch)


def _rank(shape: ModelShape, config: VapoConfig, cluster: Cluster) -> _Rank:
    tp_size = config.rollout.tensor_model_parallel_size
    size = DTYPE_BYTES[config.rollout.dtype or config.model.dtype]
    products = flops.forward_flops(shape, [1], role="actor") / tp_size
    # Of an embedding separate from the output projection only the sampled tokens' rows are read.
    read = sampler_weight_bytes(dataclasses.replace(shape, tied=True), config)
    reduced = 2 * cluster.all_gather_seconds(shape.hidden_size * size, tp_size)
    return _Rank(
        weight_seconds=read / cluster.rate("decode"),
        token_seconds=products / cluster.rate("matmul"),
        cached_seconds=kv_cache_bytes_per_token(shape, config) / cluster.rate("decode"),
        sequence_seconds=2 * shape.num_layers * reduced,
        step_seconds=cluster.decode_step_seconds
        + (2 * shape.num_layers * cluster.collective_seconds if tp_size > 1 else 0),
    )


@functools.lru_cache(maxsize=1024)
def _replay(
    rank: _Rank, prompt_seconds: float, num_replicas: int, workload: Workload, batch: int
) -> Generation:
    lengths = response_lengths(workload)
    prompts = -(-workload.num_responses // workload.group_size)
    prefill = -(-prompts // num_replicas) * prompt_seconds
    found = [
        _decode(rank, lengths[share.start : share.stop], workload.prompt_tokens, batch)
        for share in assign(workload.num_responses, num_replicas)
        if share
    ]
    seconds, tail = max(found)
    return Generation(seconds + prefill, prefill, batch, tail / seconds)


def _decode(
    rank: _Rank, lengths: np.ndarray, prompt_tokens: int, batch: int
) -> tuple[float, float]:
    """Return one replica's decode seconds, and those with the batch less than half full."""
    waiting = [int(n) for n in reversed(lengths)]
    running: list[tuple[int, int]] = []
    now = cached = 0
    seconds = tail = 0.0
    while waiting or running:
        while waiting and len(running) < batch:
            length = waiting.pop()
            heapq.heappush(running, (now + length, length))
            cached += prompt_tokens
        steps = running[0][0] - now
        spent = rank.seconds(len(running), steps, cached)
        seconds += spent
        tail += spent if 2 * len(running) < batch else 0.0
        now += steps
        cached += steps * len(running)
        while running and running[0][0] == now:
            cached -= prompt_tokens + heapq.heappop(running)[1]
    return seconds, tail
