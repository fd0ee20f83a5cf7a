"""Checks before the start: what a model's sizes decide."""

from __future__ import annotations

import os
from pathlib import Path

from vapo_megatron.config import VapoConfig
from vapo_megatron.config.missing import hub_id
from vapo_megatron.data.rollout import UNKNOWN_ROUTE
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.models.known import KNOWN_MODELS, known_shape
from vapo_megatron.models.layout_rules import check_layout
from vapo_megatron.planning.misfits import check_fits
from vapo_megatron.rollout.requests import max_model_len
from vapo_megatron.weights.adapter_table import targets_of


def check_sizes(config: VapoConfig, shape: ModelShape) -> None:
    """Refuse a layout, lengths or adapters that the model cannot have; ConfigError names them."""
    check_layout(shape, config.parallel)
    check_experts(shape, config)
    targets_of(shape, config.model.lora)
    max_model_len(shape, config.rollout)


def check_experts(shape: ModelShape, config: VapoConfig) -> None:
    """Refuse settings that need experts where there are none, and those that do not work with them.

    Raises:
        ConfigError: names the field, its value, the rule and the remedy.
    """
    if shape.experts is None:
        for name, value, off in (
            ("model.freeze_router", config.model.freeze_router, False),
            ("algorithm.router_replay", config.algorithm.router_replay, "off"),
            ("rollout.expert_parallel", config.rollout.expert_parallel, False),
        ):
            if value != off:
                raise ConfigError(
                    f"{name}={str(value).lower()} needs a model with experts, which "
                    f"model.hf_path={config.model.hf_path} is not; set it to {str(off).lower()}"
                )
        return
    if config.algorithm.router_replay == "r3" and shape.experts.count > UNKNOWN_ROUTE:
        raise ConfigError(
            f"algorithm.router_replay=r3 keeps a byte for each of a token's experts, of at most "
            f"{UNKNOWN_ROUTE}; model.hf_path={config.model.hf_path} has {shape.experts.count}; set "
            "it to r2 or off"
        )
    for role in config.algorithm.trained_roles:
        if (method := config.optimizer.method(role)) != "adamw":
            raise ConfigError(
                f"optimizer.{role}_method={method} must be adamw with experts, which other ranks "
                "hold than dense matrices; set it to that"
            )


def check_memory(config: VapoConfig, shape: ModelShape) -> None:
    """Refuse what cannot fit into this process's GPU; without a GPU nothing is checked."""
    import torch  # Late, since the other checks need none.

    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0")))
        check_fits(config, shape, gpu.total_memory)


def is_published(config: VapoConfig) -> bool:
    """Is the model a published one that is not on this machine? It is planned without files."""
    path = config.model.hf_path
    if path is None or os.path.exists(path) or hub_id(path) is not None:
        return False
    return Path(path).name in KNOWN_MODELS


def check_published(config: VapoConfig) -> None:
    """Check what a published model's sizes decide, without its files. Raises ConfigError."""
    check_sizes(config, known_shape(Path(str(config.model.hf_path)).name))
