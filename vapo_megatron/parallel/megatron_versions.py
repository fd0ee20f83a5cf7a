"""Differences between the releases of megatron-core that setup.py allows, one function each.

The rest of the package is written against 0.16 and checks no version. Each function names the
release that changed something, and does nothing on releases before it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_NOTICES = (
    "No CUDA runtime is found",  # 0.17 imports torch's compiler of extensions, which looks for CUDA
    "DistributedDataParallel: full_param_layout not provided",  # 0.18: DDP computes it itself
    "GPTModel IS DEPRECATED",  # 0.19, in favour of HybridModel
    "load_common is deprecated",  # 0.19 saves common.pt's content among the tensors
)
_LOGGERS = (
    "torch.utils.cpp_extension",
    "megatron.core.distributed.distributed_data_parallel",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.dist_checkpointing.strategies.common",
)
_WARNINGS = (
    "full scope is deprecated",  # 0.17, of the default of a field that is not set here
    "The argument order of load has been changed",  # 0.18's own call of torch
    "torch.distributed is disabled, unavailable or uninitialized",  # the same call
)
_GROUP_KEYS = frozenset({"wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr"})


def quieten_notices() -> None:
    """0.17 to 0.19 tell users at each import, model, DDP or checkpoint what they cannot change.

    To be called before megatron-core is imported.
    """
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_is_no_notice)
    for text in _WARNINGS:
        warnings.filterwarnings("ignore", text, UserWarning)


def _is_no_notice(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_NOTICES)


def adopt_group_settings(state: Mapping[Any, Any], groups: Sequence[dict[str, Any]]) -> None:
    """0.19 loads no checkpoint of a run with another learning rate; this lets it.

    Saved groups and the optimizer's are matched by the keys that 0.16 has, _GROUP_KEYS, and from
    0.19 on also by the bounds of megatron-core's own scheduler (max_lr, min_lr, start_wd, ...),
    which is not used here: the saved ones get this run's.

    Args:
        state: loaded, of one or several of megatron-core's optimizers; its groups are changed.
        groups: the optimizer's.
    """
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    settings = set(param_group_identifier_keys) - _GROUP_KEYS
    own = {_identity(group): group for group in groups}
    for saved in _saved_groups(state):
        same = own.get(_identity(saved), {})
        saved.update({key: same[key] for key in settings & same.keys()})


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(key) for key in sorted(_GROUP_KEYS))


def _saved_groups(state: Mapping[Any, Any]) -> Iterator[dict[str, Any]]:
    yield from state.get("param_groups", ())
    for part in state.values():
        if isinstance(part, dict):
            yield from _saved_groups(part)
