"""The files of an HF directory, and how a finished directory takes its place."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vapo_megatron.errors import CheckpointError
from vapo_megatron.weights.hf_reader import DTYPES, INDEX_FILE, SINGLE_FILE

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = {"format": "pt", "producer": "vapo_megatron"}
_CARRIED = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab.*", "merges.txt", "chat_template*", "*.model", "LICENSE*",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TensorPlan:
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


def prepare(out_dir: Path, partial: Path, source: Path) -> None:
    """Make an empty directory beside out_dir; refuse to replace anything but an earlier export."""
    if not (source / "config.json").is_file():
        raise CheckpointError(f"{source} has no config.json to carry along; give an HF directory")
    if source.resolve().is_relative_to(out_dir.resolve()):
        raise CheckpointError(
            f"{out_dir} holds {source}, the directory to copy from; export somewhere else"
        )
    if out_dir.exists() and not _is_replaceable(out_dir):
        raise CheckpointError(
            f"{out_dir} exists and is not an earlier export; remove it or export somewhere else"
        )
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def _is_replaceable(directory: Path) -> bool:
    if not directory.is_dir() or directory.is_symlink():
        return False
    weights = next(directory.glob("*.safetensors"), None)
    if weights is None:
        return not any(directory.iterdir())
    try:
        with safe_open(weights, framework="pt") as file:
            return (file.metadata() or {}).get("producer") == _METADATA["producer"]
    except SafetensorError:
        return False


def write_safetensors(path: Path, tensors: list[TensorPlan], data: Iterator[Tensor]) -> None:
    """Write a safetensors file: 8 bytes with the header's size, a JSON header, then the tensors."""
    header: dict[str, Any] = {"__metadata__": _METADATA}
    offset = 0
    for t in tensors:
        end = offset + t.num_bytes
        header[t.name] = {
            "dtype": _NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [offset, end],
        }  # fmt: skip
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for t in tensors:
            tensor = next(data).cpu().contiguous()
            assert (tuple(tensor.shape), tensor.dtype) == (t.shape, t.dtype), (
                f"{t.name}: planned {t.shape}, gathered {tuple(tensor.shape)}"
            )
            out.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        out.flush()
        os.fsync(out.fileno())


def carry(source: Path, partial: Path) -> None:
    """Copy the tokenizer and the generation settings, following links, and nothing executable."""
    for pattern in _CARRIED:
        for file in source.glob(pattern):
            if file.is_file() and file.suffix not in (".py", ".safetensors"):
                shutil.copyfile(file, partial / file.name)


def write_config(source: Path, partial: Path, family: str, role: str, dtype: torch.dtype) -> None:
    """Write the source's config.json with the architecture and the type of what was exported.

    Args:
        source: directory with a config.json.
        partial: where to write.
        family: model_type, "qwen2".
        role: "actor" (ForCausalLM) or "critic" (ForTokenClassification with one label, no dropout).
        dtype: of the parameters.
    """
    config = json.loads((source / "config.json").read_text())
    config.pop("auto_map", None)  # Names Python files, which are not carried along.
    name = str(dtype).removeprefix("torch.")
    config.update(dict.fromkeys({"torch_dtype", "dtype"} & set(config) or {"torch_dtype"}, name))
    head = "ForCausalLM" if role == "actor" else "ForTokenClassification"
    config["architectures"] = [family.capitalize() + head]
    if role == "critic":
        labels = {"id2label": {"0": "value"}, "label2id": {"value": 0}}
        config.update(num_labels=1, classifier_dropout=0.0, **labels)
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_index(partial: Path, weight_map: dict[str, str], total_bytes: int) -> None:
    """Write the index of several files, after checking that all are there.

    Args:
        partial: the directory.
        weight_map: tensor name -> file name.
        total_bytes: of all tensors.
    """
    files = set(weight_map.values())
    missing = sorted(f for f in files if not (partial / f).is_file())
    if missing:
        raise CheckpointError(
            f"{partial} lacks {', '.join(missing)}: each pipeline stage's first rank writes "
            "its files there; export to a file system that they share"
        )
    if files != {SINGLE_FILE}:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (partial / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def replace(partial: Path, out_dir: Path) -> None:
    """Move the finished directory to its name; an earlier export disappears last."""
    earlier = out_dir.parent / f".{out_dir.name}.replaced"
    if earlier.exists():
        shutil.rmtree(earlier)
    if out_dir.exists():
        out_dir.rename(earlier)
    partial.rename(out_dir)
    shutil.rmtree(earlier, ignore_errors=True)
