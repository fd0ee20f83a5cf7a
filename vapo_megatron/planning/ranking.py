"""The fastest layouts that fit, and why the others do not."""

from __future__ import annotations

import math
from typing import NamedTuple

from vapo_megatron.config import VapoConfig
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.planning import candidates, memory
from vapo_megatron.planning.cluster import Cluster
from vapo_megatron.planning.generation import generation
from vapo_megatron.planning.memory import PhaseMemory
from vapo_megatron.planning.plan import (
    Plan,
    Training,
    host_misfit,
    make_plan,
    misfit,
    offload_seconds,
    peak_memory,
    training_time,
)
from vapo_megatron.planning.workload import Workload

LARGEST_SHARE, SHARE_STEP = 0.9, 0.05
"""Of rollout.gpu_memory_utilization in a ranking: the largest that fits, as more KV cache is never
slower. vLLM's own default is 0.9."""


class Misfit(NamedTuple):
    """A configuration that does not fit."""

    needed: float
    """Bytes of its fullest phase; infinite where that fits, but not vLLM's cache or the host."""
    reason: str
    config: VapoConfig


class Ranking(NamedTuple):
    """Plans that fit, fastest first, one for each (TP, PP, vLLM TP); and why others do not."""

    plans: list[Plan]
    undivided: dict[str, str]
    """Why layouts cannot be, on these GPUs and of this model, by layout."""
    misfits: dict[str, Misfit]
    """The closest to fitting of each other layout."""

    @property
    def refused(self) -> dict[str, str]:
        """All reasons, by layout."""
        return self.undivided | {name: one.reason for name, one in self.misfits.items()}

    @property
    def closest(self) -> tuple[str, Misfit] | None:
        """The layout that lacks least, and what it lacks; None where all fit or none divides."""
        return min(self.misfits.items(), key=lambda item: item[1].needed, default=None)


def rank(
    shape: ModelShape,
    base: VapoConfig,
    cluster: Cluster,
    workload: Workload,
    fixed: candidates.Fixed,
) -> Ranking:
    """Plan all of candidates.trainer_layouts and keep the fastest variants of those that fit.

    Args:
        shape: of the model.
        base: what a layout does not say; parallel.world_size is the cluster's number of GPUs.
        cluster: what it runs on.
        workload: of a step.
        fixed: what is not searched over.
    """
    layouts, undivided = candidates.trainer_layouts(shape, base, fixed, cluster.gpus_per_node)
    samplers = {
        size: _fastest_generation(shape, base, cluster, workload, size)
        for size in candidates.sampler_sizes(shape, base, fixed, cluster.gpus_per_node)
    }
    best: list[Plan] = []
    misfits: dict[str, Misfit] = {}
    for layout in layouts:
        trained = _trained(shape, layout, cluster, workload, fixed)
        refused: list[Misfit] = []
        found = [
            _best_variant(
                shape, trained, cluster, workload, fixed.sampler_share, size, at_least, refused
            )
            for size, at_least in samplers.items()
        ]
        best += [plan for plan in found if plan]
        if not any(found):
            p = layout.parallel
            name = f"TP {p.tensor_model_parallel_size} x PP {p.pipeline_model_parallel_size}"
            misfits[name] = min(refused, key=lambda misfit: misfit.needed)
    return Ranking(sorted(best, key=lambda plan: plan.step_seconds), undivided, misfits)


def _trained(
    shape: ModelShape,
    layout: VapoConfig,
    cluster: Cluster,
    workload: Workload,
    fixed: candidates.Fixed,
) -> list[tuple[VapoConfig, Training]]:
    """Return a layout's variants with their trainer's times, fastest first."""
    found = []
    for variant in candidates.variants(shape, layout, fixed):
        phases = training_time(shape, variant, cluster, workload).phases
        for offload in candidates.offload_choices(layout, fixed):
            config = candidates.with_offload(variant, offload)
            copies = offload_seconds(shape, config, cluster)
            found.append((config, Training(phases, copies)))
    return sorted(found, key=lambda pair: pair[1].seconds)


def _fastest_generation(
    shape: ModelShape, base: VapoConfig, cluster: Cluster, workload: Workload, size: int
) -> float:
    """Seconds of generation if vLLM had a GPU to itself: no variant of the trainer is faster."""
    config = candidates.with_sampler(base, tensor_model_parallel_size=size)
    everything = memory.kv_cache_tokens(
        shape,
        candidates.with_sampler(config, gpu_memory_utilization=1.0),
        gpu_bytes=cluster.gpu_bytes,
    )
    return generation(shape, config, cluster, workload, everything).seconds


def _best_variant(
    shape: ModelShape,
    trained: list[tuple[VapoConfig, Training]],
    cluster: Cluster,
    workload: Workload,
    share: float | None,
    sampler_size: int,
    generation_seconds: float,
    refused: list[Misfit],
) -> Plan | None:
    """Return the fastest plan that fits with one size of vLLM's replicas.

    Args:
        shape: of the model.
        trained: variants with their trainer's times, fastest first.
        cluster: what they run on.
        workload: of a step.
        share: rollout.gpu_memory_utilization; None: the largest that fits.
        sampler_size: ranks of a replica.
        generation_seconds: no variant's generation is faster: when that cannot win, the rest is
            left out.
        refused: takes the variants that do not fit.
    """
    best: Plan | None = None
    for variant, training in trained:
        if best and training.seconds + generation_seconds >= best.step_seconds:
            break
        config = candidates.with_sampler(variant, tensor_model_parallel_size=sampler_size)
        config, phases = _widest(shape, config, cluster.gpu_bytes, share)
        reason = misfit(shape, config, cluster.gpu_bytes, phases) or host_misfit(
            shape, config, cluster.gpus_per_node
        )
        if reason:
            needed = max(phase.total for phase in phases.values())
            refused.append(
                Misfit(needed if needed > cluster.gpu_bytes else math.inf, reason, config)
            )
            continue
        plan = make_plan(shape, config, cluster, workload, training, phases)
        if best is None or plan.step_seconds < best.step_seconds:
            best = plan
    return best


def _widest(
    shape: ModelShape, config: VapoConfig, gpu_bytes: int, share: float | None
) -> tuple[VapoConfig, dict[str, PhaseMemory]]:
    """Give vLLM the largest share of a GPU that fits, in steps of SHARE_STEP, if any does."""
    if share is not None:
        config = candidates.with_sampler(config, gpu_memory_utilization=share)
    if share is not None or config.rollout.kv_cache_bytes is not None:
        return config, peak_memory(shape, config, gpu_bytes)
    config = candidates.with_sampler(config, gpu_memory_utilization=LARGEST_SHARE)
    phases = peak_memory(shape, config, gpu_bytes)
    excess = [p.total - gpu_bytes for p in phases.values()]
    # A phase without a KV cache stays as it is.
    of_cache = max((p.total - gpu_bytes for p in phases.values() if p.kv_cache), default=0)
    if 0 < of_cache == max(excess):
        steps = math.ceil(of_cache / gpu_bytes / SHARE_STEP)
        share = max(SHARE_STEP, round(LARGEST_SHARE - steps * SHARE_STEP, 2))
        config = candidates.with_sampler(config, gpu_memory_utilization=share)
        phases = peak_memory(shape, config, gpu_bytes)
    return config, phases
