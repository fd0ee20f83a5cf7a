"""The models to start from, and how they are built."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vapo_megatron.config.lora import LoraConfig
from vapo_megatron.config.section import Section, field


class ModelConfig(Section):
    """The model that is trained."""

    hf_path: str | None = field(
        None,
        "Initial actor: an HF directory (config.json, safetensors, tokenizer), or one written by "
        "`vapo convert to-megatron`; required.",
    )
    critic_hf_path: str | None = field(
        None,
        "Initial critic: an HF or converted directory of a policy or a reward model; null: the "
        "actor's weights with a new value head.",
    )
    critic_checkpoint: str | None = field(
        None,
        "Initial critic of a new run, in place of critic_hf_path: a checkpoint of any parallel "
        "layout, or a run directory (its latest checkpoint); ignored on resume.",
    )
    critic_checkpoint_optimizer: bool = field(
        True,
        "Also load the optimizer state and update count of critic_checkpoint, so that the learning "
        "rate does not warm up again; false: only the weights.",
    )
    reward_hf_path: str | None = field(
        None,
        "Reward model, which judges the rows whose verifier is reward_model: an HF or converted "
        "directory with one label and the actor's vocabulary; null: none.",
    )
    value_head_init_std: float = field(
        0.0, "Standard deviation of a new value head's weights; 0: V is 0 at first.", ge=0
    )
    value_head_bias: Literal["none", "mean_return"] = field(
        "none",
        "Constant that is added to all values; mean_return: what brings their mean to the mean "
        "return of the first step's responses, before the first update.",
    )
    dtype: Literal["bfloat16", "float32"] = field(
        "bfloat16", "Data type of parameters and activations."
    )
    layer_spec: Literal["auto", "transformer_engine", "local"] = field(
        "auto",
        "Layer implementation; auto: Transformer Engine if it is installed and dtype is bfloat16.",
    )
    fp8: Literal["hybrid", "e4m3"] | None = field(
        None,
        "FP8 format of the linear layers in training; hybrid: e4m3, gradients e5m2; needs "
        "Transformer Engine; null: no FP8.",
    )
    freeze_router: bool = field(
        False,
        "Keep the routers of a mixture of experts as they are, in actor and critic; they compute "
        "in float32 in any case.",
    )
    make_vocab_size_divisible_by: int = field(
        128, "The vocabulary is padded to a multiple of this times the tensor-parallel size.", ge=1
    )
    lora: LoraConfig = Field(default_factory=LoraConfig)
