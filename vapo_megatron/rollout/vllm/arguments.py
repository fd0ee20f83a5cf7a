"""What vLLM is built with."""

from __future__ import annotations

from typing import Any

from vapo_megatron.config import VapoConfig
from vapo_megatron.parallel.offload import is_on

CPU_KV_CACHE_BYTES = 256 * 2**20


def engine_arguments(
    hf_path: str, config: VapoConfig, max_model_len: int, *, on_cpu: bool
) -> dict[str, Any]:
    """Return the arguments of vllm.LLM.

    Args:
        hf_path: its config.json alone is read.
        config: rollout, parallel.offload, model.dtype and seed are used.
        max_model_len: longest prompt and response together.
        on_cpu: vLLM's CPU build, which neither sleeps nor captures graphs.
    """
    rollout = config.rollout
    return {
        "model": str(hf_path),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "generation_config": "vllm",
        "dtype": rollout.dtype or config.model.dtype,
        "seed": config.seed % 2**32,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "distributed_executor_backend": "external_launcher",
        "enforce_eager": on_cpu if rollout.enforce_eager is None else rollout.enforce_eager,
        "max_model_len": max_model_len,
        "max_num_seqs": rollout.max_num_sequences,
        # After part of a prompt vLLM samples, drops the token and winds the request's generator
        # back, which a CPU generator cannot do: whole prompts only.
        "enable_chunked_prefill": False if on_cpu else None,
        "enable_sleep_mode": is_on(config.parallel) and not on_cpu,
        # Without a number vLLM takes its share of the GPU, less what it measures itself to use:
        # nothing of the trainer's may be there yet, or come and go meanwhile.
        "kv_cache_memory_bytes": rollout.kv_cache_bytes or (CPU_KV_CACHE_BYTES if on_cpu else None),
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "logprobs_mode": "processed_logprobs",
    }
