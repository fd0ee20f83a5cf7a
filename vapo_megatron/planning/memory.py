"""Bytes on one GPU in each phase of a step, by arithmetic alone.

What is counted, and from where: parameters, gradients and optimizer state as megatron-core lays
them out (model_bytes.py); activations tensor by tensor as the layers save them (activations.py);
vLLM's weights, and its KV cache as what its share of the GPU leaves. The rest, which no arithmetic
gives, is a margin: the constants below, each with its source.

With offload (parallel.offload, on unless it is set to false) a role that is not at work has nothing
on the GPU, and vLLM sleeps while the trainer works: no weights, no KV cache. Without it all roles'
parameters, gradients and optimizer states, vLLM's weights and its KV cache stay throughout.

Not modelled: inputs that model.fp8 saves in FP8 (counted in bfloat16: too many bytes), those that
a frozen attention need not save (counted), the batch itself (about 60 bytes a token), cuBLAS and
NVSHMEM workspaces, NCCL's growth with the number of nodes, the frozen part of a critic's checkpoint
(counted with an optimizer), what other processes hold on the GPU, evaluation (as generation),
loading, exporting and checkpointing weights. What a node and a disk hold is in host_memory.py.
"""

from __future__ import annotations

import dataclasses

from vapo_megatron.config import VapoConfig
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.planning.activations import (
    inference_bytes,
    microbatch_tokens,
    training_bytes,
)
from vapo_megatron.planning.model_bytes import (
    DTYPE_BYTES,
    Role,
    StateBytes,
    fp8_weight_bytes,
    sampler_weight_bytes,
    state_bytes,
    widths,
)

PHASES = (
    "generation", "values", "logprobs", "reference_logprobs", "critic_update", "actor_update",
    "sync",
)  # fmt: skip
SCORES: dict[Role, str] = {
    "actor": "logprobs", "critic": "values", "reference": "reference_logprobs",
}  # fmt: skip
"""The phase of each role's forward passes."""

CUDA_CONTEXT_BYTES = 500 * 10**6
"""pytorch/pytorch issues 81257 (about 500 MB) and 107667 (300 MB and more, kernels loaded
lazily)."""

NCCL_COMMUNICATOR_BYTES = 688 * 2**20
"""NVIDIA/nccl issue 964: 544 MB for a group of 2 GPUs, 688 MB for more, 4 A100 with NVLink."""

NCCL_PEER_BYTES = 3_280_000_000 // 7
"""NVIDIA/nccl issue 1685: point to point with all 7 others of 8 H100 took 4.34 - 1.06 GB."""

NODE_PEERS = 7
"""Most ranks of its own node that a rank meets in a sync: NVIDIA's nodes have 8 GPUs."""

CUDA_GRAPH_BYTES = 1_503_657_984
"""vllm-project/vllm issue 47654: what capturing reported; it stays while vLLM sleeps."""

FRAGMENTATION = 0.15
"""Of activations and logits: average of 8 models in arXiv 2401.08156 (GMLake), with an allocator
whose segments cannot expand; the trainer's can (offload.py), so this is on the safe side."""

VLLM_LARGE_GPU_BYTES = 70 * 2**30
VLLM_BATCHED_TOKENS = (8192, 16384)
"""max_num_batched_tokens on smaller and on larger GPUs: get_batch_defaults of vLLM 0.32's
engine/arg_utils.py."""

VLLM_LOGITS_BYTES = 24
"""For each sequence and vocabulary entry while it samples: float32 logits, sorted logits, their
int64 indices, probabilities and cumulative sums (v1/sample/ops/topk_topp_sampler.py)."""

VLLM_BLOCK_TOKENS = 16
"""Tokens of one KV cache block: vLLM's default block_size."""


@dataclasses.dataclass(frozen=True)
class PhaseMemory:
    """Bytes on one GPU at the fullest moment of a phase; the parts add up to that moment."""

    parameters: int = 0
    """Megatron's, of the roles that are on the GPU; with model.fp8 the copies of all roles, too."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    """Of the actor's log-probabilities on the last stage, or of vLLM while it samples."""
    sampler_weights: int = 0
    kv_cache: int = 0
    sync_buckets: int = 0
    reserve: int = 0
    """CUDA context, NCCL, CUDA graphs, fragmentation."""

    @property
    def total(self) -> int:
        """All parts."""
        return sum(vars(self).values())


def offloads(config: VapoConfig) -> bool:
    """Whether what is not at work leaves the GPU; null means that it does."""
    return config.parallel.offload is not False


def phase_memory(
    shape: ModelShape, config: VapoConfig, *, gpu_bytes: int, pp_rank: int
) -> dict[str, PhaseMemory]:
    """Predict the fullest moment of each phase on a GPU of one pipeline stage.

    Args:
        shape: of the model; hf_config.check_layout has accepted the layout.
        config: model, parallel, rollout and algorithm are used.
        gpu_bytes: memory of the GPU, of which vLLM takes its share.
        pp_rank: pipeline stage; all its GPUs hold the same amount.

    Returns:
        By the names in PHASES, those of roles that the run holds. A total above gpu_bytes does not
        fit; a KV cache of 0 means that vLLM's share does not even hold its weights.
    """
    roles = config.algorithm.roles
    states = {role: state_bytes(shape, config, role, pp_rank=pp_rank) for role in roles}
    tokens = microbatch_tokens(config)
    weights = sampler_weight_bytes(shape, config)
    found = {"generation": _generation(shape, config, gpu_bytes)}
    for role in roles:
        computes: Role = "actor" if role == "reference" else role
        activations, logits = inference_bytes(
            shape, config, computes, pp_rank=pp_rank, tokens=tokens
        )
        found[SCORES[role]] = PhaseMemory(
            parameters=states[role].parameters, activations=activations, logits=logits
        )
    for role in config.algorithm.trained_roles:
        found[f"{role}_update"] = _update(shape, config, role, states[role], pp_rank, tokens)
    buckets = 4 * config.rollout.sync_bucket_bytes if config.parallel.world_size > 1 else 0
    found["sync"] = PhaseMemory(
        parameters=states["actor"].parameters, sampler_weights=weights, sync_buckets=buckets
    )
    if not offloads(config):
        resident = {
            "parameters": sum(s.parameters for s in states.values()),
            "gradients": sum(s.gradients for s in states.values()),
            "optimizer": sum(s.optimizer for s in states.values()),
            "sampler_weights": weights,
            "kv_cache": found["generation"].kv_cache,
        }
        found = {name: dataclasses.replace(p, **resident) for name, p in found.items()}
    copies = len(roles) * fp8_weight_bytes(shape, config)
    found = {n: dataclasses.replace(p, parameters=p.parameters + copies) for n, p in found.items()}
    return {name: _with_reserve(found[name], name, config) for name in PHASES if name in found}


def _update(
    shape: ModelShape,
    config: VapoConfig,
    role: Role,
    state: StateBytes,
    pp_rank: int,
    tokens: int,
) -> PhaseMemory:
    """The larger of a forward and backward pass and the optimizer's step.

    megatron-core takes Transformer Engine's fused Adam, which needs no room, and without it torch's
    AdamW, whose grouped step holds the square roots of all second moments, 4 bytes each.
    """
    activations, logits = training_bytes(shape, config, role, pp_rank=pp_rank, tokens=tokens)
    if config.model.layer_spec == "local":
        narrow = DTYPE_BYTES[config.model.dtype] < 4
        roots = 4 * state.optimizer // (12 if narrow else 8)
        activations = max(activations, roots - logits)
    return PhaseMemory(*state, activations=activations, logits=logits)


def _generation(shape: ModelShape, config: VapoConfig, gpu_bytes: int) -> PhaseMemory:
    """vLLM's own memory: the KV cache is what its share leaves (gpu_worker.py).

    Activations are those of one layer in a batch of max_num_batched_tokens: residual stream and
    norm, gate, up and product.
    """
    rollout = config.rollout
    w = widths(shape, rollout.tensor_model_parallel_size)
    batched = VLLM_BATCHED_TOKENS[gpu_bytes >= VLLM_LARGE_GPU_BYTES]
    width = 2 * w.hidden + max(3 * w.ffn, 2 * w.query + 2 * w.key)
    activations = batched * width * DTYPE_BYTES[rollout.dtype or config.model.dtype]
    logits = rollout.max_num_sequences * shape.vocab_size * VLLM_LOGITS_BYTES
    weights = sampler_weight_bytes(shape, config)
    kv_cache = rollout.kv_cache_bytes
    if kv_cache is None:
        share = int(gpu_bytes * rollout.gpu_memory_utilization)
        used = weights + activations + logits + CUDA_CONTEXT_BYTES + _graph_bytes(config)
        kv_cache = max(0, share - used)
    return PhaseMemory(
        activations=activations, logits=logits, sampler_weights=weights, kv_cache=kv_cache
    )


def _graph_bytes(config: VapoConfig) -> int:
    return 0 if config.rollout.enforce_eager else CUDA_GRAPH_BYTES


def _with_reserve(phase: PhaseMemory, name: str, config: VapoConfig) -> PhaseMemory:
    """Add what is on the GPU in every phase, and the allocator's losses."""
    parallel = config.parallel
    tp_size, pp_size = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    groups = sum(size > 1 for size in (tp_size, pp_size, parallel.data_parallel_size))
    groups += parallel.world_size > 1  # the world, for syncs
    groups += tp_size > 1 and pp_size > 1  # both together, for norms
    groups += 2 * (config.rollout.tensor_model_parallel_size > 1)  # torch's and vLLM's own
    peers = min(NODE_PEERS, parallel.world_size - 1)
    reserve = CUDA_CONTEXT_BYTES + _graph_bytes(config)
    reserve += groups * NCCL_COMMUNICATOR_BYTES + peers * NCCL_PEER_BYTES
    if name != "generation":  # where vLLM's profile has them in it
        reserve += int(FRAGMENTATION * (phase.activations + phase.logits))
    return dataclasses.replace(phase, reserve=reserve)


def kv_cache_bytes_per_token(shape: ModelShape, config: VapoConfig) -> int:
    """Bytes of one token's keys and values on one GPU of a vLLM replica.

    2 * layers * max(key-value heads / tp, 1) * head_dim * bytes of vLLM's dtype
    """
    w = widths(shape, config.rollout.tensor_model_parallel_size)
    size = DTYPE_BYTES[config.rollout.dtype or config.model.dtype]
    return 2 * shape.num_layers * w.key * size


def kv_cache_tokens(shape: ModelShape, config: VapoConfig, *, gpu_bytes: int) -> int:
    """Tokens that one vLLM replica's KV cache holds, in whole blocks."""
    cache = _generation(shape, config, gpu_bytes).kv_cache
    block = kv_cache_bytes_per_token(shape, config) * VLLM_BLOCK_TOKENS
    return cache // block * VLLM_BLOCK_TOKENS


def outer_stages(config: VapoConfig) -> set[int]:
    """Return the first pipeline stage and the last: one of them is the fullest.

    Those between have the layers of the first, fewer microbatches in flight, and neither the
    embedding nor the output.
    """
    return {0, config.parallel.pipeline_model_parallel_size - 1}
