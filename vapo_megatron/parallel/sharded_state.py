"""A model and its optimizer to and from a megatron-core distributed checkpoint.

Before `save_sharded`: every rank holds its shards. After: each rank has written the shards that it
is the first holder of. `load_sharded` fills every rank's shards, whatever layout wrote them.

torch's Adam makes its state at the first step and keeps a step count per parameter, which
megatron-core 0.16 does not expect; three things are mended here (the fused Adams of Transformer
Engine and apex, whose groups count, need the first alone): the state is made before saving and
loading, the count is passed on, and after loading each parameter gets a count of its own, because
the loaded one is shared and would advance once for each.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint import FileSystemWriter

from vapo_megatron.parallel import backend

backend.install()

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.strategies.torch import (  # noqa: E402
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402

from vapo_megatron.parallel.optimizer import inner_optimizers, make_optimizer_state  # noqa: E402

METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    "distrib_optim_fully_reshardable_mem_efficient": False,
}


def save_sharded(chunks: Sequence[Any], optimizer: Any, directory: Path) -> None:
    """Write model and optimizer into an empty directory; collective."""
    _prime(optimizer)
    dist_checkpointing.save(
        _state(chunks, optimizer, is_loading=False),
        str(directory),
        sharded_strategy=_WriteInProcess("torch_dist", 1),
        content_metadata=dict(METADATA),
    )


def load_sharded(chunks: Sequence[Any], optimizer: Any, directory: Path) -> None:
    """Fill model and optimizer from a directory that save_sharded wrote; collective."""
    _prime(optimizer)
    with warnings.catch_warnings():  # megatron-core's loader uses what torch will remove
        warnings.simplefilter("ignore", FutureWarning)
        loaded = dist_checkpointing.load(_state(chunks, optimizer, is_loading=True), str(directory))
    _fill(chunks, loaded)
    is_fused = not any(isinstance(inner, torch.optim.Adam) for inner in inner_optimizers(optimizer))
    _place_step(loaded["optimizer"], in_groups=is_fused)
    optimizer.load_state_dict(loaded["optimizer"])
    for inner in inner_optimizers(optimizer):
        for of_parameter in inner.state.values():
            if torch.is_tensor(of_parameter.get("step")):
                of_parameter["step"] = of_parameter["step"].clone()


def load_model_weights(
    chunks: Sequence[Any], directory: Path, leave_out: Collection[str] = ()
) -> None:
    """Fill the model alone from a checkpoint of any layout; collective.

    A vocabulary that is padded otherwise fits too: rows that the checkpoint lacks are 0.

    Args:
        chunks: model chunks, without DDP.
        directory: of a distributed checkpoint, whose tensors were found to fit.
        leave_out: keys whose parameters keep their values.
    """
    state = _model_state(chunks, dict(METADATA))
    for of_chunk in state.values():
        for name in [n for n, value in of_chunk.items() if value.key in leave_out]:
            del of_chunk[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        loaded = dist_checkpointing.load(state, str(directory))
    _fill(chunks, loaded, leave_out)


def _fill(chunks: Sequence[Any], loaded: dict[str, Any], leave_out: Collection[str] = ()) -> None:
    """Hand loaded tensors to the chunks, which must want all of them and no more."""
    for index, chunk in enumerate(chunks):
        left = chunk.load_state_dict(loaded.get(f"model{index}", {}), strict=False)
        missing = [
            name
            for name in left.missing_keys
            if not name.endswith("_extra_state") and name not in leave_out
        ]
        assert not missing and not left.unexpected_keys, f"{missing=} {left.unexpected_keys=}"


class _WriteInProcess(TorchDistSaveShardedStrategy):
    """megatron-core's format, written by torch's own writer.

    megatron-core's writer starts a manager and forks a process for each save, from a process that
    holds vLLM's and gloo's threads; here nothing is started.
    """

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        """Write this rank's shards; collective."""
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        torch.distributed.checkpoint.save(
            mcore_to_pyt_state_dict(flat, False),
            storage_writer=FileSystemWriter(checkpoint_dir, thread_count=1),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )


def _state(chunks: Sequence[Any], optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    metadata = dict(METADATA)  # megatron-core adds this run's process groups to it
    state = _model_state(chunks, metadata)
    state["optimizer"] = optimizer.sharded_state_dict(
        dict(state), is_loading=is_loading, metadata=metadata
    )
    return state


def _model_state(chunks: Sequence[Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """Describe the model's tensors.

    Extra states, which hold something with FP8 alone, are left out: which modules have one differs
    between Transformer Engine's layers and megatron-core's own, and each must load the other's.
    """
    return {
        f"model{index}": {
            name: value
            for name, value in chunk.sharded_state_dict(metadata=metadata).items()
            if not name.endswith("_extra_state")
        }
        for index, chunk in enumerate(chunks)
    }


def _prime(optimizer: Any) -> None:
    """Make Adam's state, so that there is something to load into."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part, DistributedOptimizer):
            part._set_main_param_and_optimizer_states = functools.partial(_set_keeping_step, part)
    make_optimizer_state(optimizer)


def _place_step(state: dict[Any, Any], *, in_groups: bool) -> None:
    """Put the step count where this machine's Adam looks for it, whichever wrote the checkpoint.

    A fused Adam has it in its groups, torch's with each parameter, of which megatron-core makes one
    common_step; a 0, before the first update, is left out by both. The distributed optimizer has
    no "state" here and places the count itself.
    """
    of_parameters, groups = state.get("state"), state.get("param_groups")
    if isinstance(of_parameters, dict) and groups is not None:
        steps = [float(group.pop("step")) for group in groups if "step" in group]
        step = of_parameters.pop("common_step", max(steps, default=0.0))
        if in_groups:
            for group in groups:
                group["step"] = int(step)
        else:
            of_parameters["common_step"] = torch.tensor(float(step))
    for part in state.values():
        if isinstance(part, dict) and part is not of_parameters:
            _place_step(part, in_groups=in_groups)


def _set_keeping_step(
    part: DistributedOptimizer, parameter: torch.nn.Parameter, tensors: dict[str, Any]
) -> None:
    group, index = part.model_param_group_index_map[parameter]
    state = part.optimizer.state[part.optimizer.param_groups[group]["params"][index]]
    if "step" in state and "step" not in tensors:
        tensors = {**tensors, "step": state["step"]}
    DistributedOptimizer._set_main_param_and_optimizer_states(part, parameter, tensors)
