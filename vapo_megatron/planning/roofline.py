"""Predicted seconds of the trainer's phases, from FLOPs, memory traffic and communication.

Kernels run one after the other: the times of matrix multiplications, memory traffic and
communication are added up, and only what the configuration overlaps is hidden. One stage's pass
over a microbatch is linear in its tokens, attended pairs and outputs (`Rates`). A pipeline of p
stages with v chunks each takes its slowest stage's time for every microbatch, and (p - 1) / v of a
stage's mean time to fill and drain (arXiv 2104.04473, section 2.2). A mini-batch takes as long as
its slowest data-parallel rank.

Counted per layer and token, forward (q, k, F: this rank's widths; H: divided by TP with sequence
parallelism):

    matmul         flops.layer_forward_flops / TP
    memory         10 H (two norms, two residuals), 2 (q + k) (rotary), 3 F (SwiGLU), in elements
    communication  TP: two all-reduces of H elements, or all-gathers and reduce-scatters of the same
                   CP: keys and values, 2 k elements, of the other ranks, by a ring or a gather
                   EP: H elements for each of a token's experts there and back, in place of the
                   second of TP's; 6 more pass through memory to be sorted and put back

Experts' products are counted at the rate of others, and their load as even over the ranks.

Context-parallel ranks share tokens, pairs and outputs evenly (data/context_parallel.py). Backward
gathers keys and values again and sends their gradients. A ring overlaps some of this with
attention, which is not modelled.

Backward: matrix multiplications twice, attention 2.5 times (five multiplications for two), memory
twice, communication once. A recomputed layer adds one forward pass. The actor's output projection
is always recomputed (parallel/logprobs.py), and its scores pass through memory in float32.

Adapters (model.lora) add what adapters.py counts to each pass. A frozen matrix is multiplied once
backward, as it has no gradient.

The host starts kernels while the GPU computes: a stage's layers take a microbatch as long as the
slower of the two.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from vapo_megatron.config import VapoConfig
from vapo_megatron.config.phases import VALUE_ROLES, Role
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.planning import flops
from vapo_megatron.planning.adapters import adapted_layers
from vapo_megatron.planning.cluster import Cluster
from vapo_megatron.planning.matrices import kind_of, update_seconds
from vapo_megatron.planning.model_bytes import Layout
from vapo_megatron.planning.parameters import adapters_of, trained_rows
from vapo_megatron.planning.workload import Loads, Workload, loads
from vapo_megatron.weights.holders import layout_of

FROZEN_MATMUL = 1.0
"""Backward, of a matrix without a gradient."""
BACKWARD_MATMUL, BACKWARD_ATTENTION, BACKWARD_MEMORY = 2.0, 2.5, 2.0
BACKWARD_HOST = 1.2
"""In forward passes; measured with Cluster.layer_host_seconds."""

SCORE_BYTES_FORWARD, SCORE_BYTES_BACKWARD = 32, 40
"""Memory traffic per score of a response token, counted in parallel/logprobs.py: written and read
as bfloat16, then float32 passes (copy, maximum, shift, exponential, sum; backward also scaling and
copying back)."""

OWNED_BYTES, HELD_BYTES, ACCUMULATED_BYTES = 42, 4, 10
"""Memory traffic per parameter. In an update, for each that this rank's optimizer owns (gradient
read for the norm, clipped, read; main parameter and two moments read and written; bfloat16 written)
and for each on this rank (gradient buffer zeroed). In each microbatch: its gradient added in
float32."""


class Rates(NamedTuple):
    """Seconds of a pass per token, pair, output and microbatch."""

    token: float = 0.0
    pair: float = 0.0
    output: float = 0.0
    microbatch: float = 0.0

    def seconds(self, work: Loads) -> Any:
        """Total over the microbatches; float64 in the shape of `work`."""
        return (
            self.token * work.tokens
            + self.pair * work.pairs
            + self.output * work.outputs
            + self.microbatch * work.microbatches
        )

    def plus(self, other: Rates) -> Rates:
        """Return the rates of one pass after the other."""
        return Rates(*(a + b for a, b in zip(self, other, strict=True)))


@dataclasses.dataclass(frozen=True)
class Phase:
    """One of the trainer's phases, on the slowest rank."""

    seconds: float
    bubble: float
    """Share of the seconds in which a stage idles while the pipeline fills or drains."""
    imbalance: float
    """How much longer the slowest data-parallel rank computes than the mean, as a share of it."""
    stages: float
    """How much longer the last stage computes than the others, as a share of theirs."""
    between_seconds: float
    """Of the seconds, those between mini-batches: data-parallel collectives that are not
    overlapped, and the optimizer step."""
    context_seconds: float = 0.0
    """Of the seconds, those in which context-parallel ranks exchange keys and values."""


class _Trainer(Layout):
    """A layout's costs, which the phases are composed of."""

    def __init__(self, shape: ModelShape, config: VapoConfig, cluster: Cluster) -> None:
        super().__init__(shape, config)
        self.shape, self.config, self.cluster = shape, config, cluster

    def layers(
        self, *, matmul: float, attention: float, memory: float, communication: float
    ) -> Rates:
        """All layers of a stage; the arguments say how many forward passes' worth of each part."""
        shape, cluster, size = self.shape, self.cluster, self.element_bytes
        w = self.widths
        one, two = (flops.layer_forward_flops(shape, [n]) for n in (1, 2))
        # A sequence of 1 token has 1 pair, one of 2 has 3.
        per_pair = two - 2 * one
        elements = 10 * self.residual_width + 2 * (w.query + w.key) + 3 * w.ffn
        elements += 6 * self.dispatched_width
        token = matmul * (one - per_pair) / self.tp_size / cluster.rate("matmul")
        token += memory * elements * size / cluster.rate("memory")
        # An all-reduce moves as much as an all-gather and a reduce-scatter.
        collectives = 4 if shape.experts is None else 2
        token += (
            communication * collectives * cluster.all_gather_seconds(w.hidden * size, self.tp_size)
        )
        ep_size = self.config.parallel.expert_model_parallel_size
        sent = cluster.all_gather_seconds(self.dispatched_width * size, ep_size)
        token += communication * 2 * sent
        pair = attention * per_pair / self.tp_size / cluster.rate("attention")
        shared = (self.tp_size > 1) + (ep_size > 1)
        calls = communication * 2 * cluster.collective_seconds * shared
        num_layers, part = shape.num_layers // self.pp_size, 1 / self.cp_size
        return Rates(*(num_layers * x for x in (part * token, part * pair, 0.0, calls)))

    def adapters(self, role: Role, *, forward: float, backward: float) -> Rates:
        """All adapters of a stage; the arguments say how many passes."""
        cluster, size, token, calls = self.cluster, self.element_bytes, 0.0, 0.0
        parts = self.shape.hidden_size // self.residual_width
        for one in adapted_layers(self.shape, self.config, role) or ():
            products = 2 * one.products(parts) * (forward + BACKWARD_MATMUL * backward)
            moved = one.traffic(parts, forward=forward, backward=backward) * size
            token += products / cluster.rate("matmul") + moved / cluster.rate("memory")
            passes = forward + backward
            token += passes * cluster.all_gather_seconds(one.narrow * size, self.tp_size)
            calls += passes * cluster.collective_seconds * (self.tp_size > 1)
        num_layers = self.shape.num_layers // self.pp_size
        return Rates(token=num_layers * token / self.cp_size, microbatch=num_layers * calls)

    def host(self, passes: float) -> Rates:
        """All layers of a stage: the host starts their kernels; in forward passes' worth."""
        num_layers = self.shape.num_layers // self.pp_size
        return Rates(microbatch=passes * num_layers * self.cluster.layer_host_seconds)

    @property
    def recomputed_share(self) -> float:
        """Of the layers, those that the backward pass computes again as a whole."""
        parallel = self.config.parallel
        if parallel.recompute != "full":
            return 0.0
        if parallel.recompute_method == "uniform":
            return 1.0
        return parallel.recompute_num_layers / self.layers_per_chunk

    def context(self, times: float) -> Rates:
        """All layers of a stage: keys and values of the other context-parallel ranks, so often."""
        num_bytes = 2 * self.widths.key * self.element_bytes
        token = self.cluster.all_gather_seconds(num_bytes, self.cp_size, self.tp_size)
        calls = (self.cp_size - 1) * self.cluster.collective_seconds
        num_layers = self.shape.num_layers // self.pp_size
        return Rates(token=times * num_layers * token, microbatch=times * num_layers * calls)

    def output(self, role: Role, *, matmul: float, score_bytes: float) -> Rates:
        """The last stage's output projection or value head."""
        if role in VALUE_ROLES:
            return Rates()  # A value head has H weights, a layer about 12 H^2.
        scores = self.shape.vocab_size / self.tp_size
        matmul *= flops.output_forward_flops(self.shape, 1, role=role) / self.tp_size
        seconds = matmul / self.cluster.rate("matmul")
        seconds += score_bytes * scores / self.cluster.rate("memory")
        return Rates(output=seconds / self.cp_size)

    def sends(self, times: float) -> Rates:
        """Activations from stage to stage, which the interleaved schedule overlaps."""
        if self.pp_size == 1 or self.vpp_size > 1:
            return Rates()
        bandwidth = self.cluster.neighbour_bytes(self.pp_size, self.tp_size * self.replica_size)
        token = self.residual_width * self.element_bytes / bandwidth / self.cp_size
        return Rates(token=times * token, microbatch=times * self.cluster.collective_seconds)

    def matrix_seconds(self, role: Role) -> float:
        """Updates of Dion or Muon on the rank and the stage that have most; else 0."""
        kind = kind_of(self.config, role)
        if kind is None:
            return 0.0
        divisor = self.config.model.make_vocab_size_divisible_by
        place = layout_of(self.shape, self.config.parallel, divisor)
        return max(
            update_seconds(
                trained_rows(self.shape, self.config, role, stage),
                self.shape, kind, place, self.cluster,
            )
            for stage in self.outer_stages
        )  # fmt: skip

    def trained_parameters(self, role: Role) -> list[tuple[int, int]]:
        """Trained parameters of a rank on the stage that has most: (count, copies), by holders."""
        parallel = self.config.parallel
        most = max(
            (trained_rows(self.shape, self.config, role, stage) for stage in self.outer_stages),
            key=lambda found: sum(size for _, size in found),
        )
        experts = sum(size for row, size in most if row.expert is not None)
        return [
            (sum(size for _, size in most) - experts, self.replica_size),
            (experts, parallel.expert_replica_size),
        ]


def scoring(
    shape: ModelShape, config: VapoConfig, cluster: Cluster, workload: Workload, role: Role
) -> Phase:
    """Predict the forward passes over a whole step: values, scores or log-probabilities."""
    trainer = _Trainer(shape, config, cluster)
    layers = trainer.layers(matmul=1, attention=1, memory=1, communication=1)
    context = trainer.context(1)
    stage = layers.plus(context).plus(trainer.sends(1))
    stage = stage.plus(trainer.adapters(role, forward=1, backward=0))
    output = trainer.output(role, matmul=1, score_bytes=SCORE_BYTES_FORWARD)
    work = loads(
        workload, shape.hidden_size, trainer.dp_size, config.parallel.max_tokens_per_microbatch
    )
    # All mini-batches' microbatches go through the pipeline in one pass.
    total = Loads(*(part.sum(0, keepdims=True) for part in work))
    return _pipeline(trainer, stage, trainer.host(1), output, total, 0.0, context)


def update(
    shape: ModelShape, config: VapoConfig, cluster: Cluster, workload: Workload, role: Role
) -> Phase:
    """Predict a step's updates of one role."""
    trainer, parallel = _Trainer(shape, config, cluster), config.parallel
    layers_again = trainer.recomputed_share
    attention_again = 1.0 if parallel.recompute == "selective" else layers_again
    forward = trainer.layers(
        matmul=1 + layers_again,
        attention=1 + attention_again,
        memory=1 + layers_again,
        communication=1 + layers_again,
    )
    is_frozen = adapters_of(shape, config, role) is not None
    backward_matmul = FROZEN_MATMUL if is_frozen else BACKWARD_MATMUL
    backward = trainer.layers(
        matmul=backward_matmul,
        attention=BACKWARD_ATTENTION,
        memory=BACKWARD_MEMORY,
        communication=1,
    )

    of_holders = trainer.trained_parameters(role)
    held = sum(count for count, _ in of_holders)
    accumulated = Rates(microbatch=ACCUMULATED_BYTES * held / cluster.rate("memory"))
    # Forward, recomputed, and backward, where their gradients go as well.
    context = trainer.context(1 + attention_again + 2)
    stage = forward.plus(backward).plus(context).plus(accumulated).plus(trainer.sends(2))
    stage = stage.plus(trainer.adapters(role, forward=1 + layers_again, backward=1))
    host = trainer.host(1 + layers_again + BACKWARD_HOST)
    # Forward, recomputed, and backward.
    score_bytes = SCORE_BYTES_FORWARD + SCORE_BYTES_BACKWARD
    output = trainer.output(role, matmul=2 + backward_matmul, score_bytes=score_bytes)

    work = loads(workload, shape.hidden_size, trainer.dp_size, parallel.max_tokens_per_microbatch)
    count = float(work.microbatches[:, 0].sum())
    one_pass = float(_layers_seconds(stage, host, work).mean(1).sum()) / count
    # Gradients are reduced during the last microbatch only, parameters gathered in the first.
    collectives = _gradient_seconds(trainer, of_holders, role, overlapped_seconds=one_pass / 2)
    collectives += trainer.matrix_seconds(role)
    is_shared = parallel.use_distributed_optimizer or kind_of(config, role) is not None
    owned = sum(count / (copies if is_shared else 1) for count, copies in of_holders)
    memory = (OWNED_BYTES * owned + HELD_BYTES * held) / cluster.rate("memory")

    phase = _pipeline(trainer, stage, host, output, work, collectives + memory, context)
    if role == "actor":
        return phase
    passes = workload.critic_updates_per_step
    return dataclasses.replace(
        phase,
        seconds=passes * phase.seconds,
        between_seconds=passes * phase.between_seconds,
        context_seconds=passes * phase.context_seconds,
    )


def _gradient_seconds(
    trainer: _Trainer,
    of_holders: list[tuple[int, int]],
    role: Role,
    *,
    overlapped_seconds: float,
) -> float:
    """Time of one update's data-parallel collectives that is not overlapped with compute.

    Args:
        trainer: the layout.
        of_holders: see _Trainer.trained_parameters.
        role: whose; Dion and Muon need whole gradients, and gather parameters at once.
        overlapped_seconds: compute that overlap_grad_reduce and overlap_param_gather can hide
            behind, each: half of one microbatch's forward and backward pass, as gradients are
            reduced during the last microbatch and parameters gathered during the first.
    """
    parallel, cluster = trainer.config.parallel, trainer.cluster
    stride = trainer.tp_size
    reduced = sum(cluster.all_gather_seconds(4 * n, size, stride) for n, size in of_holders)
    has_matrices = kind_of(trainer.config, role) is not None
    if has_matrices or not parallel.use_distributed_optimizer:
        reduced *= 2
    gathered = 0.0
    if has_matrices or parallel.use_distributed_optimizer:
        gathered = sum(
            cluster.all_gather_seconds(trainer.element_bytes * n, size, stride)
            for n, size in of_holders
        )
    if parallel.overlap_grad_reduce:
        reduced = max(0.0, reduced - overlapped_seconds)
    if parallel.overlap_param_gather and not has_matrices:
        gathered = max(0.0, gathered - overlapped_seconds)
    return reduced + gathered


def _layers_seconds(stage: Rates, host: Rates, work: Loads) -> Any:
    """Float64 in the shape of `work`: the GPU's pass, or the host's where that takes longer."""
    return np.maximum(stage.seconds(work), host.seconds(work))


def _pipeline(
    trainer: _Trainer,
    stage: Rates,
    host: Rates,
    output: Rates,
    work: Loads,
    after: float,
    context: Rates,
) -> Phase:
    """Add up the mini-batches: slowest rank, slowest stage, fill and drain, and what follows.

    Args:
        trainer: the layout.
        stage: the GPU's pass over a microbatch of a stage's layers.
        host: what the host takes to start that pass's kernels, at the same time.
        output: what the last stage computes more.
        work: [mini-batches, ranks].
        after: seconds after each mini-batch.
        context: the part of `stage` in which keys and values are exchanged.
    """
    middle = _layers_seconds(stage, host, work)
    slowest = middle + output.seconds(work)
    fill = (trainer.pp_size - 1) / trainer.vpp_size * middle / work.microbatches
    computed = (slowest + fill).max(1)
    total = float(computed.sum()) + len(computed) * after
    return Phase(
        seconds=total,
        bubble=float(fill.mean(1).sum()) / total,
        imbalance=float(slowest.max(1).sum() / slowest.mean(1).sum()) - 1,
        stages=float(slowest.sum() / middle.sum()) - 1 if trainer.pp_size > 1 else 0.0,
        between_seconds=len(computed) * after,
        context_seconds=float(context.seconds(work).max(1).sum()),
    )
