"""Predicted seconds of a step's generation, from those of each replica's decoding (decode.py).

The batch is limited by rollout.max_num_sequences and by the KV cache, which holds as many
sequences as fit at the average length of a running one. The last sequences leave the batch partly
empty: the tail.

An episode's turns are one decoding: half of its observations count as cached from the start, as
many as are on average. Each observation is a prefill of its own, with all before it cached.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from vapo_megatron.config import VapoConfig
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.planning import flops
from vapo_megatron.planning.carry_over import Sizes, Step, carried_steps
from vapo_megatron.planning.cluster import Cluster
from vapo_megatron.planning.decode import Rank, decode
from vapo_megatron.planning.memory import kv_cache_bytes_per_token
from vapo_megatron.planning.model_bytes import DTYPE_BYTES, engine_weight_bytes
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
    running = there_tokens(workload) + float((lengths * lengths).sum() / (2 * lengths.sum()))
    batch = min(config.rollout.max_num_sequences, max(1, int(kv_cache_tokens // running)))
    tp_size = config.rollout.tensor_model_parallel_size
    # One prompt's; the group's other requests hit the prefix cache.
    products = flops.forward_flops(shape, [workload.prompt_tokens], role="actor", num_outputs=1)
    prompt_seconds = products / tp_size / cluster.rate("matmul")
    rank = _rank(shape, config, cluster)
    num_gpus = config.rollout.num_processes or cluster.num_gpus
    if config.rollout.carry_over_groups:
        return _carried(shape, config, cluster, workload, rank, batch, num_gpus // tp_size)
    observation_seconds = observation_flops(shape, workload) / tp_size / cluster.rate("matmul")
    return _replay(
        rank, prompt_seconds, observation_seconds, num_gpus // tp_size, workload, batch
    )  # fmt: skip


def there_tokens(workload: Workload) -> int:
    """Return the cached tokens of a sequence that it has not sampled, on average."""
    return workload.prompt_tokens + workload.observation_tokens // 2


def observation_flops(shape: ModelShape, workload: Workload) -> float:
    """Count the FLOPs of prefilling an episode's observations, at half of its length each."""
    if workload.turns == 1:
        return 0.0
    each = round(workload.observation_tokens / (workload.turns - 1))
    before = there_tokens(workload) + round(workload.mean_response_tokens / 2)
    # What is cached is attended to, and not computed.
    counts = [
        flops.forward_flops(shape, [length], role="actor", num_outputs=1)
        for length in (before, before + each)
    ]
    output = flops.output_forward_flops(shape, 1, role="actor")
    return (workload.turns - 1) * (counts[1] - counts[0] + output)


def _carried(
    shape: ModelShape,
    config: VapoConfig,
    cluster: Cluster,
    workload: Workload,
    rank: Rank,
    batch: int,
    replicas: int,
) -> Generation:
    """With carry-over: the mean over steps, each as long as its slowest replica."""
    rollout, tp_size = config.rollout, config.rollout.tensor_model_parallel_size
    groups = workload.num_responses // workload.group_size
    sizes = Sizes(
        groups=-(-groups // replicas), extra=-(-rollout.carry_over_groups // replicas),
        group_size=workload.group_size, max_lag=rollout.max_lag,
        prompt_tokens=workload.prompt_tokens, batch=batch,
    )  # fmt: skip
    found = _carried_steps(shape, tp_size * cluster.rate("matmul"), rank, workload, replicas, sizes)
    seconds, prefilled, tail = (sum(of_steps) / len(found) for of_steps in zip(*found, strict=True))
    return Generation(seconds + prefilled, prefilled, batch, tail / seconds)


def _rank(shape: ModelShape, config: VapoConfig, cluster: Cluster) -> Rank:
    tp_size = config.rollout.tensor_model_parallel_size
    size = DTYPE_BYTES[config.rollout.dtype or config.model.dtype]
    products = flops.forward_flops(shape, [1], role="actor") / tp_size
    # Of an embedding separate from the output projection only the sampled tokens' rows are read.
    read = engine_weight_bytes(dataclasses.replace(shape, tied=True), config)
    reduced = 2 * cluster.all_gather_seconds(shape.hidden_size * size, tp_size)
    return Rank(
        weight_seconds=read / cluster.rate("decode"),
        token_seconds=products / cluster.rate("matmul"),
        cached_seconds=kv_cache_bytes_per_token(shape, config) / cluster.rate("decode"),
        sequence_seconds=2 * shape.num_layers * reduced,
        step_seconds=cluster.decode_step_seconds
        + (2 * shape.num_layers * cluster.collective_seconds if tp_size > 1 else 0),
    )


@functools.lru_cache(maxsize=1024)
def _carried_steps(
    shape: ModelShape, rate: float, rank: Rank, workload: Workload, num_replicas: int, sizes: Sizes
) -> list[Step]:
    def prefill(lengths: Sequence[int]) -> float:
        return flops.forward_flops(shape, lengths, role="actor", num_outputs=len(lengths)) / rate

    return carried_steps(rank, prefill, response_lengths(workload), num_replicas, sizes)


@functools.lru_cache(maxsize=1024)
def _replay(
    rank: Rank,
    prompt_seconds: float,
    observation_seconds: float,
    num_replicas: int,
    workload: Workload,
    batch: int,
) -> Generation:
    lengths = response_lengths(workload)
    prompts = -(-workload.num_responses // workload.group_size)
    prefill = -(-prompts // num_replicas) * prompt_seconds
    prefill += -(-workload.num_responses // num_replicas) * observation_seconds
    there = there_tokens(workload)
    found = [
        decode(rank, [(there, int(n)) for n in lengths[share.start : share.stop]], batch)[:2]
        for share in assign(workload.num_responses, num_replicas)
        if share
    ]
    seconds, tail = max(found)
    return Generation(seconds + prefill, prefill, batch, tail / seconds)
