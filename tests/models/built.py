"""Builds a model inside a worker process, and calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tests.layouts import Layout, parallel_fields
from tests.weights.tiny_hf import write_tiny_hf
from vapo_megatron.config import VapoConfig
from vapo_megatron.models.build import build_model
from vapo_megatron.models.hf_config import ModelShape, read_model_shape
from vapo_megatron.parallel import groups
from vapo_megatron.parallel.groups import Ranks

# isort: split
from megatron.core.packed_seq_params import PackedSeqParams


class Built(NamedTuple):
    chunks: list[Any]
    shape: ModelShape
    config: VapoConfig
    ranks: Ranks


def make_config(layout: Layout, world_size: int, **model: Any) -> VapoConfig:
    return VapoConfig.model_validate(
        {
            "model": {"dtype": "float32", "make_vocab_size_divisible_by": 64, **model},
            "parallel": parallel_fields(layout, world_size=world_size),
        }
    )


def build(
    hf_path: str,
    layout: Layout,
    role: str = "actor",
    *,
    device: str | None = None,
    **model: Any,
) -> Built:
    """Build with random weights. Process groups are made once per job."""
    config = make_config(layout, dist.get_world_size(), **model)
    try:
        ranks = groups.current()
    except AssertionError:
        ranks = groups.initialize(config.parallel)
    shape = read_model_shape(hf_path)
    chunks = build_model(
        shape, config.model, config.parallel, ranks, role, seed=config.seed, device=device
    )
    return Built(chunks, shape, config, ranks)


def write_hf(directory: Path, changes: dict[str, Any] | None = None, **shape: Any) -> str:
    """Write a tiny random Qwen2 whose config.json is changed afterwards; null removes a key."""
    path = write_tiny_hf(directory, **shape)
    file = path / "config.json"
    tree = {**json.loads(file.read_text()), **(changes or {})}
    file.write_text(json.dumps({k: v for k, v in tree.items() if v is not None}))
    return str(path)


def call(chunk: Any, ids: list[Tensor]) -> Tensor:
    """One packed forward pass of several sequences."""
    lengths = [len(sequence) for sequence in ids]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    return chunk(
        input_ids=torch.cat(ids)[None],
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        attention_mask=None,
        packed_seq_params=packed,
    )
