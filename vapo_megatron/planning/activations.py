"""What forward and backward passes hold, per packed micro-batch of S tokens on one GPU.

Saved for the backward pass by one layer, in elements for each of the S tokens. t is the
tensor-parallel size, q, k and F the widths of this rank's query heads, key heads and gated linear
unit, p the width of the projected query, key and value together (q + 2k; the whole model's where
tensor-parallel ranks outnumber the key-value heads, which they gather), h = H/t with sequence
parallelism and H without it, n this rank's query heads:

    tensor                              GPU        CPU float32   CPU bfloat16      saved by
    2 norms: input                      2 h        2 h           2 h in float32    norm
    2 norms: before the weight          -          2 h           2 h in float32    norm's weight
    2 norms: output                     2 h        2 h           2 h               linear layers
    projected q, k, v (v is a view)     p          -             -                 attention
    rotated q and k; v                  q + k      q + 2k        q + 2k            attention
    attention's output                  q          2 q           2 q               attention, linear
    log-sum-exp, float32                n          n             n                 attention
    with qk_norm: input                 q          q + p         (q + k) float32   norm
    with qk_norm: before the weight     -          q + k         (q + k) float32   norm's weight
    gate and up                         2 F        2 F           2 F               SiLU
    SiLU's output, up once more         -          2 F           2 F               product
    product                             F          F             F                 linear layer

The GPU column follows megatron-core 0.16.1's layers with their kernels for GPUs, as build.py asks
for them: torch's fused RMSNorm, attention that keeps no scores, and a fused SwiGLU. It agrees with
arXiv 2205.05198 (Korthikanti et al.), equations 1 to 4 without dropout and attention scores, but
for a gated linear unit in place of GELU, fewer key-value heads than query heads, and p, which stays
because the value that attention keeps is a view of it. Transformer Engine's layers keep a copy of
the value instead, so they need k rather than p: a little less than is counted here.

Recomputation changes what one layer saves:
    none       all of the above
    selective  attention's part becomes p + 2q (p + q where a rank has one key-value head)
    full       the layer's input alone, h; one layer at a time has all of the above

The CPU columns are what tests measure; they can check the columns' common part and everything that
is around the layers. The CPU's kernels here keep no scores either.
"""

from __future__ import annotations

from typing import Literal

from vapo_megatron.config import VapoConfig
from vapo_megatron.models.hf_config import ModelShape, padded_vocab_size
from vapo_megatron.planning.model_bytes import (
    DTYPE_BYTES,
    Role,
    Widths,
    layers_per_chunk,
    widths,
)

Kernels = Literal["gpu", "cpu"]

CHUNK_BYTES = 192 * 2**20
"""score_chunks.CHUNK_BYTES: float32 scores of one chunk of rows."""

SLAB_BYTES = 32 * 2**20
"""score_chunks.SLAB_BYTES: largest part of a narrow weight gradient beside its float32 sum."""


def microbatch_tokens(config: VapoConfig) -> int:
    """Most tokens of a packed micro-batch: a single sequence may exceed the budget."""
    rollout = config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    return max(config.parallel.max_tokens_per_microbatch, longest)


def chunks_in_flight(config: VapoConfig, *, pp_rank: int) -> int:
    """Forward passes of one model chunk whose backward pass has yet to come, at most.

    One forward, one backward (1F1B): a stage runs pp - rank - 1 micro-batches ahead. Interleaved,
    it runs 2 (pp - rank - 1) + (vpp - 1) pp chunks ahead (get_pp_rank_microbatches of
    schedules.py; arXiv 2104.04473, section 2.2). Fewer, where a mini-batch has fewer micro-batches:
    it has one response in each at least.
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


def layer_bytes(
    shape: ModelShape, config: VapoConfig, *, tokens: int, recompute: str, kernels: Kernels = "gpu"
) -> int:
    """Bytes that one layer saves for its backward pass; see the module's table.

    Args:
        shape: of the model.
        config: model.dtype, and the tensor and sequence parallelism.
        tokens: of the packed micro-batch, S, all tensor-parallel ranks together.
        recompute: as parallel.recompute.
        kernels: whose column; "cpu" is for tests.
    """
    w = widths(shape, config.parallel.tensor_model_parallel_size)
    size = DTYPE_BYTES[config.model.dtype]
    h = residual_width(shape, config)
    if recompute == "full":
        return tokens * h * size
    wide = 4 if kernels == "cpu" else size
    copies = 2 if kernels == "cpu" else 1
    norms = 2 * h * (copies * wide + size)
    mlp = (5 if kernels == "cpu" else 3) * w.ffn * size
    attention = _attention_bytes(shape, config, w, recompute == "selective", kernels)
    return tokens * (norms + attention + mlp)


def _attention_bytes(
    shape: ModelShape, config: VapoConfig, w: Widths, selective: bool, kernels: Kernels
) -> int:
    """Bytes for each token that attention saves, between its two linear layers."""
    size = DTYPE_BYTES[config.model.dtype]
    tp_size = config.parallel.tensor_model_parallel_size
    gathered = shape.num_key_value_heads < tp_size
    projected = w.projected * (tp_size if gathered else 1)
    if selective:
        shares = shape.num_key_value_heads <= tp_size
        total = size * (projected + w.query + (0 if shares else w.query))
    elif kernels == "cpu":
        total = size * (3 * w.query + 2 * w.key) + 4 * w.heads
    else:
        total = size * (projected + 2 * w.query + w.key) + 4 * w.heads
    if shape.qk_norm:
        if kernels == "gpu":
            total += size * w.query
        else:
            total += 4 * 2 * (w.query + w.key)
    return total


def residual_width(shape: ModelShape, config: VapoConfig) -> int:
    """h of the module's table."""
    parallel = config.parallel
    parts = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return shape.hidden_size // parts


def training_bytes(
    shape: ModelShape,
    config: VapoConfig,
    role: Role,
    *,
    pp_rank: int,
    tokens: int,
    kernels: Kernels = "gpu",
) -> tuple[int, int]:
    """Largest part of a forward and backward pass on one GPU, in bytes.

    What is in flight (saved_bytes), and for one layer at a time what its backward pass adds: the
    larger of
        gradients of gate, up and product      2 F S more than is freed by then
        weight gradients, not yet added up     F S + F H, or (2 H - F) S + 2 F H
    and the gradient of the residual stream twice, and where there is sequence parallelism the
    buffer [S, H] that megatron-core gathers into. The first stage's embedding has a gradient of
    its own [V/t, H]. Where the log-probabilities' part is larger than that, it hides it.

    Returns:
        (activations, logits); their sum is the peak.
    """
    w = widths(shape, config.parallel.tensor_model_parallel_size)
    size = DTYPE_BYTES[config.model.dtype]
    recompute = config.parallel.recompute
    held = saved_bytes(shape, config, role, pp_rank=pp_rank, tokens=tokens, kernels=kernels)
    extra = size * max(
        2 * w.ffn * tokens,
        w.ffn * (tokens + w.hidden),
        (2 * w.hidden - w.ffn) * tokens + 2 * w.ffn * w.hidden,
    )
    extra += 2 * residual_width(shape, config) * tokens * size
    if recompute == "full":
        one = layer_bytes(shape, config, tokens=tokens, recompute="none", kernels=kernels)
        extra += one - layer_bytes(shape, config, tokens=tokens, recompute="full")
    if pp_rank == 0:
        extra = max(extra, _vocabulary_rows(shape, config) * w.hidden * size)
    gathered = _gather_bytes(shape, config, tokens)
    logits = logits_bytes(shape, config, role, pp_rank=pp_rank, tokens=tokens, training=True)
    return held + gathered + max(0, extra - logits), logits


def saved_bytes(
    shape: ModelShape,
    config: VapoConfig,
    role: Role,
    *,
    pp_rank: int,
    tokens: int,
    kernels: Kernels = "gpu",
) -> int:
    """Bytes saved by the chunks in flight, and by what follows the layers on the last stage.

    After the layers: the final norm as in the table, then the actor's hidden states of the
    predicting tokens [T, H], counted as [S, H], or the critic's in float32.
    """
    parallel = config.parallel
    size, h = DTYPE_BYTES[config.model.dtype], residual_width(shape, config)
    layer = layer_bytes(shape, config, tokens=tokens, recompute=parallel.recompute, kernels=kernels)
    held = chunks_in_flight(config, pp_rank=pp_rank) * layers_per_chunk(shape, config) * layer
    if pp_rank == parallel.pipeline_model_parallel_size - 1:
        norm = h * (8 if kernels == "cpu" else size)
        held += tokens * (norm + (shape.hidden_size * size if role == "actor" else 4 * h))
    return held


def inference_bytes(
    shape: ModelShape, config: VapoConfig, role: Role, *, pp_rank: int, tokens: int
) -> tuple[int, int]:
    """Largest part of a forward pass without gradients on one GPU, in bytes.

    In a layer: the residual stream, the norm's output, gate, up and product; or query, key and
    value as projected and rotated, and attention's output. After the layers: the hidden states, and
    those of the predicting tokens.

    Returns:
        (activations, logits)
    """
    w = widths(shape, config.parallel.tensor_model_parallel_size)
    size, h = DTYPE_BYTES[config.model.dtype], residual_width(shape, config)
    width = 2 * h + max(3 * w.ffn, w.projected + 3 * w.query + w.key)
    logits = logits_bytes(shape, config, role, pp_rank=pp_rank, tokens=tokens, training=False)
    if logits:
        width = max(width, h + 2 * w.hidden)
    return tokens * width * size + _gather_bytes(shape, config, tokens), logits


def logits_bytes(
    shape: ModelShape,
    config: VapoConfig,
    role: Role,
    *,
    pp_rank: int,
    tokens: int,
    training: bool,
) -> int:
    """Bytes of the actor's log-probabilities on the last stage, 0 elsewhere.

    One chunk of scores, in the weight's dtype, and where that is narrow two tiles of an eighth of
    it in float32 (score_chunks.py). The backward pass adds the gradient of the hidden states, the
    float32 gradient of the output weight's shard and, where weights are narrow, its copy in their
    dtype (the chunk is gone by then) or one slab.
    """
    if role != "actor" or pp_rank != config.parallel.pipeline_model_parallel_size - 1:
        return 0
    size = DTYPE_BYTES[config.model.dtype]
    rows = _vocabulary_rows(shape, config)
    scores = min(CHUNK_BYTES, 4 * rows * tokens)
    chunk = scores * size // 4 + (2 * (scores // 8) if size < 4 else 0)
    if not training:
        return chunk
    gradient = rows * shape.hidden_size
    copy = max(gradient * size - chunk, SLAB_BYTES) if size < 4 else 0
    return chunk + 4 * gradient + copy + tokens * shape.hidden_size * size


def _vocabulary_rows(shape: ModelShape, config: VapoConfig) -> int:
    """Rows of the padded vocabulary that one tensor-parallel rank holds."""
    tp_size = config.parallel.tensor_model_parallel_size
    divisor = config.model.make_vocab_size_divisible_by
    return padded_vocab_size(shape, divisor, tp_size) // tp_size


def _gather_bytes(shape: ModelShape, config: VapoConfig, tokens: int) -> int:
    """Bytes of the buffer that sequence parallelism gathers a layer's input into, kept for good."""
    parallel = config.parallel
    if not parallel.sequence_parallel or parallel.tensor_model_parallel_size == 1:
        return 0
    return tokens * shape.hidden_size * DTYPE_BYTES[config.model.dtype]
