"""PEFT directories: adapter_config.json and adapter_model.safetensors, as peft writes them.

Reading: each rank reads its own rows or columns. Writing: the first rank gets every matrix in full,
all together a few parts in a thousand of the model's bytes, and writes them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.errors import CheckpointError
from vapo_megatron.weights.adapter_table import adapter_tensors, target_of, targets_of
from vapo_megatron.weights.gather import gather_hf_tensors
from vapo_megatron.weights.hf_directory import (
    TensorPlan,
    atomic_directory,
    note_export,
    write_safetensors,
)
from vapo_megatron.weights.hf_reader import DTYPES, HfReader
from vapo_megatron.weights.load_hf import shard_of
from vapo_megatron.weights.parameters import local_parameters

if TYPE_CHECKING:
    from vapo_megatron.config.lora import LoraConfig
    from vapo_megatron.models.hf_config import ModelShape
    from vapo_megatron.parallel.groups import Ranks

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Before the names of matrices in a file."""
_PLAIN = {
    "use_dora": False, "use_rslora": False, "fan_in_fan_out": False, "bias": "none",
    "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None, "layers_to_transform": None,
    "lora_bias": False, "target_parameters": None, "trainable_token_indices": None,
}  # fmt: skip
"""Settings of PEFT that change what an adapter computes or has, and their value without effect."""


def is_peft(directory: str | Path) -> bool:
    """Is it a PEFT directory?"""
    return Path(directory, CONFIG_FILE).is_file()


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


def check_adapters(directory: str | Path, shape: ModelShape, lora: LoraConfig) -> None:
    """Check from config and header that load_adapters can load a PEFT directory.

    Raises:
        CheckpointError: names the file, what was expected and what was found.
    """
    config = read_peft_config(directory)
    asked = {"r": lora.rank, "lora_alpha": lora.alpha}
    for name, value in asked.items():
        if config.get(name) != value:
            field = {"r": "rank", "lora_alpha": "alpha"}[name]
            raise CheckpointError(
                f"model.lora.path={directory}: its {name} is {config.get(name)}, which "
                f"model.lora.{field}={value:g} must equal; set {field}={config.get(name)}"
            )
    reader, targets = HfReader(directory, WEIGHTS_FILE), targets_of(shape, lora)
    expected = {PREFIX + n: s for n, s in wanted_tensors(shape, lora).items()}
    present = set(reader.names())
    found = sorted({target_of(name) for name in present})
    if found != sorted(targets):
        raise CheckpointError(
            f"model.lora.path={directory} has adapters of {', '.join(found)}, and "
            f"model.lora.targets asks for {', '.join(targets)}; set targets=[{', '.join(found)}]"
        )
    for name, size in expected.items():
        if name not in present or reader.shape(name) != size or reader.dtype(name) not in DTYPES:
            what = f"{list(reader.shape(name))} {reader.dtype(name)}" if name in present else "none"
            raise CheckpointError(
                f"model.lora.path={directory}: {name}: expected {list(size)}, found {what}: it is "
                "of another base model; give adapters of model.hf_path"
            )
    if extra := sorted(present - set(expected)):
        raise CheckpointError(
            f"model.lora.path={directory}: {extra[0]} is unknown: it is of another base model; "
            "give adapters of model.hf_path"
        )


def wanted_tensors(shape: ModelShape, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the matrices of all targets."""
    targets = targets_of(shape, lora)
    found = adapter_tensors(shape, lora).items()
    return {name: size for name, size in found if target_of(name) in targets}


def read_peft_config(directory: str | Path) -> dict[str, Any]:
    """Read adapter_config.json, and refuse what is more than A and B of linear layers.

    Raises:
        CheckpointError: it is missing or damaged, or has a setting that changes what is computed.
    """
    file = Path(directory, CONFIG_FILE)
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise CheckpointError(f"{file} {why}; give a directory that peft has saved") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise CheckpointError(f"{file}: peft_type must be LORA; give a LoRA adapter")
    for name, plain in _PLAIN.items():
        if config.get(name, plain) not in (plain, None, [], {}):
            raise CheckpointError(
                f"{file}: {name}={config[name]!r} is not supported, only {plain!r}; merge that "
                "adapter into its model with peft, and give the result as model.hf_path"
            )
    return config


def load_adapters(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    directory: str | Path,
    ranks: Ranks,
    lora: LoraConfig,
) -> None:
    """Copy this rank's part of a PEFT directory into its chunks' adapters.

    Raises:
        CheckpointError: before anything is copied; see check_adapters.
    """
    check_adapters(directory, shape, lora)
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
            config = peft_config(shape, lora, base)
            (unfinished.path / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
            note_export(unfinished.path, step, stop_token_ids)

        unfinished.together(write, alone=True)
    return out_dir


def peft_config(shape: ModelShape, lora: LoraConfig, base: str | Path) -> dict[str, Any]:
    """Return what peft and vLLM read in adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(targets_of(shape, lora)),
        "bias": "none",
        "inference_mode": True,
    }
