"""Adapters from and to PEFT directories (peft_files.py), across ranks.

Reading: each rank reads its own rows or columns. Writing: the first rank gets every matrix in full,
all together a few parts in a thousand of the model's bytes, and writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.weights.adapter_table import adapter_tensors
from vapo_megatron.weights.gather import gather_hf_tensors
from vapo_megatron.weights.hf_directory import (
    TensorPlan,
    atomic_directory,
    note_export,
    write_safetensors,
)
from vapo_megatron.weights.hf_reader import HfReader
from vapo_megatron.weights.load_hf import shard_of
from vapo_megatron.weights.parameters import local_parameters
from vapo_megatron.weights.peft_files import (
    PREFIX,
    WEIGHTS_FILE,
    wanted_tensors,
    write_peft_config,
)

if TYPE_CHECKING:
    from vapo_megatron.config.lora import LoraConfig
    from vapo_megatron.models.hf_config import ModelShape
    from vapo_megatron.parallel.groups import Ranks


class _Reader(HfReader):
    """Reads an adapter's matrices by the name table's names; those of no target are 0."""

    def __init__(self, directory: str | Path, unused: dict[str, tuple[int, ...]]) -> None:
        super().__init__(directory, WEIGHTS_FILE)
        self._unused = unused

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """Return a part; see HfReader. That of no target is 0."""
        if name not in self._unused:
            return super().read(PREFIX + name, dim, start, stop)
        assert stop is not None and dim == 0, "rows of B"
        return torch.zeros(stop - start, self._unused[name][1])


def load_adapters(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    directory: str | Path,
    ranks: Ranks,
    lora: LoraConfig,
) -> None:
    """Copy this rank's part of a PEFT directory, which check_adapters has accepted.

    Args:
        chunks: whose adapters are filled.
        directory: with the matrices of lora.targets.
    """
    used, sizes = wanted_tensors(shape, lora), adapter_tensors(shape, lora)
    reader = _Reader(directory, {name: size for name, size in sizes.items() if name not in used})
    for parameter in local_parameters(chunks, shape, "actor", lora):
        with torch.no_grad():
            parameter.data.copy_(shard_of(reader, parameter, shape, ranks))


def export_adapters(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    ranks: Ranks,
    out_dir: str | Path,
    base: str | Path,
    lora: LoraConfig,
    *,
    step: int | None = None,
    stop_token_ids: Sequence[int] = (),
) -> Path:
    """Write a PEFT directory of a policy's adapters. Collective over all ranks.

    Args:
        chunks: this rank's model chunks, with or without DDP.
        out_dir: replaced as a whole if it is an earlier export.
        base: directory of the base model, which is named in it.
        step, stop_token_ids: of the run, for exported_step; None: unknown.

    Returns:
        out_dir.

    Raises:
        CheckpointError: on every rank, when a directory cannot be replaced or written.
    """
    out_dir, used = Path(out_dir).absolute(), wanted_tensors(shape, lora)
    held: dict[str, Tensor] = {}
    for name, tensor in gather_hf_tensors(chunks, shape, ranks, lora=lora):
        if name in used and (not dist.is_initialized() or dist.get_rank() == 0):
            held[name] = tensor.cpu().clone()
    dtype = next(p.data.dtype for p in local_parameters(chunks, shape, "actor", lora))
    plans = [TensorPlan(PREFIX + name, size, dtype) for name, size in used.items()]
    num_bytes = sum(plan.num_bytes for plan in plans)

    with atomic_directory(out_dir, Path(base), num_bytes) as unfinished:

        def write() -> None:
            file = unfinished.path / WEIGHTS_FILE
            write_safetensors(file, plans, (held[name] for name in used))
            write_peft_config(unfinished.path, shape, lora, base)
            note_export(unfinished.path, step, stop_token_ids)

        unfinished.together(write, alone=True)
    return out_dir
