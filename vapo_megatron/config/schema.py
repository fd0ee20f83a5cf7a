"""The configuration tree: every field with its default, rule and meaning.

Defaults are the paper's (arXiv 2504.05118) where it prints a value, DAPO's (arXiv 2503.14476, same
team) where it is silent. Read through `config.load_config`, which also checks fields against each
other.
"""

from __future__ import annotations

from typing import Literal

import yaml
from pydantic import Field

from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.section import Section
from vapo_megatron.config.section import field as _field


class ModelConfig(Section):
    """What is trained."""

    hf_path: str | None = _field(
        None,
        "HF directory (config.json, safetensors, tokenizer) that the actor starts from, or one "
        "that tools/convert_hf_to_megatron.py wrote; required.",
    )
    critic_hf_path: str | None = _field(
        None,
        "HF or converted directory of a policy or a reward model that the critic starts from; "
        "null: the actor's weights, a new value head.",
    )
    critic_checkpoint: str | None = _field(
        None,
        "Run directory (its latest checkpoint) or checkpoint of any layout whose critic a new run "
        "starts from, in place of critic_hf_path; a run that resumes has its own.",
    )
    critic_checkpoint_optimizer: bool = _field(
        True,
        "Take over that critic's optimizer state and number of updates, so that nothing warms up "
        "again; false: its weights alone.",
    )
    value_head_init_std: float = _field(
        0.0, "Standard deviation of a new value head's weights; 0 starts at V = 0.", ge=0
    )
    dtype: Literal["bfloat16", "float32"] = _field(
        "bfloat16", "Type of the parameters and activations."
    )
    layer_spec: Literal["auto", "transformer_engine", "local"] = _field(
        "auto",
        "Layer implementation; auto takes Transformer Engine where it is installed, in bfloat16.",
    )
    fp8: Literal["hybrid", "e4m3"] | None = _field(
        None,
        "Type of the layers' matrix products in training; hybrid: e4m3, gradients e5m2. Needs "
        "Transformer Engine; null: dtype.",
    )
    make_vocab_size_divisible_by: int = _field(
        128, "The vocabulary is padded to a multiple of this times the tensor-parallel size.", ge=1
    )


class ParallelConfig(Section):
    """How the model and the batch are spread over processes."""

    world_size: int = _field(1, "Number of processes (one per GPU) that torchrun starts.", ge=1)
    tensor_model_parallel_size: int = _field(
        1, "Ranks that share each layer's matrices (TP).", ge=1
    )
    pipeline_model_parallel_size: int = _field(1, "Ranks that share the layers (PP).", ge=1)
    virtual_pipeline_model_parallel_size: int | None = _field(
        None, "Model chunks on each pipeline rank; null: one.", ge=1
    )
    batch_p2p_comm: bool | None = _field(
        None,
        "Batched sends and receives between pipeline stages; null: on without virtual stages, off "
        "with them, where they would go wrong.",
    )
    context_parallel_size: int = _field(1, "Only 1 is supported.", ge=1)
    sequence_parallel: bool = _field(
        False, "Shard activations between the tensor-parallel blocks along the sequence."
    )
    use_distributed_optimizer: bool = _field(
        True, "Shard optimizer state and main parameters over data-parallel ranks."
    )
    overlap_grad_reduce: bool = _field(False, "Reduce gradients while the backward pass runs.")
    overlap_param_gather: bool = _field(
        False,
        "Gather updated parameters while the forward pass runs; needs the distributed optimizer.",
    )
    recompute: Literal["none", "selective", "full"] = _field(
        "none", "Activations recomputed in the backward pass."
    )
    max_tokens_per_microbatch: int = _field(
        32768, "Token budget (prompt + response) of one packed forward pass.", ge=1
    )
    offload: bool | None = _field(
        None,
        "Keep in host memory what is not at work: each role's parameters and optimizer state, "
        "while vLLM's weights and cache are dropped; null: on a GPU.",
    )
    host_memory_gb: float | None = _field(
        None,
        "Host memory of a node that offload and checkpoints may use, in 1e9 bytes; "
        "null: what the machine has available.",
        gt=0,
    )
    gpu_memory_gb: float = _field(
        80.0,
        "Memory of a GPU in 1e9 bytes, for the plan that --dry-run prints; a run asks its own GPU.",
        gt=0,
    )
    timeout_seconds: float = _field(
        10800.0, "Longest wait for another process in a collective; timeouts.* act before.", gt=0
    )

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model: TP x PP."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model: world size / (TP x PP)."""
        return self.world_size // self.model_parallel_size


class RolloutConfig(Section):
    """How responses are sampled (vLLM)."""

    tensor_model_parallel_size: int = _field(
        1, "Ranks of one vLLM replica; world_size / this many replicas sample at once.", ge=1
    )
    max_prompt_tokens: int = _field(2048, "Longer prompts are refused.", ge=1)
    max_response_tokens: int = _field(20480, "Longer responses are truncated.", ge=1)
    temperature: float = _field(
        1.0, "Sampling temperature; the trainer divides its logits by it too.", gt=0
    )
    top_p: float = _field(1.0, "Must be 1 for training rollouts.", gt=0, le=1)
    top_k: int = _field(-1, "Must be -1 for training rollouts.")
    stop_token_ids: list[int] = _field(
        [],
        "Ids that end a response; empty: those of generation_config, config and tokenizer.",
    )
    dtype: Literal["bfloat16", "float32"] | None = _field(
        None, "Type of vLLM's weights; null: model.dtype."
    )
    kv_cache_bytes: int | None = _field(
        None, "KV cache of one rank; null: from gpu_memory_utilization, or 256 MiB on a CPU.", ge=1
    )
    gpu_memory_utilization: float = _field(
        0.5, "Share of a GPU's memory that vLLM may use when kv_cache_bytes is null.", gt=0, le=1
    )
    max_num_sequences: int = _field(256, "Responses that one replica samples at once.", ge=1)
    enforce_eager: bool | None = _field(
        None, "No CUDA graphs; null: true on a CPU, false on a GPU."
    )
    sync_bucket_bytes: int = _field(
        512 << 20,
        "Weights that a rank sends, and that it receives, at once in a sync; two such pairs are "
        "held.",
        ge=1,
    )
    verify_sync_every: int = _field(
        0,
        "Policy versions between comparisons of the sampler's weights with the trainer's by "
        "checksum, the first included; 0: none.",
        ge=0,
    )
    max_logprob_difference: float | None = _field(
        None,
        "Stop when sampler and trainer log-probabilities of a token differ by more than this "
        "(a stale or mis-sharded weight); null: only report it.",
        gt=0,
    )


class DataConfig(Section):
    """Training prompts."""

    train_path: str | None = _field(None, "JSONL or parquet file of training problems; required.")
    prompt_column: str = _field("prompt", "Column that holds the prompt's text.")
    answer_column: str = _field("answer", "Column that holds the ground truth.")
    shuffle: bool = _field(True, "Draw a new seeded order in each epoch.")


class RewardConfig(Section):
    """From a verdict to a number."""

    correct: float = _field(1.0, "Reward of a correct response.")
    incorrect: float = _field(-1.0, "Reward of any other response.")
    truncated_correct: float = _field(
        -1.0, "Reward of a response that holds the right answer but was cut off by a length limit."
    )
    overlong_buffer_tokens: int = _field(
        0,
        "Soft overlong punishment over the last this many allowed tokens; 0: none.",
        "L_cache",
        ge=0,
    )
    overlong_penalty: float = _field(1.0, "Largest soft overlong punishment.", ge=0)
    num_workers: int = _field(2, "Verifier processes on each rank that generates.", ge=1)
    timeout_seconds: float = _field(5.0, "Time limit for judging one answer.", gt=0)


class OptimizerConfig(Section):
    """AdamW; linear warm-up counted in updates, then constant."""

    actor_learning_rate: float = _field(1e-6, "Peak learning rate of the actor.", gt=0)
    critic_learning_rate: float = _field(2e-6, "Peak learning rate of the critic.", gt=0)
    actor_warmup_updates: int = _field(
        320, "Warm-up of the actor, counted from its own first update (20 rollouts of 16).", ge=0
    )
    critic_warmup_updates: int = _field(320, "Warm-up of the critic.", ge=0)
    adam_beta1: float = _field(0.9, "AdamW's beta1.", "beta_1", ge=0, lt=1)
    adam_beta2: float = _field(0.95, "AdamW's beta2.", "beta_2", ge=0, lt=1)
    adam_eps: float = _field(1e-8, "AdamW's epsilon.", gt=0)
    weight_decay: float = _field(0.1, "Decoupled weight decay; none on biases and norms.", ge=0)
    actor_clip_grad: float = _field(
        1.0, "Largest norm of the actor's gradient; 0: no clipping.", ge=0
    )
    critic_clip_grad: float = _field(
        1.0, "Largest norm of the critic's gradient; 0: no clipping.", ge=0
    )
    max_skipped_updates: int = _field(
        3,
        "Stop when so many updates of a role in a row were skipped, because a loss, gradient, "
        "value or log-probability was not finite.",
        ge=1,
    )


class CheckpointConfig(Section):
    """What is kept on disk."""

    every_steps: int = _field(10, "Steps between checkpoints; 0: only at the end.", ge=0)
    keep_last: int = _field(2, "Newest checkpoints kept.", ge=1)
    keep_every: int = _field(0, "Steps between checkpoints kept for good; 0: none.", ge=0)
    asynchronous: bool = _field(
        True,
        "Write from a copy in host memory while the run goes on; false: a step waits for the disk, "
        "and nothing is copied.",
    )
    resume: bool = _field(
        True,
        "Go on from the run directory's newest whole checkpoint, if there is one; false: begin "
        "anew, but where torchrun or Slurm starts the run again, it goes on all the same.",
    )
    grace_seconds: float = _field(
        30.0,
        "Time from SIGTERM or SIGUSR1 to when the run has to be over: it finishes the step that it "
        "is in, or, where there is no time for that, saves the one before.",
        ge=0,
    )
    hf_export: bool = _field(True, "Export the trained actor as an HF directory at the end.")


class TimeoutsConfig(Section):
    """How long a phase may go on without progress before the run is ended, with stack traces."""

    start_seconds: float = _field(
        3600.0, "Until the first phase: vLLM, the models, loading a checkpoint.", gt=0
    )
    generation_seconds: float = _field(
        7200.0, "One round of sampling, or an evaluation: its longest responses decide.", gt=0
    )
    update_seconds: float = _field(900.0, "One update of the actor or the critic.", gt=0)
    checkpoint_seconds: float = _field(3600.0, "Writing a checkpoint, or the export.", gt=0)
    other_seconds: float = _field(
        1800.0, "Any other phase: verification, exchange, values, log-probabilities, sync.", gt=0
    )
    silence_seconds: float = _field(
        120.0, "Without a sign of life from a process after its first, whatever its phase.", gt=0
    )


class LoggingConfig(Section):
    """What a run shows and writes."""

    run_dir: str = _field("runs/vapo", "Directory of everything that the run writes.")
    tensorboard: bool = _field(True, "Write TensorBoard events.")
    rollout_groups: int = _field(2, "Groups of responses written as JSONL in each step.", ge=0)
    dump_steps: int = _field(
        0, "Latest steps whose responses are kept in binary form for --replay; 0: none.", ge=0
    )
    progress: Literal["auto", "live", "plain", "off"] = _field(
        "auto", "Progress display; auto: live on a terminal, plain lines elsewhere."
    )


class EvaluationConfig(Section):
    """Accuracy on held-out problems, with the same code as training."""

    path: str | None = _field(
        None, "JSONL or parquet file of held-out problems; null: no evaluation."
    )
    every_steps: int = _field(
        0, "Steps between evaluations; 0: only before the first and after the last.", ge=0
    )
    samples: int = _field(32, "Responses per problem (the K of avg@K).", "K", ge=1)
    temperature: float = _field(1.0, "Sampling temperature; 0: greedy.", ge=0)
    top_p: float = _field(0.7, "Nucleus sampling.", gt=0, le=1)
    top_k: int = _field(-1, "Top-k sampling; -1: off.")


class VapoConfig(Section):
    """Everything that a run depends on."""

    seed: int = _field(0, "Everything random is derived from it.", ge=0)
    model: ModelConfig = Field(default_factory=ModelConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    timeouts: TimeoutsConfig = Field(default_factory=TimeoutsConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)

    def to_yaml(self) -> str:
        """Return the resolved configuration, every field written out."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False)
