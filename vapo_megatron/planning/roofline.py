"""Seconds of the trainer's phases, from FLOPs, bytes through memory and bytes on the wires.

Kernels follow each other: what products, memory and wires take is added up, and nothing hides
behind anything else but what the configuration overlaps. One stage's pass over one microbatch is
linear in its tokens, attended pairs and outputs (`Rates`); a pipeline of p stages and v chunks each
takes its slowest stage's time for every microbatch, and (p - 1) / v of a stage's mean time to fill
and drain (arXiv 2104.04473, section 2.2). A mini-batch takes as long as its slowest data-parallel
rank.

Counted for each layer and token, forward (q, k, F: this rank's widths; H: divided by TP too where
activations are sharded along the sequence):

    products     flops.layer_forward_flops / TP
    memory       10 H (two norms, two residuals), 2 (q + k) (rotary), 3 F (SwiGLU), in elements
    TP wires     two all-reduces of H elements, or as much as gathers and scatters

Backward: products twice, attention 2.5 times (five products for two), memory twice, wires once. A
layer that is computed again adds one forward pass. The actor's output projection is computed again
in any case (parallel/logprobs.py), and its scores pass through memory in float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from vapo_megatron.config import VapoConfig
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.planning import flops
from vapo_megatron.planning.cluster import Cluster
from vapo_megatron.planning.model_bytes import (
    DTYPE_BYTES,
    Role,
    chunk_parameters,
    sampler_weight_bytes,
    widths,
)
from vapo_megatron.planning.workload import Loads, Workload, loads

BACKWARD_PRODUCTS, BACKWARD_ATTENTION, BACKWARD_MEMORY = 2.0, 2.5, 2.0

SCORE_BYTES_FORWARD, SCORE_BYTES_BACKWARD = 32, 40
"""Through memory for each score of a response token, counted in parallel/logprobs.py: written and
read as bfloat16, then float32 passes (copy, maximum, shift, exponential, sum; and with the
gradient, scaling and copying back)."""

OWNED_BYTES, HELD_BYTES, ACCUMULATED_BYTES = 42, 4, 10
"""Through memory for each parameter: in an update, of those that this rank owns (gradient for the
norm, clipped, read; main parameter and two moments read and written; bfloat16 written) and of those
that it holds (gradient buffer zeroed); and for each microbatch, its gradient added in float32."""


class Rates(NamedTuple):
    """Seconds of a pass: of each token, pair, output and microbatch."""

    token: float
    pair: float
    output: float
    microbatch: float

    def seconds(self, work: Loads) -> Any:
        """Sum over the microbatches; float64, shaped as the loads."""
        return (
            self.token * work.tokens
            + self.pair * work.pairs
            + self.output * work.outputs
            + self.microbatch * work.microbatches
        )

    def plus(self, other: Rates, factor: float = 1.0) -> Rates:
        """Return self + factor * other."""
        return Rates(*(a + factor * b for a, b in zip(self, other, strict=True)))


@dataclasses.dataclass(frozen=True)
class Phase:
    """A phase of the trainer on the slowest rank."""

    seconds: float
    bubble: float = 0.0
    """Share of the seconds in which a stage waits for others to fill or drain the pipeline."""
    imbalance: float = 0.0
    """How much longer the slowest data-parallel rank computes than the mean, as a share of it."""
    stages: float = 0.0
    """How much longer the last stage computes than the others, as a share of theirs."""
    between_seconds: float = 0.0
    """Of the seconds, those between mini-batches: the data-parallel collectives that nothing hides,
    and the optimizer."""


class _Trainer:
    """A layout's numbers that all phases share."""

    def __init__(self, shape: ModelShape, config: VapoConfig, cluster: Cluster) -> None:
        p = config.parallel
        self.shape, self.config, self.cluster = shape, config, cluster
        self.tp_size, self.pp_size = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
        self.vpp_size = p.virtual_pipeline_model_parallel_size or 1
        self.dp_size = p.data_parallel_size
        self.layers = shape.num_layers // self.pp_size
        self.element_bytes = DTYPE_BYTES[config.model.dtype]

    def layer(self, *, products: float, attention: float, memory: float, wires: float) -> Rates:
        """One stage's layers, each part so many times."""
        shape, cluster, size = self.shape, self.cluster, self.element_bytes
        w = widths(shape, self.tp_size)
        one, two = (flops.layer_forward_flops(shape, [n]) for n in (1, 2))
        # A sequence of 1 token has 1 pair, one of 2 has 3.
        per_pair = two - 2 * one
        region = w.hidden / (self.tp_size if self.config.parallel.sequence_parallel else 1)
        elements = 10 * region + 2 * (w.query + w.key) + 3 * w.ffn
        token = products * (one - per_pair) / self.tp_size / cluster.matmul_flops
        token += memory * elements * size / cluster.memory_bytes
        # An all-reduce moves what a gather and a scatter do.
        token += wires * 4 * cluster.all_gather_seconds(w.hidden * size, self.tp_size)
        pair = attention * per_pair / self.tp_size / cluster.attention_flops
        calls = wires * 2 * cluster.collective_seconds if self.tp_size > 1 else 0.0
        return Rates(*(self.layers * x for x in (token, pair, 0.0, calls)))

    def output(self, role: Role, *, products: float, score_bytes: float) -> Rates:
        """The last stage's output projection or value head."""
        if role == "critic":
            return Rates(0, 0, 0, 0)  # H products a token: nothing beside a layer's 12 H^2.
        scores = self.shape.vocab_size / self.tp_size
        products *= flops.output_forward_flops(self.shape, 1, role=role) / self.tp_size
        seconds = products / self.cluster.matmul_flops
        return Rates(0, 0, seconds + score_bytes * scores / self.cluster.memory_bytes, 0)

    def sends(self, times: float) -> Rates:
        """From stage to stage; the virtual pipeline's schedule overlaps them."""
        if self.pp_size == 1 or self.vpp_size > 1:
            return Rates(0, 0, 0, 0)
        parts = self.tp_size if self.config.parallel.sequence_parallel else 1
        wire = self.cluster.neighbour_bytes(self.pp_size, self.tp_size * self.dp_size)
        token = self.shape.hidden_size * self.element_bytes / parts / wire
        return Rates(times * token, 0, 0, times * self.cluster.collective_seconds)

    def held(self, role: Role) -> int:
        """Parameters that learn, of the stage that holds most."""
        arguments = self.shape, self.config, role
        return max(
            sum(map(sum, chunk_parameters(*arguments, pp_rank=stage, learning=True)))
            for stage in (0, self.pp_size - 1)
        )


def scoring(
    shape: ModelShape, config: VapoConfig, cluster: Cluster, workload: Workload, role: Role
) -> Phase:
    """Predict the forward passes over a whole step: values (critic) or log-probabilities."""
    trainer = _Trainer(shape, config, cluster)
    stage = trainer.layer(products=1, attention=1, memory=1, wires=1).plus(trainer.sends(1))
    output = trainer.output(role, products=1, score_bytes=SCORE_BYTES_FORWARD)
    work = loads(
        workload, shape.hidden_size, trainer.dp_size, config.parallel.max_tokens_per_microbatch
    )
    # One pipeline pass carries all mini-batches' microbatches.
    whole = Loads(*(part.sum(0, keepdims=True) for part in work))
    return _pipeline(trainer, stage, stage.plus(output), whole, 0.0)


def update(
    shape: ModelShape, config: VapoConfig, cluster: Cluster, workload: Workload, role: Role
) -> Phase:
    """Predict a step's updates of one role."""
    trainer, parallel = _Trainer(shape, config, cluster), config.parallel
    again = 1.0 if parallel.recompute == "full" else 0.0
    attention = again if parallel.recompute != "selective" else 1.0
    forward = trainer.layer(
        products=1 + again, attention=1 + attention, memory=1 + again, wires=1 + again
    )
    backward = trainer.layer(
        products=BACKWARD_PRODUCTS, attention=BACKWARD_ATTENTION, memory=BACKWARD_MEMORY, wires=1
    )
    held = trainer.held(role)
    accumulated = Rates(0, 0, 0, ACCUMULATED_BYTES * held / cluster.memory_bytes)
    stage = forward.plus(backward).plus(accumulated).plus(trainer.sends(2))
    # Forward, again, and two products backward.
    score_bytes = SCORE_BYTES_FORWARD + SCORE_BYTES_BACKWARD
    output = trainer.output(role, products=2 + BACKWARD_PRODUCTS, score_bytes=score_bytes)
    work = loads(workload, shape.hidden_size, trainer.dp_size, parallel.max_tokens_per_microbatch)
    count = float(work.microbatches[:, 0].sum())
    shortest = float(stage.seconds(work).mean(1).sum()) / count
    wires = _gradient_seconds(trainer, held, backward_seconds=shortest / 2)
    owned = held / (trainer.dp_size if parallel.use_distributed_optimizer else 1)
    memory = (OWNED_BYTES * owned + HELD_BYTES * held) / cluster.memory_bytes
    phase = _pipeline(trainer, stage, stage.plus(output), work, wires + memory)
    if role == "actor":
        return phase
    passes = workload.critic_updates_per_step
    return dataclasses.replace(
        phase, seconds=passes * phase.seconds, between_seconds=passes * phase.between_seconds
    )


def _gradient_seconds(trainer: _Trainer, held: int, *, backward_seconds: float) -> float:
    """Time of one update's data-parallel collectives, less what passes of a microbatch hide.

    Args:
        trainer: the layout.
        held: parameters of one rank.
        backward_seconds: of half of a microbatch's pass: at least its forward, and about its
            backward pass; what is overlapped is hidden behind the last or the first of them.
    """
    parallel, cluster = trainer.config.parallel, trainer.cluster
    size, stride = trainer.dp_size, trainer.tp_size
    reduced = cluster.all_gather_seconds(4 * held, size, stride)
    if not parallel.use_distributed_optimizer:
        gathered, reduced = 0.0, 2 * reduced
    else:
        gathered = cluster.all_gather_seconds(trainer.element_bytes * held, size, stride)
    if parallel.overlap_grad_reduce:
        reduced = max(0.0, reduced - backward_seconds)
    if parallel.overlap_param_gather:
        gathered = max(0.0, gathered - backward_seconds)
    return reduced + gathered


def _pipeline(trainer: _Trainer, stage: Rates, last: Rates, work: Loads, after: float) -> Phase:
    """Add up mini-batches: slowest rank, slowest stage, filling and draining, what follows.

    Args:
        trainer: the layout.
        stage: any stage's pass over a microbatch.
        last: the last stage's; no faster.
        work: [mini-batches, ranks].
        after: seconds that follow each mini-batch.
    """
    middle, slowest = stage.seconds(work), last.seconds(work)
    fill = (trainer.pp_size - 1) / trainer.vpp_size * middle / work.microbatches
    computed = (slowest + fill).max(1)
    total = float(computed.sum()) + len(computed) * after
    return Phase(
        seconds=total,
        bubble=float(fill.mean(1).sum()) / total,
        imbalance=float(slowest.max(1).sum() / slowest.mean(1).sum()) - 1,
        stages=float(slowest.sum() / middle.sum()) - 1 if trainer.pp_size > 1 else 0.0,
        between_seconds=len(computed) * after,
    )


def sync_seconds(shape: ModelShape, config: VapoConfig, cluster: Cluster) -> float:
    """Estimate the weights' way into vLLM without making the plan (weights/reshard/cost.py does).

    Each node receives the part of the model that its ranks do not hold, once, through all its
    adapters; meanwhile each rank receives within the node what it lacks of its vLLM shard; then it
    writes that shard. No latencies.
    """
    trainer = _Trainer(shape, config, cluster)
    shard = sampler_weight_bytes(shape, config)
    sampler_size = config.rollout.tensor_model_parallel_size
    whole = shard * sampler_size
    per_node = min(cluster.gpus_per_node, cluster.num_gpus)
    # Ranks of a node differ in TP first, then in DP, and in PP only where both fit in it.
    stages = max(1, per_node // (trainer.tp_size * trainer.dp_size))
    share = min(1.0, stages / trainer.pp_size * min(1.0, per_node / trainer.tp_size))
    across = (1 - share) * whole / per_node / cluster.network_bytes
    lacking = 1 - min(1.0, sampler_size / (trainer.tp_size * trainer.pp_size))
    within = lacking * shard / cluster.nvlink_bytes
    return max(across, within) + 2 * shard / cluster.memory_bytes
