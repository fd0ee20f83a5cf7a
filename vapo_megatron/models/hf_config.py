"""The architecture of a model, read from a Hugging Face directory's config.json.

Imports neither torch nor megatron, so that plans and checks are quick. Nothing is guessed: whatever
the trainer would not compute exactly as transformers and vLLM do is a ConfigError that names it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

from vapo_megatron.config import ModelConfig
from vapo_megatron.config.missing import missing_model
from vapo_megatron.errors import ConfigError
from vapo_megatron.models import hf_keys

_CLASSES = (
    "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForRewardModel", "Model",
)  # fmt: skip
"""Of a family, in `architectures`; vLLM chooses its own class by that."""


@dataclasses.dataclass(frozen=True)
class _Family:
    """How one model_type differs from the others."""

    qkv_bias: bool
    qk_norm: bool
    defaults: dict[str, Any]
    """transformers' defaults for keys that config.json lacks; null counts as given."""
    stem: str
    """What the names of its classes in transformers and vLLM begin with."""
    has_experts: bool = False


_FAMILIES = {
    "qwen2": _Family(
        qkv_bias=True,
        qk_norm=False,
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768},
        stem="Qwen2",
    ),
    "qwen3": _Family(
        qkv_bias=False,
        qk_norm=True,
        defaults={"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
        stem="Qwen3",
    ),
    "qwen3_moe": _Family(
        qkv_bias=False,
        qk_norm=True,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        stem="Qwen3Moe",
        has_experts=True,
    ),
    "llama": _Family(
        qkv_bias=False,
        qk_norm=False,
        defaults={"max_position_embeddings": 2048},
        stem="Llama",
    ),
}
"""By model_type: Qwen2 and Qwen2.5; dense Qwen3; Qwen3 with experts; Llama 3 (and 2, the same
architecture)."""

_ROPE_KEYS = {
    "linear": {"factor"},
    "llama3": {
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    },
    "yarn": {"factor", "original_max_position_embeddings"},
}  # fmt: skip
"""What scalings of the rotary frequencies need; none depends on the sequence length."""


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts: feed-forward networks of which a router chooses a few for each token.

    A token's output is the sum of its experts' outputs, weighted by the softmax of the router's
    logits over all experts.
    """

    count: int
    per_token: int
    ffn_hidden_size: int
    """Of one expert."""
    normalized: bool
    """A token's weights are divided by their sum, so that they add up to 1."""
    layers: tuple[int, ...]
    """Numbers of the layers that have experts, from 0; the others are dense."""


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The architecture of a decoder-only transformer."""

    family: str
    """model_type of config.json: "qwen2" (Qwen2 and Qwen2.5), "qwen3", "qwen3_moe" or "llama"."""
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = dataclasses.field(hash=False)
    """None, or rope_type (linear, llama3 or yarn) and that scaling's own parameters."""
    tied: bool
    """The output projection is the embedding."""
    max_position_embeddings: int
    qkv_bias: bool
    qk_norm: bool
    initializer_range: float
    experts: Experts | None = None

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with experts."""
        return () if self.experts is None else self.experts.layers

    @property
    def experts_per_token(self) -> int:
        """Of a layer that has experts."""
        return 0 if self.experts is None else self.experts.per_token

    @property
    def dense_layers(self) -> tuple[int, ...] | range:
        """Numbers of the layers with one feed-forward network."""
        found = range(self.num_layers)
        return found if self.experts is None else tuple(sorted({*found} - {*self.experts.layers}))


def read_model_shape(hf_path: str | Path, field: str = "model.hf_path") -> ModelShape:
    """Read config.json of a Hugging Face directory, which the error names as a field's value.

    Raises:
        ConfigError: the file is missing or unreadable, or holds something that is not supported.
    """
    file = Path(hf_path) / "config.json"
    try:
        tree = json.loads(file.read_text())
    except OSError as error:
        if not os.path.exists(hf_path):
            raise ConfigError(missing_model(field, hf_path)) from None
        raise ConfigError(
            f"{field}={hf_path}: config.json: {error.strerror}; give a Hugging Face directory"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {error}; fetch it again") from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{file} must hold an object, found {type(tree).__name__}; fetch it again"
        )
    return _shape(_Reader(file, tree))


def read_reward_shape(model: ModelConfig, actor: ModelShape) -> ModelShape:
    """Read config.json of model.reward_hf_path; actor: the model whose tokens it scores.

    Raises:
        ConfigError: see read_model_shape; or its vocabulary is not the actor's.
    """
    field, path = "model.reward_hf_path", str(model.reward_hf_path)
    shape = read_model_shape(path, field)
    if shape.vocab_size != actor.vocab_size:
        raise ConfigError(
            f"{field}={path}: its vocab_size={shape.vocab_size} must be {actor.vocab_size}, as in "
            f"model.hf_path={model.hf_path}: the reward model is given the actor's tokens; use a "
            "reward model with the actor's tokenizer"
        )
    return shape


class _Reader:
    """config.json with errors that name the file and the key."""

    def __init__(self, file: Path, tree: dict[str, Any]) -> None:
        self.file = file
        self.tree = tree

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value; null counts as missing. Defaults are transformers' own."""
        value = self.tree.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, value, "must be a positive integer")
        return value

    def positive(self, key: str, value: Any) -> float:
        """Check that the value of a key is a positive number."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise self.error(key, value, "must be a positive number")
        return float(value)

    def error(self, key: str, value: Any, rule: str) -> ConfigError:
        """Build the error for one key."""
        return ConfigError(
            f"{self.file}: {key}={value!r}: {rule}; use a Qwen2, Qwen2.5, Qwen3 or Llama 3"
        )


def _shape(reader: _Reader) -> ModelShape:
    name = reader.get("model_type")
    family = _FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise reader.error("model_type", name, f"must be one of {', '.join(_FAMILIES)}")
    reader = _Reader(reader.file, {**family.defaults, **reader.tree})
    _check_supported(reader, name, family)
    hidden_size, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    kv_heads = reader.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise reader.error(
            "num_attention_heads", heads, f"must be divisible by num_key_value_heads={kv_heads}"
        )
    if reader.get("head_dim") is None and hidden_size % heads:
        raise reader.error(
            "hidden_size", hidden_size, f"must be divisible by num_attention_heads={heads}"
        )
    theta, scaling = _rope(reader)
    return ModelShape(
        family=name,
        hidden_size=hidden_size,
        num_layers=reader.size("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=reader.size("head_dim", hidden_size // heads),
        ffn_hidden_size=reader.size("intermediate_size"),
        vocab_size=reader.size("vocab_size"),
        norm_eps=reader.positive("rms_norm_eps", reader.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=reader.get("tie_word_embeddings", False),
        max_position_embeddings=_longest(reader),
        initializer_range=reader.positive(
            "initializer_range", reader.get("initializer_range", 0.02)
        ),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        experts=_experts(reader) if family.has_experts else None,
    )


def _experts(reader: _Reader) -> Experts:
    # transformers writes the number by either name.
    number = "num_local_experts" if reader.get("num_local_experts") else "num_experts"
    count, chosen = reader.size(number), reader.size("num_experts_per_tok")
    if chosen > count:
        raise reader.error("num_experts_per_tok", chosen, f"must be at most {number}={count}")
    normalized = reader.get("norm_topk_prob")
    if not isinstance(normalized, bool):
        raise reader.error("norm_topk_prob", normalized, "must be true or false")
    dense, every = reader.get("mlp_only_layers"), reader.size("decoder_sparse_step")
    if not isinstance(dense, list):
        raise reader.error("mlp_only_layers", dense, "must be a list of layers' numbers")
    layers = range(every - 1, reader.size("num_hidden_layers"), every)
    found = tuple(layer for layer in layers if layer not in dense)
    if not found:
        raise reader.error(
            "mlp_only_layers", dense,
            f"with decoder_sparse_step={every} leaves no layer with experts",
        )  # fmt: skip
    return Experts(count, chosen, reader.size("moe_intermediate_size"), normalized, found)


def _check_supported(reader: _Reader, name: str, family: _Family) -> None:
    if (found := hf_keys.refused(name, reader.tree)) is not None:
        raise reader.error(*found)
    classes = reader.get("architectures", [])
    known = [f"{family.stem}{kind}" for kind in _CLASSES]
    if not isinstance(classes, list) or any(one not in known for one in classes):
        raise reader.error("architectures", classes, f"each must be one of {', '.join(known)}")
    kinds = reader.get("layer_types", [])
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise reader.error("layer_types", kinds, "all must be full_attention")
    if kinds and len(kinds) != reader.size("num_hidden_layers"):
        raise reader.error(
            "layer_types", len(kinds), "as many must stand there as there are layers"
        )
    tied = reader.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise reader.error("tie_word_embeddings", tied, "must be true or false")


def _longest(reader: _Reader) -> int:
    """Return the longest sequence, as vLLM finds it."""
    given = [key for key in hf_keys.LENGTHS if reader.get(key) is not None]
    return min(reader.size(key) for key in ("max_position_embeddings", *given))


def _rope(reader: _Reader) -> tuple[float, dict[str, Any] | None]:
    """Read the base and the scaling, from `rope_parameters` or the older pair of keys."""
    given = reader.get("rope_scaling") or reader.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise reader.error("rope_scaling", given, "must be an object")
    tree = dict(given)
    base = tree.pop("rope_theta", None) or reader.get("rope_theta", 10000.0)
    theta = reader.positive("rope_theta", base)
    legacy_type = tree.pop("type", None)
    rope_type = tree.pop("rope_type", None) or legacy_type or "default"
    if not isinstance(rope_type, str) or rope_type not in hf_keys.ROPE:
        raise reader.error("rope_type", rope_type, f"must be one of {', '.join(hf_keys.ROPE)}")
    if legacy_type not in (None, rope_type):
        raise reader.error("rope_scaling's type", legacy_type, f"must be rope_type={rope_type!r}")
    if (unknown := hf_keys.refused_rope(rope_type, tree)) is not None:
        raise reader.error(*unknown, f"is unknown in the rope parameters of type {rope_type}")
    if tree.get("partial_rotary_factor") not in (None, 1):
        raise reader.error("partial_rotary_factor", tree["partial_rotary_factor"], "must be 1")
    if rope_type == "default":
        return theta, None
    length = reader.get("original_max_position_embeddings")
    if length is not None:
        tree["original_max_position_embeddings"] = length
    tree.setdefault("original_max_position_embeddings", reader.size("max_position_embeddings"))
    for key in sorted(_ROPE_KEYS[rope_type]):
        reader.positive(f"{rope_type} rope scaling's {key}", tree.get(key))
    return theta, {"rope_type": rope_type, **tree}


def padded_vocab_size(shape: ModelShape, make_divisible_by: int, tp_size: int) -> int:
    """Round the vocabulary up to a multiple of make_divisible_by * tp_size rows."""
    multiple = make_divisible_by * tp_size
    return -(-shape.vocab_size // multiple) * multiple
