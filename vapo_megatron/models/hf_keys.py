"""The keys of config.json: which the trainer obeys, and which must be off because only others do.

vLLM reads more keys than the trainer computes with, and so does transformers. Left in a config.json
(by another model, a quantisation, an experiment) they would change the engine alone. What reads
none of these files is metadata, and passes. A test compares the tables with the sources of the
installed vLLM and transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OBEYED = frozenset({
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "vocab_size", "rms_norm_eps", "rope_theta", "rope_scaling",
    "rope_parameters", "tie_word_embeddings", "initializer_range", "layer_types", "architectures",
    "original_max_position_embeddings",
})  # fmt: skip
"""The trainer computes with these, or hf_config.py and sampled.py have rules of their own."""

OBEYED_OF: dict[str, frozenset[str]] = {
    "qwen3_moe": frozenset({
        "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
        "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers",
    }),
}  # fmt: skip
"""By model_type, beside OBEYED; other families must not have them."""

LENGTHS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
    "max_target_positions", "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
"""vLLM takes the smallest of them as the longest sequence."""

_ABSENT = (None,)
_OFF = (None, False)
_NONE_OF_THEM: tuple[Any, ...] = (None, 0, [])
ONLY: dict[str, tuple[Any, ...]] = {
    # The layers.
    "hidden_act": ("silu",),
    "use_sliding_window": _OFF,
    "attention_dropout": (None, 0),
    "is_causal": (True,),
    "qk_norm": _OFF,
    "logit_scale": (1,),
    "head_dtype": (None, "model"),
    "dual_chunk_attention_config": _ABSENT,
    "hidden_size_per_head": _ABSENT,
    "attention_chunk_size": _ABSENT,
    "n_head_kv": _ABSENT,
    "num_kv_heads": _ABSENT,
    "multi_query_group_num": _ABSENT,
    "num_attention_groups": _ABSENT,
    "target_layer_count": (),
    # The rotary embedding.
    "partial_rotary_factor": (None, 1),
    "rotary_pct": (None, 1),
    "rotary_emb_fraction": (None, 1),
    "rotary_emb_base": _ABSENT,
    # The weights.
    "quantization_config": _ABSENT,
    "compression_config": _ABSENT,
    # Other architectures, of which vLLM would use parts.
    "num_experts": _NONE_OF_THEM,
    "moe_num_experts": _NONE_OF_THEM,
    "n_routed_experts": _NONE_OF_THEM,
    "num_local_experts": _NONE_OF_THEM,
    "block_configs": _NONE_OF_THEM,
    "per_layer_config": _ABSENT,
    "is_heterogeneous": _OFF,
    "is_encoder_decoder": _OFF,
    "is_mm_prefix_lm": _OFF,
    "canvas_length": _ABSENT,
    "rswa_window": _ABSENT,
    # A config in the config, which would count in place of it.
    "text_config": _ABSENT,
    "text_encoder": _ABSENT,
    "decoder": _ABSENT,
    "generator": _ABSENT,
    "thinker_config": _ABSENT,
}
"""Of every family: the values with which nothing but the trainer's computation is left."""

ONLY_OF: dict[str, dict[str, tuple[Any, ...]]] = {
    # Its biases are always there.
    "qwen2": {},
    "qwen3": {"attention_bias": _OFF},
    "qwen3_moe": {
        "attention_bias": _OFF,
        # Of each forward pass by itself, so that it would depend on how a mini-batch is cut.
        "output_router_logits": _OFF,
        "n_shared_experts": _NONE_OF_THEM,
        "shared_expert_intermediate_size": _NONE_OF_THEM,
    },
    "llama": {
        "attention_bias": _OFF, "bias": _OFF, "qkv_bias": _OFF, "mlp_bias": _OFF,
        # transformers has no sliding window in Llama, but vLLM would take one.
        "sliding_window": _ABSENT,
    },
}  # fmt: skip
"""By model_type, beside ONLY."""

INERT = frozenset({
    # Bookkeeping, token ids, and what is given to vLLM as an argument.
    "dtype", "name_or_path", "pad_token_id",
    # Matter only with what ONLY refuses: sliding windows, hybrid and latent-attention models.
    "max_window_layers", "sliding_window", "attention_bias", "layers_block_type", "attn_type_list",
    "kv_lora_rank", "mamba_chunk_size", "chunk_size", "vision_config", "encoder_config",
    "qk_nope_head_dim", "compress_ratios", "model", "moe_top_k", "moe_topk", "num_experts_per_tok",
    "num_experts_per_token", "top_k_experts",
    # Matter only to models that pool, and never generate.
    "matryoshka_dimensions", "is_matryoshka", "use_pad_token", "use_sep_token", "embedding_size",
    "position_embedding_type",
    # Of an auxiliary loss that output_router_logits alone switches on.
    "router_aux_loss_coef",
})  # fmt: skip
"""Read by vLLM or transformers, and without a meaning for these families."""

ROPE: dict[str, frozenset[str]] = {
    "default": frozenset({"factor"}),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset({
        "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor",
        "truncate",
    }),
}  # fmt: skip
"""Keys of rope_scaling or rope_parameters by rope_type, beside ROPE_ALWAYS; all are obeyed."""
ROPE_ALWAYS = frozenset({
    "type", "rope_type", "rope_theta", "original_max_position_embeddings", "partial_rotary_factor",
    "finetuned",
})  # fmt: skip

_QUANTIZED = ("quantization_config", "compression_config")
_UNQUANTIZED = (
    "vLLM would quantize weights that the trainer updates unquantized; use the unquantized model, "
    "or, where its tensors are bfloat16 or float32 already, remove the key from config.json"
)
_ONE_SIDED = "only then vLLM, transformers and the trainer compute the same"


def only_of(family: str) -> dict[str, tuple[Any, ...]]:
    """Return the accepted values of the keys that a family must not set otherwise."""
    obeyed = OBEYED_OF.get(family, frozenset())
    return {key: values for key, values in (ONLY | ONLY_OF[family]).items() if key not in obeyed}


def refused(family: str, tree: Mapping[str, Any]) -> tuple[str, Any, str] | None:
    """Return the first key that something else than the trainer obeys.

    Args:
        family: model_type, a key of ONLY_OF.
        tree: config.json.

    Returns:
        (key, value, the rule); None: there is none.
    """
    for key, accepted in only_of(family).items():
        if key not in tree or any(_equal(tree[key], value) for value in accepted):
            continue
        named = ", ".join("null" if v is None else repr(v) for v in accepted) or "no value"
        rule = _UNQUANTIZED if key in _QUANTIZED else _ONE_SIDED
        return key, tree[key], f"only {named} is supported: {rule}"
    return None


def refused_rope(rope_type: str, tree: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the first (key, value) of the rope parameters that is not of this rope_type."""
    known = ROPE[rope_type] | ROPE_ALWAYS
    return next(((k, v) for k, v in tree.items() if k not in known and v is not None), None)


def _equal(found: Any, value: Any) -> bool:
    """1 is 1.0, but not true."""
    return found == value and isinstance(found, bool) == isinstance(value, bool)
