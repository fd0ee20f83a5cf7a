"""The tiny language models' architectures: Qwen2, and Qwen3 with a mixture of experts."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)


def build_model(recipe: Any, vocab_size: int, stop_token_id: int) -> PreTrainedModel:
    """Build the model with its initial weights.

    Embeddings are N(0, 0.5), matrices N(0, 1/fan_in), those that write to the residual stream with
    half that standard deviation; biases are 0 and norms 1. A model this small only learns within a
    minute if the scale is right.

    Args:
        recipe: making.Architecture.
        vocab_size, stop_token_id: of the tokenizer.
    """
    shared = {
        "vocab_size": vocab_size,
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.ffn_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.hidden_size // recipe.head_dim,
        "num_key_value_heads": recipe.hidden_size // recipe.head_dim,
        "max_position_embeddings": recipe.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": recipe.rope_theta},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": stop_token_id,
        "pad_token_id": stop_token_id,
        "dtype": "float32",
    }
    config: Qwen2Config | Qwen3MoeConfig
    if recipe.experts:
        config = Qwen3MoeConfig(
            **shared,
            head_dim=recipe.head_dim,
            num_experts=recipe.experts,
            num_experts_per_tok=recipe.experts_per_token,
            moe_intermediate_size=recipe.ffn_size // recipe.experts_per_token,
            norm_topk_prob=True,
        )
        kind = Qwen3MoeForCausalLM
    else:
        config, kind = Qwen2Config(**shared), Qwen2ForCausalLM
    model: PreTrainedModel = kind._from_config(config, attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            # Of experts, one matrix after the other.
            std = parameter.shape[-1] ** -0.5
            if "embed_tokens" in name:
                std = recipe.embedding_std
            elif "o_proj" in name or "down_proj" in name:
                std /= 2
            parameter.normal_(0.0, std, generator=generator)
    return model
