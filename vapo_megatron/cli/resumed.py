"""Checks before the start: the checkpoint to resume from, or to take a critic from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vapo_megatron.errors import CheckpointError

if TYPE_CHECKING:
    from vapo_megatron.config import VapoConfig
    from vapo_megatron.models.hf_config import ModelShape


def check_checkpoint(config: VapoConfig, shape: ModelShape) -> None:
    """Check the checkpoint to resume from, or whose critic to take; check_inputs has its data.

    A damaged checkpoint is passed over: loading reports it and falls back to an older one.
    """
    from vapo_megatron.run.checkpoint.files import (
        CRITIC_REMEDY,
        candidates,
        check_optimizer,
        check_roles,
        check_value_range,
    )
    from vapo_megatron.weights.convert.sharded_files import ShardedReader
    from vapo_megatron.weights.convert.to_hf import check_tensors

    run_dir, path = config.logging.run_dir, config.model.critic_checkpoint
    field, remedy = f"logging.run_dir={run_dir}", "logging.run_dir"
    roles = config.algorithm.trained_roles
    found = own_checkpoints(config)
    with_optimizer, other = True, "start another run with logging.run_dir"
    if (state := own_state(config)) is not None:
        check_roles(found[0], state["num_updates"], roles)
        check_value_range(state, config.algorithm, field=f"{field} ({found[0].name})")

    # A run's own checkpoint takes precedence over model.critic_checkpoint.
    if not found and path is not None:
        field, remedy, roles = f"model.critic_checkpoint={path}", "critic_checkpoint", ("critic",)
        with_optimizer, other = config.model.critic_checkpoint_optimizer, CRITIC_REMEDY
        found = candidates(Path(path, "checkpoints")) or [Path(path)]
        if not any((directory / "critic").is_dir() for directory in found):
            raise CheckpointError(
                f"{field} holds no critic; set it to a run directory whose run had one, or to one "
                "of its checkpoints/step_*"
            )
        if (state := _state(found)) is not None:
            check_value_range(state, config.algorithm, field=field)

    for role in roles:
        if not found or not _is_intact(found[0], f"{role}/.metadata"):
            continue
        try:
            check_tensors(ShardedReader(found[0] / role), shape, role)
        except CheckpointError as error:
            raise CheckpointError(
                f"{field}: {error}; set model.hf_path to the model that it was trained from, or "
                f"another {remedy}"
            ) from None
        if with_optimizer:
            check_optimizer(found[0] / role, role, config, field=field, remedy=other)


def own_checkpoints(config: VapoConfig) -> list[Path]:
    """Return the checkpoints to resume from, best first."""
    from vapo_megatron.run.checkpoint.files import candidates, resumes

    root = Path(config.logging.run_dir, "checkpoints")
    return candidates(root) if resumes(config.checkpoint.resume) else []


def own_state(config: VapoConfig) -> dict[str, Any] | None:
    """Return the state of the checkpoint to resume from; None: there is none, or it is damaged."""
    return _state(own_checkpoints(config))


def _state(found: Sequence[Path]) -> dict[str, Any] | None:
    """Return the state of the first checkpoint; None: there is none, or it is damaged."""
    from vapo_megatron.run.checkpoint.files import STATE

    if not found or not _is_intact(found[0], STATE):
        return None
    return json.loads((found[0] / STATE).read_text())


def _is_intact(directory: Path, name: str) -> bool:
    """Compare a small file of a checkpoint with its checksum."""
    from vapo_megatron.data.storage import sha256_of
    from vapo_megatron.run.checkpoint.files import read_sums

    try:
        return read_sums(directory).get(name) == sha256_of(directory / name)
    except (ValueError, OSError):
        return False
