"""Whether a configuration fits into a GPU and a node's host memory, why not, and what would help.

`vapo plan` searches with this, and a run that cannot fit is rejected before it builds anything.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from vapo_megatron.config import VapoConfig, check_together
from vapo_megatron.config.phases import GENERATION
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.planning import memory
from vapo_megatron.planning.cluster import GB, Cluster
from vapo_megatron.planning.host_memory import host_bytes_per_node, rollout_host_bytes
from vapo_megatron.planning.memory import PhaseMemory
from vapo_megatron.planning.plan import peak_memory

REMEDY_RANK = 32
"""Of the adapters that are proposed where training all weights does not fit."""


class Misfit(NamedTuple):
    """A configuration that does not fit."""

    needed: float
    """Bytes of its fullest phase; infinite if that fits, but not vLLM's KV cache or the host."""
    reason: str
    config: VapoConfig


def find_misfit(
    shape: ModelShape, config: VapoConfig, cluster: Cluster, phases: dict[str, PhaseMemory]
) -> Misfit | None:
    """Say why a configuration does not fit into a GPU or a node's host memory; None: it fits.

    Args:
        shape: the model.
        config: the layout divides the model.
        cluster: what the job runs on.
        phases: peak_memory.
    """
    reason = _gpu_misfit(shape, config, cluster.gpu_bytes, phases)
    reason = reason or _host_misfit(shape, config, cluster.gpus_per_node)
    return _misfit(reason, config, cluster, phases)


def find_rollout_misfit(
    shape: ModelShape, config: VapoConfig, cluster: Cluster, phases: dict[str, PhaseMemory]
) -> Misfit | None:
    """The same of GPUs that only sample, and nodes of them."""
    phases = {GENERATION: phases[GENERATION]}
    reason = _gpu_misfit(shape, config, cluster.gpu_bytes, phases)
    reason = reason or _rollout_host_misfit(shape, config, cluster.gpus_per_node)
    return _misfit(reason, config, cluster, phases)


def _misfit(
    reason: str | None, config: VapoConfig, cluster: Cluster, phases: dict[str, PhaseMemory]
) -> Misfit | None:
    if reason is None:
        return None
    fullest = max(phase.total for phase in phases.values())
    return Misfit(fullest if fullest > cluster.gpu_bytes else math.inf, reason, config)


def check_fits(config: VapoConfig, shape: ModelShape, gpu_bytes: int) -> None:
    """Reject a configuration that cannot fit: it needs more than a GPU has, even without reserve.

    Args:
        config: validated, and its layout divides the model.
        shape: the model.
        gpu_bytes: memory of one GPU.

    Raises:
        ConfigError: one line: the phase, what it needs, what there is, the largest parts, remedies.
    """
    phases = {
        name: dataclasses.replace(phase, reserve=0)
        for name, phase in peak_memory(shape, config, gpu_bytes).items()
    }
    reason = _gpu_misfit(shape, config, gpu_bytes, phases)
    if reason is not None:
        adapters = adapters_remedy(shape, config, gpu_bytes, phases)
        remedies = filter(None, [_remedy(config, reason), adapters])
        raise ConfigError(
            f"this configuration cannot fit into a GPU: {reason}; {', '.join(remedies)}, or "
            "let vapo plan find a layout"
        )


def adapters_remedy(
    shape: ModelShape, config: VapoConfig, gpu_bytes: int, phases: dict[str, PhaseMemory]
) -> str | None:
    """Return a remedy where an update needs most, all weights are trained, and adapters would fit.

    Args:
        phases: peak_memory of the configuration as it is.
    """
    fullest = max(phases, key=lambda name: phases[name].total)
    with_adapters = _with_adapters(config)
    if with_adapters is None or fullest not in memory.UPDATES.values():
        return None
    fewer = peak_memory(shape, with_adapters, gpu_bytes)
    needed = [fewer[name].total for name in memory.UPDATES.values() if name in fewer]
    if max(needed) > gpu_bytes:
        return None
    return f"set model.lora.rank={REMEDY_RANK}"


def _with_adapters(config: VapoConfig) -> VapoConfig | None:
    """Return the configuration with adapters of all trained roles; None: it cannot have any."""
    if config.model.lora.rank is not None:
        return None
    lora = config.model.lora.model_copy(update={"rank": REMEDY_RANK})
    changed = config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})
    try:
        check_together(changed)
    except ConfigError:
        return None
    return changed


def _gpu_misfit(
    shape: ModelShape, config: VapoConfig, gpu_bytes: int, phases: dict[str, PhaseMemory]
) -> str | None:
    name, fullest = max(phases.items(), key=lambda item: item[1].total)
    if fullest.total > gpu_bytes:
        parts = "; ".join(f"{part} {n / GB:.1f}" for part, n in _largest_parts(fullest))
        need = f"{fullest.total / GB:.1f} GB of {gpu_bytes / GB:.1f}"
        return f"{name}{_side(config, name)} needs {need} ({parts})"
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    cached = memory.kv_cache_tokens(shape, config, gpu_bytes=gpu_bytes)
    if config.samples and cached < longest:
        return (
            f"generation{_side(config, GENERATION)} leaves vLLM a KV cache of {cached} tokens, "
            f"less than one sequence of {longest} "
            f"(weights {phases[GENERATION].engine_weights / GB:.1f} GB)"
        )
    return None


def _side(config: VapoConfig, phase: str) -> str:
    """Return whose GPU a phase is on with placement=disaggregated, for a message; else ""."""
    if not config.rollout.is_disaggregated:
        return ""
    return " on a rollout worker's GPU" if phase == GENERATION else " on a trainer's GPU"


def _largest_parts(phase: PhaseMemory) -> list[tuple[str, int]]:
    """Return the names and bytes of a phase's three largest parts."""
    parts = sorted(dataclasses.asdict(phase).items(), key=lambda item: -item[1])
    return [(name.replace("_", " "), size) for name, size in parts[:3] if size]


def _host_misfit(shape: ModelShape, config: VapoConfig, gpus_per_node: int) -> str | None:
    """Say why a node needs more than parallel.host_memory_gb, if that is set."""
    limit = config.parallel.host_memory_gb
    needed = host_bytes_per_node(shape, config, gpus_per_node=gpus_per_node)
    if limit is None or needed.total <= limit * GB:
        return None
    remedy = staged = ""
    if config.checkpoint.asynchronous and needed.checkpoint:
        synchronous = config.checkpoint.model_copy(update={"asynchronous": False})
        other = config.model_copy(update={"checkpoint": synchronous})
        less = host_bytes_per_node(shape, other, gpus_per_node=gpus_per_node)
        remedy = f"; with checkpoint.asynchronous=false {less.total / GB:.1f}"
    if needed.staged:
        versions = config.rollout.lag + 2
        staged = f", and {versions} versions of the weights {needed.staged / GB:.1f},"
    return (
        f"offload needs {needed.offloaded / GB:.1f} GB, a checkpoint {needed.checkpoint / GB:.1f} "
        f"and a step's responses {needed.step / GB:.1f}{staged} of a node's {limit:.1f} GB of "
        f"host memory{remedy}"
    )


def _rollout_host_misfit(shape: ModelShape, config: VapoConfig, gpus_per_node: int) -> str | None:
    limit = config.parallel.host_memory_gb
    needed = rollout_host_bytes(shape, config, min(gpus_per_node, config.rollout.num_processes))
    if limit is None or needed.total <= limit * GB:
        return None
    return (
        f"a node of rollout workers needs {needed.staged / GB:.1f} GB for versions of the weights "
        f"and {needed.step / GB:.1f} for responses, of {limit:.1f} GB of host memory"
    )


def _remedy(config: VapoConfig, reason: str) -> str:
    p, r = config.parallel, config.rollout
    share = (
        f"rollout.gpu_memory_utilization={r.gpu_memory_utilization:g}"
        if r.kv_cache_bytes is None
        else f"rollout.kv_cache_bytes={r.kv_cache_bytes}"
    )
    size = f"rollout.tensor_model_parallel_size={r.tensor_model_parallel_size}"
    if "KV cache" in reason:
        return f"raise {share} or {size}"
    if reason.startswith(GENERATION):
        return f"lower {share} or rollout.max_num_sequences={r.max_num_sequences}, or raise {size}"
    steps = [
        f"raise parallel.tensor_model_parallel_size={p.tensor_model_parallel_size}, "
        f"context_parallel_size={p.context_parallel_size} or "
        f"pipeline_model_parallel_size={p.pipeline_model_parallel_size}"
    ]
    steps += [] if p.recompute == "full" else [f"set recompute=full for {p.recompute}"]
    if p.recompute_method == "block":
        steps.append(f"raise recompute_num_layers={p.recompute_num_layers}")
    steps += [] if memory.offloads(config) else ["set offload=true"]
    return ", ".join([*steps, f"lower max_tokens_per_microbatch={p.max_tokens_per_microbatch}"])
