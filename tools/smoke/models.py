"""Actors, critics and batches of random numbers for the sections of tools/gpu_smoke.py."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from vapo_megatron.config import VapoConfig
from vapo_megatron.config.phases import Role
from vapo_megatron.data.batch import RolloutBatch, bounds
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.parallel import backend, groups
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.parallel.minibatches import MiniBatch, make_microbatches, make_mini_batches
from vapo_megatron.roles.actor import Actor
from vapo_megatron.roles.critic import Critic
from vapo_megatron.weights.table import hf_tensors


def make_config(
    dtype: str,
    *,
    hf_path: str | None = None,
    tokens_per_microbatch: int = 32768,
    layer_spec: str = "auto",
    parallel: Mapping[str, Any] | None = None,
    rollout: Mapping[str, Any] | None = None,
) -> VapoConfig:
    """Return a configuration in which all losses are on; by default of one process."""
    return VapoConfig.model_validate(
        {
            "model": {
                "hf_path": hf_path, "dtype": dtype, "layer_spec": layer_spec,
                "value_head_init_std": 0.02,
            },
            "parallel": {"max_tokens_per_microbatch": tokens_per_microbatch, **(parallel or {})},
            "rollout": rollout or {},
            "algorithm": {"entropy_coef": 0.01},
        }
    )  # fmt: skip


def start_groups(config: VapoConfig) -> Ranks:
    """Build the process groups of a configuration, NCCL's on a GPU; those before are forgotten."""
    if not dist.is_initialized():
        backend.initialize_distributed(timeout_seconds=60)
    groups.destroy()
    return groups.initialize(config.parallel)


def build_role(
    role: Role, shape: ModelShape, config: VapoConfig, ranks: Ranks | None = None
) -> Actor | Critic:
    """Build a role over these process groups; None: over ones of its own."""
    kind = Actor if role == "actor" else Critic
    return kind(shape, config, ranks or start_groups(config), config.model.hf_path)


def exact_float32() -> None:
    """Let no product of float32 be rounded to TF32, whatever the environment says."""
    torch.backends.cuda.matmul.allow_tf32 = False


def random_batch(lengths: Sequence[tuple[int, int]], vocab_size: int, seed: int) -> RolloutBatch:
    """Return responses as the trainer holds them before old_logprobs and values are known.

    Args:
        lengths: (prompt, response) tokens of each.
        vocab_size: tokens are drawn below it.
        seed: of all numbers.
    """
    draw = torch.Generator().manual_seed(seed)
    prompts, responses = torch.tensor(lengths).t()
    num_responses, size = len(lengths), int(responses.sum())
    return RolloutBatch(
        tokens=torch.randint(vocab_size, (int((prompts + responses).sum()),), generator=draw),
        sequence_cu_seqlens=bounds(prompts + responses),
        cu_seqlens=bounds(responses),
        positions=torch.arange(num_responses),
        rewards=torch.randn(num_responses, generator=draw),
        is_correct=torch.arange(num_responses) % 2 == 0,
        truncated=torch.zeros(num_responses, dtype=torch.bool),
        rollout_logprobs=torch.zeros(size),
        loss_mask=torch.ones(size, dtype=torch.bool),
        is_positive=(torch.arange(num_responses) % 2 == 0).repeat_interleave(responses),
        advantages=torch.randn(size, generator=draw),
        returns=torch.randn(size, generator=draw),
    )


def whole_mini_batch(
    batch: RolloutBatch, plan: Sequence[Sequence[int]], multiple_of: int = 1
) -> MiniBatch:
    """Return one mini-batch of all of this rank's responses.

    Args:
        batch: this data-parallel rank's.
        plan: [microbatch] -> positions, in the batch's order.
        multiple_of: from packed_multiple.
    """
    microbatches = make_microbatches(batch, map(len, plan), multiple_of=multiple_of)
    (mini_batch,) = make_mini_batches(microbatches, [len(plan)], groups.current())
    return mini_batch


def write_random_hf(
    directory: Path, shape: ModelShape, role: str, seed: int, dtype: torch.dtype = torch.float32
) -> None:
    """Write the tensors of a Hugging Face directory, numbers that bfloat16 holds exactly.

    Matrices keep the size of what they multiply; norms and biases are not at their neutral values,
    so that leaving one out would show. An actor has a config.json, too, for vLLM.
    """
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size in hf_tensors(shape, role).items():
        scale = size[1] ** -0.5 if len(size) == 2 else 0.1
        tensor = scale * torch.randn(size, generator=draw) + float(name.endswith("norm.weight"))
        tensors[name] = tensor.bfloat16().to(dtype)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    if role == "actor":
        (directory / "config.json").write_text(json.dumps(_hf_config(shape)))


def _hf_config(shape: ModelShape) -> dict[str, Any]:
    """The config.json of a Qwen2."""
    assert shape.family == "qwen2", shape.family
    return {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu",
        "hidden_size": shape.hidden_size, "intermediate_size": shape.ffn_hidden_size,
        "num_hidden_layers": shape.num_layers, "vocab_size": shape.vocab_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "rms_norm_eps": shape.norm_eps, "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_position_embeddings,
        "tie_word_embeddings": shape.tied, "initializer_range": shape.initializer_range,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
