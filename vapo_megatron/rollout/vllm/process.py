"""Keeps vLLM, which assumes that it owns the process, from harming the trainer.

Undoes its changes to random states, environment, thread and matmul settings; replaces its handling
of process groups, and of weights on a CPU.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import vllm.distributed.parallel_state as vllm_groups
import vllm.model_executor.layers.fused_moe.experts.cpu_moe as vllm_experts
import vllm.model_executor.layers.utils as vllm_layers
import vllm.model_executor.layers.vocab_parallel_embedding as vllm_vocabulary
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
        # What it packs, and pads, could not be updated in place either.
        vllm_experts.CPUUnquantizedExperts.process_weights_after_loading = (  # type: ignore
            lambda self, layer: None
        )
        vllm_experts.CPUUnquantizedExperts.apply = _apply_experts  # type: ignore
        vllm_sampler.batched_count_greater_than = _count_at_least
        # The function itself: compiling it takes seconds in every process, and a C++ compiler.
        vllm_vocabulary.get_masked_input_and_mask = inspect.unwrap(
            vllm_vocabulary.get_masked_input_and_mask
        )
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


def _apply_experts(
    self: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *_: Any,
    expert_map: Tensor | None,
    **__: Any,
) -> None:
    """Compute the experts of this rank from weights as they are loaded.

    Args:
        self: vLLM's module of experts.
        output, hidden_states: [tokens, H].
        w1, w2: [experts, 2 F, H], gates before ups, and [experts, H, F].
        topk_weights, topk_ids: [tokens, experts per token].
        expert_map: [all experts], each one's place in w1 and w2, or -1; None: its own number.
    """
    chosen = topk_ids.long() if expert_map is None else expert_map.long()[topk_ids.long()]
    output.zero_()
    for expert, (up, down) in enumerate(zip(w1, w2, strict=True)):
        tokens, place = torch.where(chosen == expert)
        gates, ups = torch.nn.functional.linear(hidden_states[tokens], up).chunk(2, -1)
        found = torch.nn.functional.linear(torch.nn.functional.silu(gates) * ups, down)
        weights = topk_weights[tokens, place, None].to(found.dtype)
        output.index_add_(0, tokens, found * weights)


def _count_at_least(x: Tensor, values: Tensor) -> Tensor:
    """Return the sampled token's rank, which is unused; vLLM's own needs a C++ compiler."""
    return (x >= values).sum(-1)


@contextlib.contextmanager
def process_state_kept() -> Iterator[None]:
    """Restore the environment, thread setter and matmul precision after building the engine.

    VLLM_* variables that the body adds stay: vLLM reads them later.
    """
    environment = dict(os.environ)
    set_num_threads, precision = torch.set_num_threads, torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        for name in set(os.environ) - set(environment):
            if not name.startswith("VLLM_"):
                del os.environ[name]
        os.environ.update(environment)
        torch.set_num_threads = set_num_threads
        torch.set_float32_matmul_precision(precision)


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the random states, which vLLM seeds and draws from."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def name_run() -> str:
    """Return a name for vLLM's shared memory that no other run on the machine has. Collective."""
    name = [os.urandom(8).hex()]
    dist.broadcast_object_list(name, src=0)
    return name[0]


def unlink_shared_memory(run_name: str, first_rank: int, tp_size: int) -> None:
    """Unlink the memory that a replica's ranks share on a CPU; their mappings stay valid.

    vLLM never does, so a killed run would leak it.
    """
    ranks = "-".join(str(first_rank + i) for i in range(tp_size))
    for file in Path("/dev/shm").glob(f"{run_name}-*"):
        if f"[{ranks}]" in file.name:
            file.unlink(missing_ok=True)
