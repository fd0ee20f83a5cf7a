"""The sizes of published models, for planning without their files.

Sizes are those of their config.json; what planning does not need (rotary base, longest position) is
left at a fixed number, so no model is built or loaded from these.
"""

from __future__ import annotations

from pathlib import Path

from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import Experts, ModelShape, read_model_shape

# family, hidden, layers, heads, key-value heads, head, feed-forward, vocabulary, tied
_SIZES = {
    "Qwen2.5-0.5B": ("qwen2", 896, 24, 14, 2, 64, 4864, 151936, True),
    "Qwen2.5-1.5B": ("qwen2", 1536, 28, 12, 2, 128, 8960, 151936, True),
    "Qwen2.5-3B": ("qwen2", 2048, 36, 16, 2, 128, 11008, 151936, True),
    "Qwen2.5-7B": ("qwen2", 3584, 28, 28, 4, 128, 18944, 152064, False),
    "Qwen2.5-14B": ("qwen2", 5120, 48, 40, 8, 128, 13824, 152064, False),
    "Qwen2.5-32B": ("qwen2", 5120, 64, 40, 8, 128, 27648, 152064, False),
    "Qwen2.5-72B": ("qwen2", 8192, 80, 64, 8, 128, 29568, 152064, False),
    "Qwen3-0.6B": ("qwen3", 1024, 28, 16, 8, 128, 3072, 151936, True),
    "Qwen3-4B": ("qwen3", 2560, 36, 32, 8, 128, 9728, 151936, True),
    "Qwen3-8B": ("qwen3", 4096, 36, 32, 8, 128, 12288, 151936, False),
    "Qwen3-32B": ("qwen3", 5120, 64, 64, 8, 128, 25600, 151936, False),
    "Qwen3-30B-A3B": ("qwen3_moe", 2048, 48, 32, 4, 128, 6144, 151936, False),
    "Qwen3-235B-A22B": ("qwen3_moe", 4096, 94, 64, 4, 128, 12288, 151936, False),
    "Llama-3.2-1B": ("llama", 2048, 16, 32, 8, 64, 8192, 128256, True),
    "Llama-3.1-8B": ("llama", 4096, 32, 32, 8, 128, 14336, 128256, False),
    "Llama-3.1-70B": ("llama", 8192, 80, 64, 8, 128, 28672, 128256, False),
}

# experts, of them per token, feed-forward of each; in every layer
_EXPERTS = {"Qwen3-30B-A3B": (128, 8, 768), "Qwen3-235B-A22B": (128, 8, 1536)}

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
    family, hidden_size, num_layers, heads, kv_heads, head_dim, ffn, vocab_size, tied = _SIZES[name]
    return ModelShape(
        family=family,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        ffn_hidden_size=ffn,
        vocab_size=vocab_size,
        norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        tied=tied,
        max_position_embeddings=32768,
        qkv_bias=family == "qwen2",
        qk_norm=family.startswith("qwen3"),
        initializer_range=0.02,
        experts=_experts(name, num_layers),
    )


def _experts(name: str, num_layers: int) -> Experts | None:
    if name not in _EXPERTS:
        return None
    return Experts(*_EXPERTS[name], normalized=True, layers=tuple(range(num_layers)))


def shape_of(model: str, field: str = "model.hf_path") -> ModelShape:
    """Return the shape of a model directory (or its config.json), or of a published model by name.

    A directory that does not exist here stands for the published model of its name. Errors name
    the field.

    Raises:
        ConfigError: it is neither.
    """
    path = Path(model)
    path = path.parent if path.name == "config.json" else path
    is_published = path.name in KNOWN_MODELS or "/" not in model
    if is_published and not path.exists():
        return known_shape(path.name)
    return read_model_shape(path, field)
