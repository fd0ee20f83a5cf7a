"""Reads the .metadata of a distributed checkpoint, a pickle, without running code from it."""

from __future__ import annotations

import enum
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from vapo_megatron.errors import CheckpointError

METADATA_FILE = ".metadata"
_PICKLED = {
    "builtins": {"set", "frozenset", "dict", "list", "tuple"},
    "collections": {"OrderedDict", "defaultdict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "torch": {"Size", "strided"} | {str(t).removeprefix("torch.") for t in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
        torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
}  # fmt: skip


def read_metadata(directory: Path) -> Metadata:
    """Read which tensors a distributed checkpoint holds, and where.

    Objects are left out: torch's loader would unpickle them, even where a tensor is requested.

    Raises:
        CheckpointError: it is corrupt, would run code, or names a file outside the directory.
    """
    path = directory / METADATA_FILE
    try:
        with open(path, "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise ValueError("it holds something else")
    except Exception as error:  # whatever a broken pickle raises
        raise CheckpointError(
            f"{path} is not a distributed checkpoint's metadata ({error}); do not use it"
        ) from None
    for index, place in metadata.storage_data.items():
        name = getattr(place, "relative_path", None)
        if not isinstance(name, str) or Path(name).name != name or "\\" in name:
            raise CheckpointError(
                f"{directory}: {index.fqn} is in {name!r}, but must be in a file of the same "
                "directory; do not use this checkpoint"
            )
    metadata.state_dict_metadata = dict(tensors_of(metadata))
    return metadata


def tensors_of(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return the tensors in it, without objects."""
    described = metadata.state_dict_metadata.items()
    return {key: value for key, value in described if isinstance(value, TensorStorageMetadata)}


class _Unpickler(pickle.Unpickler):
    """Allows the classes of a checkpoint's metadata and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse any class that is not listed."""
        if (module, name) == ("builtins", "getattr"):
            return _member  # How Python before 3.11.4 pickles a member of an Enum.
        if name not in _PICKLED.get(module.replace("pathlib._local", "pathlib"), ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Any:
    """Return a member of a listed Enum, in place of getattr, which could return anything."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"it names an attribute {name!r} of {kind!r}")
    return kind[name]
