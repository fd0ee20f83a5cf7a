"""Which parameters one GPU holds of a role's model, by the rows of the name table.

Below adapters (model.lora) weights are frozen and a role's own parameters are the adapters alone,
of a critic its value head, too. The frozen ones are the base, which a role has of its own or shares
with the actor (model.lora.share_base): then one copy on a GPU is the base of all that share it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from vapo_megatron.config import VapoConfig
from vapo_megatron.config.lora import LoraConfig
from vapo_megatron.config.phases import VALUE_ROLES, Role
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.weights.adapter_table import adapter_rows, targets_of
from vapo_megatron.weights.frozen import Frozen, frozen
from vapo_megatron.weights.holders import TrainerLayout, layout_of, num_shards, shard_elements
from vapo_megatron.weights.table import OUTPUT_LAYER, Row, rows

_MODULES = (
    "embedding", "input_layernorm", "linear_proj", "self_attention", "pre_mlp_layernorm", "mlp.",
    "final_layernorm", "output_layer",
)  # fmt: skip
"""Parts of parameters' names, in the order of the model's modules."""

_NOTHING = Frozen(False, False)

Chunks = list[list[tuple[Row, int]]]
"""Of each model chunk the rows with their sizes on one GPU, in elements."""


class Adapters(NamedTuple):
    """Adapters of a role, whose other weights are frozen, but for a value head."""

    rank: int
    """0: a role without adapters that computes with the actor's base."""
    targets: tuple[str, ...]


def adapters_of(shape: ModelShape, config: VapoConfig, role: Role) -> Adapters | None:
    """Return a role's adapters; None: all of its weights are its own.

    Raises:
        ConfigError: model.lora.targets names matrices of experts.
    """
    lora = config.model.lora
    if lora.rank is None:
        return None
    if lora.of(role):
        return Adapters(lora.rank, targets_of(shape, lora))
    return Adapters(0, ()) if lora.shares(role) else None


def own_rows(shape: ModelShape, config: VapoConfig, role: Role) -> list[Row]:
    """Return the rows of a role's own parameters, which checkpoints have if it is trained."""
    return _own_rows(shape, role, adapters_of(shape, config, role))


def _own_rows(shape: ModelShape, role: Role, adapters: Adapters | None) -> list[Row]:
    table = rows(shape, role)
    if adapters is None:
        return table
    heads = [row for row in table if role in VALUE_ROLES and row.megatron == OUTPUT_LAYER]
    return [*rows_of(shape, adapters), *heads]


@functools.lru_cache(maxsize=64)
def rows_of(shape: ModelShape, adapters: Adapters) -> tuple[Row, ...]:
    """Return the name table's rows of adapters."""
    if not adapters.rank:
        return ()
    return adapter_rows(shape, LoraConfig.model_validate(adapters._asdict()))


class Part(NamedTuple):
    """What decides which of a role's own parameters one GPU holds."""

    shape: ModelShape
    role: Role
    place: TrainerLayout
    pp_rank: int
    left_out: Frozen | None
    """None: all of them."""
    adapters: Adapters | None


def part_of(
    shape: ModelShape, config: VapoConfig, role: Role, *, pp_rank: int, trained: bool = False
) -> Part:
    """Return what chunks_of needs.

    Args:
        shape: the model.
        config: model, parallel and algorithm are used.
        role: a critic or a reward model has H weights in place of the output projection.
        pp_rank: pipeline stage.
        trained: leave out frozen parameters.
    """
    place = layout_of(shape, config.parallel, config.model.make_vocab_size_divisible_by)
    adapters = adapters_of(shape, config, role)
    left_out: Frozen | None = _NOTHING
    if trained and role not in config.algorithm.trained_roles:
        left_out = None
    elif trained and adapters is None:
        left_out = frozen(config.algorithm, config.model, role)
    return Part(shape, role, place, pp_rank, left_out, adapters)


def chunk_parameters(
    shape: ModelShape, config: VapoConfig, role: Role, *, pp_rank: int, trained: bool = False
) -> list[list[int]]:
    """Return the sizes of chunks_of, in elements; arguments as in part_of."""
    found = chunks_of(part_of(shape, config, role, pp_rank=pp_rank, trained=trained))
    return [[size for _, size in chunk] for chunk in found]


def trained_rows(
    shape: ModelShape, config: VapoConfig, role: Role, pp_rank: int
) -> list[tuple[Row, int]]:
    """Return the rows and sizes of what one GPU trains, of all its chunks."""
    chunks = chunks_of(part_of(shape, config, role, pp_rank=pp_rank, trained=True))
    return [one for chunk in chunks for one in chunk]


def num_parameters(
    shape: ModelShape, config: VapoConfig, role: Role, *, pp_rank: int, trained: bool
) -> int:
    """Count a role's own parameters on one GPU; arguments as in part_of."""
    return sum(map(sum, chunk_parameters(shape, config, role, pp_rank=pp_rank, trained=trained)))


def num_base_parameters(shape: ModelShape, config: VapoConfig, role: Role, *, pp_rank: int) -> int:
    """Count the frozen parameters below a role's adapters on one GPU; 0 where all are its own.

    A shared base is the actor's, with the output projection that a critic does not use.
    """
    if adapters_of(shape, config, role) is None:
        return 0
    of = "actor" if config.model.lora.shares(role) else role
    place = layout_of(shape, config.parallel, config.model.make_vocab_size_divisible_by)
    return sum(
        size
        for chunk in chunks_of(Part(shape, of, place, pp_rank, _NOTHING, None))
        for row, size in chunk
        if of not in VALUE_ROLES or row.megatron != OUTPUT_LAYER
    )


@functools.lru_cache(maxsize=4096)
def chunks_of(part: Part) -> Chunks:
    """Return what one GPU holds, one list per chunk, in its order; cached, so not to be changed."""
    shape, role, place, pp_rank, left_out, adapters = part
    if left_out is None:
        return [[] for _ in place.layers[pp_rank]]
    table = sorted(_own_rows(shape, role, adapters), key=_module_order)
    sizes = [
        (row, shard_elements(row, shape, num_shards(row, place.tp_size), place.vocab_rows))
        for row in table
        if row not in left_out and place.on_first_rank(row)
    ]
    in_layers = [(row.layers(shape), row, size) for row, size in sizes if row.is_in_layer]
    chunks = [
        [(row, size) for layer in range(*layers) for of, row, size in in_layers if layer in of]
        for layers in place.layers[pp_rank]
    ]
    for row, size in sizes:
        # A tied output projection is the embedding itself on a single stage, otherwise a copy.
        if row.is_in_layer or row.is_copy and place.pp_size == 1:
            continue
        stage, chunk = place.home(row)
        if stage == pp_rank:
            chunks[chunk].insert(0 if row is table[0] else len(chunks[chunk]), (row, size))
    return chunks


def _module_order(row: Row) -> tuple[int, bool]:
    """Sort as megatron-core registers parameters: attention's output projection comes first.

    Of an adapter B is a parameter of the module itself, before A, which are those of a module in
    it.
    """
    name = row.megatron[0]
    return next(i for i, part in enumerate(_MODULES) if part in name), not name.endswith(".B")
