"""The configuration tree: every field with its default, constraints and description.

Defaults are the paper's (arXiv 2504.05118) where it gives a value, else DAPO's (arXiv 2503.14476,
same team). Use `config.load_config`, which also checks fields against each other.
"""

from __future__ import annotations

from typing import Literal

import yaml
from pydantic import Field

from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.data import DataConfig, FileConfig
from vapo_megatron.config.environment import EnvironmentConfig
from vapo_megatron.config.phases import Role
from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.config.section import Section
from vapo_megatron.config.section import field as _field


class ModelConfig(Section):
    """The model that is trained."""

    hf_path: str | None = _field(
        None,
        "Initial actor: an HF directory (config.json, safetensors, tokenizer), or one written by "
        "`vapo convert to-megatron`; required.",
    )
    critic_hf_path: str | None = _field(
        None,
        "Initial critic: an HF or converted directory of a policy or a reward model; null: the "
        "actor's weights with a new value head.",
    )
    critic_checkpoint: str | None = _field(
        None,
        "Initial critic of a new run, in place of critic_hf_path: a checkpoint of any parallel "
        "layout, or a run directory (its latest checkpoint); ignored on resume.",
    )
    critic_checkpoint_optimizer: bool = _field(
        True,
        "Also load the optimizer state and update count of critic_checkpoint, so that the learning "
        "rate does not warm up again; false: only the weights.",
    )
    reward_hf_path: str | None = _field(
        None,
        "Reward model, which judges the rows whose verifier is reward_model: an HF or converted "
        "directory with one label and the actor's vocabulary; null: none.",
    )
    value_head_init_std: float = _field(
        0.0, "Standard deviation of a new value head's weights; 0: V is 0 at first.", ge=0
    )
    value_head_bias: Literal["none", "mean_return"] = _field(
        "none",
        "Constant that is added to all values; mean_return: what brings their mean to the mean "
        "return of the first step's responses, before the first update.",
    )
    dtype: Literal["bfloat16", "float32"] = _field(
        "bfloat16", "Data type of parameters and activations."
    )
    layer_spec: Literal["auto", "transformer_engine", "local"] = _field(
        "auto",
        "Layer implementation; auto: Transformer Engine if it is installed and dtype is bfloat16.",
    )
    fp8: Literal["hybrid", "e4m3"] | None = _field(
        None,
        "FP8 format of the linear layers in training; hybrid: e4m3, gradients e5m2; needs "
        "Transformer Engine; null: no FP8.",
    )
    make_vocab_size_divisible_by: int = _field(
        128, "The vocabulary is padded to a multiple of this times the tensor-parallel size.", ge=1
    )


class ParallelConfig(Section):
    """How the model and the batch are distributed over ranks."""

    world_size: int = _field(
        1,
        "Number of processes (one per GPU) that train; torchrun starts these and "
        "rollout.num_processes.",
        ge=1,
    )
    tensor_model_parallel_size: int = _field(
        1, "Tensor-parallel size (TP): ranks that share each layer's matrices.", ge=1
    )
    pipeline_model_parallel_size: int = _field(
        1, "Pipeline-parallel size (PP): ranks that share the layers.", ge=1
    )
    virtual_pipeline_model_parallel_size: int | None = _field(
        None, "Model chunks on each pipeline rank; null: one.", ge=1
    )
    batch_p2p_comm: bool | None = _field(
        None,
        "Batched sends and receives between pipeline stages; null: on without virtual stages, off "
        "with them, where batching is unsafe.",
    )
    context_parallel_size: int = _field(
        1, "Context-parallel size (CP): ranks that share each sequence.", ge=1
    )
    sequence_parallel: bool = _field(
        False, "Shard activations outside the tensor-parallel regions along the sequence."
    )
    use_distributed_optimizer: bool = _field(
        True, "Shard optimizer state and float32 main parameters over data-parallel ranks."
    )
    overlap_grad_reduce: bool = _field(
        False, "Overlap the gradient reduction with the backward pass."
    )
    overlap_param_gather: bool = _field(
        False,
        "Overlap the all-gather of updated parameters with the forward pass; needs the distributed "
        "optimizer.",
    )
    recompute: Literal["none", "selective", "full"] = _field(
        "none", "Activation recomputation in the backward pass."
    )
    recompute_method: Literal["uniform", "block"] = _field(
        "uniform",
        "With recompute=full; uniform: all layers, in units of recompute_num_layers whose inputs "
        "are kept; block: only the first recompute_num_layers of each model chunk.",
    )
    recompute_num_layers: int = _field(
        1,
        "Layers of a unit (uniform; it must divide a chunk's), or of each chunk that are "
        "recomputed (block).",
        ge=1,
    )
    max_tokens_per_microbatch: int = _field(
        32768, "Token budget (prompt + response) of one packed microbatch.", ge=1
    )
    offload: bool | None = _field(
        None,
        "Offload idle models to host memory: parameters and optimizer state of each role; an idle "
        "vLLM drops its weights and KV cache; null: true on a GPU.",
    )
    host_memory_gb: float | None = _field(
        None,
        "Host memory per node that offload, checkpoints and a step's responses may use, in 1e9 "
        "bytes; null: all that is available.",
        gt=0,
    )
    gpu_memory_gb: float = _field(
        80.0,
        "Memory of a GPU in 1e9 bytes, for the plan of --dry-run; a run queries its GPU instead.",
        gt=0,
    )
    timeout_seconds: float = _field(
        10800.0, "Timeout of collectives; at least the largest of timeouts.*.", gt=0
    )

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of a model: TP x PP."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Ranks that train on different responses: world size / (TP x CP x PP)."""
        return self.world_size // (self.model_parallel_size * self.context_parallel_size)

    @property
    def replica_size(self) -> int:
        """Copies of a model, which reduce gradients and share the optimizer: CP x DP."""
        return self.context_parallel_size * self.data_parallel_size


class OptimizerConfig(Section):
    """AdamW; linear learning rate warm-up, then constant."""

    actor_learning_rate: float = _field(1e-6, "Peak learning rate of the actor.", gt=0)
    critic_learning_rate: float = _field(2e-6, "Peak learning rate of the critic.", gt=0)
    actor_warmup_updates: int = _field(
        320, "Warm-up of the actor, in updates of the actor (20 steps of 16).", ge=0
    )
    critic_warmup_updates: int = _field(
        320, "Warm-up of the critic, in updates of the critic.", ge=0
    )
    adam_beta1: float = _field(0.9, "AdamW's beta1.", "beta_1", ge=0, lt=1)
    adam_beta2: float = _field(0.95, "AdamW's beta2.", "beta_2", ge=0, lt=1)
    adam_eps: float = _field(1e-8, "AdamW's epsilon.", gt=0)
    weight_decay: float = _field(0.1, "Decoupled weight decay; not on biases and norms.", ge=0)
    actor_clip_grad: float = _field(1.0, "Gradient norm clipping of the actor; 0: off.", ge=0)
    critic_clip_grad: float = _field(1.0, "Gradient norm clipping of the critic; 0: off.", ge=0)
    max_skipped_updates: int = _field(
        3,
        "Stop the run after this many consecutive updates of a role were skipped because a loss, "
        "gradient, value or log-probability was not finite.",
        ge=1,
    )


class CheckpointConfig(Section):
    """Checkpoints, resume and export."""

    every_steps: int = _field(10, "Steps between checkpoints; 0: only at the end.", ge=0)
    keep_last: int = _field(2, "Number of latest checkpoints to keep.", ge=1)
    keep_every: int = _field(0, "Steps between checkpoints that are never deleted; 0: none.", ge=0)
    asynchronous: bool = _field(
        True,
        "Copy the state to host memory and write it while training continues; false: training "
        "waits for the disk, and nothing is copied.",
    )
    resume: bool = _field(
        True,
        "Resume from the run directory's latest complete checkpoint, if any; false: start from "
        "scratch; a job that torchrun or Slurm restarts still resumes.",
    )
    grace_seconds: float = _field(
        30.0,
        "Time that a run has to exit after SIGTERM, SIGUSR1 or Ctrl-C: it finishes the current "
        "step if there is time, else saves the previous one.",
        ge=0,
    )
    hf_export: bool = _field(True, "Export the trained actor as an HF directory at the end.")


class TimeoutsConfig(Section):
    """How long a phase may last without progress before the run is aborted with stack traces."""

    start_seconds: float = _field(
        3600.0, "Startup: building vLLM and the models, loading a checkpoint.", gt=0
    )
    generation_seconds: float = _field(
        7200.0, "One round of sampling, or an evaluation; set by the longest responses.", gt=0
    )
    update_seconds: float = _field(900.0, "One update of the actor or the critic.", gt=0)
    checkpoint_seconds: float = _field(3600.0, "Writing a checkpoint or the HF export.", gt=0)
    other_seconds: float = _field(
        1800.0,
        "Any other phase: verification, exchange, values, log-probabilities, weight sync.",
        gt=0,
    )
    silence_seconds: float = _field(
        120.0, "Time without a heartbeat from a process, in any phase.", gt=0
    )


class LoggingConfig(Section):
    """Output of a run."""

    run_dir: str = _field("runs/vapo", "Output directory.")
    tensorboard: bool = _field(True, "Write TensorBoard events.")
    wandb_project: str | None = _field(
        None, "Weights & Biases project to log metrics to; null: off."
    )
    wandb_name: str | None = _field(
        None, "The run's name there; null: the name of run_dir, without what is above it."
    )
    wandb_group: str | None = _field(None, "Its group there, such as of several seeds.")
    wandb_tags: list[str] = _field([], "Its tags there.")
    rollout_groups: int = _field(2, "Groups of responses written as JSONL per step.", ge=0)
    dump_steps: int = _field(
        0, "Number of latest steps whose responses are dumped for --replay; 0: none.", ge=0
    )
    progress: Literal["auto", "live", "plain", "off"] = _field(
        "auto", "Progress display; auto: live on a terminal, plain lines elsewhere."
    )


class EvaluationConfig(Section):
    """Accuracy on held-out problems, with the training verifier."""

    path: str | None = _field(
        None, "JSONL or parquet file of held-out problems; null, without sources: no evaluation."
    )
    sources: dict[str, FileConfig] = _field(
        {}, "Several files by name, in place of path, each with the fields below."
    )
    every_steps: int = _field(
        0, "Steps between evaluations; 0: only before the first and after the last step.", ge=0
    )
    samples: int = _field(32, "Responses per problem (the K of avg@K).", "K", ge=1)
    temperature: float = _field(1.0, "Sampling temperature; 0: greedy.", ge=0)
    top_p: float = _field(0.7, "Nucleus sampling.", gt=0, le=1)
    top_k: int = _field(-1, "Top-k sampling; -1: off.")


class VapoConfig(Section):
    """The full configuration of a run."""

    seed: int = _field(0, "Seed of all randomness.", ge=0)
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
        apart = {"placement": "colocated", "num_processes": 0, "lag": 0, "carry_over_groups": 0}
        return self.model_copy(update={"rollout": self.rollout.model_copy(update=apart)})

    @property
    def num_processes(self) -> int:
        """Processes that torchrun starts."""
        return self.parallel.world_size + self.rollout.num_processes

    @property
    def roles(self) -> tuple[Role, ...]:
        """The models that a run loads."""
        scored = () if self.model.reward_hf_path is None else ("reward_model",)
        return (*self.algorithm.roles, *scored)

    def for_replay(self) -> VapoConfig:
        """Return what a replay builds: its responses have their verdicts, so no reward model."""
        model = self.model.model_copy(update={"reward_hf_path": None})
        return self.model_copy(update={"model": model})

    def to_yaml(self) -> str:
        """Return the resolved configuration with every field."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False)
