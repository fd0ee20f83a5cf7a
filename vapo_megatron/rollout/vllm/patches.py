"""Parts of vLLM that do not fit a process owned by a trainer, replaced."""

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
    """Replace the parts of vLLM that do not fit a process owned by a trainer."""
    vllm_groups.destroy_distributed_environment = _destroy_own_world
    place = (f"vapo:{run_name}", rank, int(os.environ.get("LOCAL_RANK", rank)))
    vllm_executor.ExecutorWithExternalLauncher._distributed_args = (  # type: ignore[method-assign]
        lambda self: place
    )
    if current_platform.is_cpu():
        vllm_layers.dispatch_cpu_unquantized_gemm = _keep_weight_unpacked
        vllm_sampler.batched_count_greater_than = _count_at_least
        # vLLM's own moves and binds the memory of the whole process to one NUMA node.
        torch.ops._C.init_cpu_memory_env = lambda nodes: None  # type: ignore[attr-defined]


def _destroy_own_world() -> None:
    """vLLM's own calls torch.distributed.destroy_process_group(): the trainer's groups go too."""
    if vllm_groups._WORLD:
        vllm_groups._WORLD.destroy()
    vllm_groups._WORLD = None
    vllm_groups._NODE_COUNT = None


def _keep_weight_unpacked(layer: Any, remove_weight: bool) -> None:
    """vLLM's own repacks each weight and leaves shape (0,), which no update can reach."""
    layer.cpu_linear = torch.nn.functional.linear


def _count_at_least(x: Tensor, values: Tensor) -> Tensor:
    """Rank of the sampled token, which nobody reads; vLLM's own is compiled by a C++ compiler."""
    return (x >= values).sum(-1)
