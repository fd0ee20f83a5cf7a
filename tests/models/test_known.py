"""The sizes of published models, against their config.json files and parameter counts."""

from __future__ import annotations

import json

import pytest

from tests.models import published, qwen25
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.models.known import KNOWN_MODELS, known_shape
from vapo_megatron.weights.table import parameter_count

COUNTS = {**{f"Qwen2.5-{name}": n for name, n in qwen25.COUNTS.items()}, **published.COUNTS}
FIELDS = (
    "family", "hidden_size", "num_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "ffn_hidden_size", "vocab_size", "tied", "qkv_bias", "qk_norm", "experts",
)  # fmt: skip


def test_parameter_count():
    for name in KNOWN_MODELS:
        assert parameter_count(known_shape(name)) == COUNTS[name], name


def test_as_config_json_says(tmp_path):
    for name in KNOWN_MODELS:
        config = published.MODELS.get(name) or {
            "model_type": "qwen2",
            **qwen25.config_json(name.removeprefix("Qwen2.5-")),
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        expected, found = read_model_shape(tmp_path), known_shape(name)
        assert [getattr(found, f) for f in FIELDS] == [getattr(expected, f) for f in FIELDS], name


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match=r"'Qwen9' must be one of .*, or a directory with config"):
        known_shape("Qwen9")
