"""Loads HF directories: each rank reads its own slices of the safetensors files and nothing else.

Before: every rank holds built model chunks with any weights. After: each rank's parameters hold its
part of the checkpoint, and no rank has held more than one parameter's parts at a time. Nothing is
sent between ranks, and no code from the checkpoint is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vapo_megatron.errors import CheckpointError
from vapo_megatron.weights import layout
from vapo_megatron.weights.hf_export import export_hf
from vapo_megatron.weights.hf_reader import HfReader
from vapo_megatron.weights.mapping import (
    EMBEDDING,
    OUTPUT,
    VALUE_HEAD,
    VALUE_HEAD_BIAS,
    LocalParameter,
    hf_tensors,
    local_parameters,
)

if TYPE_CHECKING:
    from vapo_megatron.models.hf_config import ModelShape
    from vapo_megatron.parallel.groups import ParallelGroups

__all__ = ["HfReader", "check_hf_tensors", "export_hf", "load_hf_weights"]

_FLOATS = ("F32", "BF16", "F16")


def check_hf_tensors(reader: HfReader, shape: ModelShape, role: str) -> None:
    """Compare names, shapes and types of all tensors with the model's.

    A critic also starts from a policy (no score.weight: the head keeps its initial weights, lm_head
    is left out) or from a reward model with one label (score.weight is the value head).

    Raises:
        CheckpointError: names tensors with what was expected and found.
    """
    expected = hf_tensors(shape, role)
    present = set(reader.names())
    optional, ignored = set(), set()
    if role == "critic":
        optional.add(VALUE_HEAD)
        ignored.add(OUTPUT)
        if VALUE_HEAD in present:
            expected[VALUE_HEAD_BIAS] = (1,)
            optional.add(VALUE_HEAD_BIAS)
    elif shape.tied:
        ignored.add(OUTPUT)
    problems = []
    for name, size in expected.items():
        if name not in present:
            if name not in optional:
                problems.append(f"{name} is missing (expected shape {list(size)})")
        elif reader.shape(name) != size:
            problems.append(
                f"{name}: expected shape {list(size)}, found {list(reader.shape(name))}"
            )
        elif reader.dtype(name) not in _FLOATS:
            problems.append(f"{name}: expected {' or '.join(_FLOATS)}, found {reader.dtype(name)}")
    problems += [
        f"{name} is unknown"
        for name in reader.names()
        if name not in expected and name not in ignored and not name.endswith("rotary_emb.inv_freq")
    ]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"{reader.directory} does not hold the {role} that config.json describes: "
            f"{'; '.join(problems[:5])}{more}"
        )


def load_hf_weights(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    hf_path: str | Path,
    groups: ParallelGroups,
    role: str,
) -> int:
    """Copy this rank's part of an HF directory into its chunks, before the optimizer is built.

    Args:
        chunks: from build_model, one for each virtual pipeline stage.
        shape: of the model that was built.
        hf_path: directory with safetensors files.
        groups: this rank's place.
        role: a critic takes a policy or a reward model; see check_hf_tensors.

    Returns:
        Bytes of tensors that this rank has read.

    Raises:
        CheckpointError: before anything is copied, naming tensor, expected and found.
    """
    reader = HfReader(hf_path)
    check_hf_tensors(reader, shape, role)
    parameters = local_parameters(chunks, shape, role)
    present = set(reader.names())
    if role == "actor" and shape.tied and OUTPUT in present:
        _check_really_tied(reader, parameters, shape, groups)
    if VALUE_HEAD_BIAS in present and reader.read(VALUE_HEAD_BIAS).any():
        raise CheckpointError(
            f"{reader.directory}: {VALUE_HEAD_BIAS} must be 0, found "
            f"{reader.read(VALUE_HEAD_BIAS).tolist()}: the value head has no bias; give another "
            "model.critic_hf_path"
        )
    for parameter in parameters:
        if parameter.hf_names == (VALUE_HEAD,) and VALUE_HEAD not in present:
            continue
        shard = layout.merge(
            parameter.row.kind,
            list(_parts(reader, parameter, shape, groups)),
            num_groups=shape.num_key_value_heads // groups.tp_size,
            num_rows=parameter.data.shape[0],
        )
        assert shard.shape == parameter.data.shape, (
            f"{parameter.name}: built as {list(parameter.data.shape)}, loaded {list(shard.shape)}"
        )
        parameter.data.copy_(shard)
    return reader.bytes_read


def _parts(
    reader: HfReader, parameter: LocalParameter, shape: ModelShape, groups: ParallelGroups
) -> Iterator[Tensor]:
    """Yield this rank's parts of the HF tensors of one parameter."""
    kind = parameter.row.kind
    dim = layout.shard_dim(kind)
    for name, size in zip(parameter.hf_names, parameter.row.shapes(shape), strict=True):
        if dim is None:
            yield reader.read(name)
        elif kind == "vocabulary":
            padded = parameter.data.shape[0] * groups.tp_size
            yield reader.read(
                name,
                dim,
                *layout.vocabulary_bounds(size[0], padded, groups.tp_rank, groups.tp_size),
            )
        else:
            yield reader.read(name, dim, *layout.bounds(size[dim], groups.tp_rank, groups.tp_size))


def _check_really_tied(
    reader: HfReader,
    parameters: list[LocalParameter],
    shape: ModelShape,
    groups: ParallelGroups,
) -> None:
    """Refuse a tied model whose file holds an output matrix of its own."""
    if reader.shape(OUTPUT) != (size := reader.shape(EMBEDDING)):
        raise CheckpointError(
            f"{reader.directory}: {OUTPUT}: expected shape {list(size)}, found "
            f"{list(reader.shape(OUTPUT))}"
        )
    for parameter in parameters:
        if parameter.hf_names != (EMBEDDING,):
            continue
        padded = parameter.data.shape[0] * groups.tp_size
        rows = layout.vocabulary_bounds(size[0], padded, groups.tp_rank, groups.tp_size)
        if not torch.equal(reader.read(EMBEDDING, 0, *rows), reader.read(OUTPUT, 0, *rows)):
            raise CheckpointError(
                f"{reader.directory}: config.json says tie_word_embeddings=true, but {OUTPUT} "
                f"differs from {EMBEDDING}; set it to false"
            )
