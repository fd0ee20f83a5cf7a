"""Writes an HF directory from Megatron shards, one parameter at a time.

Before: every rank holds its shards. During: the ranks of the first data-parallel replica, and the
first ranks that hold each expert, send each parameter to their stage's leader, its first rank,
which appends it to its own safetensors file; no rank holds more than one full parameter, or as many
experts as there are expert-parallel ranks. After: the directory is complete, or not there at all.
Every rank must call; the leaders must share the directory's file system.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.errors import CheckpointError
from vapo_megatron.parallel.gradient_buffers import wait_for_parameters
from vapo_megatron.parallel.reduce import gather_objects
from vapo_megatron.weights import layout
from vapo_megatron.weights.hf_directory import (
    MAX_FILE_BYTES,
    TensorPlan,
    Unfinished,
    architecture,
    atomic_directory,
    copy_settings,
    divide,
    file_names,
    note_export,
    read_config,
    write_index,
    write_safetensors,
)
from vapo_megatron.weights.holders import HOLDERS, expert_shifts, shard_dim
from vapo_megatron.weights.parameters import LocalParameter, local_parameters, unwrap
from vapo_megatron.weights.table import (
    VALUE_HEAD,
    VALUE_HEAD_BIAS,
    parameter_count,
    shift_expert,
)

if TYPE_CHECKING:
    from vapo_megatron.models.hf_config import ModelShape
    from vapo_megatron.parallel.groups import Ranks

_Planned: TypeAlias = tuple[LocalParameter, list[TensorPlan]]
"""A parameter of this stage, and its HF tensors."""


def export_hf(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    ranks: Ranks,
    out_dir: str | Path,
    copy_from: str | Path,
    role: str = "actor",
    *,
    step: int | None = None,
    stop_token_ids: Sequence[int] = (),
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Write a directory that transformers loads. Collective over all ranks.

    For a critic's class see hf_directory.architecture.

    Args:
        chunks: this rank's model chunks, with or without DDP.
        out_dir: replaced as a whole if it is an earlier export.
        copy_from: directory whose config.json, generation settings and tokenizer are copied.
        role: "actor" or "critic".
        step: of the run, for exported_step; None: unknown.
        stop_token_ids: see copy_settings.
        max_file_bytes: largest file, unless a single parameter is larger.

    Returns:
        out_dir. Tensors have the parameters' own types.

    Raises:
        CheckpointError: on every rank, when a directory cannot be replaced or written.
    """
    out_dir, source = Path(out_dir).absolute(), Path(copy_from)
    element_size = next(unwrap(chunks[0]).parameters()).element_size()
    num_bytes = parameter_count(shape, value_head=role == "critic") * element_size
    try:
        with atomic_directory(out_dir, source, num_bytes) as unfinished:
            _export(
                chunks, shape, ranks, unfinished, source, role, stop_token_ids, max_file_bytes
            )  # fmt: skip
            unfinished.together(
                lambda: note_export(unfinished.path, step, stop_token_ids), alone=True
            )
    except CheckpointError as error:
        raise CheckpointError(f"HF export: {error}") from None
    return out_dir


def _export(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    ranks: Ranks,
    unfinished: Unfinished,
    source: Path,
    role: str,
    stop_token_ids: Sequence[int],
    max_file_bytes: int,
) -> None:
    """Fill a directory, its index last."""
    partial = unfinished.path
    wait_for_parameters(chunks)
    parameters = [p for p in local_parameters(chunks, shape, role) if not p.row.is_copy]
    # Wider types first: the safetensors reader needs each tensor aligned to its type.
    parameters.sort(key=lambda p: -p.data.dtype.itemsize)
    dtype = parameters[-1].data.dtype
    bias = None
    if role == "critic":
        bias = _value_bias(chunks[-1], architecture(read_config(source), shape.family, role))
    planned = [(p, _tensors_of(p, shape, ranks, bias is not None)) for p in parameters]
    mine = divide(planned, lambda item: sum(t.num_bytes for t in item[1]), max_file_bytes)
    files, first = _all_files(mine, ranks)
    paths = [partial / name for name in list(files)[first : first + len(mine)]]

    def write() -> None:
        if ranks.replica_rank == 0 or ranks.edp_rank == 0:
            _write_stage(mine, paths, shape, ranks, bias)

    def finish() -> None:
        copy_settings(source, partial, shape.family, role, dtype, stop_token_ids)
        write_index(partial, files)

    unfinished.together(write)
    unfinished.together(finish, alone=True)


def _value_bias(last_chunk: torch.nn.Module, class_name: str) -> Tensor | None:
    """Return the value head's bias; 0 if it has none but the transformers class has one."""
    bias = getattr(getattr(unwrap(last_chunk), "output_layer", None), "bias", None)
    if bias is None and class_name.endswith("TokenClassification"):
        return torch.zeros(1)
    return bias


def _tensors_of(
    parameter: LocalParameter, shape: ModelShape, ranks: Ranks, with_bias: bool
) -> list[TensorPlan]:
    """Return what _gather yields of a parameter."""
    row, dtype = parameter.row, parameter.data.dtype
    tensors = [
        TensorPlan(shift_expert(name, shift), size, dtype)
        for shift in expert_shifts(row, shape, ranks)
        for name, size in zip(parameter.hf_names, row.shapes(shape), strict=True)
    ]
    if parameter.hf_names == (VALUE_HEAD,) and with_bias:
        tensors.append(TensorPlan(VALUE_HEAD_BIAS, (1,), dtype))
    return tensors


def _all_files(mine: list[list[_Planned]], ranks: Ranks) -> tuple[dict[str, list[TensorPlan]], int]:
    """Return the tensors of all stages' files by name, and the index of this stage's first file."""
    leads = ranks.tp_rank == 0 and ranks.replica_rank == 0
    of_stage = [[t for _, tensors in file for t in tensors] for file in mine]
    plans = dict(filter(None, gather_objects((ranks.pp_rank, of_stage) if leads else None)))
    stages = [plans[stage] for stage in sorted(plans)]
    contents = [file for stage in stages for file in stage]
    first = sum(map(len, stages[: ranks.pp_rank]))
    return dict(zip(file_names(len(contents)), contents, strict=True)), first


def _write_stage(
    files: list[list[_Planned]],
    paths: list[Path],
    shape: ModelShape,
    ranks: Ranks,
    bias: Tensor | None,
) -> None:
    """Gather this stage's parameters and write them on its leader."""
    problem: OSError | None = None
    for file, path in zip(files, paths, strict=True):
        tensors = (t for p, _ in file for t in _gather(p, shape, ranks, bias))
        if ranks.tp_rank == 0 and ranks.replica_rank == 0:
            try:
                write_safetensors(path, [t for _, plans in file for t in plans], tensors)
            except OSError as error:
                problem = error
        # The other ranks, and the leader after an error, still take part in each gather.
        for _ in tensors:
            pass
    if problem is not None:
        raise problem


def _gather(
    parameter: LocalParameter, shape: ModelShape, ranks: Ranks, bias: Tensor | None
) -> Iterator[Tensor]:
    """Yield the full HF tensors of one parameter on the stage's first rank, nothing elsewhere."""
    shard, row = parameter.merged.contiguous(), parameter.row
    cut, spread = HOLDERS[row.holder]
    holders = ranks.replica_rank if spread is None else ranks.edp_rank
    if holders > 0:
        return
    shards = [shard]
    axis = ranks.axes[spread or cut]
    if axis.size > 1 and (spread or shard_dim(row.kind) is not None):
        shards = [torch.empty_like(shard) for _ in range(axis.size)] if axis.rank == 0 else []
        dist.gather(shard, shards or None, group=axis.group, group_dst=0)
    if axis.rank == 0:
        for whole in [[one] for one in shards] if spread else [shards]:
            yield from layout.join(
                row.kind,
                whole,
                num_groups=shape.num_key_value_heads,
                head_dim=shape.head_dim,
                num_rows=shape.vocab_size,
            )
        if parameter.hf_names == (VALUE_HEAD,) and bias is not None:
            yield bias.to(shard.dtype)
