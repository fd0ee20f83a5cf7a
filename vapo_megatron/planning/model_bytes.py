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
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from vapo_megatron.config import VapoConfig
from vapo_megatron.config.phases import VALUE_ROLES, Role
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import ModelShape, check_layout, padded_vocab_size
from vapo_megatron.models.known import shape_of

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}

PARAMETER_ALIGNMENT = 64
"""_pad_start_of_param_if_needed of param_and_grad_buffer.py, in elements."""

BUCKET_ALIGNMENT = 128
"""_pad_end_of_bucket_if_needed of the same file."""

SAMPLER_VOCAB_PADDING = 64
"""DEFAULT_VOCAB_PADDING_SIZE of vLLM's vocab_parallel_embedding."""


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
    head: int
    heads: int
    """Number of query heads."""


def widths(shape: ModelShape, tp_size: int) -> Widths:
    """Shard a layer over tensor-parallel ranks.

    With more ranks than key-value heads the projection is still sharded evenly, and each rank's
    attention reads one whole head (megatron-core's attention.py, get_query_key_value).
    """
    query = shape.num_attention_heads * shape.head_dim
    key = shape.num_key_value_heads * shape.head_dim
    return Widths(
        hidden=shape.hidden_size,
        query=query // tp_size,
        key=max(shape.num_key_value_heads // tp_size, 1) * shape.head_dim,
        projected=(query + 2 * key) // tp_size,
        ffn=shape.ffn_hidden_size // tp_size,
        head=shape.head_dim,
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


def chunk_parameters(
    shape: ModelShape, config: VapoConfig, role: Role, *, pp_rank: int, trained: bool = False
) -> list[list[int]]:
    """Sizes of the parameters on one GPU, in elements.

    Args:
        shape: the model.
        config: model, parallel and algorithm are used.
        role: a critic or a reward model has H weights in place of the output projection.
        pp_rank: pipeline stage.
        trained: leave out frozen parameters.

    Returns:
        One list per chunk, in the order of its module's parameters.
    """
    layout = Layout(shape, config)
    w, rows = layout.widths, layout.vocabulary_rows
    if trained and role not in config.algorithm.trained_roles:
        return [[] for _ in range(layout.vpp_size)]
    attention = [w.hidden * w.query, w.projected * w.hidden]
    attention += [w.projected] if shape.qkv_bias else []
    attention += [w.head, w.head] if shape.qk_norm else []
    if trained and role == "critic" and config.algorithm.freeze_critic_attention:
        attention = []
    layer = [w.hidden, *attention, w.hidden, 2 * w.ffn * w.hidden, w.ffn * w.hidden]
    chunks = [layer * layout.layers_per_chunk for _ in range(layout.vpp_size)]
    if pp_rank == 0:
        chunks[0] = [rows * w.hidden, *chunks[0]]
    if pp_rank == layout.pp_size - 1:
        # A tied output projection is the embedding itself on a single stage, otherwise a copy.
        shares = role not in VALUE_ROLES and shape.tied and layout.pp_size == 1
        output = w.hidden if role in VALUE_ROLES else rows * w.hidden
        chunks[-1] = [*chunks[-1], w.hidden] + ([] if shares else [output])
    return chunks


def num_parameters(
    shape: ModelShape, config: VapoConfig, role: Role, *, pp_rank: int, trained: bool
) -> int:
    """Parameters on one GPU; arguments as in chunk_parameters."""
    return sum(map(sum, chunk_parameters(shape, config, role, pp_rank=pp_rank, trained=trained)))


def state_bytes(shape: ModelShape, config: VapoConfig, role: Role, *, pp_rank: int) -> StateBytes:
    """Bytes of one role's parameters, gradient buffers and optimizer state on one GPU."""
    parallel = config.parallel
    size = DTYPE_BYTES[config.model.dtype]
    of_optimizer = 8 + (4 if size < 4 else 0)
    parameters = gradients = optimizer = 0
    every, trained = (
        chunk_parameters(shape, config, role, pp_rank=pp_rank, trained=only)
        for only in (False, True)
    )
    for index, (all_sizes, sizes) in enumerate(zip(every, trained, strict=True)):
        frozen = sum(all_sizes) - sum(sizes)
        held = owned = sum(sizes)
        if parallel.use_distributed_optimizer:
            bucketed = parallel.overlap_grad_reduce and pp_rank == 0 and index == 0
            held = padded_elements(sizes, parallel.replica_size, bucketed=bucketed)
            owned = held // parallel.replica_size
        parameters += (held + frozen) * size
        gradients += held * 4
        optimizer += owned * of_optimizer
    return StateBytes(parameters, gradients, optimizer)


def padded_elements(sizes: list[int], dp_size: int, *, bucketed: bool) -> int:
    """Length of the distributed optimizer's buffer for parameters of these sizes.

    Args:
        sizes: in elements, in the module's order; the buffer holds them in reverse.
        dp_size: number of ranks that hold them, data-parallel times context-parallel.
        bucketed: overlap_grad_reduce splits the first stage's first chunk into buckets of at least
            max(40e6, 1e6 * dp) elements (distributed_data_parallel.py).
    """
    end_alignment = math.lcm(dp_size, BUCKET_ALIGNMENT)
    limit = max(40_000_000, 1_000_000 * dp_size) if bucketed else math.inf
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
    w = widths(shape, config.parallel.tensor_model_parallel_size)
    rows = w.projected + w.query + 3 * w.ffn
    return 2 * rows * w.hidden * shape.num_layers // config.parallel.pipeline_model_parallel_size


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def sampler_weight_bytes(shape: ModelShape, config: VapoConfig) -> int:
    """Bytes of vLLM's weights on one GPU.

    Like a trainer of one pipeline stage, except that the vocabulary is padded to a multiple of 64
    rows in total, every rank holds whole key-value heads, and a tied projection is never copied.
    """
    tp_size = config.rollout.tensor_model_parallel_size
    w = widths(shape, tp_size)
    qkv_rows = w.query + 2 * w.key
    layer = 2 * w.hidden + qkv_rows * w.hidden + w.query * w.hidden + 3 * w.ffn * w.hidden
    layer += qkv_rows if shape.qkv_bias else 0
    layer += 2 * w.head if shape.qk_norm else 0
    vocabulary = _round_up(shape.vocab_size, SAMPLER_VOCAB_PADDING) // tp_size * w.hidden
    elements = shape.num_layers * layer + w.hidden + vocabulary * (1 if shape.tied else 2)
    return elements * DTYPE_BYTES[config.rollout.dtype or config.model.dtype]
