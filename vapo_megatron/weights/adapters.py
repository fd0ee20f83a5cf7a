"""Gives model chunks their adapters, and merges them into the weights.

Before: the chunks hold the frozen weights of a role (weights/load_hf.py), not yet wrapped in DDP.
After `attach_adapters`: the linear layers of adapter_table.py add what their adapters return; A is
random, the same in every layout, and B is 0.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vapo_megatron.models.adapters import Adapter, Pairs, attach, prepare_frozen
from vapo_megatron.weights.adapter_table import is_adapted, target_of, targets_of
from vapo_megatron.weights.holders import part_bounds, shard_axis, shard_dim
from vapo_megatron.weights.parameters import LocalParameter, local_parameters

if TYPE_CHECKING:
    from vapo_megatron.config.lora import LoraConfig
    from vapo_megatron.models.hf_config import ModelShape
    from vapo_megatron.parallel.groups import Ranks


def attach_adapters(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    ranks: Ranks,
    lora: LoraConfig,
    role: str,
    *,
    seed: int,
    sequence_parallel: bool,
) -> None:
    """Give this rank's chunks their adapters, which are then all that is to be trained.

    Args:
        chunks: with their weights; one for each virtual pipeline stage, without DDP.
        lora: rank, alpha and targets are used.
        role: "actor" or "critic".
        seed: of the initial A, with each matrix's name.
        sequence_parallel: parallel.sequence_parallel.
    """
    targets = targets_of(shape, lora)
    for chunk, one in _linear_layers(chunks, shape, role):
        if not is_adapted(one.row, shape, targets):
            continue
        pairs = _pairs(one, shape, ranks)
        initial = {
            target_of(name): _initial(name, pairs, lora.rank, columns, ranks, one, seed)
            for name, (_, columns) in zip(one.hf_names, one.row.shapes(shape), strict=True)
            if target_of(name) in targets
        }
        adapter = Adapter(
            one.data, pairs, initial, lora.factor, sequence_parallel=sequence_parallel
        )
        path, _, name = one.name.removesuffix(".weight").rpartition(".")
        attach(chunk.get_submodule(path), name, adapter)
    for chunk in chunks:
        prepare_frozen(chunk, learns=True)


def _linear_layers(
    chunks: Sequence[torch.nn.Module], shape: ModelShape, role: str
) -> Iterator[tuple[torch.nn.Module, LocalParameter]]:
    """Yield (chunk, weight) of what may have adapters."""
    for chunk in chunks:
        for one in local_parameters([chunk], shape, role):
            if one.row.is_layer_matrix(shape):
                yield chunk, one


def _pairs(one: LocalParameter, shape: ModelShape, ranks: Ranks) -> Pairs:
    row, dim = one.row, shard_dim(one.row.kind)
    assert dim is not None, f"every rank holds all of {one.hf_names}"
    sizes, axis = row.shapes(shape), shard_axis(row, ranks)
    num_rows = [size[0] for size in sizes]
    if dim == 0:
        held = part_bounds(
            row.kind, num_rows, axis.rank, axis.size,
            num_groups=shape.num_key_value_heads, padded_rows=0,
        )  # fmt: skip
        num_rows = [stop - start for start, stop in held]
    # A piece of one key-value head's rows is in order.
    groups = max(1, shape.num_key_value_heads // axis.size) if row.kind == "qkv" else 1
    return Pairs([target_of(name) for name in one.hf_names], num_rows, groups, dim == 1)


def _initial(
    name: str,
    pairs: Pairs,
    rank: int | None,
    columns: int,
    ranks: Ranks,
    one: LocalParameter,
    seed: int,
) -> Tensor:
    """Draw an A as PEFT does (Kaiming, uniform within 1 / sqrt(in)), and take this rank's part."""
    assert rank is not None, "there are no adapters"
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    bound = 1 / math.sqrt(columns)
    whole = (torch.rand(rank, columns, generator=generator, device="cpu") * 2 - 1) * bound
    if not pairs.by_columns:
        return whole
    axis = shard_axis(one.row, ranks)
    # A view would keep all of it in memory.
    return whole.chunk(axis.size, 1)[axis.rank].contiguous()
