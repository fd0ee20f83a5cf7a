"""Published Qwen3 and Llama 3 models: what their config.json files say, and parameter counts."""

from __future__ import annotations

from typing import Any

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}


def _rope(factor: float) -> dict[str, Any]:
    return {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }


def _sizes(hidden: int, layers: int, heads: int, ffn: int, *, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "tie_word_embeddings": tied,
    }


MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {**_QWEN3, **_sizes(1024, 28, 16, 3072, tied=True)},
    "Qwen3-4B": {**_QWEN3, **_sizes(2560, 36, 32, 9728, tied=True)},
    "Qwen3-8B": {**_QWEN3, **_sizes(4096, 36, 32, 12288, tied=False)},
    "Qwen3-32B": {**_QWEN3, **_sizes(5120, 64, 64, 25600, tied=False)},
    "Qwen3-30B-A3B": {
        **_QWEN3,
        **_EXPERTS,
        **_sizes(2048, 48, 32, 6144, tied=False),
        "moe_intermediate_size": 768,
    },
    "Qwen3-235B-A22B": {
        **_QWEN3,
        **_EXPERTS,
        **_sizes(4096, 94, 64, 12288, tied=False),
        "moe_intermediate_size": 1536,
    },
    # Llama 3.1's files name no head_dim, Llama 3.2's do.
    "Llama-3.1-8B": {
        **_LLAMA,
        **_sizes(4096, 32, 32, 14336, tied=False),
        "rope_scaling": _rope(8.0),
    },
    "Llama-3.1-70B": {
        **_LLAMA,
        **_sizes(8192, 80, 64, 28672, tied=False),
        "rope_scaling": _rope(8.0),
    },
    "Llama-3.2-1B": {
        **_LLAMA,
        **_sizes(2048, 16, 32, 8192, tied=True),
        "head_dim": 64,
        "rope_scaling": _rope(32.0),
    },
}

COUNTS = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.2-1B": 1_235_814_400,
}
