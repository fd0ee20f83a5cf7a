"""Chooses the transformer layers' implementation: Transformer Engine's, or megatron-core's own.

Transformer Engine brings fused attention over packed sequences, norms fused into the linear layers,
and FP8. It computes in bfloat16 alone: its fused attention has no float32.

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
from megatron.core.extensions import transformer_engine as extension
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import is_te_min_version
from torch import Tensor

from vapo_megatron.config import ModelConfig
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.attention import PackedAttention
from vapo_megatron.models.context_attention import ContextShards
from vapo_megatron.models.experts import prepare_experts
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.models.rope import Rotary
from vapo_megatron.parallel.minibatches import FP8_MULTIPLE


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, with its weight marked for sequence parallelism: its gradient is partial.

    megatron-core's own wrapper of the same module refuses sequence parallelism.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class RotaryTable(RotaryEmbedding):
    """megatron-core's table of rotary angles, for Transformer Engine's layers, in few lengths.

    megatron-core keeps the last 32 tables, float32 [length, 1, 1, head_dim], each for the longest
    sequence of a microbatch, and nearly every microbatch has another: 370 MB at 22,528 tokens.
    Rounded up to powers of two, all lengths of a model take 33 MB.

    Args:
        head_dim: of query and key.
        frequencies: float32 [head_dim / 2], from rope_frequencies.
    """

    def __init__(self, head_dim: int, frequencies: Tensor) -> None:
        super().__init__(head_dim, rotary_percent=1.0, use_cpu_initialization=True)
        self.inv_freq = frequencies

    def get_rotary_seq_len(self, *args: Any, **keywords: Any) -> int:
        """Return the length of the table, at least 1024, for the arguments of megatron-core's."""
        longest = super().get_rotary_seq_len(*args, **keywords)
        return max(1024, 1 << (longest - 1).bit_length())


def uses_transformer_engine(model: ModelConfig) -> bool:
    """Resolve model.layer_spec: auto is Transformer Engine in bfloat16 where it is installed.

    Raises:
        ConfigError: Transformer Engine is required, but there is none or no GPU; or megatron-core
            cannot import it.
    """
    asked = model.layer_spec == "transformer_engine"
    if model.layer_spec == "local" or (not asked and model.dtype == "float32"):
        return False
    installed = importlib.util.find_spec("transformer_engine") is not None
    usable = installed and torch.cuda.is_available()
    if asked and not usable:
        missing = "there is no GPU" if installed else "it is not installed"
        raise ConfigError(
            f"model.layer_spec=transformer_engine, but {missing}; install transformer-engine on a "
            "GPU machine, or set model.layer_spec=auto"
        )
    if usable and not extension.HAVE_TE:
        raise ConfigError(
            f"model.layer_spec={model.layer_spec}: transformer-engine is installed, but "
            "transformer_engine.pytorch cannot be imported; fix the installation, or set "
            "model.layer_spec=local"
        )
    return usable


def check_fp8(shape: ModelShape, model: ModelConfig, tp_size: int) -> None:
    """Refuse model.fp8 if Transformer Engine cannot use it here.

    Raises:
        ConfigError: names the field, its value and what it needs.
    """
    if model.fp8 is None:
        return
    if shape.experts is not None:
        raise ConfigError(
            f"model.fp8={model.fp8} is not supported with experts, whose tokens would have to be "
            "padded for it; set model.fp8=null"
        )
    heads, groups = shape.num_attention_heads, shape.num_key_value_heads
    # Rows and columns of a rank's matrices: each is the inner dimension of some product.
    widths = {
        "model's hidden_size": shape.hidden_size,
        "rank's query, key and value rows": (heads + 2 * groups) * shape.head_dim // tp_size,
        "rank's query rows": heads * shape.head_dim // tp_size,
        "rank's intermediate_size": shape.ffn_hidden_size // tp_size,
    }
    odd = next((key for key, width in widths.items() if width % FP8_MULTIPLE), None)
    if not uses_transformer_engine(model):
        lacking = (
            "Transformer Engine, which is not installed, or there is no GPU; install "
            "transformer-engine on a GPU machine"
        )
    elif not is_te_min_version("2.2.0"):
        lacking = "transformer-engine 2.2 or newer; update it"
    elif torch.cuda.get_device_capability() < (8, 9):
        lacking = "a GPU of compute capability 8.9 or newer (Ada, Hopper); use another one"
    elif odd:
        lacking = (
            f"the {odd}, {widths[odd]} with parallel.tensor_model_parallel_size={tp_size}, to be a "
            f"multiple of {FP8_MULTIPLE}; lower the size"
        )
    else:
        return
    raise ConfigError(f"model.fp8={model.fp8} needs {lacking}, or set model.fp8=null")


def block_spec(
    config: TransformerConfig,
    rotary: Rotary,
    *,
    transformer_engine: bool,
    shards: ContextShards | None = None,
    vp_stage: int | None = None,
) -> TransformerBlockSubmodules | ModuleSpec:
    """Return the spec of this rank's layers of one model chunk.

    Args:
        config: of the model.
        rotary: used in the local layers' attention; with Transformer Engine GPTModel rotates.
        shards: of the local layers' attention, with context parallelism.
        transformer_engine: from uses_transformer_engine.
        vp_stage: which chunk; None without a virtual pipeline.
    """
    has_experts: Any = config.num_moe_experts and config.moe_layer_freq
    if transformer_engine and has_experts:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    if transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)

    def layer(num_experts: int | None) -> ModuleSpec:
        spec = get_gpt_layer_local_spec(
            normalization="RMSNorm", qk_layernorm=config.qk_layernorm, num_experts=num_experts
        )
        spec.submodules.input_layernorm = RMSNorm
        spec.submodules.pre_mlp_layernorm = RMSNorm
        if num_experts is not None:
            # Transformer Engine's layers keep this norm's name in checkpoints: see table.py.
            names = spec.submodules.sharded_state_dict_keys_map
            names = {key: name for key, name in names.items() if not key.startswith("pre_mlp_")}
            spec.submodules.sharded_state_dict_keys_map = names
        attention = spec.submodules.self_attention.submodules
        attention.core_attention = functools.partial(PackedAttention, rotary=rotary, shards=shards)
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
        return spec

    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    layers = [layer(None)] * count
    if has_experts:
        prepare_experts()
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        sparse = layer(config.num_moe_experts)
        layers = [sparse if has_experts[first + i] else layers[i] for i in range(count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)
