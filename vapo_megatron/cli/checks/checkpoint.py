"""Checks before the start: the checkpoint to resume from, or to take a critic from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vapo_megatron.config import VapoConfig
from vapo_megatron.config.lora import LoraConfig
from vapo_megatron.config.phases import Role
from vapo_megatron.data.storage import sha256_of
from vapo_megatron.errors import CheckpointError
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.run.checkpoint.files import (
    CRITIC_REMEDY,
    STATE,
    candidates,
    check_meaning,
    check_optimizer,
    check_roles,
    read_sums,
    resumes,
)
from vapo_megatron.weights.convert.sharded_files import ShardedReader
from vapo_megatron.weights.convert.to_hf import check_adapted, check_tensors


def check_checkpoint(config: VapoConfig, shape: ModelShape) -> None:
    """Check the checkpoint to resume from, else the one whose critic to take, if there is either.

    A damaged checkpoint is passed over: loading reports it and falls back to an older one. That
    its data are the run's is checked in contents.py.
    """
    if found := own_checkpoints(config):
        _check_own(found[0], config, shape)
    elif config.model.critic_checkpoint is not None:
        _check_critic(config.model.critic_checkpoint, config, shape)


def _check_own(newest: Path, config: VapoConfig, shape: ModelShape) -> None:
    field, roles = f"logging.run_dir={config.logging.run_dir}", config.algorithm.trained_roles
    if (state := _state(newest)) is not None:
        check_roles(newest, state["num_updates"], roles)
        check_meaning(state, config, roles, field=f"{field} ({newest.name})")
    for role in roles:
        lora = config.model.lora if config.model.lora.of(role) else None
        if _check_tensors(newest, role, shape, field, "logging.run_dir", lora):
            remedy = "start another run with logging.run_dir"
            check_optimizer(newest / role, role, config, field=field, remedy=remedy)


def _check_critic(path: str, config: VapoConfig, shape: ModelShape) -> None:
    field = f"model.critic_checkpoint={path}"
    found = candidates(Path(path, "checkpoints")) or [Path(path)]
    if not any((directory / "critic").is_dir() for directory in found):
        raise CheckpointError(
            f"{field} holds no critic; set it to a run directory whose run had one, or to one "
            "of its checkpoints/step_*"
        )
    newest = found[0]
    if (state := _state(newest)) is not None:
        check_meaning(state, config, ["critic"], field=field)
    lora = config.model.lora if config.model.lora.of("critic") else None
    if (
        _check_tensors(newest, "critic", shape, field, "critic_checkpoint", lora)
        and config.model.critic_checkpoint_optimizer
    ):
        check_optimizer(newest / "critic", "critic", config, field=field, remedy=CRITIC_REMEDY)


def _check_tensors(
    newest: Path, role: Role, shape: ModelShape, field: str, remedy: str, lora: LoraConfig | None
) -> bool:
    """Compare a role's tensors with the model's sizes; False: they are damaged."""
    if not _is_intact(newest, f"{role}/.metadata"):
        return False
    reader = ShardedReader(newest / role)
    check_adapted(reader, role, lora)
    try:
        check_tensors(reader, shape, role, lora)
    except CheckpointError as error:
        raise CheckpointError(
            f"{field}: {error}; set model.hf_path to the model that it was trained from, or "
            f"another {remedy}"
        ) from None
    return True


def own_checkpoints(config: VapoConfig) -> list[Path]:
    """Return the checkpoints to resume from, best first."""
    root = Path(config.logging.run_dir, "checkpoints")
    return candidates(root) if resumes(config.checkpoint.resume) else []


def own_state(config: VapoConfig) -> dict[str, Any] | None:
    """Return the state of the checkpoint to resume from; None: there is none, or it is damaged."""
    found = own_checkpoints(config)
    return _state(found[0]) if found else None


def _state(checkpoint: Path) -> dict[str, Any] | None:
    """Return the state of a checkpoint; None: it is damaged."""
    return json.loads((checkpoint / STATE).read_text()) if _is_intact(checkpoint, STATE) else None


def _is_intact(directory: Path, name: str) -> bool:
    """Compare a small file of a checkpoint with its checksum."""
    try:
        return read_sums(directory).get(name) == sha256_of(directory / name)
    except (ValueError, OSError):
        return False
