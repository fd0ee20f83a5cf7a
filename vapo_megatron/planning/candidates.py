"""Layouts worth a look: TP x PP that divide, with the settings that trade for memory."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from vapo_megatron.config import VapoConfig, check_together
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import ModelShape, check_layout

RECOMPUTE = ("none", "selective", "full")


@dataclasses.dataclass(frozen=True)
class Fixed:
    """What is not searched over; None: it is."""

    tensor: int | None = None
    pipeline: int | None = None
    virtual: int | None = None
    recompute: str | None = None
    max_tokens: int | None = None
    offload: bool | None = None
    sampler_tensor: int | None = None
    sampler_share: float | None = None


def trainer_layouts(
    shape: ModelShape, base: VapoConfig, fixed: Fixed, gpus_per_node: int
) -> tuple[list[VapoConfig], dict[str, str]]:
    """Return the trainer's layouts that a run would take, and why it would not take the others.

    TP stays within a node: it is every power of two there, PP every divisor of what is left over.
    Chunks are left to `variants`, unless they are chosen.
    Sequence parallelism is on wherever TP is: it computes the same with less memory.

    Args:
        shape: of the model.
        base: everything that a layout does not say; parallel.world_size is the number of GPUs.
        fixed: what the user has chosen.
        gpus_per_node: bounds TP, unless it is chosen.
    """
    world_size = base.parallel.world_size
    tensors = [fixed.tensor] if fixed.tensor else _powers_of_two(min(gpus_per_node, world_size))
    chunks = fixed.virtual if fixed.virtual != 1 else None
    found, refused = [], {}
    for tp_size in tensors:
        pipelines = [n for n in range(1, world_size + 1) if world_size % (tp_size * n) == 0]
        for pp_size in [fixed.pipeline] if fixed.pipeline else pipelines or [1]:
            config = _with_parallel(
                base,
                tensor_model_parallel_size=tp_size,
                pipeline_model_parallel_size=pp_size,
                virtual_pipeline_model_parallel_size=chunks,
                sequence_parallel=tp_size > 1,
            )
            try:
                check_together(config)
                check_layout(shape, config.parallel)
            except ConfigError as error:
                if pp_size <= shape.num_layers or fixed.pipeline:
                    refused[f"TP {tp_size} x PP {pp_size}"] = str(error).split(";")[0]
                continue
            found.append(config)
    return found, refused


def variants(shape: ModelShape, layout: VapoConfig, fixed: Fixed) -> Iterator[VapoConfig]:
    """Yield a layout with every number of chunks, recomputation and microbatch worth trying.

    Budgets are the longest sequence, half and twice of it: a shorter budget fills a pipeline with
    more microbatches, and a response that exceeds it stands alone.
    """
    pp_size = layout.parallel.pipeline_model_parallel_size
    per_stage = shape.num_layers // pp_size
    chunked = pp_size > 1 and not layout.parallel.batch_p2p_comm
    chunks = [n for n in (1, 2, 4) if per_stage % n == 0] if chunked else [1]
    longest = layout.rollout.max_prompt_tokens + layout.rollout.max_response_tokens
    for vpp_size, recompute, max_tokens in itertools.product(
        [fixed.virtual] if fixed.virtual else chunks,
        [fixed.recompute] if fixed.recompute else RECOMPUTE,
        [fixed.max_tokens] if fixed.max_tokens else (longest, longest // 2, 2 * longest),
    ):
        config = _with_parallel(
            layout,
            virtual_pipeline_model_parallel_size=vpp_size if vpp_size > 1 else None,
            recompute=recompute,
            max_tokens_per_microbatch=max_tokens,
        )
        check_together(config)
        check_layout(shape, config.parallel)
        yield config


def sampler_sizes(
    shape: ModelShape, base: VapoConfig, fixed: Fixed, gpus_per_node: int
) -> list[int]:
    """Return vLLM's tensor-parallel sizes: powers of two within a node that divide the heads.

    Raises:
        ConfigError: the chosen one divides neither the heads nor the GPUs.
    """
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    world_size, chosen = base.parallel.world_size, fixed.sampler_tensor
    sizes = [chosen] if chosen else _powers_of_two(min(gpus_per_node, world_size))
    found = [
        size
        for size in sizes
        if world_size % size == 0
        and heads % size == 0
        and (kv_heads % size == 0 or size % kv_heads == 0)
    ]
    if not found:
        raise ConfigError(
            f"rollout.tensor_model_parallel_size={chosen} must divide parallel.world_size="
            f"{world_size} and the model's num_attention_heads={heads}, and be a divisor or a "
            f"multiple of its num_key_value_heads={kv_heads}; lower it"
        )
    return found


def offload_choices(base: VapoConfig, fixed: Fixed) -> list[bool]:
    """Return whether what is not at work may leave the GPU: both, unless it is chosen."""
    chosen = base.parallel.offload if fixed.offload is None else fixed.offload
    return [False, True] if chosen is None else [chosen]


def with_offload(config: VapoConfig, offload: bool) -> VapoConfig:
    """Return the configuration with or without offloading."""
    return _with_parallel(config, offload=offload)


def with_sampler(config: VapoConfig, **fields: Any) -> VapoConfig:
    """Return the configuration with other rollout fields."""
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=fields)})


def _with_parallel(config: VapoConfig, **fields: Any) -> VapoConfig:
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=fields)})


def _powers_of_two(largest: int) -> list[int]:
    return [2**n for n in range(largest.bit_length()) if 2**n <= largest]
