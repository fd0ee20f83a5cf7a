"""Who holds which rectangle of which HF tensor: the trainer's side and the sampler's, as data.

Everything is stated in the coordinates of the HF tensors, so that two layouts meet there. A bias or
a norm counts as one column. The name table (mapping.py) says which tensors make a parameter.

Trainer: ranks are numbered tensor parallel fastest, then data parallel, then pipeline. Sampler:
consecutive ranks form a replica, its tensor-parallel rank is rank % tp_size, and vLLM's loaders say
what that rank keeps:

    kind         vLLM parameter     this rank's part
    vocabulary   [V_padded/tp, H]   rows of the vocabulary padded to a multiple of 64
    qkv          q, then k, then v  its query heads; its key-value heads, or the one that it shares
    gate_up      gate, then up      its rows of each
    row          [out, in/tp]       its columns
    replicated   any                all of it

Padding rows of a vocabulary are nobody's: they are in no piece.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import padded_vocab_size
from vapo_megatron.weights import layout
from vapo_megatron.weights.mapping import EMBEDDING, Row

if TYPE_CHECKING:
    from vapo_megatron.models.hf_config import ModelShape

VLLM_VOCAB_PADDING = 64
"""DEFAULT_VOCAB_PADDING_SIZE of vLLM's vocab_parallel_embedding."""

LayerRange = tuple[int, int]
"""[first, stop) of consecutive layers, numbered from 0 in the whole model."""


class Piece(NamedTuple):
    """A rectangle of an HF tensor, and where it lies in a local parameter. Counted in elements."""

    tensor: str
    """HF name; `{}` stands for the layer."""
    row: int
    column: int
    rows: int
    columns: int
    parameter: str
    """Local name; `{}` stands for the layer."""
    local_row: int
    local_column: int


@dataclasses.dataclass(frozen=True)
class TrainerLayout:
    """Where megatron-core puts the model's parameters."""

    tp_size: int
    dp_size: int
    layers: tuple[tuple[LayerRange, ...], ...]
    """layers[stage][chunk]; a stage has one chunk for each of its virtual stages."""
    vocab_rows: int
    """Of the padded vocabulary, over all tensor-parallel ranks."""
    transformer_engine: bool = False
    """Which of the table's two names a parameter has."""

    @property
    def pp_size(self) -> int:
        """Pipeline stages."""
        return len(self.layers)

    @property
    def last_chunk(self) -> int:
        """Index of a stage's last chunk: on the last stage it holds the output."""
        return len(self.layers[0]) - 1

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp_size * self.dp_size * self.pp_size

    def stage_of(self, row: Row) -> int:
        """Return the stage that holds a row outside the layers (of a copy: the last has it)."""
        return 0 if row.hf == (EMBEDDING,) and not row.is_copy else self.pp_size - 1

    def rank(self, stage: int, dp_rank: int, tp_rank: int) -> int:
        """Return the global rank."""
        return tp_rank + self.tp_size * (dp_rank + self.dp_size * stage)


def trainer_layout(
    shape: ModelShape,
    *,
    tp_size: int,
    pp_size: int,
    vpp_size: int = 1,
    dp_size: int,
    make_vocab_size_divisible_by: int = 128,
    transformer_engine: bool = False,
) -> TrainerLayout:
    """Describe megatron-core's placement: equal chunks, chunk v of all stages before chunk v + 1.

    Args:
        shape: of the model; hf_config.check_layout has accepted the sizes.
        tp_size, pp_size, vpp_size, dp_size: ranks on each axis, and model chunks of each rank.
        make_vocab_size_divisible_by: model.make_vocab_size_divisible_by.
        transformer_engine: layer_spec.uses_transformer_engine.
    """
    assert shape.num_layers % (pp_size * vpp_size) == 0, f"{shape.num_layers} layers do not divide"
    assert vpp_size == 1 or pp_size > 1, "virtual stages need a pipeline"
    size = shape.num_layers // (pp_size * vpp_size)
    firsts = [[(v * pp_size + p) * size for v in range(vpp_size)] for p in range(pp_size)]
    return TrainerLayout(
        tp_size=tp_size,
        dp_size=dp_size,
        layers=tuple(tuple((first, first + size) for first in stage) for stage in firsts),
        vocab_rows=padded_vocab_size(shape, make_vocab_size_divisible_by, tp_size),
        transformer_engine=transformer_engine,
    )


def check_sampler(shape: ModelShape, tp_size: int, world_size: int) -> None:
    """Refuse a sampler layout that vLLM could not load.

    Raises:
        ConfigError: names the field, its value, and what the model's config.json says.
    """
    name = f"rollout.tensor_model_parallel_size={tp_size}"
    for key, value in (
        ("num_attention_heads", shape.num_attention_heads),
        ("intermediate_size", shape.ffn_hidden_size),
        ("padded vocabulary", _vllm_vocab_rows(shape)),
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
            f"{name} must divide parallel.world_size={world_size}: every rank belongs to a "
            "replica; change one of them"
        )


def trainer_pieces(
    row: Row, shape: ModelShape, trainer: TrainerLayout, tp_rank: int
) -> list[Piece]:
    """List what a tensor-parallel rank of the trainer holds of one row of the name table."""
    name = row.megatron[-1] if trainer.transformer_engine else row.megatron[0]
    sizes = _sizes(row, shape)
    dim = layout.shard_dim(row.kind)
    if dim is None:
        return _stacked(row.hf, [(0, 0, *size) for size in sizes], name)
    all_bounds = layout.part_bounds(
        row.kind,
        [size[dim] for size in sizes],
        tp_rank,
        trainer.tp_size,
        num_groups=shape.num_key_value_heads,
        padded_rows=trainer.vocab_rows,
    )
    cut = [_cut(size, dim, *part) for size, part in zip(sizes, all_bounds, strict=True)]
    if row.kind != "qkv":
        return _stacked(row.hf, cut, name)
    # A shard interleaves its key-value heads; see layout.merge_qkv.
    num_groups = max(1, shape.num_key_value_heads // trainer.tp_size)
    groups = [
        (row_ + rows // num_groups * group, column, rows // num_groups, columns)
        for group in range(num_groups)
        for row_, column, rows, columns in cut
    ]
    return _stacked(row.hf * num_groups, groups, name)


def sampler_pieces(row: Row, shape: ModelShape, tp_size: int, tp_rank: int) -> list[Piece]:
    """List what a tensor-parallel rank of vLLM holds of one row of the name table.

    A tied output projection shares the embedding's memory, so a copy has no pieces of its own.
    """
    if row.is_copy:
        return []
    sizes = _sizes(row, shape)
    if row.kind == "qkv":
        query, key, value = sizes
        kv_heads = shape.num_key_value_heads
        # Where ranks outnumber key-value heads, consecutive ranks hold the same one.
        parts = min(tp_size, kv_heads)
        part = tp_rank // (tp_size // parts)
        cut = [_cut(query, 0, *layout.bounds(query[0], tp_rank, tp_size))]
        cut += [_cut(size, 0, *layout.bounds(size[0], part, parts)) for size in (key, value)]
        return _stacked(row.hf, cut, row.hf[0].replace("q_proj", "qkv_proj"))
    if row.kind == "vocabulary":
        ((vocab_size, columns),) = sizes
        start, stop = layout.bounds(_vllm_vocab_rows(shape), tp_rank, tp_size)
        cut = [_cut((vocab_size, columns), 0, min(start, vocab_size), min(stop, vocab_size))]
        return _stacked(row.hf, cut, row.hf[0])
    if row.kind == "replicated":
        return _stacked(row.hf, [(0, 0, *size) for size in sizes], row.hf[0])
    dim = layout.shard_dim(row.kind)
    assert dim is not None
    cut = [_cut(size, dim, *layout.bounds(size[dim], tp_rank, tp_size)) for size in sizes]
    return _stacked(row.hf, cut, row.hf[0].replace("gate_proj", "gate_up_proj"))


def _sizes(row: Row, shape: ModelShape) -> list[tuple[int, int]]:
    """Return rows and columns of each HF tensor."""
    return [(size[0], size[1] if len(size) > 1 else 1) for size in row.shapes(shape)]


def _vllm_vocab_rows(shape: ModelShape) -> int:
    return -(-shape.vocab_size // VLLM_VOCAB_PADDING) * VLLM_VOCAB_PADDING


def _cut(size: tuple[int, int], dim: int, start: int, stop: int) -> tuple[int, int, int, int]:
    """Return (row, column, rows, columns) of [start, stop) along one dimension."""
    rows, columns = size
    if dim == 0:
        return start, 0, stop - start, columns
    return 0, start, rows, stop - start


def _stacked(
    tensors: tuple[str, ...], rectangles: list[tuple[int, int, int, int]], parameter: str
) -> list[Piece]:
    """Put rectangles below each other in one parameter, the tensors taking turns."""
    pieces, below = [], 0
    for i, rectangle in enumerate(rectangles):
        if rectangle[2]:
            pieces.append(Piece(tensors[i % len(tensors)], *rectangle, parameter, below, 0))
        below += rectangle[2]
    return pieces
