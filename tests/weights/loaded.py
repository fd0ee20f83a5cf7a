"""Builds a model inside a worker process, fills it with NaN and loads an HF directory into it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.cut import batch_of
from tests.layouts import Layout, parallel_fields
from tests.models.built import call
from vapo_megatron.config import VapoConfig
from vapo_megatron.data.microbatch import Microbatch, make_microbatch
from vapo_megatron.models.build import build_model
from vapo_megatron.models.hf_config import ModelShape, read_model_shape
from vapo_megatron.parallel import groups
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.parallel.optimizer import (
    build_ddp,
    build_optimizer,
    optimizer_step,
    set_learning_rate,
)
from vapo_megatron.parallel.schedule import forward_backward
from vapo_megatron.weights.load_hf import load_hf_weights

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
            "parallel": parallel_fields(
                layout,
                world_size=dist.get_world_size(),
                # Which ranks with a part of each expert's tokens need.
                sequence_parallel=layout.tp > 1 and layout.ep > 1,
                use_distributed_optimizer=True,
                overlap_grad_reduce=overlap,
                overlap_param_gather=overlap,
            ),
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


def forward(chunk: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """One packed sequence through a model on one pipeline stage."""
    with torch.no_grad():
        return call(chunk, list(ids))


def two_updates(loaded: Loaded) -> Iterator[list[torch.nn.Module]]:
    """Update an actor on its data-parallel ranks twice; after each, its wrapped chunks."""
    chunks = build_ddp(loaded.chunks, loaded.config.parallel, loaded.chunks[0].config)
    optimizer = build_optimizer(chunks, loaded.config.optimizer, "actor")
    set_learning_rate(optimizer, 0.01)
    for _ in range(2):
        forward_backward(chunks, [microbatch()], lambda out, _: (out.float().square().sum(), {}))
        optimizer_step(optimizer)
        yield chunks


def microbatch() -> Microbatch:
    """One response of 4 tokens after a prompt of 3."""
    return make_microbatch(batch_of(torch.tensor([5, 9, 17, 33, 65, 129, 2]), [7], [4]))
