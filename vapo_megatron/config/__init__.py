"""Fields, rules, and the registries of techniques, phases and metrics."""

from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.data import DataConfig, FileConfig, SourceConfig
from vapo_megatron.config.environment import EnvironmentConfig
from vapo_megatron.config.help import describe_fields
from vapo_megatron.config.load import load_config, read_config, recipe_names
from vapo_megatron.config.model import ModelConfig
from vapo_megatron.config.optimizer import OptimizerConfig
from vapo_megatron.config.parallel import ParallelConfig
from vapo_megatron.config.reward import RewardConfig, ScaleConfig
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.config.rules import check_together
from vapo_megatron.config.run import (
    CheckpointConfig,
    EvaluationConfig,
    LoggingConfig,
    TimeoutsConfig,
)
from vapo_megatron.config.schema import VapoConfig
from vapo_megatron.errors import ConfigError

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "FileConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RewardConfig",
    "RolloutConfig",
    "ScaleConfig",
    "SourceConfig",
    "TimeoutsConfig",
    "VapoConfig",
    "check_together",
    "describe_fields",
    "load_config",
    "read_config",
    "recipe_names",
]
