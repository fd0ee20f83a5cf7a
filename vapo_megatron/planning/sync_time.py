"""Predicted seconds of a weight sync, from the bytes that links and memory carry."""

from __future__ import annotations

from vapo_megatron.config import VapoConfig
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.planning.adapters import adapted_layers
from vapo_megatron.planning.cluster import Cluster
from vapo_megatron.planning.model_bytes import Layout, engine_weight_bytes

MERGED_BYTES = 28
"""Memory traffic for each element of a weight that an adapter's product is added to: a float32 copy
(6), the product (4), their sum (12) and the weight in its own type (6)."""


def sync_seconds(shape: ModelShape, config: VapoConfig, cluster: Cluster) -> float:
    """Estimate the weight sync; planning/reshard.py computes it from the actual plan.

    Each node receives the part of the model that its ranks do not hold, once, through all its
    adapters. Meanwhile each rank receives within the node what it is missing of its vLLM shard, and
    then reads and writes that shard. Latencies are left out. Adapters are merged into the weights
    before, so that as many bytes are sent.
    """
    merged = _merge_seconds(shape, config, cluster)
    if config.rollout.is_disaggregated:
        return merged + _sync_to_rollout_workers(shape, config, cluster)
    trainer = Layout(shape, config)
    shard = engine_weight_bytes(shape, config)
    rollout_tp_size = config.rollout.tensor_model_parallel_size
    model = shard * rollout_tp_size
    per_node = min(cluster.gpus_per_node, cluster.num_gpus)
    # A node's ranks differ in TP first, then in CP and DP, and in PP only if all fit into the node.
    stages = max(1, per_node // (trainer.tp_size * trainer.replica_size))
    share = min(1.0, stages / trainer.pp_size * min(1.0, per_node / trainer.tp_size))
    across = (1 - share) * model / per_node / cluster.rate("network")
    missing = 1 - min(1.0, rollout_tp_size / (trainer.tp_size * trainer.pp_size))
    within = missing * shard / cluster.rate("nvlink")
    return merged + max(across, within) + 2 * shard / cluster.rate("memory")


def _merge_seconds(shape: ModelShape, config: VapoConfig, cluster: Cluster) -> float:
    """Estimate how long a trainer takes to add the adapters' products to its weights."""
    elements = sum(
        layer.outputs * layer.inputs for layer in adapted_layers(shape, config, "actor") or ()
    )
    layers = shape.num_layers // config.parallel.pipeline_model_parallel_size
    return layers * elements * MERGED_BYTES / cluster.rate("memory")


def _sync_to_rollout_workers(shape: ModelShape, config: VapoConfig, cluster: Cluster) -> float:
    """Estimate the weight sync from GPUs that train to GPUs that sample.

    Each node that samples receives the whole model once, through all its adapters; all adapters of
    the trainers send. Within a node each rank receives its shard, and writes it: with a lag into
    host memory.
    """
    shard, rollout = engine_weight_bytes(shape, config), config.rollout
    model = shard * rollout.tensor_model_parallel_size
    trainers, rollout_workers = config.parallel.world_size, rollout.num_processes
    if cluster.num_gpus <= cluster.gpus_per_node:
        wires = max(1.0, rollout_workers / trainers) * shard / cluster.rate("nvlink")
    else:
        receivers = min(rollout_workers, cluster.gpus_per_node)
        nodes = -(-rollout_workers // cluster.gpus_per_node)
        across = max(model / receivers, nodes * model / trainers) / cluster.rate("network")
        wires = max(across, shard / cluster.rate("nvlink"))
    return wires + 2 * shard / cluster.rate("memory") + staging_seconds(shape, config, cluster)


def staging_seconds(shape: ModelShape, config: VapoConfig, cluster: Cluster) -> float:
    """Copy of a rollout worker's shard to host memory, or back, which only a lag needs."""
    copied = engine_weight_bytes(shape, config) if config.rollout.lag else 0
    return copied / cluster.rate("pcie")
