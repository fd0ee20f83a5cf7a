"""Builds a model inside a worker process, fills it with NaN and loads an HF directory into it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from vapo_megatron.config import VapoConfig
from vapo_megatron.data.batch import RolloutBatch
from vapo_megatron.data.microbatch import Microbatch, make_microbatch
from vapo_megatron.models.build import build_model
from vapo_megatron.models.hf_config import ModelShape, read_model_shape
from vapo_megatron.parallel import groups
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.weights.load_hf import load_hf_weights

# isort: split
from megatron.core.packed_seq_params import PackedSeqParams


class Layout(NamedTuple):
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp


# Layouts with fewer key-value heads than tensor-parallel ranks, of models with 4 query heads.
FEW_HEADS = [(Layout(2, 1), 1), (Layout(2, 2), 1), (Layout(4, 1), 1), (Layout(4, 1), 2)]


class Loaded(NamedTuple):
    chunks: list[torch.nn.Module]
    shape: ModelShape
    ranks: Ranks
    num_bytes: int
    config: VapoConfig


def make_config(layout: Layout, overlap: bool = False, **model: Any) -> VapoConfig:
    return VapoConfig.model_validate(
        {
            # A vocabulary of 300 is padded to 320 with TP 1, to 384 with TP 2.
            "model": {"dtype": "float32", "make_vocab_size_divisible_by": 64, **model},
            "parallel": {
                "world_size": dist.get_world_size(),
                "tensor_model_parallel_size": layout.tp,
                "pipeline_model_parallel_size": layout.pp,
                "virtual_pipeline_model_parallel_size": layout.vpp,
                "context_parallel_size": layout.cp,
                "expert_model_parallel_size": layout.ep,
                # Which ranks with a part of each expert's tokens need.
                "sequence_parallel": layout.tp > 1 and layout.ep > 1,
                "overlap_grad_reduce": overlap,
                "overlap_param_gather": overlap,
            },
        }
    )


def load(
    hf_path: str,
    layout: Layout,
    role: str = "actor",
    *,
    built_as: str | None = None,
    **settings: Any,
) -> Loaded:
    """Build from `built_as` (default: hf_path), load hf_path. A critic's head keeps its weights."""
    config = make_config(layout, **settings)
    ranks = groups.initialize(config.parallel)
    shape = read_model_shape(built_as or hf_path)
    chunks = build_model(shape, config.model, config.parallel, ranks, role, seed=config.seed)
    for name, parameter in all_parameters(chunks):
        if role == "actor" or name != "output_layer.weight":
            parameter.data.fill_(torch.nan)
    num_bytes = load_hf_weights(chunks, shape, hf_path, ranks, role)
    return Loaded(chunks, shape, ranks, num_bytes, config)


def all_parameters(chunks: list[torch.nn.Module]) -> list[tuple[str, torch.nn.Parameter]]:
    return [pair for chunk in chunks for pair in chunk.named_parameters()]


def widen(chunks: list[torch.nn.Module], wanted: str) -> None:
    """Make one parameter float32, as a model of mixed types would hold it."""
    for name, parameter in all_parameters(chunks):
        if name == wanted:
            parameter.data = parameter.data.float()


@torch.no_grad()
def forward(chunk: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """One packed sequence through a model on one pipeline stage."""
    return hidden_states(chunk, ids)


def hidden_states(chunk: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """`forward` with gradients."""
    size = ids.shape[1]
    bounds = torch.tensor([0, size], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=size,
        max_seqlen_kv=size,
    )
    return chunk(
        input_ids=ids,
        position_ids=torch.arange(size)[None],
        attention_mask=None,
        packed_seq_params=packed,
    )


def microbatch() -> Microbatch:
    """One response of 4 tokens after a prompt of 3."""
    empty = torch.zeros(1)
    return make_microbatch(
        RolloutBatch(
            tokens=torch.tensor([5, 9, 17, 33, 65, 129, 2]),
            sequence_cu_seqlens=torch.tensor([0, 7], dtype=torch.int32),
            cu_seqlens=torch.tensor([0, 4], dtype=torch.int32),
            positions=torch.tensor([0]),
            rewards=empty,
            is_correct=empty.bool(),
            truncated=empty.bool(),
            rollout_logprobs=torch.zeros(4),
            loss_mask=torch.ones(4),
        )
    )
