"""The configuration tree: its sections, and what follows from several of them.

Defaults are the paper's (arXiv 2504.05118) where it gives a value, else DAPO's (arXiv 2503.14476,
same team). Use `config.load_config`, which also checks fields against each other.
"""

from __future__ import annotations

import yaml
from pydantic import Field

from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.data import DataConfig
from vapo_megatron.config.environment import EnvironmentConfig
from vapo_megatron.config.model import ModelConfig
from vapo_megatron.config.optimizer import OptimizerConfig
from vapo_megatron.config.parallel import ParallelConfig
from vapo_megatron.config.phases import Role
from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.config.run import (
    CheckpointConfig,
    EvaluationConfig,
    LoggingConfig,
    TimeoutsConfig,
)
from vapo_megatron.config.section import Section, field


class VapoConfig(Section):
    """The full configuration of a run."""

    seed: int = field(0, "Seed of all randomness.", ge=0)
    model: ModelConfig = Field(default_factory=ModelConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    timeouts: TimeoutsConfig = Field(default_factory=TimeoutsConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)

    def colocated(self) -> VapoConfig:
        """Return the same for work whose processes all do the same, such as an evaluation."""
        update = {"placement": "colocated", "num_processes": 0, "lag": 0, "carry_over_groups": 0}
        return self.model_copy(update={"rollout": self.rollout.model_copy(update=update)})

    @property
    def num_processes(self) -> int:
        """Processes that torchrun starts."""
        return self.parallel.world_size + self.rollout.num_processes

    @property
    def samples(self) -> bool:
        """Whether responses are sampled; False: the data give them."""
        return self.data.response_column is None

    @property
    def roles(self) -> tuple[Role, ...]:
        """The models that a run loads."""
        judge = () if self.model.reward_hf_path is None else ("reward_model",)
        return (*self.algorithm.roles, *judge)

    def for_replay(self) -> VapoConfig:
        """Return what a replay builds: its responses have their verdicts, so no reward model."""
        model = self.model.model_copy(update={"reward_hf_path": None})
        return self.model_copy(update={"model": model})

    def to_yaml(self) -> str:
        """Return the resolved configuration with every field."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False)
