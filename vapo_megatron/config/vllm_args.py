"""What vLLM must not be given in `rollout.vllm_args`, and what FP8 keys and values ask for.

The trainer sets some arguments and relies on others. Names and types that vLLM itself does not know
are refused by rollout/vllm/extra_arguments.py.
"""

from __future__ import annotations

from vapo_megatron.config.schema import VapoConfig

FIELDS = {
    "model": "model.hf_path",
    "tokenizer": "model.hf_path",
    "dtype": "rollout.dtype",
    "seed": "seed",
    "tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "enable_expert_parallel": "rollout.expert_parallel",
    "max_model_len": "rollout.max_prompt_tokens and rollout.max_response_tokens",
    "max_num_seqs": "rollout.max_num_sequences",
    "enforce_eager": "rollout.enforce_eager",
    "kv_cache_memory_bytes": "rollout.kv_cache_bytes",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "kv_cache_dtype": "rollout.kv_cache_dtype",
    "enable_sleep_mode": "parallel.offload",
    "enable_return_routed_experts": "algorithm.router_replay",
}
"""Arguments of vLLM with the field to use in their place."""

_LAYOUT = "a replica is rollout.tensor_model_parallel_size ranks, as the weight sync assumes"
_WEIGHTS = "the weight sync replaces the weights in place, in their own data type"
_DRAFT = (
    "a draft model's weights are neither loaded nor synced; use speculative_config with "
    "method=ngram, which has none"
)
KEPT = {
    "skip_tokenizer_init": "prompts and responses are token ids here",
    "load_format": "the weights come from the trainer",
    "generation_config": "sampling is as rollout and evaluation say",
    "override_generation_config": "sampling is as rollout and evaluation say",
    "hf_overrides": "the trainer sets head_dtype for float32 logits",
    "distributed_executor_backend": "vLLM runs in the trainer's processes",
    "logprobs_mode": "training needs the log-probabilities that were sampled from",
    "enable_chunked_prefill": "it is on with a GPU, and must be off without one",
    "pipeline_parallel_size": _LAYOUT,
    "data_parallel_size": _LAYOUT,
    "prefill_context_parallel_size": _LAYOUT,
    "decode_context_parallel_size": _LAYOUT,
    "moe_backend": "only triton keeps the experts' weights as they were loaded, to be synced",
    "quantization": _WEIGHTS,
    "quantization_config": _WEIGHTS,
    "cpu_offload_gb": _WEIGHTS,
    "enable_lora": _WEIGHTS,
    "spec_method": _DRAFT,
    "spec_model": _DRAFT,
    "spec_tokens": _DRAFT,
}
"""Arguments of vLLM that no run may change, and why."""


def vllm_args_rule(c: VapoConfig) -> str | None:
    """Return an error message for the first name that must not be there; None: there is none."""
    for name, value in c.rollout.vllm_args.items():
        given = f"rollout.vllm_args: {name}={value}"
        if name in FIELDS:
            return f"{given} is set by the trainer; use {FIELDS[name]}, and remove it"
        if name in KEPT:
            return f"{given} must not be set: {KEPT[name]}; remove it"
    if c.algorithm.router_replay == "r3":
        if c.rollout.vllm_args.get("enable_prefix_caching") is False:
            return (
                "rollout.vllm_args: enable_prefix_caching must be on with algorithm.router_replay="
                "r3, found false: vLLM keeps routes beside cached keys and values; remove it, or "
                "set router_replay to r2 or off"
            )
    speculative = c.rollout.vllm_args.get("speculative_config")
    if isinstance(speculative, dict) and speculative.get("method") != "ngram":
        return (
            "rollout.vllm_args: speculative_config must have method=ngram, found "
            f"{speculative.get('method')}: {_DRAFT}"
        )
    return None


def advice(c: VapoConfig) -> list[str]:
    """Return a line on what is allowed, but likely worse than its remedy."""
    a, r = c.algorithm, c.rollout
    corrected = a.sampler_correction != "none" or r.behaviour == "sampler"
    if r.kv_cache_dtype == "auto" or corrected or a.policy_loss != "ppo_clip":
        return []
    return [
        f"rollout.kv_cache_dtype={r.kv_cache_dtype} moves the engine away from the trainer, and "
        "algorithm.sampler_correction=none trains as if it had not; set sampler_correction=tis"
    ]


def kv_cache_rule(c: VapoConfig) -> str | None:
    """FP8 keys and values need weights of 16 bits."""
    r = c.rollout
    if r.kv_cache_dtype == "auto":
        return None
    if (r.dtype or c.model.dtype) != "bfloat16":
        return (
            f"rollout.kv_cache_dtype={r.kv_cache_dtype} needs vLLM's weights in bfloat16, found "
            f"{r.dtype or c.model.dtype}; set rollout.dtype=bfloat16, or kv_cache_dtype=auto"
        )
    return None
