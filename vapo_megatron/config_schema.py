"""The configuration tree: every field with its default, rule and meaning.

Defaults are the paper's (arXiv 2504.05118) where it prints a value, DAPO's (arXiv 2503.14476, same
team) where it is silent. Read through `config.load_config`, which also checks fields against each
other.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """Frozen; unknown keys, NaN, infinity, and true or false for a number are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic would read as 0 or 1."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        members = get_args(annotation) or (annotation,)
        if isinstance(value, bool) and (int in members or float in members):
            raise PydanticCustomError("truth", "Input should be a number")
        return value


def _field(default: Any, description: str, symbol: str | None = None, **rules: Any) -> Any:
    """Declare a field with its sentence for --help and, where there is one, the paper's symbol."""
    extra: Any = {"symbol": symbol} if symbol else None
    if isinstance(default, list):
        rules["default_factory"] = lambda: list(default)
    else:
        rules["default"] = default
    return Field(description=description, json_schema_extra=extra, **rules)


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
        "Host memory of a node that offload may use, in 1e9 bytes; null: what the machine has "
        "available.",
        gt=0,
    )
    gpu_memory_gb: float = _field(
        80.0,
        "Memory of a GPU in 1e9 bytes, for the plan that --dry-run prints; a run asks its own GPU.",
        gt=0,
    )
    timeout_seconds: float = _field(3600.0, "Longest wait for another process.", gt=0)

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


class AlgorithmConfig(Section):
    """VAPO. Each of the seven techniques is one field."""

    policy_steps: int = _field(
        313,
        "Rollout steps in which the actor trains, after value pretraining (5,000 updates / 16).",
        ge=0,
    )
    responses_per_step: int = _field(8192, "Responses sampled in a step.", ge=1)
    group_size: int = _field(
        16,
        "Group sampling: responses per prompt; prompts = responses_per_step / group_size.",
        "G",
        ge=1,
    )
    dynamic_sampling: bool = _field(
        False,
        "Dynamic sampling (DAPO): drop the groups whose responses are all right or all wrong, and "
        "sample more prompts in their place; not during value pretraining.",
    )
    dynamic_sampling_max_rounds: int = _field(
        10,
        "Rounds of sampling in a step; then dropped groups fill the places that are still empty.",
        ge=1,
    )
    mini_batch_size: int = _field(512, "Responses per optimizer update, over all ranks.", ge=1)
    advantage_estimator: Literal["gae", "grpo", "dr_grpo"] = _field(
        "gae",
        "How advantages are computed; gae: from a critic's values; grpo: (reward - mean) / std of "
        "the group; dr_grpo: reward - mean; these two train no critic.",
    )
    stage: Literal["all", "value_pretraining"] = _field(
        "all",
        "all: value pretraining, then the policy; value_pretraining: that alone, for a later run's "
        "model.critic_checkpoint.",
    )
    value_pretraining_steps: int = _field(
        50, "Value pretraining: first steps, in which the critic alone trains.", ge=0
    )
    value_pretraining_patience: int | None = _field(
        None,
        "Steps without a new maximum of the explained variance after which "
        "stage=value_pretraining is over; null: it has value_pretraining_steps.",
        ge=1,
    )
    lambda_critic: float | Literal["same_as_actor"] = _field(
        1.0, "Decoupled GAE: lambda of the critic's returns.", "lambda_critic"
    )
    lambda_actor: float | Literal["adaptive"] = _field(
        "adaptive",
        "Length-adaptive GAE: lambda of the actor's advantages; adaptive: 1 - 1/(alpha*l).",
        "lambda_policy",
    )
    length_adaptive_alpha: float = _field(
        0.05, "alpha of the length-adaptive lambda; aim at alpha*l of about 20.", "alpha", gt=0
    )
    gamma: float = _field(1.0, "Discount per token.", "gamma", gt=0, le=1)
    clip_low: float = _field(0.2, "Lower clip of the probability ratio.", "epsilon_low", ge=0, lt=1)
    clip_high: float = _field(
        0.28, "Clip-higher: upper clip of the probability ratio.", "epsilon_high", ge=0
    )
    loss_aggregation: Literal["token", "sample", "constant"] = _field(
        "token",
        "Token-level loss: average over all tokens; sample: per response and then over responses; "
        "constant: sum over tokens / (responses * rollout.max_response_tokens).",
    )
    overlong_filtering: bool = _field(
        False, "Responses that a length limit cut off carry no loss, of any role."
    )
    positive_lm_coef: float = _field(
        0.1, "Positive-example LM loss: weight of the NLL of correct responses.", "mu", ge=0
    )
    advantage_whitening: bool = _field(False, "Normalise advantages over the whole step.")
    value_clip: float | None = _field(
        None, "Clip of the value around its old value in the value loss; null: none.", gt=0
    )
    value_bound: float | None = _field(
        None,
        "Largest |V|, V = bound * tanh(head / bound); null: V is the value head's output.",
        gt=0,
    )
    freeze_critic_attention: bool = _field(
        False, "Leave the critic's attention at its first weights: query, key, value and output."
    )
    sampler_correction: Literal["none", "tis", "icepop"] = _field(
        "none",
        "Weigh tokens in the policy loss by k, their probability in the trainer over that in the "
        "sampler; tis: at most a cap; icepop: k within a range, tokens outside it are dropped.",
    )
    sampler_tis_cap: float = _field(2.0, "Largest k with sampler_correction=tis.", "C", gt=0)
    sampler_icepop_low: float = _field(
        0.5, "Smallest k that sampler_correction=icepop keeps.", gt=0, le=1
    )
    sampler_icepop_high: float = _field(
        5.0, "Largest k that sampler_correction=icepop keeps.", ge=1
    )
    entropy_coef: float = _field(0.0, "Weight of the entropy bonus.", ge=0)
    kl_coef: float = _field(
        0.0,
        "Weight of the KL to a frozen reference policy, model.hf_path (k3 estimator); 0: none is "
        "loaded.",
        "beta",
        ge=0,
    )
    critic_updates_per_step: int = _field(
        1, "Passes of the critic over each step's mini-batches.", ge=1
    )

    @property
    def trained_roles(self) -> tuple[Literal["actor", "critic"], ...]:
        """The models that learn: a critic only where advantages come from its values.

        In value pretraining as a stage of its own it learns alone.
        """
        if self.stage == "value_pretraining":
            return ("critic",)
        return ("actor", "critic") if self.advantage_estimator == "gae" else ("actor",)

    @property
    def roles(self) -> tuple[Literal["actor", "critic", "reference"], ...]:
        """The models that a run holds: the policy, what learns, and what its KL is taken to."""
        if self.stage == "value_pretraining":
            return ("actor", "critic")
        return (*self.trained_roles, "reference") if self.kl_coef > 0 else self.trained_roles

    @property
    def num_prompts(self) -> int:
        """Prompts of a step."""
        return self.responses_per_step // self.group_size

    @property
    def num_steps(self) -> int:
        """The stage's steps: value pretraining's and, with "all", the policy's."""
        policy_steps = self.policy_steps if self.stage == "all" else 0
        return self.value_pretraining_steps + policy_steps


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


class CheckpointConfig(Section):
    """What is kept on disk."""

    every_steps: int = _field(10, "Steps between checkpoints; 0: only at the end.", ge=0)
    keep_last: int = _field(2, "Checkpoints kept.", ge=1)
    resume: bool = _field(
        True, "Go on from the run directory's latest checkpoint, if there is one."
    )
    hf_export: bool = _field(True, "Export the trained actor as an HF directory at the end.")


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
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)

    def to_yaml(self) -> str:
        """Return the resolved configuration, every field written out."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False)
