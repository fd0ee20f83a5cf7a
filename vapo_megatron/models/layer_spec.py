"""Which implementation the transformer layers have: Transformer Engine's, or megatron-core's own.

The parameters' names differ in one place: Transformer Engine fuses each layer norm into the linear
layer behind it (`self_attention.linear_qkv.layer_norm_weight` for `input_layernorm.weight`,
`mlp.linear_fc1.layer_norm_weight` for `pre_mlp_layernorm.weight`).
"""

from __future__ import annotations

import vapo_megatron.parallel  # noqa: F401  prepares megatron-core for this machine

# isort: split
import functools
import importlib.util
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from vapo_megatron.config import ModelConfig
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.attention import PackedAttention
from vapo_megatron.models.rope import Rotary


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, whose weight says whether its gradient is partial (sequence parallelism).

    megatron-core's wrapper of the same module refuses sequence parallelism instead.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def uses_transformer_engine(model: ModelConfig) -> bool:
    """Resolve model.layer_spec.

    Raises:
        ConfigError: Transformer Engine is asked for and not installed, or there is no GPU.
    """
    if model.layer_spec == "local":
        return False
    installed = importlib.util.find_spec("transformer_engine") is not None
    usable = installed and torch.cuda.is_available()
    if model.layer_spec == "transformer_engine" and not usable:
        missing = "there is no GPU" if installed else "it is not installed"
        raise ConfigError(
            f"model.layer_spec=transformer_engine, but {missing}; install transformer-engine on a "
            "GPU machine, or set model.layer_spec=auto"
        )
    return usable


def block_spec(
    config: TransformerConfig,
    rotary: Rotary,
    *,
    transformer_engine: bool,
    vp_stage: int | None = None,
) -> TransformerBlockSubmodules | ModuleSpec:
    """Return the spec of this rank's layers of one model chunk.

    Args:
        config: of the model.
        rotary: done inside the local layers' attention; Transformer Engine's layers leave it to
            GPTModel.
        transformer_engine: from uses_transformer_engine.
        vp_stage: which chunk; None without a virtual pipeline.
    """
    if transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = functools.partial(PackedAttention, rotary=rotary)
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=RMSNorm)
