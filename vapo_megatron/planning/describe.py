"""Plans as text: a ranking, one layout in detail, YAML to paste, and --dry-run's comments."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import yaml

from vapo_megatron.config import VapoConfig
from vapo_megatron.config.lora import LoraConfig
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.models.known import shape_of
from vapo_megatron.planning import flops, memory
from vapo_megatron.planning.cluster import GB, Cluster
from vapo_megatron.planning.host_memory import host_bytes_per_node
from vapo_megatron.planning.memory import PhaseMemory, checkpoint_bytes
from vapo_megatron.planning.misfits import adapters_remedy, find_misfit
from vapo_megatron.planning.model_bytes import check_layouts
from vapo_megatron.planning.notes import describe_adapters, not_modelled
from vapo_megatron.planning.parameters import adapters_of
from vapo_megatron.planning.plan import (
    PUBLISHED_OVER_PREDICTED,
    Plan,
    make_plan,
    model_flops,
    peak_memory,
)
from vapo_megatron.planning.ranking import Ranking, layout_name
from vapo_megatron.planning.workload import Workload, workload_of
from vapo_megatron.weights.table import parameter_count

LEGEND = f"""\
range: {PUBLISHED_OVER_PREDICTED[0]:g} to {PUBLISHED_OVER_PREDICTED[1]:g} times the prediction, \
as published jobs took
vLLM: TP of a replica; share: gpu_memory_utilization; budget: tokens per microbatch
copies: offload; bubble: share of the trainer's seconds; uneven: slowest rank over the mean
tok/s/GPU: response tokens; all tok: with prompts; peak: of the fullest GPU, in the phase named"""

_IDLE = ["train", "sample", "train idle", "sample idle"]
IDLE_LEGEND = """\
train, sample: GPUs; train idle, sample idle: seconds of a step in which they wait"""

_SHORT = {
    "generation": "sample", "logprobs": "logps", "reference_logprobs": "ref",
    "reward_scores": "score",
    "critic_update": "critic", "actor_update": "actor", "offload": "copies",
}  # fmt: skip

PARTS = {
    "parameters": "params", "base": "base", "gradients": "grads", "optimizer": "optim",
    "activations": "activ", "logits": "logits", "engine_weights": "vLLM", "kv_cache": "KV",
    "sync_buckets": "sync", "reserve": "reserve",
}  # fmt: skip

_PASTED = {
    "parallel": (
        "world_size", "tensor_model_parallel_size", "context_parallel_size",
        "pipeline_model_parallel_size", "expert_model_parallel_size",
        "virtual_pipeline_model_parallel_size", "sequence_parallel", "use_distributed_optimizer",
        "overlap_grad_reduce", "overlap_param_gather", "recompute", "max_tokens_per_microbatch",
        "offload",
    ),
    "rollout": (
        "tensor_model_parallel_size", "max_prompt_tokens", "max_response_tokens",
        "gpu_memory_utilization", "max_num_sequences",
    ),
    "algorithm": ("responses_per_step", "group_size", "mini_batch_size"),
}  # fmt: skip

_PASTED_GIVEN = ("max_prompt_tokens", "max_response_tokens")
"""Of rollout, where the data give the responses."""
_PASTED_APART = ("placement", "num_processes", "lag", "max_logprob_difference")


def recompute_name(config: VapoConfig) -> str:
    """Return parallel.recompute; of which layers, if not of each by itself: full, block 4."""
    p = config.parallel
    if p.recompute != "full" or (p.recompute_method, p.recompute_num_layers) == ("uniform", 1):
        return p.recompute
    return f"full, {p.recompute_method} {p.recompute_num_layers}"


def describe_job(name: str, shape: ModelShape, c: Cluster, w: Workload) -> str:
    """Return what is planned: model, cluster, workload."""
    roles = " and ".join(w.trained_roles)
    nodes = math.ceil(c.num_gpus / c.gpus_per_node)
    episodes = ""
    if w.turns > 1:
        episodes = (
            f"\nepisodes: mean {w.turns:g} turns, {w.observation_tokens} tokens of observations; "
            "the environment's own time is not modelled"
        )
    return (
        f"{name}: {parameter_count(shape) / 1e9:.2f}e9 parameters, {roles}, on "
        f"{_counted(c.num_gpus, 'GPU')} in {_counted(nodes, 'node')}\n"
        f"GPU: {c.gpu_bytes / GB:g} GB, {c.peak_tflops:g} TFLOP/s, memory "
        f"{c.memory_gb_per_second:g} GB/s, NVLink {c.nvlink_gb_per_second:g}, network "
        f"{c.network_gb_per_second:g}, PCIe {c.pcie_gb_per_second:g}; storage "
        f"{c.storage_gb_per_second:g} GB/s\n"
        f"step: {w.num_responses} responses in groups of {w.group_size}, mean "
        f"{w.response_tokens / w.num_responses:.0f} tokens, at most {w.max_response_tokens}; "
        f"prompts of {w.prompt_tokens}; mini-batches of {w.mini_batch_size}{episodes}"
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


def describe_ranking(ranking: Ranking, top: int) -> str:
    """Return the fastest plans as a table, and why other layouts are rejected."""
    blocks = []
    if ranking.plans:
        phases = list(ranking.plans[0].seconds)
        head = ["TP", "PP", "VPP", "DP", "vLLM", "share", "recompute", "budget", "offload"]
        head += ["step s", "range", *(_SHORT.get(name, name) for name in phases)]
        head += ["bubble", "uneven", "tok/s/GPU", "all tok", "peak GB", "in"]
        rows = [head, *(_row(plan, phases) for plan in ranking.plans[:top])]
        for name, field in (
            ("EP", "expert_model_parallel_size"),
            ("CP", "context_parallel_size"),
        ):
            sizes = [getattr(plan.config.parallel, field) for plan in ranking.plans[:top]]
            if max(sizes) > 1:
                rows = [[row[0], str(size), *row[1:]] for row, size in zip(rows, [name, *sizes])]
        legend = LEGEND
        if ranking.plans[0].config.rollout.is_disaggregated:
            idle = [_IDLE, *(_idle_row(plan) for plan in ranking.plans[:top])]
            rows = [[*own, *row] for own, row in zip(idle, rows, strict=True)]
            legend = f"{LEGEND}\n{IDLE_LEGEND}"
        lines = _aligned(rows, left=("recompute", "in"))
        left = len(ranking.plans) - top
        if left > 0:
            lines.append(f"... and {left} slower (--top {len(ranking.plans)} shows all)")
        blocks += ["\n".join(lines), legend]
    by_reason: dict[str, list[str]] = {}
    for layout, reason in ranking.rejected.items():
        by_reason.setdefault(reason, []).append(layout)
    if by_reason:
        lines = [f"  {', '.join(layouts)}: {reason}" for reason, layouts in by_reason.items()]
        blocks.append("\n".join(["rejected:", *lines]))
    return "\n\n".join(blocks)


def describe_misfit(shape: ModelShape, ranking: Ranking, c: Cluster) -> tuple[str, str]:
    """Return the memory of what is closest to fitting, and one line: why, and what would help."""
    where = f"{_counted(c.num_gpus, 'GPU')} of {c.gpu_bytes / GB:g} GB"
    if ranking.closest is None:
        name, reason = next(iter(ranking.undivided.items()))
        return "no layout divides the GPUs and the model", (
            f"no layout divides {where} and the model: {name}: {reason}; use another number of "
            "GPUs, or fix fewer options"
        )
    name, closest = ranking.closest
    phases = peak_memory(shape, closest.config, c.gpu_bytes)
    fewer = (
        f" {adapters},"
        if (adapters := adapters_remedy(shape, closest.config, c.gpu_bytes, phases))
        else ""
    )
    offload = "yes" if memory.offloads(closest.config) else "no"
    title = f"closest: {name}, recompute {recompute_name(closest.config)}, offload {offload}"
    return "\n".join([title, "", *_memory_table(phases, c.gpu_bytes)]), (
        f"nothing fits into {where}; the closest, {name}: {closest.reason}; use more or larger "
        f"GPUs, shorter sequences,{fewer} or fix fewer options"
    )


def _idle_row(plan: Plan) -> list[str]:
    p, r, timeline = plan.config.parallel, plan.config.rollout, plan.timeline
    return [
        str(p.world_size),
        str(r.num_processes),
        f"{timeline.trainer_idle_seconds:.0f}",
        f"{timeline.sampler_idle_seconds:.0f}",
    ]


def _row(plan: Plan, phases: Sequence[str]) -> list[str]:
    p, r = plan.config.parallel, plan.config.rollout
    phase, peak = plan.peak
    least, most = plan.step_seconds_range
    return [
        str(p.tensor_model_parallel_size),
        str(p.pipeline_model_parallel_size),
        str(p.virtual_pipeline_model_parallel_size or 1),
        str(p.data_parallel_size),
        str(r.tensor_model_parallel_size) if plan.config.samples else "-",
        "-" if r.kv_cache_bytes or not plan.config.samples else f"{r.gpu_memory_utilization:.2f}",
        recompute_name(plan.config),
        str(p.max_tokens_per_microbatch),
        "yes" if p.offload else "no",
        f"{plan.step_seconds:.0f}",
        f"{least:.0f}-{most:.0f}",
        *(f"{plan.seconds[name]:.1f}" for name in phases),
        f"{plan.training.mean('bubble'):.1%}",
        f"{plan.training.mean('imbalance'):.1%}",
        f"{plan.response_tokens_per_second:.0f}",
        f"{plan.total_tokens_per_second:.0f}",
        f"{peak.total / GB:.1f}",
        phase,
    ]


def _aligned(rows: Sequence[Sequence[str]], left: Collection[str]) -> list[str]:
    """Return the rows as lines, with columns as wide as their widest cell.

    Args:
        rows: the first one is the head.
        left: heads of the columns that are aligned to the left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if head in left else cell.rjust(width)
            for head, cell, width in zip(rows[0], row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def describe_plan(shape: ModelShape, plan: Plan, sync: float | None = None) -> str:
    """Return one layout in detail.

    Args:
        shape: the model.
        plan: fits or not.
        sync: seconds of the weight sync by plan.resharding_seconds, if computed.
    """
    p, r, c = plan.config.parallel, plan.config.rollout, plan.cluster
    updates = [name for name in ("critic_update", "actor_update") if name in plan.training.phases]
    seconds = sum(plan.seconds[name] for name in updates)
    used = flops.utilization(
        model_flops(shape, plan.config, plan.workload), seconds, c.peak_tflops * 1e12 * p.world_size
    )

    host = host_bytes_per_node(shape, plan.config, gpus_per_node=c.gpus_per_node)
    disk = checkpoint_bytes(shape, plan.config)
    least, most = plan.step_seconds_range
    engines, cache = "responses given", []
    if plan.config.samples:
        engines = f"vLLM TP {r.tensor_model_parallel_size}"
        replicas = (r.num_processes or c.num_gpus) // r.tensor_model_parallel_size
        cache = [
            f"  vLLM: KV cache of {plan.kv_cache_tokens} tokens in each of {replicas} replicas"
        ]
    lines = [
        f"{layout_name(plan.config)} x DP {p.data_parallel_size} "
        f"(VPP {p.virtual_pipeline_model_parallel_size or 1}), recompute "
        f"{recompute_name(plan.config)}, {engines}: {plan.step_seconds:.0f} s a step "
        f"({least:.0f} to {most:.0f})",
        f"  {plan.response_tokens_per_second:.0f} response tokens/s/GPU; "
        f"{plan.total_tokens_per_second:.0f} with the prompts; updates at {used:.0%} MFU, "
        f"{used * c.peak_tflops:.0f} TFLOP/s/GPU",
        *([describe_placement(plan)] if plan.config.rollout.is_disaggregated else []),
        "",
        *_memory_table(plan.memory, c.gpu_bytes),
        "",
        *_time_table(plan, sync),
        "",
        *cache,
        *describe_adapters(shape, plan.config),
        f"  host memory: {host.offloaded / GB:.0f} GB per node for offloading, "
        f"{host.checkpoint / GB:.0f} GB while a checkpoint is saved, {host.step / GB:.0f} GB for a "
        "step's responses at their longest"
        + (f", {host.staged / GB:.0f} GB for versions of the weights" if host.staged else ""),
        f"  checkpoint: {disk / 1e12:.2f} TB, {disk / (c.storage_gb_per_second * GB):.0f} s at "
        f"{c.storage_gb_per_second:g} GB/s",
    ]
    return "\n".join(lines)


def _memory_table(phases: dict[str, PhaseMemory], gpu_bytes: int) -> Iterable[str]:
    # Only with adapters is there a base.
    parts = {
        part: short for part, short in PARTS.items()
        if part != "base" or any(phase.base for phase in phases.values())
    }  # fmt: skip
    rows = [["GB", *parts.values(), f"of {gpu_bytes / GB:g}"]]
    for name, phase in phases.items():
        sizes = [getattr(phase, part) for part in parts] + [phase.total]
        rows.append([name, *(f"{size / GB:.1f}" for size in sizes)])
    return (f"  {line}" for line in _aligned(rows, left=("GB",)))


def _time_table(plan: Plan, sync: float | None) -> Iterable[str]:
    generation, seconds = plan.generation, plan.seconds
    notes = {
        "sync": "estimate" if sync is None else f"estimate; {sync:.2f} s by the resharding plan",
    }
    if generation is not None:
        notes["generation"] = (
            f"prefill {generation.prefill_seconds:.1f} s; batch of at most "
            f"{generation.batch} sequences; {generation.tail:.0%} of decoding below half of that"
        )
    for name, phase in plan.training.phases.items():
        notes[name] = (
            f"bubble {phase.bubble:.1%}; slowest rank {phase.imbalance:+.1%}; last stage "
            f"{phase.stages:+.0%}; {phase.between_seconds:.1f} s between updates"
            + (f"; keys and values {phase.context_seconds:.1f} s" if phase.context_seconds else "")
        )
    rows = [["phase", "seconds", ""]]
    rows += [[name, f"{value:.1f}", notes.get(name, "")] for name, value in seconds.items()]
    return (f"  {line}" for line in _aligned(rows, left=("phase", "")))


def describe_placement(plan: Plan) -> str:
    """Return one line: who trains and who samples, and how long each waits."""
    p, r, timeline = plan.config.parallel, plan.config.rollout, plan.timeline
    return (
        f"  {_counted(p.world_size, 'GPU')} train and {r.num_processes} sample, lag {r.lag}: in a "
        f"step the trainers wait {timeline.trainer_idle_seconds:.0f} s, the rollout workers "
        f"{timeline.sampler_idle_seconds:.0f} s"
    )


def describe_gain(plan: Plan, colocated: Plan | None) -> str:
    """Return one sentence: a plan with older weights against the best colocated one without."""
    r, cluster = plan.config.rollout, plan.cluster
    parts = [f"lag {r.lag}"] if r.is_disaggregated else []
    parts += [f"{r.carry_over_groups} groups carried over"] if r.carry_over_groups else []
    what = " and ".join(parts)
    told = f"{what} on {_counted(cluster.num_gpus, 'GPU')}: {plan.step_seconds:.0f} s a step"
    if colocated is None:
        return f"{told}; colocated, nothing fits with these options"
    gain = colocated.step_seconds / plan.step_seconds
    verdict = f"{gain:.2f} times as fast" if gain >= 1 else f"{1 / gain:.2f} times as slow"
    return f"{told}, {verdict} as the best colocated plan, {colocated.step_seconds:.0f} s"


def to_paste(config: VapoConfig) -> str:
    """Return the settings that a plan decides, as YAML."""
    tree = config.model_dump()
    pasted = dict(_PASTED)
    if config.rollout.is_disaggregated:
        pasted["rollout"] = (*_PASTED_APART, *_PASTED["rollout"])
    if not config.samples:
        pasted["rollout"] = _PASTED_GIVEN
    if recompute_name(config) != config.parallel.recompute:
        pasted["parallel"] += ("recompute_method", "recompute_num_layers")
    if config.rollout.kv_cache_dtype != "auto":
        pasted["rollout"] += ("kv_cache_dtype",)
    found = {part: {name: tree[part][name] for name in names} for part, names in pasted.items()}
    if config.model.lora.rank is not None:
        default = LoraConfig().model_dump()
        lora = {name: x for name, x in tree["model"]["lora"].items() if x != default[name]}
        found["model"] = {"lora": lora}
    return yaml.safe_dump(found, sort_keys=False)


def dry_run_comment(config: VapoConfig) -> str:
    """Plan a configuration as it is, on H100s with parallel.gpu_memory_gb, as YAML comments.

    Without the model's sizes, or where the layout does not divide them, one comment says why.
    """
    try:
        if config.model.hf_path is None:
            raise ConfigError("model.hf_path is not set")
        shape = shape_of(config.model.hf_path)
        check_layouts(shape, config)
        adapters_of(shape, config, "actor")
        workload = workload_of(config)
    except ConfigError as error:
        return f"# no plan: {error} (vapo plan plans published models without their files)\n"
    num_gpus = config.num_processes
    cluster = Cluster(
        num_gpus=num_gpus,
        gpus_per_node=min(8, num_gpus),
        gpu_bytes=int(config.parallel.gpu_memory_gb * GB),
    )
    plan = make_plan(shape, config, cluster, workload)
    misfit = find_misfit(shape, config, cluster, plan.memory)
    blocks = [
        describe_job(str(config.model.hf_path), shape, cluster, workload)
        + f"\n{f'DOES NOT FIT: {misfit.reason}' if misfit else 'fits'}",
        describe_plan(shape, plan),
        not_modelled(config),
    ]
    lines = "\n\n".join(blocks).splitlines()
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)
