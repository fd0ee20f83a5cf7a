"""A tiny random directory of any family, made from a seed, for the tests of every room.

It holds config.json, generation_config.json and safetensors. There is no tokenizer: tests pass ids.
Every tensor is random, biases and norm weights included, so that a swapped or forgotten tensor
changes the output.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

EOS = 2

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "use_sliding_window": False,
        "attention_bias": False,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "use_sliding_window": False,
        "attention_bias": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_theta": 500.0,
        # Of the pairs of dimensions of 8 and more, some are slowed, some kept, some in between.
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}
"""model_type -> what its config.json holds beside the sizes."""


def write_tiny_hf(
    directory: str | Path,
    *,
    family: str = "qwen2",
    tied: bool = False,
    num_layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    ffn: int = 96,
    vocab: int = 300,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    num_files: int = 1,
    config: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write the directory, make it if needed, and return its path.

    Args:
        family: model_type, a key of FAMILIES.
        tied: tie_word_embeddings; there is no lm_head.weight then.
        head_dim: None: hidden // heads, the only one that vLLM's Qwen2 takes (32 or more on a CPU).
        num_files: more than one: sharded files with model.safetensors.index.json.
        config: keys of config.json in place of FAMILIES's.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    head_dim = head_dim or hidden // heads
    own = {**FAMILIES[family], **config}
    tensors = _tensors(
        family, tied, num_layers, hidden, heads, kv_heads, head_dim, ffn, vocab, seed, own
    )
    tensors = {name: t.to(dtype) for name, t in tensors.items()}
    tree: dict[str, Any] = {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "tie_word_embeddings": tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": 1,
        "eos_token_id": EOS,
        **own,
    }
    if family != "qwen2" or head_dim != hidden // heads:
        tree["head_dim"] = head_dim
    (directory / "config.json").write_text(json.dumps(tree, indent=2))
    (directory / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": [EOS]})
    )
    _write_files(directory, tensors, num_files)
    return directory


def write_tiny_model(directory: str | Path, *, last: Sequence[str] = (), **options: Any) -> Path:
    """Write write_tiny_hf's directory with a tokenizer of as many words, among them the last."""
    from tests.rollout.tiny_tokenizer import write_tiny_tokenizer

    path = write_tiny_hf(directory, **options)
    write_tiny_tokenizer(path, options.get("vocab", 300), last=last)
    return path


def write_tiny_reward_model(
    directory: str | Path, *, bias: float | None = None, **options: Any
) -> Path:
    """Write a ...ForSequenceClassification with one label, of write_tiny_hf's sizes.

    Args:
        bias: of the label; None: there is none.
        options: see write_tiny_hf.
    """
    directory = write_tiny_hf(directory, **options)
    config = json.loads((directory / "config.json").read_text())
    (name,) = config["architectures"]
    name = name.replace("CausalLM", "SequenceClassification")
    config |= {"architectures": [name], "num_labels": 1}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    tensors = load_file(directory / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    generator = torch.Generator().manual_seed(options.get("seed", 0) + 1000)
    tensors["score.weight"] = torch.randn(1, config["hidden_size"], generator=generator) * 0.2
    if bias is not None:
        tensors["score.bias"] = torch.tensor([bias])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _tensors(
    family: str,
    tied: bool,
    num_layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocab: int,
    seed: int,
    config: Mapping[str, Any],
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    def bias(size: int) -> Tensor:
        return torch.randn(size, generator=generator) * 0.2

    def norm(size: int = hidden) -> Tensor:
        return 1 + torch.randn(size, generator=generator) * 0.2

    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden) * 2}
    for i in range(num_layers):
        p = f"model.layers.{i}."
        for name, size in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            tensors[p + f"self_attn.{name}_proj.weight"] = matrix(size * head_dim, hidden)
            if family == "qwen2":
                tensors[p + f"self_attn.{name}_proj.bias"] = bias(size * head_dim)
            if family.startswith("qwen3") and name in "qk":
                tensors[p + f"self_attn.{name}_norm.weight"] = norm(head_dim)
        tensors[p + "self_attn.o_proj.weight"] = matrix(hidden, heads * head_dim)
        networks, width = [p + "mlp."], ffn
        if config.get("num_experts") and i not in config["mlp_only_layers"]:
            networks = [f"{p}mlp.experts.{n}." for n in range(config["num_experts"])]
            width = config["moe_intermediate_size"]
            tensors[p + "mlp.gate.weight"] = matrix(len(networks), hidden)
        for network in networks:
            tensors[network + "gate_proj.weight"] = matrix(width, hidden)
            tensors[network + "up_proj.weight"] = matrix(width, hidden)
            tensors[network + "down_proj.weight"] = matrix(hidden, width)
        tensors[p + "input_layernorm.weight"] = norm()
        tensors[p + "post_attention_layernorm.weight"] = norm()
    tensors["model.norm.weight"] = norm()
    if not tied:
        tensors["lm_head.weight"] = matrix(vocab, hidden)
    return tensors


def _write_files(directory: Path, tensors: dict[str, Tensor], num_files: int) -> None:
    if num_files == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map = {}
    for i in range(num_files):
        file = f"model-{i + 1:05d}-of-{num_files:05d}.safetensors"
        part = {n: tensors[n] for n in names[i::num_files]}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
