"""Which ranks hold which slice of a parameter.

A row of the name table names its holders. `HOLDERS` has the axes of parallel/groups.py along which
such a parameter is cut, and over which other parameters of its kind are spread; `part_bounds` is
what a shard has of each HF tensor, along `shard_dim`; `TrainerLayout` numbers ranks, stages and
layers. Ranks are numbered tensor parallel fastest, then data parallel, then pipeline. The first EP
ranks of a stage hold its experts, each as many, and so do the next EP ranks. Imports neither torch
nor process groups.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vapo_megatron.models.hf_config import padded_vocab_size
from vapo_megatron.weights.table import EMBEDDING, Holder, Kind, Row, shift_expert

if TYPE_CHECKING:
    from vapo_megatron.config import ParallelConfig
    from vapo_megatron.models.hf_config import ModelShape
    from vapo_megatron.parallel.groups import Axis, Ranks

LayerRange = tuple[int, int]
"""[first, stop) of consecutive layers, numbered from 0 in the whole model."""


class Axes(NamedTuple):
    """Names of axes of parallel/groups.py."""

    cut: str
    """Its ranks hold different slices of such a parameter."""
    spread: str | None = None
    """Its ranks hold different parameters; None: the same."""


HOLDERS: dict[Holder, Axes] = {"dense": Axes("tp"), "expert": Axes("etp", "ep")}
"""Experts are not cut: "etp" has one rank."""


def shard_axis(row: Row, ranks: Ranks) -> Axis:
    """Return a rank's place among those that hold the slices of a row."""
    return ranks.axes[HOLDERS[row.holder].cut]


def num_shards(row: Row, tp_size: int) -> int:
    """Return into how many slices a row may be cut."""
    return tp_size if HOLDERS[row.holder].spread is None else 1


def expert_shifts(row: Row, shape: ModelShape, ranks: Ranks) -> list[int]:
    """Return what is added to an expert's number on each rank of its axis; [0] of all else."""
    spread = HOLDERS[row.holder].spread
    if spread is None or shape.experts is None:
        return [0]
    axis = ranks.axes[spread]
    count = shape.experts.count // axis.size
    return [(rank - axis.rank) * count for rank in range(axis.size)]


def shard_dim(kind: Kind) -> int | None:
    """Return the dimension along which the HF tensors are cut, or None."""
    return {"vocabulary": 0, "qkv": 0, "gate_up": 0, "row": 1, "replicated": None}[kind]


def shard_elements(row: Row, shape: ModelShape, num_shards: int, vocab_rows: int) -> int:
    """Count the elements of a shard, any of them.

    Args:
        row: of the name table.
        num_shards: ranks on the row's axis of shards.
        vocab_rows: of the padded vocabulary, over all shards.
    """
    elements = row.elements(shape)
    if row.kind == "vocabulary":
        elements = elements // shape.vocab_size * vocab_rows
    return elements if shard_dim(row.kind) is None else elements // num_shards


def parts(
    row: Row, shape: ModelShape, tp_rank: int, tp_size: int, vocab_rows: int
) -> list[tuple[int, int]]:
    """Return a rank's part of each HF tensor of a row that is cut; see part_bounds."""
    dim = shard_dim(row.kind)
    assert dim is not None, f"every rank holds all of {row.hf}"
    return part_bounds(
        row.kind,
        [size[dim] for size in row.shapes(shape)],
        tp_rank,
        tp_size,
        num_groups=shape.num_key_value_heads,
        padded_rows=vocab_rows,
    )


def bounds(size: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """Return [start, stop) of a rank's part of `size` elements, which tp_size divides."""
    assert size % tp_size == 0, f"{size} is not a multiple of the tensor-parallel size {tp_size}"
    part = size // tp_size
    return tp_rank * part, (tp_rank + 1) * part


def part_bounds(
    kind: Kind,
    sizes: Sequence[int],
    tp_rank: int,
    tp_size: int,
    *,
    num_groups: int,
    padded_rows: int,
) -> list[tuple[int, int]]:
    """Return [start, stop) of a rank's part of each HF tensor along shard_dim(kind).

    Args:
        kind: see layout.py; not "replicated".
        sizes: of the full HF tensors along that dimension.
        tp_rank, tp_size: whose part.
        num_groups: key-value heads of the model.
        padded_rows: of a vocabulary with its padding, over all ranks. Padding is in no part.
    """
    if kind == "qkv":
        return _qkv_bounds(sizes, tp_rank, tp_size, num_groups)
    if kind == "vocabulary":
        start, stop = bounds(padded_rows, tp_rank, tp_size)
        return [(min(start, size), min(stop, size)) for size in sizes]
    return [bounds(size, tp_rank, tp_size) for size in sizes]


def _qkv_bounds(
    sizes: Sequence[int], tp_rank: int, tp_size: int, num_groups: int
) -> list[tuple[int, int]]:
    """Find a rank's chunk of the interleaved rows in the query, the key and the value."""

    def rows_before(row: int) -> list[int]:
        """Count the rows of each HF tensor before an interleaved row."""
        group, left = divmod(row, sum(sizes) // num_groups)
        counts = []
        for size in sizes:
            in_group = size // num_groups
            here = min(left, in_group)
            counts.append(group * in_group + here)
            left -= here
        return counts

    start, stop = bounds(sum(sizes), tp_rank, tp_size)
    return list(zip(rows_before(start), rows_before(stop), strict=True))


class Member(NamedTuple):
    """The ranks at one place of an axis."""

    axis: str
    """tp or ep"""
    rank: int


def cut_rank(member: Member | None) -> int:
    """Return the tensor-parallel rank whose slice some ranks hold; 0 of what is not cut."""
    return member.rank if member is not None and member.axis == "tp" else 0


@dataclasses.dataclass(frozen=True)
class TrainerLayout:
    """Where megatron-core keeps the model's parameters."""

    tp_size: int
    dp_size: int
    """Ranks with the same parameters, those of context parallelism among them."""
    layers: tuple[tuple[LayerRange, ...], ...]
    """layers[stage][chunk]; a stage has one chunk per virtual stage."""
    vocab_rows: int
    """Of the padded vocabulary, over all tensor-parallel ranks."""
    transformer_engine: bool = False
    """Which of the table's two names a parameter has."""
    ep_size: int = 1
    experts_per_rank: int = 0
    """Of each layer with experts."""

    @property
    def pp_size(self) -> int:
        """Pipeline stages."""
        return len(self.layers)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp_size * self.dp_size * self.pp_size

    def home(self, row: Row, layer: int | None = None) -> tuple[int, int]:
        """Return the stage and the chunk that hold a row, in one layer or outside the layers."""
        if layer is not None:
            return next(
                (stage, chunk)
                for stage, chunks in enumerate(self.layers)
                for chunk, (first, stop) in enumerate(chunks)
                if first <= layer < stop
            )
        if row.hf == (EMBEDDING,) and not row.is_copy:
            return 0, 0
        return self.pp_size - 1, len(self.layers[-1]) - 1

    def slices(self, row: Row) -> Sequence[Member | None]:
        """List whose slices of a row differ; None: all ranks of a stage hold the same."""
        if row.expert is not None:
            return [Member("ep", row.expert // self.experts_per_rank)]
        if shard_dim(row.kind) is None:
            return [None]
        return [Member("tp", rank) for rank in range(self.tp_size)]

    def holders(self, stages: Iterable[int], member: Member | None) -> tuple[int, ...]:
        """List the ranks of some stages that hold a slice; see `slices`."""
        in_stage = self.tp_size * self.dp_size
        first, step = 0, 1
        if member is not None:
            first, step = member.rank, self.tp_size if member.axis == "tp" else self.ep_size
        return tuple(stage * in_stage + i for stage in stages for i in range(first, in_stage, step))

    def local_name(self, row: Row) -> str:
        """Return a row's Megatron name on the ranks that hold it."""
        name = row.megatron[-1] if self.transformer_engine else row.megatron[0]
        first = 0 if row.expert is None else row.expert % self.experts_per_rank - row.expert
        return shift_expert(name, first)

    def on_first_rank(self, row: Row) -> bool:
        """Is a row on the first rank of its stage? All ranks of a stage hold as much as that."""
        return row.expert is None or row.expert < self.experts_per_rank

    def rank(self, stage: int, dp_rank: int, tp_rank: int) -> int:
        """Return the global rank."""
        return tp_rank + self.tp_size * (dp_rank + self.dp_size * stage)

    def stage(self, rank: int) -> int:
        """Return the stage of a global rank."""
        return rank // (self.tp_size * self.dp_size)


@functools.lru_cache(maxsize=256)
def trainer_layout(
    shape: ModelShape,
    *,
    tp_size: int,
    pp_size: int,
    vpp_size: int = 1,
    dp_size: int,
    ep_size: int = 1,
    make_vocab_size_divisible_by: int = 128,
    transformer_engine: bool = False,
) -> TrainerLayout:
    """Describe megatron-core's placement: equal chunks, chunk v of all stages before chunk v + 1.

    Args:
        shape: of the model; layout_rules.check_layout has accepted the sizes.
        tp_size, pp_size, vpp_size, dp_size: ranks on each axis, and model chunks of each rank;
            dp_size is CP x DP, the ranks with the same parameters.
        ep_size: ranks of a stage that share its experts.
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
        ep_size=ep_size,
        experts_per_rank=0 if shape.experts is None else shape.experts.count // ep_size,
    )


def layout_of(
    shape: ModelShape, parallel: ParallelConfig, make_vocab_size_divisible_by: int = 128
) -> TrainerLayout:
    """Return the trainer_layout of a configuration."""
    pp_size = parallel.pipeline_model_parallel_size
    return trainer_layout(
        shape,
        tp_size=parallel.tensor_model_parallel_size,
        pp_size=pp_size,
        vpp_size=(parallel.virtual_pipeline_model_parallel_size or 1) if pp_size > 1 else 1,
        dp_size=parallel.replica_size,
        ep_size=parallel.expert_model_parallel_size,
        make_vocab_size_divisible_by=make_vocab_size_divisible_by,
    )
