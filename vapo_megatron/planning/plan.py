"""A configuration's plan: bytes and seconds of each phase."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

from vapo_megatron.config import VapoConfig
from vapo_megatron.config.phases import GENERATION, SYNC
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.planning import flops, memory
from vapo_megatron.planning.cluster import Cluster
from vapo_megatron.planning.generation import Generation, generation
from vapo_megatron.planning.memory import PhaseMemory
from vapo_megatron.planning.model_bytes import Layout, base_bytes, role_shape, state_bytes
from vapo_megatron.planning.parameters import adapters_of
from vapo_megatron.planning.reshard import plan_cost
from vapo_megatron.planning.roofline import Phase, scoring, update
from vapo_megatron.planning.schedule import Timeline, steady_state
from vapo_megatron.planning.sync_time import staging_seconds, sync_seconds
from vapo_megatron.planning.workload import Workload, response_lengths
from vapo_megatron.weights.holders import layout_of
from vapo_megatron.weights.reshard import planner

PUBLISHED_OVER_PREDICTED = (0.73, 1.44)
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
    generation: Generation | None
    """None: the data give the responses."""
    training: Training
    sync_seconds: float
    staging_seconds: float = 0.0
    """With rollout.lag: a rollout worker loads a version that it holds."""

    @property
    def seconds(self) -> dict[str, float]:
        """By phase, in the order of a step; copies to and from the host last."""
        found = {name: phase.seconds for name, phase in self.training.phases.items()}
        if self.generation is not None:
            found = {GENERATION: self.generation.seconds, **found, SYNC: self.sync_seconds}
        return {**found, "offload": self.training.offload_seconds}

    @functools.cached_property
    def timeline(self) -> Timeline:
        """How the steps follow each other; colocated, one phase after the other."""
        if not self.config.rollout.is_disaggregated or self.generation is None:
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
        if memory.scores(config, role)
    }
    for role in config.algorithm.trained_roles:
        found[memory.UPDATES[role]] = update(shape, *rest, role)
    in_order = {name: found[name] for name in memory.PHASES if name in found}
    return Training(in_order, offload_seconds(shape, config, cluster))


def offload_seconds(shape: ModelShape, config: VapoConfig, cluster: Cluster) -> float:
    """Predict the copies of a step between GPU and host memory.

    A role's parameters are copied in for its forward passes; for its updates parameters and
    optimizer state are copied in and out. A base below adapters is copied in for either, and never
    out.
    """
    if not memory.offloads(config):
        return 0.0
    copied = 0
    stages = Layout(shape, config).outer_stages
    for role in config.roles:
        of_role = role_shape(shape, config, role)
        states = [state_bytes(of_role, config, role, pp_rank=stage) for stage in stages]
        times = 2 if role in config.algorithm.trained_roles else 0
        once = int(memory.scores(config, role))
        bases = [base_bytes(of_role, config, role, pp_rank=stage) for stage in stages]
        copied += max(
            once * s.parameters + times * (s.parameters + s.optimizer) + (once + times // 2) * base
            for s, base in zip(states, bases, strict=True)
        )
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
    sampled = generation(shape, config, cluster, workload, cached) if config.samples else None
    return Plan(
        config=config,
        cluster=cluster,
        workload=workload,
        memory=phases or peak_memory(shape, config, cluster.gpu_bytes),
        kv_cache_tokens=cached,
        generation=sampled,
        training=training or training_time(shape, config, cluster, workload),
        sync_seconds=sync_seconds(shape, config, cluster) if config.samples else 0.0,
        staging_seconds=staging_seconds(shape, config, cluster),
    )


def peak_memory(shape: ModelShape, config: VapoConfig, gpu_bytes: int) -> dict[str, PhaseMemory]:
    """Return each phase's memory on the stage that needs most, for the roles of this run."""
    found = [
        memory.phase_memory(shape, config, gpu_bytes=gpu_bytes, pp_rank=stage)
        for stage in Layout(shape, config).outer_stages
    ]
    return {name: max((f[name] for f in found), key=lambda p: p.total) for name in found[0]}


def model_flops(shape: ModelShape, config: VapoConfig, workload: Workload) -> int:
    """Model FLOPs of a step's updates: forward and backward, without recomputation."""
    lengths = [int(n) + workload.given_tokens for n in response_lengths(workload)]
    outputs = workload.response_tokens
    passes = {"actor": 1, "critic": workload.critic_updates_per_step}
    return sum(
        passes[role]
        * flops.training_flops(
            shape, lengths, role=role, num_outputs=outputs,
            adapters=adapters_of(shape, config, role),
        )
        for role in workload.trained_roles
    )  # fmt: skip


def resharding_seconds(shape: ModelShape, plan: Plan) -> float:
    """Predict the weight sync from its actual plan, which takes seconds to make."""
    p, rollout, cluster = plan.config.parallel, plan.config.rollout, plan.cluster
    sync_plan = planner.make_plan(
        shape, layout_of(shape, p), rollout.tensor_model_parallel_size,
        gpus_per_node=cluster.gpus_per_node, relay=True,
        rollout_workers=range(p.world_size, cluster.num_gpus) if rollout.is_disaggregated else None,
    )  # fmt: skip
    return plan_cost(sync_plan, cluster, rollout.sync_bucket_bytes).seconds
