"""Search over layouts: the fastest that fit, and why the others do not.

A layout is TP x CP x PP; its variants are the settings that trade time for memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from vapo_megatron.config import VapoConfig, check_together
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.planning import memory
from vapo_megatron.planning.cluster import Cluster
from vapo_megatron.planning.generation import generation
from vapo_megatron.planning.memory import PhaseMemory
from vapo_megatron.planning.misfits import Misfit, find_misfit
from vapo_megatron.planning.model_bytes import check_layouts, role_shape
from vapo_megatron.planning.plan import Plan, Training, make_plan, peak_memory, training_time
from vapo_megatron.planning.workload import Workload

RECOMPUTE = ("none", "selective", "full")

LARGEST_SHARE, SHARE_STEP = 0.9, 0.05
"""Of rollout.gpu_memory_utilization: the search takes the largest share that fits, as more KV cache
is never slower. 0.9 is vLLM's default."""


CONTEXT_TOKENS = 16_384
"""Of the longest sequence on a context-parallel rank, at least, in the search: with less, the
keys and values that ranks exchange take as long as the layers."""


class Fixed(NamedTuple):
    """Settings fixed by the user, named as the options of `vapo plan`; None: searched over."""

    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    ep: int | None = None
    vpp: int | None = None
    recompute: str | None = None
    recompute_layers: int | None = None
    """Of each chunk; with recompute=full."""
    max_tokens: int | None = None
    offload: bool | None = None
    vllm_tp: int | None = None
    vllm_share: float | None = None
    samplers: int | None = None
    """With rollout.placement=disaggregated."""


class Ranking(NamedTuple):
    """Plans that fit, fastest first, one per (TP, CP, PP, EP, vLLM TP); and why others do not."""

    plans: list[Plan]
    undivided: dict[str, str]
    """Why a layout does not divide the GPUs or the model, by layout."""
    misfits: dict[str, Misfit]
    """The variant closest to fitting, by layout."""

    @property
    def rejected(self) -> dict[str, str]:
        """All reasons, by layout."""
        return self.undivided | {name: one.reason for name, one in self.misfits.items()}

    @property
    def closest(self) -> tuple[str, Misfit] | None:
        """The layout closest to fitting, with its shortfall; None if there are no misfits."""
        return min(self.misfits.items(), key=lambda item: item[1].needed, default=None)


def rank(
    shape: ModelShape, base: VapoConfig, cluster: Cluster, workload: Workload, fixed: Fixed
) -> Ranking:
    """Plan the variants of all layouts, and keep the fastest that fits of each.

    Args:
        shape: the model.
        base: all other settings; parallel.world_size is the cluster's number of GPUs.
        cluster: what the job runs on.
        workload: of a step.
        fixed: settings that are not searched over.
    """
    layouts, undivided = trainer_layouts(shape, base, fixed, cluster.gpus_per_node)
    rollout_workers = {
        size: _fastest_generation(shape, base, cluster, workload, size)
        for size in rollout_tp_sizes(shape, base, fixed, cluster.gpus_per_node)
    }
    plans: list[Plan] = []
    misfits: dict[str, Misfit] = {}
    for layout in layouts:
        timed = [
            (variant, training_time(shape, variant, cluster, workload))
            for variant in variants(shape, layout, fixed)
        ]
        timed.sort(key=lambda pair: pair[1].seconds)
        fitting, not_fitting = [], []
        # at_least is the fastest generation possible, whatever the trainer leaves vLLM.
        for size, at_least in rollout_workers.items():
            best: Plan | None = None
            for variant, training in timed:
                if best and training.seconds + at_least >= best.step_seconds:
                    break  # no later variant can win
                found = _planned(
                    shape, variant, training, cluster, workload, size, fixed.vllm_share
                )
                if isinstance(found, Misfit):
                    not_fitting.append(found)
                elif best is None or found.step_seconds < best.step_seconds:
                    best = found
            fitting += [best] if best else []
        plans += fitting
        if not_fitting and not fitting:
            misfits[layout_name(layout)] = min(not_fitting, key=lambda one: one.needed)
    return Ranking(sorted(plans, key=lambda plan: plan.step_seconds), undivided, misfits)


def _planned(
    shape: ModelShape,
    variant: VapoConfig,
    training: Training,
    cluster: Cluster,
    workload: Workload,
    rollout_tp_size: int,
    share: float | None,
) -> Plan | Misfit:
    """Plan a variant with one size of vLLM's replicas, and with the largest share that fits."""
    config = with_rollout(variant, tensor_model_parallel_size=rollout_tp_size)
    config, phases = with_largest_share(shape, config, cluster.gpu_bytes, share)
    found = find_misfit(shape, config, cluster, phases)
    return found or make_plan(shape, config, cluster, workload, training, phases)


def trainer_layouts(
    shape: ModelShape, base: VapoConfig, fixed: Fixed, gpus_per_node: int
) -> tuple[list[VapoConfig], dict[str, str]]:
    """Return the trainer's valid layouts, and the reasons why others are invalid.

    TP stays within a node: every power of two that fits into it. EP spans up to four. CP is tried
    in powers of two, as long as each rank has CONTEXT_TOKENS of the longest sequence. PP is every
    divisor of the remaining GPUs. Sequence parallelism is on with TP: the same result with less
    memory. Virtual stages are left to `variants` unless fixed.

    Args:
        shape: the model.
        base: all other settings; parallel.world_size is the number of GPUs.
        fixed: settings that are not searched over.
        gpus_per_node: limits TP unless that is fixed.
    """
    world_size, rollout = base.parallel.world_size, base.rollout
    tensors = [fixed.tp] if fixed.tp else _powers_of_two(min(gpus_per_node, world_size))
    # Tokens for experts go to other nodes, too, as others' trainers have them: to four at most.
    most = 1 if shape.experts is None else min(shape.experts.count, 4 * gpus_per_node, world_size)
    experts = [fixed.ep] if fixed.ep else _powers_of_two(most)
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    contexts = [fixed.cp] if fixed.cp else _powers_of_two(max(1, longest // CONTEXT_TOKENS))
    chunks = fixed.vpp if fixed.vpp != 1 else None
    stages = range(1, min(world_size, shape.num_layers) + 1)
    found, rejected = [], {}
    for tp_size, cp_size in itertools.product(tensors, contexts):
        ranks = tp_size * cp_size
        pipelines = [n for n in stages if world_size % (ranks * n) == 0]
        for pp_size, ep_size in itertools.product(
            [fixed.pp] if fixed.pp else pipelines or [1], experts
        ):
            if not fixed.ep and world_size % (pp_size * ep_size):
                continue
            config = with_parallel(
                base,
                tensor_model_parallel_size=tp_size,
                context_parallel_size=cp_size,
                pipeline_model_parallel_size=pp_size,
                virtual_pipeline_model_parallel_size=chunks,
                sequence_parallel=tp_size > 1,
                expert_model_parallel_size=ep_size,
            )
            try:
                check_together(config)
                check_layouts(shape, config)
            except ConfigError as error:
                rejected[layout_name(config)] = str(error).split(";")[0]
                continue
            found.append(config)
    return found, rejected


def layout_name(config: VapoConfig) -> str:
    """Return TP 8 x PP 4, or TP 8 x CP 2 x PP 4."""
    p = config.parallel
    cp = f" x CP {p.context_parallel_size}" * (p.context_parallel_size > 1)
    ep = f" x EP {p.expert_model_parallel_size}" * (p.expert_model_parallel_size > 1)
    return f"TP {p.tensor_model_parallel_size}{cp} x PP {p.pipeline_model_parallel_size}{ep}"


def variants(shape: ModelShape, layout: VapoConfig, fixed: Fixed) -> Iterator[VapoConfig]:
    """Yield a layout with all virtual stages, recomputation, microbatches and offload to try.

    Token budgets are the longest sequence, half and twice of it: a smaller budget fills a pipeline
    with more microbatches, and a longer response gets a microbatch of its own.
    """
    pp_size = layout.parallel.pipeline_model_parallel_size
    per_stage = [role_shape(shape, layout, role).num_layers // pp_size for role in layout.roles]
    chunked = pp_size > 1 and not layout.parallel.batch_p2p_comm
    chunks = [n for n in (1, 2, 4) if all(m % n == 0 for m in per_stage)] if chunked else [1]
    longest = layout.rollout.max_prompt_tokens + layout.rollout.max_response_tokens
    offload = layout.parallel.offload if fixed.offload is None else fixed.offload
    for vpp_size, recompute, max_tokens, offloads in itertools.product(
        [fixed.vpp] if fixed.vpp else chunks,
        [fixed.recompute or "full"] if fixed.recompute or fixed.recompute_layers else RECOMPUTE,
        [fixed.max_tokens] if fixed.max_tokens else (longest, longest // 2, 2 * longest),
        (False, True) if offload is None else (offload,),
    ):
        block = fixed.recompute_layers if recompute == "full" else None
        if (block or 0) > min(per_stage) // vpp_size:
            continue
        config = with_parallel(
            layout,
            virtual_pipeline_model_parallel_size=vpp_size if vpp_size > 1 else None,
            recompute=recompute,
            recompute_method="block" if block else "uniform",
            recompute_num_layers=block or 1,
            max_tokens_per_microbatch=max_tokens,
            offload=offloads,
        )
        check_together(config)
        check_layouts(shape, config)
        yield config


def rollout_tp_sizes(
    shape: ModelShape, base: VapoConfig, fixed: Fixed, gpus_per_node: int
) -> list[int]:
    """Return vLLM's tensor-parallel sizes: powers of two within a node that divide the heads.

    Where the data give the responses there is no vLLM, and the size is left as it is.

    Raises:
        ConfigError: the fixed size divides neither the heads nor the GPUs.
    """
    if not base.samples:
        return [base.rollout.tensor_model_parallel_size]
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    name, world_size, chosen = "parallel.world_size", base.parallel.world_size, fixed.vllm_tp
    if base.rollout.is_disaggregated:
        name, world_size = "rollout.num_processes", base.rollout.num_processes
    sizes = [chosen] if chosen else _powers_of_two(min(gpus_per_node, world_size))
    found = [
        size
        for size in sizes
        if world_size % size == 0
        and heads % size == 0
        and (kv_heads % size == 0 or size % kv_heads == 0)
    ]
    if not found:
        raise ConfigError(
            f"rollout.tensor_model_parallel_size={chosen} must divide {name}="
            f"{world_size} and the model's num_attention_heads={heads}, and be a divisor or a "
            f"multiple of its num_key_value_heads={kv_heads}; lower it"
        )
    return found


def with_parallel(config: VapoConfig, **fields: Any) -> VapoConfig:
    """Return the configuration with other parallel fields."""
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=fields)})


def with_rollout(config: VapoConfig, **fields: Any) -> VapoConfig:
    """Return the configuration with other rollout fields."""
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=fields)})


def _powers_of_two(largest: int) -> list[int]:
    return [2**n for n in range(largest.bit_length()) if 2**n <= largest]


def _fastest_generation(
    shape: ModelShape, base: VapoConfig, cluster: Cluster, workload: Workload, size: int
) -> float:
    """Lower bound of generation's seconds: vLLM with a whole GPU to itself."""
    if not base.samples:
        return 0.0
    config = with_rollout(base, tensor_model_parallel_size=size)
    whole_gpu = with_rollout(config, gpu_memory_utilization=1.0)
    tokens = memory.kv_cache_tokens(shape, whole_gpu, gpu_bytes=cluster.gpu_bytes)
    return generation(shape, config, cluster, workload, tokens).seconds


def with_largest_share(
    shape: ModelShape, config: VapoConfig, gpu_bytes: int, share: float | None
) -> tuple[VapoConfig, dict[str, PhaseMemory]]:
    """Give vLLM the largest share of a GPU that fits, in steps of SHARE_STEP, unless it is fixed.

    Returns:
        The configuration and its peak_memory, whether it fits or not.
    """
    if share is not None:
        config = with_rollout(config, gpu_memory_utilization=share)
    if share is not None or config.rollout.kv_cache_bytes is not None or not config.samples:
        return config, peak_memory(shape, config, gpu_bytes)
    config = with_rollout(config, gpu_memory_utilization=LARGEST_SHARE)
    phases = peak_memory(shape, config, gpu_bytes)
    excess = [p.total - gpu_bytes for p in phases.values()]
    # Only phases that hold the KV cache shrink with vLLM's share.
    of_cache = max((p.total - gpu_bytes for p in phases.values() if p.kv_cache), default=0)
    if 0 < of_cache and (of_cache == max(excess) or config.rollout.is_disaggregated):
        steps = math.ceil(of_cache / gpu_bytes / SHARE_STEP)
        share = max(SHARE_STEP, round(LARGEST_SHARE - steps * SHARE_STEP, 2))
        config = with_rollout(config, gpu_memory_utilization=share)
        phases = peak_memory(shape, config, gpu_bytes)
    return config, phases
