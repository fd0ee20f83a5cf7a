"""A resharding plan as data: moves of slices between ranks, and the steps that execute them.

planner.py makes a plan, steps.py cuts it into steps that fit a buffer; whoever executes it needs
nothing but these classes. All but LiveWeight hold integers and strings, and pickle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

ENGINE = -1
"""In place of a chunk's index: the parameter is the engine's."""


class LiveWeight(NamedTuple):
    """A weight that the engine computes with."""

    tensor: Tensor
    padding_rows: int
    """Last rows, of no token; they must be 0."""


class Slice(NamedTuple):
    """A rectangle of one parameter of one rank, in elements; a bias or a norm is one column."""

    chunk: int
    """Index of the trainer's model chunk (virtual stage), or ENGINE."""
    parameter: str
    """Name within that chunk, or vLLM's name (`model.layers.3.self_attn.qkv_proj.weight`)."""
    row: int
    column: int
    rows: int
    columns: int

    @property
    def num_elements(self) -> int:
        """Elements of the rectangle."""
        return self.rows * self.columns

    def part(self, first: int, rows: int) -> Slice:
        """Return some of its rows, counted from its first."""
        return self._replace(row=self.row + first, rows=rows)


class Move(NamedTuple):
    """A slice sent into an engine's parameter.

    Its source is a trainer's parameter or, for a relay (source.chunk is ENGINE), the engine's
    parameter of a rank on the same node that has received it before.
    """

    destination_rank: int
    source_rank: int
    """Equal to destination_rank: a copy within the process."""
    source: Slice
    destination: Slice
    """As many rows and columns as the source."""


class Layer(NamedTuple):
    """A layer that repeats a block."""

    number: int
    """In the whole model, from 0."""
    chunk: int
    """The model chunk that holds it on its stage."""
    local_number: int
    """Within that chunk."""


@dataclasses.dataclass(frozen=True)
class Block:
    """Moves of one layer, repeated for all layers of a stage; or of parameters outside them."""

    moves: tuple[Move, ...]
    """From the trainer's parameters; sorted. In layers, names contain `{}` for the layer's number,
    and the trainer's chunk is 0."""
    relays: tuple[Move, ...] = ()
    """From the engine's parameters, after all of `moves` have arrived; sorted."""
    layers: tuple[Layer, ...] = ()
    """Empty outside the layers: moves are then used as they are."""

    def at(self, layer: Layer | None, moves: Iterable[Move]) -> Iterator[Move]:
        """Yield some of the moves or relays with a layer's names filled in."""
        for move in moves:
            if layer is None:
                yield move
                continue
            yield move._replace(
                source=_at(layer, move.source), destination=_at(layer, move.destination)
            )


def _at(layer: Layer, part: Slice) -> Slice:
    if part.chunk == ENGINE:
        return part._replace(parameter=part.parameter.format(layer.number))
    return part._replace(chunk=layer.chunk, parameter=part.parameter.format(layer.local_number))


@dataclasses.dataclass(frozen=True)
class Plan:
    """All moves that fill every rank's shard of the engine."""

    world_size: int
    gpus_per_node: int
    """Ranks [n * gpus_per_node, (n + 1) * gpus_per_node) share node n."""
    bytes_per_element: int
    blocks: tuple[Block, ...]

    def received(self, rank: int) -> list[Move]:
        """List the moves into a rank's shard, with copies; they write every element once."""
        return [m for m in self._of(rank) if m.destination_rank == rank]

    def sent(self, rank: int) -> list[Move]:
        """List the moves from a rank's parameters to other ranks, with relays."""
        return [m for m in self._of(rank) if m.destination_rank != rank]

    def _of(self, rank: int) -> Iterator[Move]:
        for block in self.blocks:
            everything = (*block.moves, *block.relays)
            mine = [m for m in everything if rank in (m.source_rank, m.destination_rank)]
            for layer in block.layers or (None,):
                yield from block.at(layer, mine)


RELAY_LAG = 2


class Transfer(NamedTuple):
    """What this rank sends to, or receives from, one peer in one step: one flat buffer."""

    peer: int
    slices: tuple[Slice, ...]
    """Of this rank's parameters: the engine's to receive, the trainer's (or, for relays, the
    engine's) to send. Each is flattened row by row; both ends list them in the same order."""

    @property
    def num_elements(self) -> int:
        """Elements of the buffer."""
        return sum(s.num_elements for s in self.slices)


class Step(NamedTuple):
    """One rank's part of one bucket. Every rank has the same number of steps, matched by index.

    What a step relays was received at least RELAY_LAG steps before: a step may be packed while the
    one before it is still in flight.
    """

    copies: tuple[Move, ...]
    """Within the process."""
    sends: tuple[Transfer, ...]
    """By peer, ascending; never to this rank itself, never empty."""
    receives: tuple[Transfer, ...]
    """By peer, ascending."""
