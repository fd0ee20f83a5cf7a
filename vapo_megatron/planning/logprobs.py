"""Predicted bytes of the actor's log-probabilities, which parallel/score_chunks.py computes."""

from __future__ import annotations

from vapo_megatron.planning.model_bytes import Layout

CPU_CHUNK_BYTES = 192 * 2**20
GPU_CHUNK_BYTES = 2**30
GPU_CHUNK_ROWS = 4096
SLAB_BYTES = 32 * 2**20
"""score_chunks.py's constants of these names."""


def logprob_bytes(
    layout: Layout,
    tokens: int,
    *,
    training: bool,
    with_entropy: bool,
    on_cpu: bool,
    is_frozen: bool = False,
) -> int:
    """Return the peak bytes of the log-probabilities of a microbatch on the last stage.

    One chunk of scores in float32; on a CPU in the weight's dtype, with bfloat16 weights beside a
    tile in float32. Another tile is for the entropy. The backward pass adds the gradient of the
    hidden states, the float32 gradient of the output weight's shard and, with bfloat16 weights, the
    chunk's gradient in their dtype (on a CPU one slab), or the weight's gradient in it, by when the
    scores are freed.

    Args:
        layout: of the actor.
        tokens: of the microbatch on this rank.
        training: with a backward pass.
        with_entropy: the entropy is computed, too.
        on_cpu: see activations.Passes.
        is_frozen: the output weight has no gradient.
    """
    size, columns, hidden = layout.element_bytes, layout.vocabulary_rows, layout.widths.hidden
    most = max(1, (CPU_CHUNK_BYTES if on_cpu else GPU_CHUNK_BYTES) // (4 * columns))
    most = most if on_cpu else min(most, GPU_CHUNK_ROWS)
    chunk = min(most, tokens)
    tile = min(max(1, most // 8), chunk)
    is_narrow = size < 4
    if on_cpu:
        scores = columns * (chunk * size + 4 * tile * (1 + with_entropy) * is_narrow)
    else:
        scores = columns * 4 * min(most, chunk + tile * with_entropy)
    if not training:
        return scores
    weight = columns * hidden
    narrow_weight = size * weight * is_narrow
    narrow_chunk = min(narrow_weight, SLAB_BYTES) if on_cpu else columns * size * chunk * is_narrow
    if is_frozen:
        return tokens * hidden * size + scores + narrow_chunk
    # The weight's gradient in its own dtype is made when the scores are freed.
    return tokens * hidden * size + 4 * weight + max(scores + narrow_chunk, narrow_weight)
