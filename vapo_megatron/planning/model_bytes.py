"""Predicted bytes of parameters, gradients and optimizer states on one GPU.

Counted per role (actor, critic, reference or reward model) and pipeline stage; the tensor-,
context- and data-parallel ranks of a stage hold the same amount. What megatron-core 0.16.1
allocates, in bytes, for n parameters on this rank, dp data-parallel times context-parallel ranks
and a parameter size of b (2 or 4):

                             parameters  gradients  optimizer
    distributed optimizer    b n'        4 n'       (8 + main) n' / dp
    without it               b n         4 n        (8 + main) n

main is the float32 copy: 4 bytes where b is 2, none where parameters are float32 themselves. 8 are
Adam's two moments. n' is n padded so that every parameter starts at a multiple of 64 elements and
every bucket ends at a multiple of lcm(dp, 128) (param_and_grad_buffer.py). In bfloat16 that is 18
bytes per parameter, of which 12 are sharded: 2 more than in arXiv 1910.02054 (ZeRO), section 3.1,
because gradients are float32 here. Adam's step counters are left out. Frozen parameters (all of the
reference and the reward model; the actor's where value pretraining is the only stage; the critic's
attention with algorithm.freeze_critic_attention) take b bytes each, unpadded, and nothing else.
With Dion or Muon parameters and gradients are those without the distributed optimizer, and
matrices.py says what the optimizer has. With adapters (model.lora) n counts these and a value head
alone; the frozen base below them takes b bytes for each of its parameters, once for all roles that
share it.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from vapo_megatron.config import VapoConfig
from vapo_megatron.config.parallel import ParallelConfig
from vapo_megatron.config.phases import Role
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import ModelShape, padded_vocab_size
from vapo_megatron.models.known import shape_of
from vapo_megatron.models.layout_rules import check_layout
from vapo_megatron.planning import matrices
from vapo_megatron.planning.parameters import (
    Part,
    adapters_of,
    chunks_of,
    num_base_parameters,
    num_parameters,
    own_rows,
    part_of,
    trained_rows,
)
from vapo_megatron.weights.frozen import frozen
from vapo_megatron.weights.holders import layout_of, shard_elements
from vapo_megatron.weights.reshard.vllm_layout import engine_elements
from vapo_megatron.weights.table import rows

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}

KV_CACHE_BYTES = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""By rollout.kv_cache_dtype; auto: DTYPE_BYTES of vLLM's weights. Scales are one number a layer."""

ADAM_BYTES = 8
"""Two moments in float32."""

PARAMETER_ALIGNMENT = 64
"""_pad_start_of_param_if_needed of param_and_grad_buffer.py, in elements."""

BUCKET_ALIGNMENT = 128
"""_pad_end_of_bucket_if_needed of the same file."""


def role_shape(shape: ModelShape, config: VapoConfig, role: Role) -> ModelShape:
    """Return the sizes of a role's model: the actor's, but the reward model has its own."""
    return _reward_shape(str(config.model.reward_hf_path)) if role == "reward_model" else shape


@functools.lru_cache(maxsize=16)
def _reward_shape(path: str) -> ModelShape:
    return shape_of(path)


def check_layouts(shape: ModelShape, config: VapoConfig) -> None:
    """Refuse a layout that does not divide a role's model; ConfigError: see check_layout."""
    check_layout(shape, config.parallel)
    if "reward_model" in config.roles:
        own, path = role_shape(shape, config, "reward_model"), config.model.reward_hf_path
        try:
            check_layout(own, config.parallel)
        except ConfigError as error:
            raise ConfigError(f"model.reward_hf_path={path}: {error}") from None


class StateBytes(NamedTuple):
    """Bytes of one role on one GPU while it trains."""

    parameters: int
    """Its own; frozen ones below adapters are base_bytes."""
    gradients: int
    optimizer: int


class Widths(NamedTuple):
    """Widths of one tensor-parallel rank's shard of a layer, in elements."""

    hidden: int
    """H, not sharded."""
    query: int
    key: int
    """Of the keys that attention reads; the values' width is the same."""
    projected: int
    """Query, key and value as projected: rows of linear_qkv."""
    ffn: int
    """With experts the sum of those that a token is sent to, spread over the ranks: each computes
    as many tokens, if the load is even."""
    heads: int
    """Number of query heads."""


def widths(shape: ModelShape, tp_size: int) -> Widths:
    """Shard a layer over tensor-parallel ranks.

    With more ranks than key-value heads the projection is still sharded evenly, and each rank's
    attention reads one whole head (megatron-core's attention.py, get_query_key_value).
    """
    experts = shape.experts
    ffn = shape.ffn_hidden_size if experts is None else experts.per_token * experts.ffn_hidden_size
    query = shape.num_attention_heads * shape.head_dim
    key = shape.num_key_value_heads * shape.head_dim
    return Widths(
        hidden=shape.hidden_size,
        query=query // tp_size,
        key=max(shape.num_key_value_heads // tp_size, 1) * shape.head_dim,
        projected=(query + 2 * key) // tp_size,
        ffn=ffn // tp_size,
        heads=shape.num_attention_heads // tp_size,
    )


class Layout:
    """The trainer's parallel sizes, and what one of its ranks holds of the model."""

    def __init__(self, shape: ModelShape, config: VapoConfig) -> None:
        p = config.parallel
        self.tp_size, self.pp_size = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
        self.vpp_size = p.virtual_pipeline_model_parallel_size or 1
        self.dp_size, self.cp_size = p.data_parallel_size, p.context_parallel_size
        self.replica_size = p.replica_size
        self.element_bytes = DTYPE_BYTES[config.model.dtype]
        self.widths = widths(shape, self.tp_size)
        self.residual_width = shape.hidden_size // (self.tp_size if p.sequence_parallel else 1)
        """Channels of the residual stream per token: h of activations.py."""
        chosen = 0 if shape.experts is None else shape.experts.per_token
        self.dispatched_width = chosen * shape.hidden_size // self.tp_size
        """Channels per token that are sent to experts; 0: there are none."""
        self.layers_per_chunk = shape.num_layers // (self.pp_size * self.vpp_size)
        divisor = config.model.make_vocab_size_divisible_by
        self.vocabulary_rows = padded_vocab_size(shape, divisor, self.tp_size) // self.tp_size

    @property
    def outer_stages(self) -> set[int]:
        """The first and the last pipeline stage: one of them needs the most memory.

        Stages between have as many layers, fewer microbatches in flight than the first, and neither
        the embedding nor the output.
        """
        return {0, self.pp_size - 1}


def state_bytes(shape: ModelShape, config: VapoConfig, role: Role, *, pp_rank: int) -> StateBytes:
    """Bytes of one role's parameters, gradient buffers and optimizer state on one GPU."""
    if (kind := matrices.kind_of(config, role)) is not None:
        return _with_matrices(shape, config, role, kind, pp_rank)
    every, trained = (
        part_of(shape, config, role, pp_rank=pp_rank, trained=only) for only in (False, True)
    )
    size = DTYPE_BYTES[config.model.dtype]
    return _with_adam(every, trained, config.parallel, size, optimizer_bytes(config))


# Plans differ in vLLM's sizes, which change nothing here.
@functools.lru_cache(maxsize=4096)
def _with_adam(
    every: Part, trained: Part, parallel: ParallelConfig, size: int, optimizer_size: int
) -> StateBytes:
    """Return the same for AdamW. size, optimizer_size: bytes of a parameter and of its states."""
    parameters = gradients = optimizer = 0
    chunks = zip(chunks_of(every), chunks_of(trained), strict=True)
    for index, (all_rows, learning) in enumerate(chunks):
        frozen_ = sum(n for _, n in all_rows) - sum(n for _, n in learning)
        parameters += frozen_ * size
        # Experts have a buffer of their own: other ranks hold the same ones.
        for is_expert, copies in (
            (False, parallel.replica_size),
            (True, parallel.expert_replica_size),
        ):
            sizes = [n for row, n in learning if (row.expert is not None) == is_expert]
            held = owned = sum(sizes)
            if parallel.use_distributed_optimizer:
                bucketed = parallel.overlap_grad_reduce and every.pp_rank == 0 and index == 0
                limit = max(40_000_000, 1_000_000 * parallel.replica_size)
                held = padded_elements(sizes, copies, limit if bucketed else math.inf)
                owned = held // copies
            parameters += held * size
            gradients += held * 4
            optimizer += owned * optimizer_size
    return StateBytes(parameters, gradients, optimizer)


def base_bytes(shape: ModelShape, config: VapoConfig, role: Role, *, pp_rank: int) -> int:
    """Bytes of the frozen weights below a role's adapters on one GPU, its own or the actor's."""
    found = num_base_parameters(shape, config, role, pp_rank=pp_rank)
    return found * DTYPE_BYTES[config.model.dtype]


def all_base_bytes(shape: ModelShape, config: VapoConfig, *, pp_rank: int) -> int:
    """Bytes of the frozen weights below adapters of all roles on one GPU, a shared base once."""
    lora = config.model.lora
    own = [role for role in config.roles if not lora.shares(role)]
    return sum(base_bytes(shape, config, role, pp_rank=pp_rank) for role in own)


def _with_matrices(
    shape: ModelShape, config: VapoConfig, role: Role, kind: matrices.Kind, pp_rank: int
) -> StateBytes:
    """Return the same for Dion or Muon, on the rank that owns most; gradients are whole."""
    every = num_parameters(shape, config, role, pp_rank=pp_rank, trained=False)
    trained = trained_rows(shape, config, role, pp_rank)
    place = layout_of(shape, config.parallel, config.model.make_vocab_size_divisible_by)
    return StateBytes(
        parameters=every * DTYPE_BYTES[config.model.dtype],
        gradients=4 * sum(size for _, size in trained),
        optimizer=matrices.most_state_bytes(trained, shape, kind, place),
    )


def optimizer_bytes(config: VapoConfig) -> int:
    """Per parameter on the GPU: AdamW's two moments, and the float32 copy of a bfloat16 one."""
    return ADAM_BYTES + (4 if DTYPE_BYTES[config.model.dtype] < 4 else 0)


def saved_state_bytes(shape: ModelShape, config: VapoConfig, role: Role) -> int:
    """Bytes of one role's optimizer state in a checkpoint, each parameter once.

    The padding of the vocabulary counts, and what is frozen does not.
    """
    layout, kind = Layout(shape, config), matrices.kind_of(config, role)
    vocab_rows = layout.vocabulary_rows * layout.tp_size
    kept, total = frozen(config.algorithm, config.model, role), 0
    has_adapters = adapters_of(shape, config, role) is not None
    for row in own_rows(shape, config, role):
        if row.is_copy or row in kept and not has_adapters:
            continue
        elements = shard_elements(row, shape, 1, vocab_rows)
        if kind is None:
            size = elements * optimizer_checkpoint_bytes(config)
        else:
            size = matrices.state_bytes_of(row, elements, shape, kind, 1)
        total += size * row.count(shape)
    return total


def optimizer_checkpoint_bytes(config: VapoConfig) -> int:
    """Per parameter in a checkpoint: AdamW's two moments, and what the optimizer updates.

    That is the main parameters of a bfloat16 model or the distributed optimizer's shards; without
    either the optimizer updates the model's own float32 parameters.
    """
    if config.parallel.use_distributed_optimizer:
        return ADAM_BYTES + 4
    return optimizer_bytes(config)


def padded_elements(sizes: list[int], dp_size: int, limit: float = math.inf) -> int:
    """Length of the distributed optimizer's buffer for parameters of these sizes.

    Args:
        sizes: in elements, in the module's order; the buffer holds them in reverse.
        dp_size: number of ranks that hold them, of dense ones data- times context-parallel.
        limit: overlap_grad_reduce splits the first stage's first chunk into buckets of at least
            max(40e6, 1e6 * dp) elements (distributed_data_parallel.py).
    """
    end_alignment = math.lcm(dp_size, BUCKET_ALIGNMENT)
    end = bucket_start = 0
    for size in reversed(sizes):
        end = _round_up(end, PARAMETER_ALIGNMENT) + size
        if end - bucket_start >= limit:
            end = bucket_start = _round_up(end, end_alignment)
    return _round_up(end, end_alignment)


def fp8_weight_bytes(shape: ModelShape, config: VapoConfig) -> int:
    """Bytes of the FP8 copies of one role's layer matrices on one GPU; 0 without model.fp8.

    Transformer Engine keeps a weight's copy and its transpose, a byte each, for the lifetime of its
    module (get_weight_workspace of module/base.py, requested by megatron-core's TELinear):
    offloading the parameters does not free them.
    """
    if config.model.fp8 is None:
        return 0
    matrices = [row for row in rows(shape, "actor") if row.is_layer_matrix(shape)]
    tp_size = config.parallel.tensor_model_parallel_size
    elements = sum(shard_elements(row, shape, tp_size, 0) * row.count(shape) for row in matrices)
    return 2 * elements // config.parallel.pipeline_model_parallel_size


def dummy_gradient_bytes(shape: ModelShape, config: VapoConfig) -> int:
    """Bytes of the empty weight gradients that Transformer Engine keeps on one GPU.

    Its modules add a weight's gradient to the float32 buffer themselves and give autograd an
    uninitialised tensor of the weight's shape and type instead: one for each distinct shape, never
    freed (get_dummy_wgrad of module/base.py, 2.11). Actor and critic have the same shapes. A weight
    below adapters has no gradient.
    """
    if config.model.layer_spec == "local" or config.model.dtype != "bfloat16":
        return 0
    if all(adapters_of(shape, config, role) for role in config.algorithm.trained_roles):
        return 0
    h, w = shape.hidden_size, widths(shape, config.parallel.tensor_model_parallel_size)
    shapes = {(w.projected, h), (h, w.query), (2 * w.ffn, h), (h, w.ffn)}
    return sum(rows * columns for rows, columns in shapes) * DTYPE_BYTES["bfloat16"]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def engine_weight_bytes(shape: ModelShape, config: VapoConfig) -> int:
    """Bytes of vLLM's weights on one GPU.

    Like a trainer of one pipeline stage, except that the vocabulary is padded to a multiple of 64
    rows in total, every rank holds whole key-value heads, and a tied projection is never copied.
    """
    elements = _engine_elements(shape, config.rollout.tensor_model_parallel_size)
    return elements * DTYPE_BYTES[config.rollout.dtype or config.model.dtype]


@functools.lru_cache(maxsize=256)
def _engine_elements(shape: ModelShape, tp_size: int) -> int:
    table = rows(shape, "actor")
    return sum(engine_elements(row, shape, tp_size) * row.count(shape) for row in table)
