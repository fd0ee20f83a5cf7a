"""The sizes of published models, for plans made without their files.

As their config.json says; what a plan does not need (rotary base, longest position) is left at
Qwen2's defaults, so nothing is built or loaded from here.
"""

from __future__ import annotations

from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import ModelShape

# hidden, layers, heads, key-value heads, feed-forward, vocabulary, tied
_SIZES = {
    "Qwen2.5-0.5B": (896, 24, 14, 2, 4864, 151936, True),
    "Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "Qwen2.5-3B": (2048, 36, 16, 2, 11008, 151936, True),
    "Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064, False),
    "Qwen2.5-14B": (5120, 48, 40, 8, 13824, 152064, False),
    "Qwen2.5-32B": (5120, 64, 40, 8, 27648, 152064, False),
    "Qwen2.5-72B": (8192, 80, 64, 8, 29568, 152064, False),
}

KNOWN_MODELS = tuple(_SIZES)


def known_shape(name: str) -> ModelShape:
    """Return the shape of a published model.

    Raises:
        ConfigError: the name is not one of KNOWN_MODELS.
    """
    if name not in _SIZES:
        raise ConfigError(
            f"model {name!r} must be one of {', '.join(_SIZES)}, or a directory with config.json"
        )
    hidden_size, num_layers, heads, kv_heads, ffn, vocab_size, tied = _SIZES[name]
    return ModelShape(
        family="qwen2",
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden_size // heads,
        ffn_hidden_size=ffn,
        vocab_size=vocab_size,
        norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        tied=tied,
        max_position_embeddings=32768,
        qkv_bias=True,
        qk_norm=False,
        initializer_range=0.02,
    )
