"""Which layouts a model allows, and what its shards hold when every element is an integer.

Both sides are written down here without weights/reshard: a Megatron shard as a chunk of the
merged tensors, a vLLM shard as its weight loaders narrow the HF tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from vapo_megatron.config import ParallelConfig
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.models.known import known_shape
from vapo_megatron.models.layout_rules import check_layout
from vapo_megatron.weights import layout
from vapo_megatron.weights.holders import TrainerLayout, trainer_layout
from vapo_megatron.weights.table import Row, rows

MODELS = ("Qwen2.5-0.5B", "Qwen2.5-7B", "Qwen2.5-32B")


@dataclasses.dataclass(frozen=True)
class Case:
    """One model on one layout of the trainer and the sampler."""

    model: str
    tp: int
    pp: int
    vpp: int
    dp: int
    rollout_tp: int
    gpus_per_node: int = 8
    rollout_workers: int = 0
    """Ranks after the trainer's that sample; 0: the trainer's do."""

    @property
    def world_size(self) -> int:
        """Of the trainer."""
        return self.tp * self.pp * self.dp

    @property
    def num_ranks(self) -> int:
        return self.world_size + self.rollout_workers

    @property
    def rollout_ranks(self) -> range:
        return range(self.world_size if self.rollout_workers else 0, self.num_ranks)

    def shard(self, rank: int) -> int:
        """The sampler's tensor-parallel rank."""
        return (rank - self.rollout_ranks.start) % self.rollout_tp

    @property
    def shape(self) -> ModelShape:
        return known_shape(self.model)

    @property
    def trainer(self) -> TrainerLayout:
        return trainer_layout(
            self.shape, tp_size=self.tp, pp_size=self.pp, vpp_size=self.vpp, dp_size=self.dp
        )

    def __str__(self) -> str:
        sizes = f"tp{self.tp}-pp{self.pp}-vpp{self.vpp}-dp{self.dp}-vllm{self.rollout_tp}"
        apart = f"-apart{self.rollout_workers}" if self.rollout_workers else ""
        return f"{self.model}-{sizes}-node{self.gpus_per_node}{apart}"


def trainer_layouts(model: str, max_world_size: int = 64) -> Iterator[tuple[int, int, int, int]]:
    """Yield every (tp, pp, vpp, dp) that heads and layers allow."""
    shape = known_shape(model)
    divisors = [n for n in range(1, shape.num_layers + 1) if shape.num_layers % n == 0]
    for tp in range(1, max_world_size + 1):
        for pp in divisors:
            for vpp in divisors if pp > 1 else [1]:
                if tp * pp > max_world_size or shape.num_layers % (pp * vpp):
                    continue
                if _allowed(model, tp, pp, vpp):
                    for dp in range(1, max_world_size // (tp * pp) + 1):
                        yield tp, pp, vpp, dp


@functools.cache
def _allowed(model: str, tp: int, pp: int, vpp: int) -> bool:
    parallel = ParallelConfig(
        world_size=tp * pp,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
    )
    try:
        check_layout(known_shape(model), parallel)
    except ConfigError:
        return False
    return True


def rollout_tp_sizes(model: str, world_size: int) -> list[int]:
    """List the vLLM tensor-parallel sizes of 1, 2, 4, 8 that heads and world size allow."""
    heads = known_shape(model).num_attention_heads
    return [tp for tp in (1, 2, 4, 8) if heads % tp == 0 and world_size % tp == 0]


@dataclasses.dataclass(frozen=True)
class Symbols:
    """One row of the name table; every element is a distinct integer, -1 for padding.

    Columns that no layout separates are one: `column_width` elements wide.
    """

    row: Row
    column_width: int
    parameter: str
    """vLLM's."""
    trainer: list[np.ndarray]
    """By tensor-parallel rank, [rows, columns / column_width]."""
    sampler: list[np.ndarray]
    shared: np.ndarray
    """[rollout_tp, tp]: elements of a sampler shard that a trainer shard holds."""

    known_unions: dict[tuple[frozenset[int], int], int] = dataclasses.field(default_factory=dict)

    def union(self, rollout_tp_ranks: frozenset[int], tp_rank: int) -> int:
        """Count the elements of a trainer shard that at least one of some sampler shards needs."""
        key = rollout_tp_ranks, tp_rank
        if key not in self.known_unions:
            wanted = np.unique(np.concatenate([self.sampler[j].ravel() for j in rollout_tp_ranks]))
            common = np.intersect1d(wanted[wanted >= 0], np.unique(self.trainer[tp_rank]))
            self.known_unions[key] = len(common) * self.column_width
        return self.known_unions[key]


def symbols(shape: ModelShape, row: Row, tp: int, rollout_tp: int, vocab_rows: int) -> Symbols:
    """Number the elements of a row's HF tensors and cut both sides' shards."""
    sizes = [(*size, 1)[:2] for size in row.shapes(shape)]
    width = sizes[0][1]
    if row.kind == "row":
        width //= math.lcm(tp, rollout_tp)
    full, first = [], 0
    for num_rows, columns in sizes:
        count = num_rows * columns // width
        full.append(torch.arange(first, first + count, dtype=torch.int32).view(num_rows, -1))
        first += count
    trainer = _trainer_shards(shape, row, full, tp, vocab_rows)
    name, sampler = _engine_shards(shape, row, full, rollout_tp)
    return Symbols(
        row,
        width,
        name,
        [shard.numpy() for shard in trainer],
        [shard.numpy() for shard in sampler],
        np.array([[_common(s, t, first) * width for t in trainer] for s in sampler]),
    )


def _common(one: Tensor, other: Tensor, count: int) -> int:
    held = torch.zeros(count + 1, dtype=torch.bool)  # The last entry is for -1.
    held[other.flatten().long()] = True
    held[count] = False
    return int(held[one.flatten().long()].sum())


def _trainer_shards(
    shape: ModelShape, row: Row, full: list[Tensor], tp: int, vocab_rows: int
) -> list[Tensor]:
    if row.kind == "qkv":
        merged = layout.merge_qkv(*full, num_groups=shape.num_key_value_heads)
        return list(merged.chunk(tp))
    if row.kind == "gate_up":
        return [torch.cat(both) for both in zip(*(x.chunk(tp) for x in full), strict=True)]
    (only,) = full
    if row.kind == "vocabulary":
        padding = only.new_full((vocab_rows - len(only), only.shape[1]), -1)
        return list(torch.cat([only, padding]).chunk(tp))
    return list(only.chunk(tp, 1)) if row.kind == "row" else [only] * tp


def _engine_shards(
    shape: ModelShape, row: Row, full: list[Tensor], tp: int
) -> tuple[str, list[Tensor]]:
    """Narrow as vLLM's loaders do, under vLLM's names (qwen2.py: hf_to_vllm_mapper)."""
    name = row.hf[0]
    if row.kind == "qkv":
        loaded = [qkv_shard(shape, full, rank, tp) for rank in range(tp)]
        return name.replace("q_proj", "qkv_proj"), loaded
    if row.kind == "gate_up":
        # MergedColumnParallelLinear: each output's rank-th part, concatenated.
        size = shape.ffn_hidden_size // tp
        loaded = [torch.cat([x.narrow(0, r * size, size) for x in full]) for r in range(tp)]
        return name.replace("gate_proj", "gate_up_proj"), loaded
    (only,) = full
    if row.kind == "vocabulary":
        # VocabParallelEmbedding: 64 rows of padding granularity; what is beyond is not loaded.
        per_rank = -(-shape.vocab_size // 64) * 64 // tp
        padding = only.new_full((per_rank * tp - len(only), only.shape[1]), -1)
        return name, list(torch.cat([only, padding]).split(per_rank))
    if row.kind == "row":
        size = only.shape[1] // tp
        return name, [only.narrow(1, rank * size, size) for rank in range(tp)]
    return name, [only] * tp


def qkv_shard(shape: ModelShape, full: list[Tensor], rank: int, tp: int) -> Tensor:
    """QKVParallelLinear.weight_loader: num_kv_head_replicas ranks load the same key and value."""
    num_heads = shape.num_attention_heads // tp
    if tp >= shape.num_key_value_heads:
        num_kv_heads, replicas = 1, tp // shape.num_key_value_heads
    else:
        num_kv_heads, replicas = shape.num_key_value_heads // tp, 1
    parts = []
    for tensor, heads, shard_rank in zip(
        full, (num_heads, num_kv_heads, num_kv_heads), (rank, rank // replicas, rank // replicas)
    ):
        size = heads * shape.head_dim
        parts.append(tensor.narrow(0, shard_rank * size, size))
    return torch.cat(parts)


@functools.lru_cache(maxsize=8)
def all_symbols(model: str, tp: int, rollout_tp: int) -> tuple[list[Symbols], list[Symbols]]:
    """Return the symbols of one layer, and of what is outside the layers."""
    shape = known_shape(model)
    vocab_rows = trainer_layout(shape, tp_size=tp, pp_size=1, dp_size=1).vocab_rows
    found = [
        symbols(shape, row, tp, rollout_tp, vocab_rows)
        for row in rows(shape, "actor")
        if not row.is_copy
    ]
    return (
        [s for s in found if "{}" in s.row.hf[0]],
        [s for s in found if "{}" not in s.row.hf[0]],
    )
