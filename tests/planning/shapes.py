"""Shapes and configurations that several tests count by hand."""

from __future__ import annotations

import dataclasses

from vapo_megatron.config import VapoConfig
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.models.known import known_shape

GPU_BYTES = 80 * 10**9


def small_shape(
    hidden: int, layers: int, heads: int, kv_heads: int, head: int, ffn: int, vocab: int
) -> ModelShape:
    """Qwen2.5 with other sizes: biases of query, key and value, untied."""
    return dataclasses.replace(
        known_shape("Qwen2.5-7B"),
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        ffn_hidden_size=ffn,
        vocab_size=vocab,
    )


def make_config(
    tp=8,
    pp=4,
    dp=4,
    vpp=None,
    *,
    cp=1,
    vllm_tp=4,
    model=None,
    rollout=None,
    algorithm=None,
    optimizer=None,
    **parallel,
):
    """By default Qwen2.5-32B on 128 GPUs, as examples/configs has it."""
    return VapoConfig.model_validate(
        {
            "model": model or {},
            "parallel": {
                "world_size": tp * cp * pp * dp,
                "context_parallel_size": cp,
                "tensor_model_parallel_size": tp,
                "pipeline_model_parallel_size": pp,
                "virtual_pipeline_model_parallel_size": vpp,
                "sequence_parallel": tp > 1,
                "recompute": "full",
                "max_tokens_per_microbatch": 24576,
                **parallel,
            },
            "rollout": {"tensor_model_parallel_size": vllm_tp, **(rollout or {})},
            "algorithm": algorithm or {},
            "optimizer": optimizer or {},
        }
    )


def changed(config: VapoConfig, **sections: dict) -> VapoConfig:
    """The configuration with other fields in these sections."""
    made = {name: getattr(config, name).model_copy(update=f) for name, f in sections.items()}
    return config.model_copy(update=made)


# A layer of Qwen2.5-32B on one of 8 tensor-parallel ranks. Query 40 * 128 = 5120, key 8 * 128 =
# 1024, projected (5120 + 2 * 1024) / 8 = 896 rows; feed-forward 27648 / 8 = 3456.
#   5120 * 640 + 896 * 5120 + 896 + 2 * 5120 + 3 * 3456 * 5120
# = 3276800 + 4587520 + 896 + 10240 + 53084160 = 60959616
LAYER = 60_959_616
# The vocabulary of 152064 is padded to a multiple of 128 * 8: 152576, 19072 rows of 5120 each.
VOCABULARY = 97_648_640
