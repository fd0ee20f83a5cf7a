"""A configuration's plan: bytes and seconds of each phase, and whether it fits.

`vapo plan` prints plans, and a run that cannot fit is rejected before it builds anything.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

from vapo_megatron.config import VapoConfig
from vapo_megatron.config.phases import GENERATION, SYNC
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.planning import flops, memory
from vapo_megatron.planning.cluster import GB, Cluster
from vapo_megatron.planning.generation import Generation, generation
from vapo_megatron.planning.host_memory import host_bytes_per_node
from vapo_megatron.planning.memory import PhaseMemory
from vapo_megatron.planning.model_bytes import Layout, role_shape, state_bytes
from vapo_megatron.planning.roofline import (
    Phase,
    scoring,
    staging_seconds,
    sync_seconds,
    update,
)
from vapo_megatron.planning.schedule import Timeline, steady_state
from vapo_megatron.planning.workload import Workload, response_lengths
from vapo_megatron.weights.holders import layout_of
from vapo_megatron.weights.reshard import cost, planner

PUBLISHED_OVER_PREDICTED = (0.73, 1.63)
"""Least and most that published jobs took, as a multiple of what is predicted for them: the error
of predicted seconds. From the jobs and figures of tests/planning/published.py."""


@dataclasses.dataclass(frozen=True)
class Training:
    """The trainer's phases."""

    phases: dict[str, Phase]
    """By their names in memory.PHASES, for the roles of this run."""
    offload_seconds: float
    """Copies between GPU and host memory."""

    @property
    def seconds(self) -> float:
        """All phases and copies."""
        return sum(phase.seconds for phase in self.phases.values()) + self.offload_seconds

    def mean(self, of: Literal["bubble", "imbalance"]) -> float:
        """Mean of a share over the phases, weighted by their seconds."""
        phases = self.phases.values()
        total = sum(phase.seconds for phase in phases)
        return sum(phase.seconds * float(getattr(phase, of)) for phase in phases) / total


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a configuration needs, and how long a step with all updates takes."""

    config: VapoConfig
    cluster: Cluster
    workload: Workload
    memory: dict[str, PhaseMemory]
    """Of the fullest pipeline stage, by phase."""
    kv_cache_tokens: int
    generation: Generation
    training: Training
    sync_seconds: float
    staging_seconds: float = 0.0
    """With rollout.lag: a sampler loads a version that it holds."""

    @property
    def seconds(self) -> dict[str, float]:
        """By phase, in the order of a step; copies to and from the host last."""
        found = {GENERATION: self.generation.seconds}
        found |= {name: phase.seconds for name, phase in self.training.phases.items()}
        return {**found, SYNC: self.sync_seconds, "offload": self.training.offload_seconds}

    @functools.cached_property
    def timeline(self) -> Timeline:
        """How the steps follow each other; colocated, one phase after the other."""
        if not self.config.rollout.is_apart:
            return Timeline(sum(self.seconds.values()), 0.0, 0.0)
        return steady_state(
            [self.staging_seconds + self.generation.seconds], [self.training.seconds],
            sync=self.sync_seconds, lag=self.config.rollout.lag,
        )  # fmt: skip

    @property
    def step_seconds(self) -> float:
        """Of a step that updates every trained role."""
        return self.timeline.step_seconds

    @property
    def step_seconds_range(self) -> tuple[float, float]:
        """step_seconds with the planner's error: the least and the most to expect."""
        least, most = PUBLISHED_OVER_PREDICTED
        return least * self.step_seconds, most * self.step_seconds

    @property
    def response_tokens_per_second(self) -> float:
        """Response tokens per second and GPU."""
        return self.workload.response_tokens / self.step_seconds / self.cluster.num_gpus

    @property
    def total_tokens_per_second(self) -> float:
        """Prompt and response tokens per second and GPU."""
        return self.workload.total_tokens / self.step_seconds / self.cluster.num_gpus

    @property
    def peak(self) -> tuple[str, PhaseMemory]:
        """The fullest phase."""
        return max(self.memory.items(), key=lambda item: item[1].total)


def training_time(
    shape: ModelShape, config: VapoConfig, cluster: Cluster, workload: Workload
) -> Training:
    """Predict the trainer's phases of a step."""
    rest = config, cluster, workload
    found = {
        memory.SCORES[role]: scoring(role_shape(shape, config, role), *rest, role)
        for role in config.roles
    }
    for role in config.algorithm.trained_roles:
        found[memory.UPDATES[role]] = update(shape, *rest, role)
    in_order = {name: found[name] for name in memory.PHASES if name in found}
    return Training(in_order, offload_seconds(shape, config, cluster))


def offload_seconds(shape: ModelShape, config: VapoConfig, cluster: Cluster) -> float:
    """Predict the copies of a step between GPU and host memory.

    A role's parameters are copied in for its forward passes; for its updates parameters and
    optimizer state are copied in and out.
    """
    if not memory.offloads(config):
        return 0.0
    copied = 0
    stages = Layout(shape, config).outer_stages
    for role in config.roles:
        of_role = role_shape(shape, config, role)
        states = [state_bytes(of_role, config, role, pp_rank=stage) for stage in stages]
        times = 2 if role in config.algorithm.trained_roles else 0
        copied += max(s.parameters + times * (s.parameters + s.optimizer) for s in states)
    return copied / cluster.rate("pcie")


def make_plan(
    shape: ModelShape,
    config: VapoConfig,
    cluster: Cluster,
    workload: Workload,
    training: Training | None = None,
    phases: dict[str, PhaseMemory] | None = None,
) -> Plan:
    """Plan one configuration, whether it fits or not.

    Args:
        shape: the model; the configuration's layout divides it.
        config: its processes (num_processes) are the cluster's GPUs.
        cluster: what the job runs on.
        workload: of a step.
        training: the trainer's times if already known; rollout settings do not change them.
        phases: peak_memory if already known.
    """
    cached = memory.kv_cache_tokens(shape, config, gpu_bytes=cluster.gpu_bytes)
    return Plan(
        config=config,
        cluster=cluster,
        workload=workload,
        memory=phases or peak_memory(shape, config, cluster.gpu_bytes),
        kv_cache_tokens=cached,
        generation=generation(shape, config, cluster, workload, cached),
        training=training or training_time(shape, config, cluster, workload),
        sync_seconds=sync_seconds(shape, config, cluster),
        staging_seconds=staging_seconds(shape, config, cluster),
    )


def peak_memory(shape: ModelShape, config: VapoConfig, gpu_bytes: int) -> dict[str, PhaseMemory]:
    """Return each phase's memory on the stage that needs most, for the roles of this run."""
    found = [
        memory.phase_memory(shape, config, gpu_bytes=gpu_bytes, pp_rank=stage)
        for stage in Layout(shape, config).outer_stages
    ]
    return {name: max((f[name] for f in found), key=lambda p: p.total) for name in found[0]}


def misfit(
    shape: ModelShape, config: VapoConfig, cluster: Cluster, phases: dict[str, PhaseMemory]
) -> str | None:
    """Say why a configuration does not fit into a GPU or a node's host memory; None: it fits.

    Args:
        shape: the model.
        config: the layout divides the model.
        cluster: what the job runs on.
        phases: peak_memory.
    """
    return gpu_misfit(shape, config, cluster.gpu_bytes, phases) or _host_misfit(
        shape, config, cluster.gpus_per_node
    )


def gpu_misfit(
    shape: ModelShape, config: VapoConfig, gpu_bytes: int, phases: dict[str, PhaseMemory]
) -> str | None:
    """Say why phases of a configuration do not fit into a GPU; None: they do."""
    name, fullest = max(phases.items(), key=lambda item: item[1].total)
    if fullest.total > gpu_bytes:
        parts = "; ".join(f"{part} {n / GB:.1f}" for part, n in _largest_parts(fullest))
        need = f"{fullest.total / GB:.1f} GB of {gpu_bytes / GB:.1f}"
        return f"{name}{_side(config, name)} needs {need} ({parts})"
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    cached = memory.kv_cache_tokens(shape, config, gpu_bytes=gpu_bytes)
    if cached < longest:
        return (
            f"generation{_side(config, GENERATION)} leaves vLLM a KV cache of {cached} tokens, "
            f"less than one sequence of {longest} "
            f"(weights {phases[GENERATION].sampler_weights / GB:.1f} GB)"
        )
    return None


def _side(config: VapoConfig, phase: str) -> str:
    """Say whose GPU a phase is on, where GPUs of their own sample."""
    if not config.rollout.is_apart:
        return ""
    return " on a sampler's GPU" if phase == GENERATION else " on a trainer's GPU"


def _host_misfit(shape: ModelShape, config: VapoConfig, gpus_per_node: int) -> str | None:
    """Say why a node needs more than parallel.host_memory_gb, if that is set."""
    limit = config.parallel.host_memory_gb
    needed = host_bytes_per_node(shape, config, gpus_per_node=gpus_per_node)
    if limit is None or needed.total <= limit * GB:
        return None
    remedy = ""
    if config.checkpoint.asynchronous and needed.checkpoint:
        synchronous = config.checkpoint.model_copy(update={"asynchronous": False})
        other = config.model_copy(update={"checkpoint": synchronous})
        less = host_bytes_per_node(shape, other, gpus_per_node=gpus_per_node)
        remedy = f"; with checkpoint.asynchronous=false {less.total / GB:.1f}"
    staged = ""
    if needed.staged:
        versions = config.rollout.lag + 2
        staged = f", and {versions} versions of the weights {needed.staged / GB:.1f},"
    return (
        f"offload needs {needed.offloaded / GB:.1f} GB, a checkpoint {needed.checkpoint / GB:.1f} "
        f"and a step's responses {needed.step / GB:.1f}{staged} of a node's {limit:.1f} GB of "
        f"host memory{remedy}"
    )


def _largest_parts(phase: PhaseMemory) -> list[tuple[str, int]]:
    """Return the names and bytes of a phase's three largest parts."""
    parts = sorted(dataclasses.asdict(phase).items(), key=lambda item: -item[1])
    return [(name.replace("_", " "), size) for name, size in parts[:3] if size]


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
    reason = gpu_misfit(shape, config, gpu_bytes, phases)
    if reason is not None:
        raise ConfigError(
            f"this configuration cannot fit into a GPU: {reason}; {_remedy(config, reason)}, or "
            "let vapo plan find a layout"
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
    steps += [] if memory.offloads(config) else ["set offload=true"]
    return ", ".join([*steps, f"lower max_tokens_per_microbatch={p.max_tokens_per_microbatch}"])


def model_flops(shape: ModelShape, workload: Workload) -> int:
    """Model FLOPs of a step's updates: forward and backward, without recomputation."""
    lengths = [int(n) + workload.prompt_tokens for n in response_lengths(workload)]
    outputs = workload.response_tokens
    passes = {"actor": 1, "critic": workload.critic_updates_per_step}
    return sum(
        passes[role] * flops.training_flops(shape, lengths, role=role, num_outputs=outputs)
        for role in workload.trained_roles
    )


def resharding_seconds(shape: ModelShape, plan: Plan) -> float:
    """Predict the weight sync from its actual plan, which takes seconds to make."""
    p, cluster = plan.config.parallel, plan.cluster
    trainer = layout_of(shape, p)
    rollout, per_node = plan.config.rollout, cluster.gpus_per_node
    samplers = range(p.world_size, cluster.num_gpus) if plan.config.rollout.is_apart else None
    sync_plan = planner.make_plan(
        shape, trainer, rollout.tensor_model_parallel_size, gpus_per_node=per_node, relay=True,
        samplers=samplers,
    )  # fmt: skip
    bandwidths = cost.Cluster(
        gpus_per_node=per_node,
        nvlink_gb_per_second=2 * cluster.rate("nvlink") / GB,
        network_gb_per_second=cluster.rate("network") / GB,
        memory_gb_per_second=cluster.rate("memory") / GB,
    )
    return cost.plan_cost(sync_plan, bandwidths, rollout.sync_bucket_bytes).seconds
