"""Loads HF directories: each rank reads only its own slices of the safetensors files.

Before: every rank holds model chunks with arbitrary weights. After: its parameters hold its part of
the checkpoint; it has held at most one parameter's parts in addition. Nothing is sent between
ranks, and no code from the checkpoint is run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vapo_megatron.config.phases import VALUE_ROLES
from vapo_megatron.data.batch import all_finite
from vapo_megatron.errors import CheckpointError
from vapo_megatron.weights import layout
from vapo_megatron.weights.convert.sharded_files import ShardedReader, is_distributed_checkpoint
from vapo_megatron.weights.convert.to_hf import check_checkpoint
from vapo_megatron.weights.expected import compare_tensors
from vapo_megatron.weights.hf_reader import DTYPES, HfReader
from vapo_megatron.weights.holders import parts, shard_axis, shard_dim
from vapo_megatron.weights.parameters import LocalParameter, local_parameters, unwrap
from vapo_megatron.weights.table import EMBEDDING, OUTPUT, VALUE_HEAD, VALUE_HEAD_BIAS, hf_tensors

if TYPE_CHECKING:
    from vapo_megatron.models.hf_config import ModelShape
    from vapo_megatron.parallel.groups import Ranks


def check_weights(hf_path: str | Path, shape: ModelShape, role: str) -> None:
    """Check from the files' headers that load_hf_weights can load them.

    Raises:
        CheckpointError: see check_hf_tensors.
    """
    if is_distributed_checkpoint(hf_path):
        check_checkpoint(ShardedReader(hf_path), shape, role)
    else:
        check_hf_tensors(HfReader(hf_path), shape, role)


def check_hf_tensors(reader: HfReader, shape: ModelShape, role: str) -> None:
    """Compare names, shapes and types of all tensors with the model's.

    A critic may start from a policy (no score.weight: the head keeps its initial weights; lm_head
    is ignored) or from a reward model with one label (score.weight is the value head). A
    reward_model must have that label.

    Raises:
        CheckpointError: names tensors with what was expected and found.
    """
    present = dict.fromkeys(reader.names())
    expected = hf_tensors(shape, role)
    if role == "critic" and VALUE_HEAD not in present:
        del expected[VALUE_HEAD]
    elif role in VALUE_ROLES and VALUE_HEAD_BIAS in present:
        expected[VALUE_HEAD_BIAS] = (1,)
    ignored = {OUTPUT} if role in VALUE_ROLES or shape.tied else set()
    ignored |= {name for name in present if name.endswith("rotary_emb.inv_freq")}
    compare_tensors(reader, role, expected, [n for n in present if n not in ignored], DTYPES)


def check_tied(reader: HfReader, read: Callable[[str], Iterator[Tensor]]) -> None:
    """Refuse a tied model whose file has a different output matrix.

    Args:
        reader: of the file.
        read: yields parts of a tensor; called with EMBEDDING and OUTPUT if their headers agree.
    """
    expected, found = (f"{list(reader.shape(n))} {reader.dtype(n)}" for n in (EMBEDDING, OUTPUT))
    if expected != found:
        raise CheckpointError(
            f"{reader.directory}: {OUTPUT}: expected {expected} as {EMBEDDING}, found {found}"
        )
    for embedding, output in zip(read(EMBEDDING), read(OUTPUT), strict=True):
        if not torch.equal(embedding, output):
            raise CheckpointError(
                f"{reader.directory}: config.json says tie_word_embeddings=true, but {OUTPUT} "
                f"differs from {EMBEDDING}; set it to false"
            )


def load_hf_weights(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    hf_path: str | Path,
    ranks: Ranks,
    role: str,
) -> int:
    """Copy this rank's part of an HF directory into its chunks, before the optimizer is built.

    Collective if hf_path is a converted checkpoint.

    Args:
        chunks: from build_model, one for each virtual pipeline stage.
        shape: of the model that was built.
        hf_path: directory with safetensors files, or one that convert_hf_to_megatron.py wrote.
        role: actor, critic or reward_model; a critic takes a policy or a reward model.

    Returns:
        Bytes that this rank has read.

    Raises:
        CheckpointError: before anything is copied, naming tensor, expected and found; later, for a
            number that is not finite.
    """
    if is_distributed_checkpoint(hf_path):
        return _load_converted(chunks, shape, Path(hf_path), role)
    reader = HfReader(hf_path)
    check_hf_tensors(reader, shape, role)
    parameters = local_parameters(chunks, shape, role)
    present = set(reader.names())
    if role == "actor" and shape.tied and OUTPUT in present:
        # A file may store the tied output; if it differs, it is another model.
        embeddings = [p for p in parameters if p.hf_names == (EMBEDDING,)]

        def read(name: str) -> Iterator[Tensor]:
            for parameter in embeddings:
                renamed = dataclasses.replace(parameter, hf_names=(name,))
                yield from _parts(reader, renamed, shape, ranks)

        check_tied(reader, read)
    head = getattr(unwrap(chunks[-1]), "output_layer", None)
    if role in VALUE_ROLES and head is not None and VALUE_HEAD_BIAS in present:
        head.set_bias(reader.read(VALUE_HEAD_BIAS))
    for parameter in parameters:
        # A policy has no value head: it stays as built.
        if parameter.hf_names == (VALUE_HEAD,) and VALUE_HEAD not in present:
            continue
        parameter.data.copy_(shard_of(reader, parameter, shape, ranks))
    return reader.bytes_read


def shard_of(
    reader: HfReader, parameter: LocalParameter, shape: ModelShape, ranks: Ranks
) -> Tensor:
    """Read this rank's shard of a parameter. CheckpointError: a number in it is not finite."""
    read = list(_parts(reader, parameter, shape, ranks))
    for name, part in zip(parameter.hf_names, read, strict=True):
        if not all_finite(part):
            raise CheckpointError(
                f"{reader.directory}: {name} has numbers that are not finite (NaN, infinity); the "
                "file is damaged, or the run that wrote it diverged: take another checkpoint"
            )
    shard = layout.merge(
        parameter.row.kind,
        read,
        num_groups=shape.num_key_value_heads,
        tp_size=shard_axis(parameter.row, ranks).size,
        num_rows=parameter.data.shape[0],
    )
    assert shard.shape == parameter.data.shape, (
        f"{parameter.name}: built as {list(parameter.data.shape)}, loaded {list(shard.shape)}"
    )
    return shard


def _load_converted(
    chunks: Sequence[torch.nn.Module], shape: ModelShape, directory: Path, role: str
) -> int:
    """Load a distributed checkpoint; a critic's head keeps its weights if there are none in it."""
    from vapo_megatron.parallel.sharded_state import load_model_weights  # imports megatron-core

    reader = ShardedReader(directory)
    present = {tensor.key for tensor in check_checkpoint(reader, shape, role)}
    leave_out = {"output_layer.weight"} - present if role == "critic" else set()
    load_model_weights(chunks, directory, leave_out)
    return sum(reader.dtype(key).itemsize * math.prod(reader.shape(key)) for key in present)


def _parts(
    reader: HfReader, parameter: LocalParameter, shape: ModelShape, ranks: Ranks
) -> Iterator[Tensor]:
    """Yield this rank's parts of the HF tensors of one parameter."""
    row, axis = parameter.row, shard_axis(parameter.row, ranks)
    dim = shard_dim(row.kind)
    if dim is None:
        yield from map(reader.read, parameter.hf_names)
        return
    held = parts(row, shape, axis.rank, axis.size, parameter.data.shape[0] * axis.size)
    for name, (start, stop) in zip(parameter.hf_names, held, strict=True):
        yield reader.read(name, dim, start, stop)
