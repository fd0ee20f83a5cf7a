"""Writes an HF directory from Megatron shards, one parameter at a time.

Before: every rank holds its shards. During: the ranks of the first data-parallel replica send each
parameter to their stage's leader (tensor-parallel rank 0), which appends it to its own safetensors
file; no rank holds more than one full parameter. After: the directory is complete, or not there at
all. Every rank must call; the leaders must share the directory's file system.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.data.storage import replace_directory
from vapo_megatron.errors import CheckpointError
from vapo_megatron.parallel.reduce import gather_objects
from vapo_megatron.weights import layout
from vapo_megatron.weights.hf_directory import (
    TensorPlan,
    architecture,
    copy_auxiliary,
    partial_of,
    prepare,
    read_config,
    write_config,
    write_index,
    write_safetensors,
)
from vapo_megatron.weights.hf_reader import SINGLE_FILE
from vapo_megatron.weights.mapping import (
    VALUE_HEAD,
    VALUE_HEAD_BIAS,
    LocalParameter,
    local_parameters,
    unwrap,
    wait_for_parameters,
)

if TYPE_CHECKING:
    from vapo_megatron.models.hf_config import ModelShape
    from vapo_megatron.parallel.groups import Ranks

MAX_FILE_BYTES = 4 << 30


@dataclasses.dataclass(frozen=True)
class _File:
    """A file: parameters of this stage, and their HF tensors in the same order."""

    parameters: list[LocalParameter]
    tensors: list[TensorPlan]


def export_hf(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    ranks: Ranks,
    out_dir: str | Path,
    copy_from: str | Path,
    role: str = "actor",
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Write a directory that transformers loads. Collective over all ranks.

    For a critic's class see hf_directory.architecture.

    Args:
        chunks: this rank's model chunks, with or without DDP.
        shape: of the model.
        ranks: this rank's place.
        out_dir: replaced as a whole if it is an earlier export.
        copy_from: directory whose config.json, generation settings and tokenizer are copied.
        role: "actor" or "critic".
        max_file_bytes: largest file, unless a single parameter is larger.

    Returns:
        out_dir. Tensors have the parameters' own types.

    Raises:
        CheckpointError: on every rank, when a directory cannot be replaced or written.
    """
    out_dir, source = Path(out_dir).absolute(), Path(copy_from)
    partial = partial_of(out_dir)
    is_main = ranks.rank == 0
    _agree(_problem_of(lambda: prepare(out_dir, source)) if is_main else None)

    try:
        _export(chunks, shape, ranks, partial, source, role, max_file_bytes)
        _agree(_problem_of(lambda: replace_directory(partial, out_dir)) if is_main else None)
    except CheckpointError:
        if is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return out_dir


def _export(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    ranks: Ranks,
    partial: Path,
    source: Path,
    role: str,
    max_file_bytes: int,
) -> None:
    """Fill the directory `partial`, its index last."""
    wait_for_parameters(chunks)
    parameters = [p for p in local_parameters(chunks, shape, role) if not p.row.is_copy]
    # Wider types first: the safetensors reader needs each tensor aligned to its type.
    parameters.sort(key=lambda p: -p.data.dtype.itemsize)
    dtype = parameters[-1].data.dtype
    bias = None
    if role == "critic":
        bias = _value_bias(chunks[-1], architecture(read_config(source), shape.family, role))
    files = _plan(parameters, shape, max_file_bytes, bias is not None)
    stage_names, weight_map, total_bytes = _name_files(files, ranks)
    paths = [partial / name for name in stage_names]
    _agree(_write_stage(files, paths, shape, ranks, bias) if ranks.dp_rank == 0 else None)

    def finish() -> None:
        copy_auxiliary(source, partial)
        write_config(source, partial, shape.family, role, dtype)
        write_index(partial, weight_map, total_bytes)

    _agree(_problem_of(finish) if ranks.rank == 0 else None)


def _value_bias(last_chunk: torch.nn.Module, class_name: str) -> Tensor | None:
    """Return the value head's bias; 0 if it has none but the transformers class has one."""
    bias = getattr(getattr(unwrap(last_chunk), "output_layer", None), "bias", None)
    if bias is None and class_name.endswith("TokenClassification"):
        return torch.zeros(1)
    return bias


def _problem_of(action: Callable[[], object]) -> str | None:
    try:
        action()
    except (OSError, ValueError) as error:
        return str(error) or repr(error)
    return None


def _agree(problem: str | None) -> None:
    """Raise on every rank if one has a problem, so that none waits for a rank that has left."""
    for found in gather_objects(problem):
        if found:
            raise CheckpointError(f"HF export: {found}")


def _plan(
    parameters: list[LocalParameter], shape: ModelShape, max_file_bytes: int, with_bias: bool
) -> list[_File]:
    """Divide this stage's parameters over files; the same on every rank of the stage."""
    files: list[_File] = []
    used = 0
    for parameter in parameters:
        dtype = parameter.data.dtype
        tensors = [
            TensorPlan(name, size, dtype)
            for name, size in zip(parameter.hf_names, parameter.row.shapes(shape), strict=True)
        ]
        if parameter.hf_names == (VALUE_HEAD,) and with_bias:
            tensors.append(TensorPlan(VALUE_HEAD_BIAS, (1,), dtype))
        num_bytes = sum(t.num_bytes for t in tensors)
        if not files or used + num_bytes > max_file_bytes:
            files.append(_File([], []))
            used = 0
        files[-1].parameters.append(parameter)
        files[-1].tensors.extend(tensors)
        used += num_bytes
    return files


def _name_files(files: list[_File], ranks: Ranks) -> tuple[list[str], dict[str, str], int]:
    """Return this stage's file names; of all stages, tensor name -> file name and total bytes."""
    leads = ranks.tp_rank == 0 and ranks.dp_rank == 0
    mine = (ranks.pp_rank, [[(t.name, t.num_bytes) for t in f.tensors] for f in files])
    plans = gather_objects(mine if leads else None)
    stages = [stage for _, stage in sorted(p for p in plans if p is not None)]
    count = sum(map(len, stages))
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    if count == 1:
        names = [SINGLE_FILE]
    contents = [file for stage in stages for file in stage]
    weight_map = {t: name for name, file in zip(names, contents, strict=True) for t, _ in file}
    first = sum(map(len, stages[: ranks.pp_rank]))
    total_bytes = sum(size for file in contents for _, size in file)
    return names[first : first + len(files)], weight_map, total_bytes


def _write_stage(
    files: list[_File],
    paths: list[Path],
    shape: ModelShape,
    ranks: Ranks,
    bias: Tensor | None,
) -> str | None:
    """Gather this stage's parameters and write them on its leader; return a problem or None."""
    problem = None
    for file, path in zip(files, paths, strict=True):
        tensors = (t for p in file.parameters for t in _gather(p, shape, ranks, bias))
        if ranks.tp_rank == 0:
            try:
                write_safetensors(path, file.tensors, tensors)
            except OSError as error:
                problem = f"{path}: {error.strerror}"
        # The other ranks, and the leader after an error, still take part in each gather.
        for _ in tensors:
            pass
    return problem


def _gather(
    parameter: LocalParameter, shape: ModelShape, ranks: Ranks, bias: Tensor | None
) -> Iterator[Tensor]:
    """Yield the full HF tensors of one parameter on tensor-parallel rank 0, nothing elsewhere."""
    shard, kind = parameter.data.contiguous(), parameter.row.kind
    shards = [shard]
    if ranks.tp_size > 1 and layout.shard_dim(kind) is not None:
        is_leader = ranks.tp_rank == 0
        shards = [torch.empty_like(shard) for _ in range(ranks.tp_size)] if is_leader else []
        dist.gather(shard, shards or None, group=ranks.tp_group, group_dst=0)
    if ranks.tp_rank == 0:
        yield from layout.join(
            kind,
            shards,
            num_groups=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            num_rows=shape.vocab_size,
        )
        if parameter.hf_names == (VALUE_HEAD,) and bias is not None:
            yield bias.to(shard.dtype)
