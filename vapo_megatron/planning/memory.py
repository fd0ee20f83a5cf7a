"""Predicted bytes: per GPU and phase of a step, and of a checkpoint.

Counted: parameters, gradients and optimizer state as megatron-core allocates them (model_bytes.py);
activations tensor by tensor as the layers save them (activations.py); vLLM's weights, and its KV
cache as the remainder of vLLM's share of the GPU. What cannot be derived is a margin: the constants
below, each with its source.

With offload (parallel.offload, on unless false) a role that is idle holds nothing on the GPU, and
vLLM sleeps while the trainer works: no weights, no KV cache. Without it the parameters, gradients
and optimizer states of all roles, vLLM's weights and its KV cache stay throughout.

With rollout.placement=disaggregated the phase of generation is that of a GPU that samples: vLLM
never sleeps, and takes weights in meanwhile. The other phases are those of a GPU that trains, which
holds nothing of vLLM's.

Where the data give the responses there is no vLLM, and the actor has its updates alone.

Not modelled: inputs that model.fp8 saves in FP8 (counted in bfloat16, an overestimate), inputs that
a frozen attention need not save (counted), a microbatch's inputs (70 bytes a token), cuBLAS and
NVSHMEM workspaces, NCCL's growth with the number of nodes, the frozen part of a critic's checkpoint
(counted with an optimizer), other processes on the GPU, evaluation (like generation), and loading,
exporting and saving weights. Host memory is in host_memory.py.
"""

from __future__ import annotations

import dataclasses

from vapo_megatron.config import VapoConfig
from vapo_megatron.config.phases import (
    ACTOR_UPDATE,
    CRITIC_UPDATE,
    GENERATION,
    LOGPROBS,
    REFERENCE_LOGPROBS,
    REWARD_SCORES,
    SYNC,
    VALUES,
    Role,
)
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.planning.activations import Passes, microbatch_tokens
from vapo_megatron.planning.matrices import kind_of, layer_bytes
from vapo_megatron.planning.model_bytes import (
    DTYPE_BYTES,
    KV_CACHE_BYTES,
    Layout,
    StateBytes,
    all_base_bytes,
    base_bytes,
    dummy_gradient_bytes,
    engine_weight_bytes,
    fp8_weight_bytes,
    optimizer_bytes,
    role_shape,
    saved_state_bytes,
    state_bytes,
    widths,
)
from vapo_megatron.planning.parameters import own_rows, trained_rows
from vapo_megatron.weights.holders import shard_elements
from vapo_megatron.weights.table import parameter_count

PHASES = (
    GENERATION, REWARD_SCORES, VALUES, LOGPROBS, REFERENCE_LOGPROBS,
    CRITIC_UPDATE, ACTOR_UPDATE, SYNC,
)  # fmt: skip
SCORES: dict[Role, str] = {
    "actor": LOGPROBS, "critic": VALUES, "reference": REFERENCE_LOGPROBS,
    "reward_model": REWARD_SCORES,
}  # fmt: skip
"""The phase of each role's forward passes."""
UPDATES: dict[Role, str] = {
    "critic": CRITIC_UPDATE, "actor": ACTOR_UPDATE,
}  # fmt: skip

CUDA_CONTEXT_BYTES = 500 * 10**6
"""pytorch/pytorch issues 81257 (about 500 MB) and 107667 (300 MB and more, kernels loaded
lazily)."""

NCCL_COMMUNICATOR_BYTES = 688 * 2**20
"""NVIDIA/nccl issue 964: 544 MB for a group of 2 GPUs, 688 MB for more, 4 A100 with NVLink."""

NCCL_PEER_BYTES = 3_280_000_000 // 7
"""NVIDIA/nccl issue 1685: point to point with all 7 others of 8 H100 took 4.34 - 1.06 GB."""

NODE_PEERS = 7
"""Most peers on its own node that a rank talks to in a weight sync: NVIDIA's nodes have 8 GPUs."""

CUDA_GRAPH_BYTES = 1_503_657_984
"""vllm-project/vllm issue 47654: as reported by graph capture; not freed while vLLM sleeps."""

FRAGMENTATION = 0.15
"""Of activations and logits: average of 8 models in arXiv 2401.08156 (GMLake), with an allocator
whose segments cannot expand. The trainer's can (offload.py), so this is an upper estimate."""

VLLM_LARGE_GPU_BYTES = 70 * 2**30
VLLM_BATCHED_TOKENS = (8192, 16384)
"""max_num_batched_tokens on smaller and on larger GPUs: get_batch_defaults of vLLM 0.32's
engine/arg_utils.py."""

VLLM_LOGITS_BYTES = 24
"""Per sequence and vocabulary entry while sampling: float32 logits, sorted logits, their int64
indices, probabilities and cumulative sums (v1/sample/ops/topk_topp_sampler.py)."""

VLLM_BLOCK_TOKENS = 16
"""Tokens of one KV cache block: vLLM's default block_size."""


@dataclasses.dataclass(frozen=True)
class PhaseMemory:
    """Bytes on one GPU at a phase's peak; the parts add up to it."""

    parameters: int = 0
    """Megatron's, of the roles on the GPU, without a base; with model.fp8 also the FP8 copies of
    all roles."""
    base: int = 0
    """Frozen weights below adapters, of the roles on the GPU; once where they share it."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    """Of the actor's log-probabilities on the last stage, or of vLLM's sampling."""
    engine_weights: int = 0
    kv_cache: int = 0
    sync_buckets: int = 0
    reserve: int = 0
    """CUDA context, NCCL, CUDA graphs, fragmentation, Transformer Engine's dummy gradients."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(vars(self).values())


def scores(config: VapoConfig, role: Role) -> bool:
    """Whether a role has forward passes of its own; the actor needs none on given responses."""
    return config.samples or role != "actor"


def offloads(config: VapoConfig) -> bool:
    """Whether idle roles and vLLM leave the GPU; parallel.offload=null means yes."""
    return config.parallel.offload is not False


def phase_memory(
    shape: ModelShape, config: VapoConfig, *, gpu_bytes: int, pp_rank: int
) -> dict[str, PhaseMemory]:
    """Predict each phase's peak on a GPU of one pipeline stage.

    Args:
        shape: the model; layout_rules.check_layout has accepted the layout.
        config: model, parallel, rollout and algorithm are used.
        gpu_bytes: memory of the GPU, of which vLLM takes its share.
        pp_rank: pipeline stage; all its GPUs hold the same amount.

    Returns:
        By the names in PHASES, for the roles of this run. A total above gpu_bytes does not fit; a
        KV cache of 0 means that vLLM's share does not even hold its weights.
    """
    roles = config.roles
    shapes = {role: role_shape(shape, config, role) for role in roles}
    states = {role: state_bytes(shapes[role], config, role, pp_rank=pp_rank) for role in roles}
    bases = {role: base_bytes(shapes[role], config, role, pp_rank=pp_rank) for role in roles}
    found: dict[str, PhaseMemory] = {}
    for role in roles:
        tokens = microbatch_tokens(config)
        passes = Passes(shapes[role], config, role, pp_rank=pp_rank, tokens=tokens)
        activations, logits = passes.inference()
        if scores(config, role):
            found[SCORES[role]] = PhaseMemory(
                states[role].parameters, bases[role], activations=activations, logits=logits
            )
        if role in config.algorithm.trained_roles:
            found[UPDATES[role]] = _update(passes, states[role], bases[role])

    # Send and receive buffers, each double.
    buckets = 4 * config.rollout.sync_bucket_bytes if config.num_processes > 1 else 0
    resident: dict[str, int] = {}
    if config.samples:
        weights, sampling = (
            engine_weight_bytes(shape, config),
            _generation(shape, config, gpu_bytes),
        )
        found[GENERATION] = sampling
        found[SYNC] = PhaseMemory(
            parameters=states["actor"].parameters,
            base=bases["actor"],
            engine_weights=0 if config.rollout.is_disaggregated else weights,
            sync_buckets=buckets,
        )
        if not config.rollout.is_disaggregated:
            resident = {"engine_weights": weights, "kv_cache": sampling.kv_cache}

    # Without offloading every phase also holds the other models and the KV cache.
    if not offloads(config):
        resident |= StateBytes(*map(sum, zip(*states.values(), strict=True)))._asdict()
        resident["base"] = all_base_bytes(shape, config, pp_rank=pp_rank)
        found = {name: dataclasses.replace(p, **resident) for name, p in found.items()}

    if copies := sum(fp8_weight_bytes(shapes[role], config) for role in roles):
        found = {
            n: dataclasses.replace(p, parameters=p.parameters + copies) for n, p in found.items()
        }
    if config.samples and config.rollout.is_disaggregated:
        found[GENERATION] = dataclasses.replace(sampling, sync_buckets=buckets)
    kept = dummy_gradient_bytes(shape, config)
    return {
        name: _with_reserve(found[name], name, config, kept) for name in PHASES if name in found
    }


def _update(passes: Passes, state: StateBytes, base: int) -> PhaseMemory:
    """The larger of a forward-backward pass and the optimizer step.

    With Transformer Engine megatron-core uses its fused Adam, which needs no temporaries. torch's
    AdamW, used otherwise, holds the square roots of all second moments, 4 bytes each. Dion and Muon
    hold as much as two copies of a layer's matrices, if one rank owns all of them.
    """
    model = passes.config.model
    activations, logits = passes.training()
    if kind_of(passes.config, passes.role) is not None:
        trained = trained_rows(passes.shape, passes.config, passes.role, passes.pp_rank)
        copies = 2 * layer_bytes(trained, passes.shape)
        activations = max(activations, copies - logits)
    elif model.layer_spec == "local":
        roots = 4 * state.optimizer // optimizer_bytes(passes.config)
        activations = max(activations, roots - logits)
    return PhaseMemory(**state._asdict(), base=base, activations=activations, logits=logits)


def _generation(shape: ModelShape, config: VapoConfig, gpu_bytes: int) -> PhaseMemory:
    """vLLM's memory: its KV cache takes what is left of its share (gpu_worker.py).

    Activations are those of one layer in a batch of max_num_batched_tokens: residual stream and
    norm, gate, up and product.
    """
    rollout = config.rollout
    w = widths(shape, rollout.tensor_model_parallel_size)
    batched = VLLM_BATCHED_TOKENS[gpu_bytes >= VLLM_LARGE_GPU_BYTES]
    width = 2 * w.hidden + max(3 * w.ffn, 2 * w.query + 2 * w.key)
    activations = batched * width * DTYPE_BYTES[rollout.dtype or config.model.dtype]
    logits = rollout.max_num_sequences * shape.vocab_size * VLLM_LOGITS_BYTES
    weights = engine_weight_bytes(shape, config)
    kv_cache = rollout.kv_cache_bytes
    if kv_cache is None:
        share = int(gpu_bytes * rollout.gpu_memory_utilization)
        used = weights + activations + logits + CUDA_CONTEXT_BYTES + _graph_bytes(config)
        kv_cache = max(0, share - used)
    return PhaseMemory(
        activations=activations, logits=logits, engine_weights=weights, kv_cache=kv_cache
    )


def _offloads_graphs(config: VapoConfig) -> bool:
    """Whether vLLM's CUDA graphs leave the GPU while it sleeps."""
    return bool(config.rollout.vllm_args.get("sleep_mode_offload_cudagraph"))


def _graph_bytes(config: VapoConfig) -> int:
    return 0 if config.rollout.enforce_eager else CUDA_GRAPH_BYTES


def _with_reserve(phase: PhaseMemory, name: str, config: VapoConfig, kept: int) -> PhaseMemory:
    """Add what every phase has on the GPU besides models, and the allocator's fragmentation.

    Args:
        phase: without reserve.
        name: of the phase.
        config: decides the communicators and CUDA graphs.
        kept: bytes of tensors that a trainer never frees.
    """
    trains = name != GENERATION or not config.rollout.is_disaggregated
    samples = config.samples and (name == GENERATION or not config.rollout.is_disaggregated)
    groups = int(config.num_processes > 1)  # all processes, for weight syncs
    if trains:
        groups += _trainer_groups(config)
    if samples:
        groups += 2 * (config.rollout.tensor_model_parallel_size > 1)  # torch's and vLLM's own
    peers = min(NODE_PEERS, config.num_processes - 1)
    away = name != GENERATION and offloads(config) and _offloads_graphs(config)
    reserve = CUDA_CONTEXT_BYTES + (_graph_bytes(config) if samples and not away else 0)
    reserve += kept if trains else 0
    reserve += groups * NCCL_COMMUNICATOR_BYTES + peers * NCCL_PEER_BYTES
    if name != GENERATION:  # vLLM's profiling run has measured its own fragmentation
        reserve += int(FRAGMENTATION * (phase.activations + phase.logits))
    return dataclasses.replace(phase, reserve=reserve)


def _trainer_groups(config: VapoConfig) -> int:
    p = config.parallel
    tp_size, pp_size = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    cp_size, dp_size = p.context_parallel_size, p.data_parallel_size
    groups = sum(size > 1 for size in (tp_size, pp_size, cp_size, dp_size))
    groups += cp_size > 1 and dp_size > 1  # both together, for gradients
    return groups + (tp_size > 1 and pp_size > 1)  # both together, for gradient norms


def kv_cache_bytes_per_token(shape: ModelShape, config: VapoConfig) -> int:
    """Bytes of one token's keys and values on one GPU of a vLLM replica.

    2 * layers * max(key-value heads / tp, 1) * head_dim * bytes of rollout.kv_cache_dtype
    """
    w, rollout = widths(shape, config.rollout.tensor_model_parallel_size), config.rollout
    size = KV_CACHE_BYTES.get(rollout.kv_cache_dtype)
    size = size or DTYPE_BYTES[rollout.dtype or config.model.dtype]
    return 2 * shape.num_layers * w.key * size


def kv_cache_tokens(shape: ModelShape, config: VapoConfig, *, gpu_bytes: int) -> int:
    """Tokens that one vLLM replica's KV cache holds, in whole blocks; 0: there is no vLLM."""
    if not config.samples:
        return 0
    cache = _generation(shape, config, gpu_bytes).kv_cache
    block = kv_cache_bytes_per_token(shape, config) * VLLM_BLOCK_TOKENS
    return cache // block * VLLM_BLOCK_TOKENS


def checkpoint_bytes(shape: ModelShape, config: VapoConfig) -> int:
    """Size on disk of one checkpoint of the whole job: its models and their optimizers.

    Each parameter once, however many ranks hold it, including the padding of the vocabulary. With
    adapters only these and a value head: a run reads what is frozen below them where it started.
    """
    layout = Layout(shape, config)
    vocab_rows = layout.vocabulary_rows * layout.tp_size
    num_bytes = 0
    for role in config.algorithm.trained_roles:
        elements = sum(
            shard_elements(row, shape, 1, vocab_rows) * row.count(shape)
            for row in own_rows(shape, config, role)
            if not row.is_copy
        )
        num_bytes += elements * DTYPE_BYTES[config.model.dtype]
        num_bytes += saved_state_bytes(shape, config, role)
    return num_bytes


def export_bytes(shape: ModelShape, config: VapoConfig) -> int:
    """Size on disk of a run's export; 0: it makes none."""
    if not config.checkpoint.hf_export or "actor" not in config.algorithm.trained_roles:
        return 0
    return parameter_count(shape) * DTYPE_BYTES[config.model.dtype]
