"""The arguments of vllm.LLM."""

from __future__ import annotations

from typing import Any

from vapo_megatron.config import RolloutConfig
from vapo_megatron.config.lora import LoraConfig
from vapo_megatron.parallel import environment
from vapo_megatron.rollout.vllm.adapter import adapter_arguments

CPU_KV_CACHE_BYTES = 256 * 2**20


def engine_arguments(
    hf_path: str,
    rollout: RolloutConfig,
    max_model_len: int,
    *,
    dtype: str,
    seed: int,
    offload: bool,
    on_cpu: bool,
    returns_routes: bool = False,
    adapters: LoraConfig | None = None,
) -> dict[str, Any]:
    """Return the arguments for those of RolloutEngine; of hf_path, vLLM reads only config.json.

    Args:
        max_model_len: longest prompt and response together, in tokens.
        on_cpu: vLLM's CPU build, which neither sleeps nor captures graphs.
        returns_routes, adapters: see RolloutEngine.
    """
    arguments = {
        "model": hf_path,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "generation_config": "vllm",
        "dtype": dtype,
        # Float32 logits on a GPU, as score_chunks.py has them there. vLLM's CPU build would cast
        # the whole output projection for each token.
        "hf_overrides": {} if on_cpu else {"head_dtype": "float32"},
        "seed": seed % 2**32,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "enable_expert_parallel": rollout.expert_parallel,
        "distributed_executor_backend": "external_launcher",
        "enforce_eager": on_cpu if rollout.enforce_eager is None else rollout.enforce_eager,
        "max_model_len": max_model_len,
        "max_num_seqs": rollout.max_num_sequences,
        # After a chunk vLLM samples a token, drops it and rewinds the request's generator, which a
        # CPU generator does not support.
        "enable_chunked_prefill": False if on_cpu else None,
        "enable_sleep_mode": offload and not on_cpu,
        # If None, vLLM takes its share of the GPU less the usage that it measures: the trainer may
        # not allocate anything before or meanwhile.
        "kv_cache_memory_bytes": rollout.kv_cache_bytes or (CPU_KV_CACHE_BYTES if on_cpu else None),
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        # FP8 keys and values have the scale 1, which needs no calibration: the checkpoints have
        # none, and vLLM's own calculation of it is gone since 0.31.
        "kv_cache_dtype": rollout.kv_cache_dtype,
        "logprobs_mode": "processed_logprobs",
    }
    if not on_cpu:
        # Others swap, pad or re-block the experts' weights after loading, which the weight sync
        # then could not write in place (vLLM's fused_moe/oracle/unquantized.py).
        arguments["moe_backend"] = "triton"
    if returns_routes:
        # Routes are kept beside cached keys and values.
        arguments |= {"enable_return_routed_experts": True, "enable_prefix_caching": True}
    if adapters is not None:
        arguments |= adapter_arguments(adapters)
    if not on_cpu and not environment.has_multicast():
        # See environment.WITHOUT_MULTICAST: the fusion would call FlashInfer's all-reduce again.
        arguments["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    return _merged(arguments, rollout.vllm_args)


def _merged(arguments: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Return both; where both have a mapping, the mappings merged, of which `extra` wins."""
    found = dict(arguments)
    for name, value in extra.items():
        mine = found.get(name)
        both = isinstance(mine, dict) and isinstance(value, dict)
        found[name] = _merged(mine, value) if both and mine is not None else value
    return found
