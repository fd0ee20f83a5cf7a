"""Which part of which HF tensor each vLLM rank holds, as data; see shards.py for the coordinates.

Consecutive ranks form a replica; a rank's tensor-parallel rank in it is rank % tp_size. As vLLM's
loaders have it:

    kind         vLLM parameter     this rank's part
    vocabulary   [V_padded/tp, H]   rows of the vocabulary padded to a multiple of 64
    qkv          q, then k, then v  its query heads; its key-value heads, or the one that it shares
    gate_up      gate, then up      its rows of each
    row          [out, in/tp]       its columns
    replicated   any                all of it

A layer's experts are two parameters, [E, 2 F/tp, H] of gates and ups and [E, H, F/tp], or whole
experts with rollout.expert_parallel: the first E/tp on the first rank, and so on. Here they are
matrices [E 2 F/tp, H] and [E H, F/tp].
"""

from __future__ import annotations

from collections.abc import Sequence

from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.weights.adapter_table import target_of
from vapo_megatron.weights.holders import bounds, shard_elements
from vapo_megatron.weights.reshard.shards import (
    Piece,
    matrix_sizes,
    rectangles,
    slice_along,
    stacked,
)
from vapo_megatron.weights.table import Row

ADAPTER_NAME = "adapter."
"""Before the names of an adapter's matrices among the engine's weights."""
VLLM_VOCAB_PADDING = 64
"""DEFAULT_VOCAB_PADDING_SIZE of vLLM's vocab_parallel_embedding."""


def check_rollout_layout(
    shape: ModelShape, tp_size: int, world_size: int, experts_apart: bool = False
) -> None:
    """Refuse an engine layout that vLLM could not load.

    Args:
        shape: of the model.
        tp_size, world_size: ranks of a replica, and of all.
        experts_apart: rollout.expert_parallel.

    Raises:
        ConfigError: names the field, its value, and what the model's config.json says.
    """
    name = f"rollout.tensor_model_parallel_size={tp_size}"
    sizes = {
        "num_attention_heads": shape.num_attention_heads,
        "padded vocabulary": _vocab_rows(shape),
    }
    if shape.dense_layers:
        sizes["intermediate_size"] = shape.ffn_hidden_size
    if shape.experts is not None and experts_apart:
        sizes["num_experts"] = shape.experts.count
    elif shape.experts is not None:
        sizes["moe_intermediate_size"] = shape.experts.ffn_hidden_size
    for key, value in sizes.items():
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


def engine_pieces(
    row: Row, shape: ModelShape, tp_size: int, tp_rank: int, experts_apart: bool = False
) -> list[Piece]:
    """List what a tensor-parallel rank of vLLM holds of one row of the name table.

    A tied output projection shares the embedding's memory, so a copy has no pieces of its own.

    Args:
        row: of the table.
        tp_size, tp_rank: of the engine.
        experts_apart: rollout.expert_parallel.
    """
    if row.is_copy:
        return []
    if row.expert is not None:
        return _expert_pieces(row, shape, tp_size, tp_rank, experts_apart)
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


def _expert_pieces(
    row: Row, shape: ModelShape, tp_size: int, tp_rank: int, experts_apart: bool
) -> list[Piece]:
    """List what a rank holds of one expert, behind the experts before it."""
    assert row.expert is not None and shape.experts is not None
    expert = row.expert
    if experts_apart:
        rank, expert = divmod(expert, shape.experts.count // tp_size)
        if rank != tp_rank:
            return []
        tp_rank, tp_size = 0, 1
    parts_held = rectangles(row, shape, tp_rank, tp_size, 0)
    name = "w2_weight" if row.kind == "row" else "w13_weight"
    parameter = f"{row.hf[0].rpartition('.experts.')[0]}.experts.routed_experts.{name}"
    below = expert * sum(rows for _, _, rows, _ in parts_held)
    return stacked(row.hf, parts_held, parameter, below)


def adapter_pieces(row: Row, shape: ModelShape, targets: Sequence[str]) -> list[Piece]:
    """List what each rank holds of a row of adapter_table.py: the matrices of targets, whole."""
    return [
        Piece(name, 0, 0, *size, ADAPTER_NAME + name, 0, 0)
        for name, size in zip(row.hf, matrix_sizes(row, shape), strict=True)
        if target_of(name) in targets
    ]


def engine_elements(row: Row, shape: ModelShape, tp_size: int) -> int:
    """Count what each rank holds of a row, with the vocabulary's padding."""
    if row.kind == "qkv":
        pieces = engine_pieces(row, shape, tp_size, 0)
        return sum(piece.rows * piece.columns for piece in pieces)
    return 0 if row.is_copy else shard_elements(row, shape, tp_size, _vocab_rows(shape))


def _vocab_rows(shape: ModelShape) -> int:
    return -(-shape.vocab_size // VLLM_VOCAB_PADDING) * VLLM_VOCAB_PADDING
