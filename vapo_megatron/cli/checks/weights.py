"""Checks before the start: initial weights of each role, and the reward model."""

from __future__ import annotations

from pathlib import Path

from vapo_megatron.cli.checks.sizes import check_sizes
from vapo_megatron.config import VapoConfig
from vapo_megatron.errors import CheckpointError, ConfigError
from vapo_megatron.models.hf_config import ModelShape, read_reward_shape
from vapo_megatron.reward.reward_model import check_reward_model_judges
from vapo_megatron.rollout.inputs import Inputs
from vapo_megatron.rollout.tokenizer import check_same_tokenizer
from vapo_megatron.weights import load_hf
from vapo_megatron.weights.peft_files import check_adapters


def check_weights(config: VapoConfig, shape: ModelShape) -> None:
    """Compare the headers of the initial weights with the model's sizes."""
    starts = [("actor", "model.hf_path", config.model.hf_path)]
    if "critic" in config.algorithm.trained_roles:
        starts.append(("critic", "model.critic_hf_path", config.model.critic_hf_path))
    for role, field, path in starts:
        if path is not None:
            _check_files(role, field, path, shape)
    if (lora := config.model.lora).path is not None:
        check_adapters(lora.path, shape, lora, str(config.model.hf_path))


def check_reward_model(config: VapoConfig, inputs: Inputs) -> None:
    """Refuse a reward model that cannot score the actor's responses, or that judges no row.

    Raises:
        UserError: names model.reward_hf_path.
    """
    path = config.model.reward_hf_path
    if path is None:
        return
    shape = read_reward_shape(config.model, inputs.shape)
    try:
        check_sizes(config, shape)
    except ConfigError as error:
        raise ConfigError(f"model.reward_hf_path={path}: {error}") from None
    check_same_tokenizer(inputs.tokenizer, path)
    _check_files("reward_model", "model.reward_hf_path", path, shape)
    assert inputs.dataset is not None, "a replay needs no reward model"
    check_reward_model_judges(config.reward, inputs.dataset.rows, inputs.dataset.path, path)


def _check_files(role: str, field: str, path: str, shape: ModelShape) -> None:
    """Compare the headers of a directory's weights with the sizes of a role's model."""
    try:
        load_hf.check_weights(Path(path), shape, role)
    except CheckpointError as error:
        raise CheckpointError(f"{field}={path}: {error}") from None
