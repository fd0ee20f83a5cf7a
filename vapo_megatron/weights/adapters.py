"""Gives model chunks their adapters, and merges them into the weights.

Before: the chunks hold the frozen weights of a role (weights/load_hf.py), not yet wrapped in DDP.
After `attach_adapters`: the linear layers of adapter_table.py add what their adapters return; A is
random, the same in every layout, and B is 0.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
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
    for chunk in chunks:
        for one in local_parameters([chunk], shape, role):
            if is_adapted(one.row, shape, targets):
                adapter = Adapter(
                    one.data, _pairs(one, shape, ranks),
                    _initial(one, shape, ranks, lora, targets, seed), lora.factor,
                    sequence_parallel=sequence_parallel,
                )  # fmt: skip
                path, _, name = one.name.removesuffix(".weight").rpartition(".")
                attach(chunk.get_submodule(path), name, adapter)
        prepare_frozen(chunk)


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
    one: LocalParameter,
    shape: ModelShape,
    ranks: Ranks,
    lora: LoraConfig,
    targets: Sequence[str],
    seed: int,
) -> dict[str, Tensor]:
    """Draw the A of a weight's targets as PEFT does (Kaiming, uniform within 1 / sqrt(in)).

    Each is drawn whole, by its matrix's name, and a rank keeps its columns of it.
    """
    assert lora.rank is not None, "there are no adapters"
    axis, found = shard_axis(one.row, ranks), {}
    for name, (_, columns) in zip(one.hf_names, one.row.shapes(shape), strict=True):
        if target_of(name) not in targets:
            continue
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        whole = torch.rand(lora.rank, columns, generator=generator, device="cpu")
        whole = (whole * 2 - 1) / math.sqrt(columns)
        if shard_dim(one.row.kind) == 1:
            # A view would keep all of it in memory.
            whole = whole.chunk(axis.size, 1)[axis.rank].contiguous()
        found[target_of(name)] = whole
    return found
