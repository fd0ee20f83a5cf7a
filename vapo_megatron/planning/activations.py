"""Predicted activation bytes of forward and backward passes over a packed microbatch on one GPU.

Saved by one layer for the backward pass, in elements per token. t is the tensor-parallel size; q, k
and F are the widths of this rank's query heads, key heads and gated linear unit; p is the width of
the projected query, key and value together (q + 2k; the whole model's where tensor-parallel ranks
outnumber the key-value heads, as they gather it); h = H/t with sequence parallelism and H without
it; n is the number of this rank's query heads:

    tensor                              GPU      CPU, float32   CPU, bfloat16     saved by
    2 norms: input                      2 h      2 h            2 h in float32    norm
    2 norms: before the weight          -        2 h            2 h in float32    norm's weight
    2 norms: output                     2 h      2 h            2 h               linear layers
    projected q, k, v: v is a view      p        -              -                 attention
    qk_norm: input                      q        q + p          q + k in float32  norm
    qk_norm: before the weight          -        q + k          q + k in float32  norm's weight
    rotated q and k; on a CPU v, too    q + k    q + 2k         q + 2k            attention
    attention's output                  q        2 q            2 q               attention, linear
    log-sum-exp in float32              n        n              n                 attention
    gate and up                         2 F      2 F            2 F               SiLU
    SiLU's output, up once more         -        2 F            2 F               product
    product                             F        F              F                 linear layer
    a token's copies for its experts    k H/t    -              -                 experts

With experts F is the sum of the k that a token is sent to, over t, as tokens are even over the
ranks that hold experts; the router's scores and what the dispatcher remembers are left out.

The GPU column follows megatron-core 0.16.1's layers with their GPU kernels, as selected by
build.py: torch's fused RMSNorm, attention that does not materialize scores, and a fused SwiGLU. It
agrees with section 4 of arXiv 2205.05198 (Korthikanti et al.) without dropout and attention scores,
except for a gated linear unit in place of GELU, fewer key-value heads than query heads, and p,
which stays alive because the value that attention saves is a view of it. Transformer Engine's
layers save a copy of the value instead, k rather than p: slightly less than is counted here.

What one layer saves, by parallel.recompute:
    none       all of the above
    selective  attention's part becomes p + 2 q, or p + q where a rank has one key-value head, whose
               query is a view of p; with qk_norm p + 2 q + k and the norm's
    full       only the input, h, of each unit of parallel.recompute_num_layers layers; all of the
               above for one unit at a time. With recompute_method=block the input of so many
               layers of each chunk, which come first, and all of the above of its others: when
               the first of them is computed again, the others' are free

With adapters (model.lora) the layers' own weights and norms are frozen. Then "before the weight" is
not saved, the outputs of norms and the product only where an adapter takes them, and adapters.py
says what these save. While the backward pass runs there is no gradient of a frozen weight, nor of
the embedding; what a layer's adapters have at one time, forward, may be more than what its backward
pass adds. Experts are counted as if they were trained.

The CPU columns are there to be measured: tests compare them with real allocations, which verifies
what the columns have in common and everything outside the layers. The CPU's attention does not
materialize scores either. Statistics of norms, a few bytes a token, and the rotary table are left
out.
"""

from __future__ import annotations

import dataclasses
import functools

from vapo_megatron.config import VapoConfig
from vapo_megatron.config.phases import VALUE_ROLES, Role
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.planning.adapters import AdaptedLinear, adapted_layers, named
from vapo_megatron.planning.logprobs import logprob_bytes
from vapo_megatron.planning.model_bytes import Layout


def microbatch_tokens(config: VapoConfig) -> int:
    """Most tokens of a packed microbatch on a rank; a single sequence may exceed the budget.

    Context-parallel ranks share the microbatch evenly.
    """
    rollout, parallel = config.rollout, config.parallel
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    return -(-max(parallel.max_tokens_per_microbatch, longest) // parallel.context_parallel_size)


def chunks_in_flight(config: VapoConfig, *, pp_rank: int) -> int:
    """Most forward passes of model chunks whose backward pass is still to come.

    With the 1F1B schedule a stage runs pp - rank - 1 microbatches ahead, interleaved
    2 (pp - rank - 1) + (vpp - 1) pp chunks (get_pp_rank_microbatches of schedules.py; arXiv
    2104.04473, section 2.2); never more than a mini-batch has microbatches, of at least one
    response each.
    """
    parallel = config.parallel
    pp_size = parallel.pipeline_model_parallel_size
    vpp_size = parallel.virtual_pipeline_model_parallel_size or 1
    ahead = pp_size - pp_rank - 1
    if vpp_size > 1:
        ahead = 2 * ahead + (vpp_size - 1) * pp_size
    responses = -(-config.algorithm.mini_batch_size // parallel.data_parallel_size)
    rounded = responses if vpp_size == 1 else -(-responses // pp_size) * pp_size
    return min(ahead + 1, rounded * vpp_size)


@dataclasses.dataclass(frozen=True)
class Passes:
    """Bytes of one role's forward and backward passes on one GPU."""

    shape: ModelShape
    config: VapoConfig
    role: Role
    _: dataclasses.KW_ONLY
    pp_rank: int
    tokens: int
    """S', of a packed microbatch on a context-parallel rank, before sequence parallelism splits
    it."""
    on_cpu: bool = False
    """Use the table's CPU columns, as tests do."""

    @functools.cached_property
    def _layout(self) -> Layout:
        return Layout(self.shape, self.config)

    @functools.cached_property
    def _adapted(self) -> tuple[AdaptedLinear, ...] | None:
        """The linear layers with adapters, whose base is frozen; None: all is trained."""
        return adapted_layers(self.shape, self.config, self.role)

    def _saves_input(self, *names: str) -> int:
        """Count those of these linear layers that save their input."""
        if self._adapted is None:
            return len(names)
        return sum(named(self._adapted, name) is not None for name in names)

    @property
    def _is_last(self) -> bool:
        return self.pp_rank == self._layout.pp_size - 1

    def training(self) -> tuple[int, int]:
        """Return the peak of a forward and backward pass: (activations, logits), to be added up.

        What is in flight (`saved`), and the backward pass of one layer at a time, which adds the
        largest of
            gradients of gate, up and product      2 F S more than is freed by then
            the second linear layer's              F S + F H, and with sequence parallelism the
                                                   gathered gradient H S
            the first linear layer's               (2 H - F) S + 2 F H
        (with a frozen base the largest of 2 F S + the gathered gradient, (2 H - F) S, and what
        the adapters of gate and up have at one time, forward, above what the MLP saves)
        and twice the gradient of the residual stream, h S; with a pipeline also two receive buffers
        of that size. Sequence parallelism keeps a buffer [S, H] to gather into. On the first stage
        the embedding's gradient [V/t, H] counts in place of a layer's backward pass where it is
        larger. The log-probabilities' memory is freed before the layers' backward pass, so only the
        larger of the two counts.
        """
        tokens, layout, w = self.tokens, self._layout, self._layout.widths
        size = layout.element_bytes
        residual, gathered = tokens * layout.residual_width * size, self._gather_buffer()
        held = self.saved() + self._keys_and_values(backward=True)
        # A frozen layer gathers into memory of its own, which is free by the time of a peak.
        held += gathered if self._adapted is None else 0
        held += 2 * residual if layout.pp_size > 1 else 0
        if self._adapted is None:
            extra = max(
                size * 2 * w.ffn * tokens,
                size * w.ffn * (tokens + w.hidden) + gathered,
                size * ((2 * w.hidden - w.ffn) * tokens + 2 * w.ffn * w.hidden),
            )
        else:
            extra = max(
                size * 2 * w.ffn * tokens + gathered,
                size * (2 * w.hidden - w.ffn) * tokens,
                tokens * (size * self._adding(self._adapted) - self._mlp()),
            )
        # What goes to the experts and comes back, forward and backward.
        extra += 2 * residual + 2 * size * layout.dispatched_width * tokens
        extra += self._recomputed()
        if self.pp_rank == 0 and self._adapted is None:
            extra = max(extra, layout.vocabulary_rows * w.hidden * size)
        logits = self._logits(training=True)
        return held + max(0, extra - logits), logits

    def saved(self) -> int:
        """Return what the chunks in flight save, and on the last stage what follows the layers.

        After the layers: the final norm as in the table, then the actor's hidden states at the
        predicting tokens [T, H], counted as [S, H], or the critic's in float32. On a CPU a chunk's
        output is kept until its backward pass (build.py's deallocate_pipeline_outputs).
        """
        layout = self._layout
        size, h = layout.element_bytes, layout.residual_width
        in_flight = chunks_in_flight(self.config, pp_rank=self.pp_rank)
        held = in_flight * self.chunk()
        if self.on_cpu:
            held += (in_flight - self._is_last) * self.tokens * h * size
        if self._is_last:
            norm = h * (size if not self.on_cpu else 8 if self._adapted is None else 4)
            is_policy = self.role not in VALUE_ROLES
            hidden = self.shape.hidden_size * size if is_policy else 4 * h
            held += self.tokens * (norm + hidden)
        return held

    def chunk(self) -> int:
        """Return what one chunk's layers save for its backward pass."""
        p, num_layers = self.config.parallel, self._layout.layers_per_chunk
        units = p.recompute_num_layers
        if p.recompute != "full":
            return num_layers * self.layer(p.recompute)
        if p.recompute_method == "uniform":
            return num_layers // units * self.layer("full")
        return units * self.layer("full") + (num_layers - units) * self.layer("none")

    def _recomputed(self) -> int:
        """Bytes of the layers that are computed again at one time, above what `chunk` counts."""
        p, whole = self.config.parallel, self.layer("none")
        if p.recompute != "full":
            return 0
        if p.recompute_method == "uniform":
            return p.recompute_num_layers * whole - self.layer("full")
        free = (self._layout.layers_per_chunk - p.recompute_num_layers) * whole
        return max(0, whole - self.layer("full") - free)

    def layer(self, recompute: str) -> int:
        """Return what one layer saves for its backward pass with this parallel.recompute."""
        layout = self._layout
        size, h = layout.element_bytes, layout.residual_width
        if recompute == "full":
            return self.tokens * h * size
        before = 4 if self._adapted is None else 0
        norms = 2 * h * (4 + before if self.on_cpu else size)
        with_experts = self.shape.experts is not None
        norms += h * size * max(self._saves_input("linear_qkv", "linear_fc1"), 1 + with_experts)
        saved = self.tokens * (norms + self._attention(recompute == "selective") + self._mlp())
        return saved + self._of_adapters()

    def _mlp(self) -> int:
        """Bytes per token that a layer's MLP saves between its linear layers, or experts."""
        layout = self._layout
        product = self._saves_input("linear_fc2") or self.shape.experts is not None
        ffn = (4 if self.on_cpu else 2) + product
        return (ffn * layout.widths.ffn + layout.dispatched_width) * layout.element_bytes

    def _of_adapters(self) -> int:
        """Bytes that a layer's adapters save, beside the inputs of its linear layers."""
        layout, elements = self._layout, 0
        for one in self._adapted or ():
            cut = layout.tp_size if one.by_columns and self.config.parallel.sequence_parallel else 1
            elements += one.copied + one.narrow * self.tokens // cut
        return elements * layout.element_bytes

    @staticmethod
    def _adding(adapted: tuple[AdaptedLinear, ...]) -> int:
        """Elements per token of the first linear layer of the MLP while its adapters are added."""
        first = named(adapted, "linear_fc1")
        return 0 if first is None else 3 * first.outputs

    def _attention(self, selective: bool) -> int:
        """Bytes per token that attention saves between its two linear layers."""
        layout, shape, w = self._layout, self.shape, self._layout.widths
        size = layout.element_bytes
        gathered = shape.num_key_value_heads < layout.tp_size
        projected = w.projected * (layout.tp_size if gathered else 1)
        # With one key-value head the query is a view of the projection as well.
        copied = w.query if shape.num_key_value_heads > layout.tp_size else 0
        both = w.query + w.key
        if selective:
            total = size * (projected + w.query + (both if shape.qk_norm else copied))
        elif self.on_cpu:
            total = size * (both + w.key + 2 * w.query) + 4 * w.heads
            total -= 0 if self._saves_input("linear_proj") else size * w.query
        else:
            total = size * (projected + both + w.query) + 4 * w.heads
        if not shape.qk_norm:
            return total
        if not self.on_cpu:
            return total + size * copied
        if size < 4:
            return total + 4 * 2 * both
        return total + size * (copied + both + (0 if selective else projected))

    def inference(self) -> tuple[int, int]:
        """Return the peak of a forward pass without gradients: (activations, logits), to be added.

        In a layer: the stage's input, the layer's input, the norm's output and the previous
        microbatch's output (but not values), with the residual stream, gate, up and product (a CPU
        has gate and up twice), or with the projection, a copy of its query, rotated query and key,
        and attention's output; or what adapters have at one time. After the layers: the hidden
        states, the same gathered, those of the predicting tokens, and the scores.
        """
        layout, w = self._layout, self._layout.widths
        h, bytes_per_channel = layout.residual_width, self.tokens * layout.element_bytes
        # A virtual pipeline's last rank has the outputs of its other chunks.
        has_one_chunk = self.config.parallel.virtual_pipeline_model_parallel_size is None
        only_values = self._is_last and has_one_chunk and self.role in VALUE_ROLES
        held = (3 if only_values else 4) * h
        mlp = held + h + (5 if self.on_cpu else 3) * w.ffn + 3 * layout.dispatched_width
        attention = held + w.projected + 3 * w.query + w.key
        buffers = self._gather_buffer()
        if self._adapted is not None:
            whole, buffers = buffers // bytes_per_channel, 0
            query = named(self._adapted, "linear_qkv")
            mlp = max(mlp, held + h + max(2 * w.ffn + whole, self._adding(self._adapted)))
            joined = 3 * query.outputs if query else 0
            attention = max(attention, held + max(w.projected + whole, joined))
        logits = self._logits(training=False)
        after = bytes_per_channel * (h + 2 * w.hidden) if logits else 0
        layer = bytes_per_channel * max(mlp, attention)
        buffers += self._keys_and_values(backward=False)
        return max(layer - logits, after) + buffers, logits

    def _logits(self, *, training: bool) -> int:
        """Bytes of the actor's log-probabilities on the last stage, 0 elsewhere."""
        if self.role in VALUE_ROLES or not self._is_last:
            return 0
        # The old log-probabilities come with the entropy, the loss only for an entropy bonus.
        with_entropy = not training or self.config.algorithm.entropy_coef > 0
        return logprob_bytes(
            self._layout, self.tokens, training=training, with_entropy=with_entropy,
            on_cpu=self.on_cpu, is_frozen=self._adapted is not None,
        )  # fmt: skip

    def _keys_and_values(self, *, backward: bool) -> int:
        """Bytes of other context-parallel ranks' keys and values in one layer's attention.

        Transformer Engine sends them around a ring, [S', 2 k]: one is received while another is
        used, and so are their gradients backward (AttnFuncWithCPAndKVP2P). Our own attention
        gathers those of all ranks, [S, 2 k], and puts them into the order of the sequences;
        backward it sums their gradients in float32 and puts these into the ranks' order.
        """
        layout = self._layout
        if layout.cp_size == 1:
            return 0
        elements, size = 2 * layout.widths.key * self.tokens, layout.element_bytes
        if self.config.model.layer_spec != "local" and not self.on_cpu:
            return elements * size * (4 if backward else 2)
        return elements * layout.cp_size * ((size + 8) if backward else 2 * size)

    def _gather_buffer(self) -> int:
        """Bytes of sequence parallelism's buffer, which a layer's input is gathered into."""
        layout = self._layout
        if not self.config.parallel.sequence_parallel or layout.tp_size == 1:
            return 0
        return self.tokens * self.shape.hidden_size * layout.element_bytes
