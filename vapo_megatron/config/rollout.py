"""The section `rollout`: where responses are sampled, with what, and how old the weights are."""

from __future__ import annotations

from typing import Any, Literal

from vapo_megatron.config.section import Section
from vapo_megatron.config.section import field as _field


class RolloutConfig(Section):
    """How responses are sampled (vLLM)."""

    placement: Literal["colocated", "disaggregated"] = _field(
        "colocated",
        "Where vLLM runs: in the processes that train, or in rollout.num_processes of its own.",
    )
    num_processes: int = _field(
        0, "Processes that only sample, with placement=disaggregated; the last of torchrun's.", ge=0
    )
    lag: int = _field(
        0,
        "Step k trains on responses that the weights of step k - lag sampled; above 0 the "
        "rollout workers sample while the trainers train.",
        ge=0,
    )
    carry_over_groups: int = _field(
        0,
        "Groups in flight beyond a step's: a step ends once its number of groups is whole, and "
        "the others go on in the next step, with its weights; 0: every step waits for all.",
        ge=0,
    )
    max_lag: int = _field(
        1,
        "With carry_over_groups: a group that step k begins is trained on in step k + max_lag at "
        "the latest; that step waits for it. No token is more than lag + max_lag versions old.",
        ge=1,
    )
    behaviour: Literal["recomputed", "sampler"] = _field(
        "recomputed",
        "Old log-probabilities of the ratio: the trainer's before the update, or the engine's.",
    )
    tensor_model_parallel_size: int = _field(
        1, "Ranks per inference engine; the processes that sample make up that many engines.", ge=1
    )
    expert_parallel: bool = _field(
        False,
        "An engine's ranks hold whole experts, each its own, in place of a slice of every one.",
    )
    max_prompt_tokens: int = _field(
        2048, "Maximum prompt length; longer prompts are an error.", ge=1
    )
    max_response_tokens: int = _field(
        20480, "Maximum response length; longer responses are truncated.", ge=1
    )
    temperature: float = _field(
        1.0, "Sampling temperature; also applied to the trainer's logits.", gt=0
    )
    top_p: float = _field(1.0, "Must be 1 for training rollouts.", gt=0, le=1)
    top_k: int = _field(-1, "Must be -1 for training rollouts.")
    stop_token_ids: list[int] = _field(
        [],
        "Token ids that end a response, in place of the model's own stop tokens; empty: those of "
        "generation_config, config and tokenizer.",
    )
    dtype: Literal["bfloat16", "float32"] | None = _field(
        None, "Data type of vLLM's weights; null: model.dtype."
    )
    kv_cache_bytes: int | None = _field(
        None,
        "KV cache size per rank; null: from gpu_memory_utilization, or 256 MiB on a CPU.",
        ge=1,
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = _field(
        "auto",
        "Data type of vLLM's keys and values; auto: that of its weights. FP8 (fp8 is fp8_e4m3) "
        "halves the cache and rounds more: use it with algorithm.sampler_correction.",
    )
    gpu_memory_utilization: float = _field(
        0.5, "Fraction of GPU memory for vLLM when kv_cache_bytes is null.", gt=0, le=1
    )
    max_num_sequences: int = _field(256, "Responses that one engine samples concurrently.", ge=1)
    shared_queue: bool = _field(
        False,
        "Engines take the groups of a step from one list as they have room among their "
        "max_num_sequences, so that a slow one does not hold up the others; false: each samples an "
        "equal share.",
    )
    enforce_eager: bool | None = _field(
        None, "Disable CUDA graphs; null: true on a CPU, false on a GPU."
    )
    vllm_args: dict[str, Any] = _field(
        {},
        "Further arguments of vLLM's engine by their names there, such as {max_num_batched_tokens: "
        "16384}; those that this trainer sets are refused.",
    )
    sync_bucket_bytes: int = _field(
        512 << 20,
        "Size of a weight sync's send and receive buffers on a rank; two of each are allocated.",
        ge=1,
    )
    adapter_sync: Literal["merged", "adapter"] = _field(
        "merged",
        "With model.lora: send the weights with the adapters added, or the adapters alone to a "
        "vLLM that adds them; weights that vLLM has dropped, to lend its memory, are sent again.",
    )
    verify_sync_every: int = _field(
        0,
        "Policy versions between checksum comparisons of vLLM's and the trainer's weights, "
        "starting with the first; 0: never.",
        ge=0,
    )
    compare_routes_every: int = _field(
        10,
        "Steps between comparisons of vLLM's log-probabilities with those of the trainer's own "
        "routes, with algorithm.router_replay=r3, starting with the first; each costs a forward "
        "pass; 0: never.",
        ge=0,
    )
    max_logprob_difference: float | None = _field(
        None,
        "Stop the run when vLLM's and the trainer's log-probabilities differ by more than this on "
        "1 % of the tokens, or by a tenth of it in the mean (a sign of stale or wrongly sharded "
        "weights); null: only report it.",
        gt=0,
    )

    @property
    def is_disaggregated(self) -> bool:
        """Whether processes of their own sample."""
        return self.placement == "disaggregated"

    @property
    def is_stale(self) -> bool:
        """Whether tokens are trained on that older weights than a step's have sampled."""
        return self.lag > 0 or self.carry_over_groups > 0
