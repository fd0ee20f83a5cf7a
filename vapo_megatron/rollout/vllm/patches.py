"""Replacements for parts of vLLM that assume it owns the process."""

from __future__ import annotations

import os
from typing import Any

import torch
import vllm.distributed.parallel_state as vllm_groups
import vllm.model_executor.layers.utils as vllm_layers
import vllm.v1.executor.uniproc_executor as vllm_executor
import vllm.v1.sample.sampler as vllm_sampler
from torch import Tensor
from vllm.platforms import current_platform


def adapt_vllm(rank: int, run_name: str) -> None:
    """Patch vLLM for use in the trainer's process."""
    vllm_groups.destroy_distributed_environment = _destroy_own_world
    # vLLM names the memory that a replica's ranks share on a CPU after the first of these.
    arguments = (f"vapo:{run_name}", rank, int(os.environ.get("LOCAL_RANK", rank)))
    vllm_executor.ExecutorWithExternalLauncher._distributed_args = (  # type: ignore[method-assign]
        lambda self: arguments
    )
    if current_platform.is_cpu():
        vllm_layers.dispatch_cpu_unquantized_gemm = _keep_weight_unpacked
        vllm_sampler.batched_count_greater_than = _count_at_least
        # vLLM's own moves and binds the whole process's memory to one NUMA node.
        torch.ops._C.init_cpu_memory_env = lambda nodes: None  # type: ignore[attr-defined]


def _destroy_own_world() -> None:
    """vLLM's own calls destroy_process_group(), which would destroy the trainer's groups too."""
    if vllm_groups._WORLD:
        vllm_groups._WORLD.destroy()
    vllm_groups._WORLD = None
    vllm_groups._NODE_COUNT = None


def _keep_weight_unpacked(layer: Any, remove_weight: bool) -> None:
    """vLLM's own repacks each weight and leaves shape (0,), which cannot be updated in place."""
    layer.cpu_linear = torch.nn.functional.linear


def _count_at_least(x: Tensor, values: Tensor) -> Tensor:
    """Return the sampled token's rank, which is unused; vLLM's own needs a C++ compiler."""
    return (x >= values).sum(-1)
