"""A model and its optimizer to and from a megatron-core distributed checkpoint.

Before `take_snapshot`: every rank holds its shards. After: each rank has copies of the shards whose
first holder it is, to be written later. `load_sharded` fills every rank's shards from a checkpoint
of any layout.
"""

from __future__ import annotations

import itertools
import os
import pickle
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from vapo_megatron.errors import CheckpointError
from vapo_megatron.parallel.checkpoint_metadata import read_metadata, tensors_of
from vapo_megatron.parallel.offload import find_storages
from vapo_megatron.parallel.optimizer_state import load_optimizer_state, make_optimizer_state
from vapo_megatron.parallel.reduce import gather_objects

METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    "distrib_optim_fully_reshardable_mem_efficient": False,
}


class Snapshot(NamedTuple):
    """What a rank writes of a model and its optimizer."""

    items: list[tuple[MetadataIndex, Tensor]]
    """The shards of which this rank is the first holder, each with its place in the full tensor."""
    common: dict[str, Any]
    """The same on every rank."""
    metadata: Metadata | None
    """Of all ranks' shards, without file names; on the main rank."""


def take_snapshot(chunks: Sequence[Any], optimizer: Any, *, copy: bool) -> Snapshot:
    """Describe and copy what is saved; collective; writes nothing.

    Args:
        chunks: model chunks, without DDP.
        optimizer: of these.
        copy: copy live tensors into host memory; False: refer to them.
    """
    make_optimizer_state(optimizer)
    state = _state(chunks, optimizer, is_loading=False)
    state["content_metadata"] = dict(METADATA)
    sharded, common = save_preprocess(state)
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    writer = _SnapshotWriter(_live_storages(chunks, optimizer) if copy else None)
    torch.distributed.checkpoint.save(
        mcore_to_pyt_state_dict(flat, False),
        storage_writer=writer,
        planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
    )
    return Snapshot(writer.items, common, writer.metadata)


def _live_storages(chunks: Sequence[Any], optimizer: Any) -> set[int]:
    """Return the addresses of a model's and its optimizer's storages."""
    of_chunks = [p for chunk in chunks for p in chunk.parameters()]
    parameters, state, _ = find_storages(of_chunks, optimizer)
    buffers = [buffer.untyped_storage() for chunk in chunks for buffer in chunk.buffers()]
    return {storage.data_ptr() for storage in [*parameters, *state, *buffers]}


def load_sharded(chunks: Sequence[Any], optimizer: Any, directory: Path) -> None:
    """Fill model and optimizer from a directory of snapshots; collective.

    Raises:
        CheckpointError: it is of another model or kind of optimizer, or would run code; nothing was
            changed.
    """
    make_optimizer_state(optimizer)
    found = tensors_of(read_metadata(directory))
    _add_bias(chunks, found)
    state = _state(chunks, optimizer, is_loading=True)
    _check_fits(state, found, directory)
    loaded = _load(state, directory)
    _fill(chunks, loaded)
    load_optimizer_state(optimizer, loaded["optimizer"])


def load_model_weights(
    chunks: Sequence[Any], directory: Path, leave_out: Collection[str] = ()
) -> None:
    """Fill the model alone from a checkpoint of any layout; collective.

    The vocabulary may be padded differently: rows that the checkpoint lacks are 0.

    Args:
        chunks: model chunks, without DDP.
        directory: a distributed checkpoint whose tensors are known to fit.
        leave_out: keys whose parameters are not loaded.
    """
    _add_bias(chunks, tensors_of(read_metadata(directory)))
    state = _model_state(chunks, dict(METADATA))
    for of_chunk in state.values():
        for name in [n for n, value in of_chunk.items() if value.key in leave_out]:
            del of_chunk[name]
    _fill(chunks, _load(state, directory), leave_out)


def _load(state: dict[str, Any], directory: Path) -> dict[str, Any]:
    # Without it megatron-core 0.19 looks for an object of the metadata, which torch would unpickle.
    if not (directory / "common.pt").exists():
        raise CheckpointError(f"{directory} has no common.pt; do not use it")
    # With this variable torch would unpickle anything in common.pt.
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    with warnings.catch_warnings():  # megatron-core uses deprecated functions of torch
        warnings.simplefilter("ignore", FutureWarning)
        try:
            return dist_checkpointing.load(state, str(directory))
        except pickle.UnpicklingError:  # its message suggests loading the file unsafely
            raise CheckpointError(
                f"{directory}: a file holds more than tensors and numbers; do not use it"
            ) from None


def _add_bias(chunks: Sequence[Any], found: Collection[str]) -> None:
    """Give the value head a bias if the checkpoint has one."""
    for module in chunks[-1].modules():
        if "output_layer.bias" in found and hasattr(module, "set_bias"):
            module.set_bias(torch.zeros(1))


def _check_fits(
    state: dict[str, Any], found: Mapping[str, TensorStorageMetadata], directory: Path
) -> None:
    """Compare requested names and shapes with the checkpoint's; collective."""
    problems = []
    for wanted in nested_values(load_preprocess(state)[0]):
        if not isinstance(wanted, ShardedTensor):
            continue
        shape = list(wanted.global_shape)
        if wanted.key not in found:
            problems.append(f"{wanted.key} is missing")
        elif list(found[wanted.key].size) != shape and not wanted.allow_shape_mismatch:
            size = list(found[wanted.key].size)
            problems.append(f"{wanted.key}: expected shape {shape}, found {size}")
    problems = sorted(set(itertools.chain(*gather_objects(problems))))
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(
            f"{directory} is of another model, or of an optimizer with other settings: "
            f"{'; '.join(problems[:3])}{more}; resume with the configuration that wrote it, or "
            "start another run with logging.run_dir"
        )


class _Reader(FileSystemReader):
    """Reads a checkpoint without running code from its metadata."""

    def read_metadata(self, *arguments: Any, **options: Any) -> Metadata:
        """Read it safely, and once."""
        if not hasattr(self, "_metadata"):
            self._metadata = read_metadata(Path(self.path))
            self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata


# torch unpickles whatever the metadata holds, and megatron-core takes no other reader.
assert hasattr(strategies, "_get_filesystem_reader"), "megatron-core reads metadata elsewhere"
strategies._get_filesystem_reader = lambda directory, *_, **options: _Reader(directory)


def _fill(chunks: Sequence[Any], loaded: dict[str, Any], leave_out: Collection[str] = ()) -> None:
    """Load tensors into the chunks, which must need exactly these."""
    for index, chunk in enumerate(chunks):
        left = chunk.load_state_dict(loaded.get(f"model{index}", {}), strict=False)
        leave_out = {*leave_out, *_base_names(chunk)}
        missing = [
            name
            for name in left.missing_keys
            if not name.endswith("_extra_state") and name not in leave_out
        ]
        assert not missing and not left.unexpected_keys, f"{missing=} {left.unexpected_keys=}"


class _SnapshotWriter(FileSystemWriter):
    """Lets torch plan who saves what, and keeps the tensors in memory instead of writing them."""

    def __init__(self, live: set[int] | None) -> None:
        super().__init__("")
        self._live = live
        self.items: list[tuple[MetadataIndex, Tensor]] = []
        self.metadata: Metadata | None = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create no directory."""
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy live tensors."""
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor), f"{item.index.fqn}: not a tensor"
            tensor = tensor.detach()
            if self._live is not None and tensor.device.type != "cpu":
                tensor = tensor.cpu()
            # What the distributed optimizer has gathered for saving is a copy already.
            elif self._live and tensor.untyped_storage().data_ptr() in self._live:
                tensor = tensor.clone()
            self.items.append((item.index, tensor))
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Keep the metadata."""
        self.metadata = metadata


def _state(chunks: Sequence[Any], optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    metadata = dict(METADATA)  # a copy: megatron-core adds process groups to it
    state = _model_state(chunks, metadata)
    state["optimizer"] = optimizer.sharded_state_dict(
        dict(state), is_loading=is_loading, metadata=metadata
    )
    return state


def _model_state(chunks: Sequence[Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """Describe the model's tensors.

    Extra states (used by FP8 alone) are left out: Transformer Engine's layers and megatron-core's
    own have them in different modules, and each must load the other's checkpoints. So are weights
    below adapters, which a run reads from where it started.
    """
    state = {}
    for index, chunk in enumerate(chunks):
        base = _base_names(chunk)
        state[f"model{index}"] = {
            name: value
            for name, value in chunk.sharded_state_dict(metadata=metadata).items()
            if not name.endswith("_extra_state") and name not in base
        }
    return state


def _base_names(chunk: Any) -> set[str]:
    """Return the names of the frozen parameters that roles/base.py has marked."""
    return {name for name, p in chunk.named_parameters() if getattr(p, "is_base", False)}
