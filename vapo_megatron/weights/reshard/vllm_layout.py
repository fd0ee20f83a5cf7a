"""Which part of which HF tensor each vLLM rank holds, as data; see shards.py for the coordinates.

Consecutive ranks form a replica; a rank's tensor-parallel rank in it is rank % tp_size. As vLLM's
loaders have it:

    kind         vLLM parameter     this rank's part
    vocabulary   [V_padded/tp, H]   rows of the vocabulary padded to a multiple of 64
    qkv          q, then k, then v  its query heads; its key-value heads, or the one that it shares
    gate_up      gate, then up      its rows of each
    row          [out, in/tp]       its columns
    replicated   any                all of it
"""

from __future__ import annotations

from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.weights.holders import bounds, shard_elements
from vapo_megatron.weights.reshard.shards import (
    Piece,
    matrix_sizes,
    rectangles,
    slice_along,
    stacked,
)
from vapo_megatron.weights.table import Row

VLLM_VOCAB_PADDING = 64
"""DEFAULT_VOCAB_PADDING_SIZE of vLLM's vocab_parallel_embedding."""


def check_rollout_layout(shape: ModelShape, tp_size: int, world_size: int) -> None:
    """Refuse an engine layout that vLLM could not load.

    Raises:
        ConfigError: names the field, its value, and what the model's config.json says.
    """
    name = f"rollout.tensor_model_parallel_size={tp_size}"
    for key, value in (
        ("num_attention_heads", shape.num_attention_heads),
        ("intermediate_size", shape.ffn_hidden_size),
        ("padded vocabulary", _vocab_rows(shape)),
    ):
        if value % tp_size:
            raise ConfigError(f"{name} must divide the model's {key}={value}; lower it")
    kv_heads = shape.num_key_value_heads
    if kv_heads % tp_size and tp_size % kv_heads:
        raise ConfigError(
            f"{name} must be a divisor or a multiple of the model's num_key_value_heads="
            f"{kv_heads}; change it"
        )
    if world_size % tp_size:
        raise ConfigError(
            f"{name} must divide the number of processes that sample, {world_size}: each belongs "
            "to a replica; change parallel.world_size or, if they are apart, rollout.num_processes"
        )


def engine_pieces(row: Row, shape: ModelShape, tp_size: int, tp_rank: int) -> list[Piece]:
    """List what a tensor-parallel rank of vLLM holds of one row of the name table.

    A tied output projection shares the embedding's memory, so a copy has no pieces of its own.
    """
    if row.is_copy:
        return []
    if row.kind == "qkv":
        query, *others = matrix_sizes(row, shape)
        # Where ranks outnumber key-value heads, consecutive ranks hold the same one.
        parts = min(tp_size, shape.num_key_value_heads)
        part = tp_rank // (tp_size // parts)
        parts_held = [slice_along(query, 0, *bounds(query[0], tp_rank, tp_size))]
        parts_held += [slice_along(size, 0, *bounds(size[0], part, parts)) for size in others]
        return stacked(row.hf, parts_held, row.hf[0].replace("q_proj", "qkv_proj"))
    parts_held = rectangles(row, shape, tp_rank, tp_size, _vocab_rows(shape))
    return stacked(row.hf, parts_held, row.hf[0].replace("gate_proj", "gate_up_proj"))


def engine_elements(row: Row, shape: ModelShape, tp_size: int) -> int:
    """Count what each rank holds of a row, with the vocabulary's padding."""
    if row.kind == "qkv":
        pieces = engine_pieces(row, shape, tp_size, 0)
        return sum(piece.rows * piece.columns for piece in pieces)
    return 0 if row.is_copy else shard_elements(row, shape, tp_size, _vocab_rows(shape))


def _vocab_rows(shape: ModelShape) -> int:
    return -(-shape.vocab_size // VLLM_VOCAB_PADDING) * VLLM_VOCAB_PADDING
