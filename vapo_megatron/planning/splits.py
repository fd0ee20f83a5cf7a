"""Search over splits of the GPUs into those that train and those that sample.

Trainers and rollout workers share nothing but the weight sync, so each split gets the fastest of
either that fits. With a lag the slower one decides the step time, without one they add up.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from vapo_megatron.config import VapoConfig
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.planning import memory
from vapo_megatron.planning.cluster import Cluster
from vapo_megatron.planning.generation import generation
from vapo_megatron.planning.misfits import Misfit, find_misfit, find_rollout_misfit
from vapo_megatron.planning.plan import Plan, make_plan, model_flops, peak_memory, training_time
from vapo_megatron.planning.ranking import (
    Fixed,
    Ranking,
    layout_name,
    rollout_tp_sizes,
    trainer_layouts,
    variants,
    with_largest_share,
    with_parallel,
    with_rollout,
)
from vapo_megatron.planning.schedule import steady_state
from vapo_megatron.planning.workload import Workload


class _RolloutWorkers(NamedTuple):
    """The fastest that fit on one split's sampling GPUs."""

    config: VapoConfig
    """Trains nowhere yet."""
    seconds: float


def rank_splits(
    shape: ModelShape, base: VapoConfig, cluster: Cluster, workload: Workload, fixed: Fixed
) -> Ranking:
    """Plan splits, and keep the fastest that fits of each; of a chosen split, of each layout.

    Args:
        shape: the model.
        base: all other settings, with rollout.placement=disaggregated.
        cluster: what the job runs on.
        workload: of a step.
        fixed: settings that are not searched over.
    """
    found = Ranking([], {}, {})
    candidates = []
    for rollout_workers in _split_sizes(cluster, fixed):
        split = with_parallel(base, world_size=cluster.num_gpus - rollout_workers)
        split = with_rollout(split, num_processes=rollout_workers)
        chosen = _fastest_rollout_workers(shape, split, cluster, workload, fixed)
        if isinstance(chosen, Misfit):
            found.misfits[f"{rollout_workers} rollout workers"] = chosen
        else:
            at_least = _at_least(shape, chosen, cluster, workload)
            candidates.append((at_least, rollout_workers, chosen))
    candidates.sort()
    best = math.inf
    for at_least, rollout_workers, chosen in candidates:
        if at_least < best:
            plans, undivided, misfits = _trainers(shape, chosen, cluster, workload, fixed)
            found.plans.extend(plans)
            best = min([best, *(plan.step_seconds for plan in plans)])
            prefix = f"{rollout_workers} rollout workers, "
            found.undivided.update({prefix + name: why for name, why in undivided.items()})
            found.misfits.update({prefix + name: one for name, one in misfits.items()})
    return found._replace(plans=sorted(found.plans, key=lambda plan: plan.step_seconds))


def _split_sizes(cluster: Cluster, fixed: Fixed) -> list[int]:
    """Return how many GPUs may sample: whole nodes, or any number of a single node's.

    If the size of vLLM's replicas is chosen and divides none of them, all are returned.

    Raises:
        ConfigError: none is left to train.
    """
    chosen = fixed.samplers
    num_gpus, per_node = cluster.num_gpus, cluster.gpus_per_node
    if chosen is not None:
        if chosen >= num_gpus:
            raise ConfigError(
                f"--samplers={chosen} must be less than --gpus={num_gpus}: others train; lower it"
            )
        return [chosen]
    if num_gpus == 1:
        raise ConfigError(
            "--placement=disaggregated needs --gpus of at least 2, found 1: one trains, one "
            "samples; raise it, or plan --placement=colocated"
        )
    step = per_node if num_gpus > per_node else 1
    sizes = list(range(step, num_gpus, step))
    return [n for n in sizes if n % (fixed.vllm_tp or 1) == 0] or sizes


def _fastest_rollout_workers(
    shape: ModelShape, split: VapoConfig, cluster: Cluster, workload: Workload, fixed: Fixed
) -> _RolloutWorkers | Misfit:
    found, misfits = [], []
    for size in rollout_tp_sizes(shape, split, fixed, cluster.gpus_per_node):
        config = with_rollout(split, tensor_model_parallel_size=size)
        config, phases = with_largest_share(shape, config, cluster.gpu_bytes, fixed.vllm_share)
        if misfit := find_rollout_misfit(shape, config, cluster, phases):
            misfits.append(misfit)
            continue
        tokens = memory.kv_cache_tokens(shape, config, gpu_bytes=cluster.gpu_bytes)
        seconds = generation(shape, config, cluster, workload, tokens).seconds
        found.append(_RolloutWorkers(config, seconds))
    if not found:
        return min(misfits, key=lambda one: one.needed)
    return min(found, key=lambda one: one.seconds)


def _at_least(
    shape: ModelShape, chosen: _RolloutWorkers, cluster: Cluster, workload: Workload
) -> float:
    """Lower bound of a step: the trainers do nothing but the updates' products, at full rate."""
    trainers = chosen.config.parallel.world_size
    updates = model_flops(shape, chosen.config, workload) / trainers / cluster.rate("matmul")
    lag = chosen.config.rollout.lag
    return steady_state([chosen.seconds], [updates], sync=0.0, lag=lag).step_seconds


def _trainers(
    shape: ModelShape, chosen: _RolloutWorkers, cluster: Cluster, workload: Workload, fixed: Fixed
) -> Ranking:
    """Plan the trainers of one split, fastest first: the first that fits, or one per layout."""
    layouts, undivided = trainer_layouts(shape, chosen.config, fixed, cluster.gpus_per_node)
    timed = [
        (variant, training_time(shape, variant, cluster, workload))
        for layout in layouts
        for variant in variants(shape, layout, fixed)
    ]
    timed.sort(key=lambda pair: pair[1].seconds)
    plans: dict[str, Plan] = {}
    misfits: dict[str, Misfit] = {}
    for variant, training in timed:
        name = layout_name(variant)
        if name in plans:
            continue
        phases = peak_memory(shape, variant, cluster.gpu_bytes)
        misfit = find_misfit(shape, variant, cluster, phases)
        if misfit is None:
            plans[name] = make_plan(shape, variant, cluster, workload, training, phases)
            if fixed.samplers is None:
                break
            continue
        if name not in misfits or misfit.needed < misfits[name].needed:
            misfits[name] = misfit
    if fixed.samplers is None and plans:
        return Ranking(list(plans.values()), {}, {})
    left = {name: one for name, one in misfits.items() if name not in plans}
    return Ranking(list(plans.values()), undivided, left)
