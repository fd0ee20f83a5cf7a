"""A resharding plan as data: moves of rectangles between ranks, and the steps that carry them out.

reshard.py makes a plan, steps.py cuts it into steps that fit a buffer; whoever executes it needs
nothing but these classes. All are immutable, hold integers and strings, and pickle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Slice(NamedTuple):
    """A rectangle of one parameter of one rank, in elements; a bias or a norm is one column."""

    chunk: int
    """Index of the trainer's model chunk (virtual stage); 0 for the sampler."""
    parameter: str
    """Name within that chunk, or vLLM's name (`model.layers.3.self_attn.qkv_proj.weight`)."""
    row: int
    column: int
    rows: int
    columns: int


class Move(NamedTuple):
    """One rectangle on its way from a trainer's parameter into a sampler's parameter."""

    destination_rank: int
    source_rank: int
    """destination_rank itself: a copy within the process."""
    source: Slice
    destination: Slice
    """As many rows and columns as the source."""

    @property
    def num_elements(self) -> int:
        """Elements moved."""
        return self.source.rows * self.source.columns


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
    """Moves of one layer, for all layers that a stage holds; or of one parameter outside them."""

    moves: tuple[Move, ...]
    """Sorted. Of layers, names hold `{}` for the layer's number and every chunk is 0."""
    layers: tuple[Layer, ...] = ()
    """Empty outside the layers: the moves are then meant as they stand."""

    def at(self, layer: Layer | None, moves: Sequence[Move] | None = None) -> Iterator[Move]:
        """Yield the moves (or some of them) with a layer's names filled in."""
        moves = self.moves if moves is None else moves
        if layer is None:
            yield from moves
            return
        for move in moves:
            source, destination = move.source, move.destination
            yield move._replace(
                source=source._replace(
                    chunk=layer.chunk, parameter=source.parameter.format(layer.local_number)
                ),
                destination=destination._replace(
                    parameter=destination.parameter.format(layer.number)
                ),
            )


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that has to move so that every rank holds its shard of the sampler."""

    world_size: int
    gpus_per_node: int
    """Ranks [n * gpus_per_node, (n + 1) * gpus_per_node) share node n."""
    bytes_per_element: int
    blocks: tuple[Block, ...]

    def received(self, rank: int) -> list[Move]:
        """List the moves into a rank's shard, copies within the process among them."""
        return [m for m in self._of(rank) if m.destination_rank == rank]

    def sent(self, rank: int) -> list[Move]:
        """List the moves out of a rank's parameters to other ranks."""
        return [m for m in self._of(rank) if m.destination_rank != rank]

    def _of(self, rank: int) -> Iterator[Move]:
        for block in self.blocks:
            mine = [m for m in block.moves if rank in (m.source_rank, m.destination_rank)]
            for layer in block.layers or (None,):
                yield from block.at(layer, mine)


class Transfer(NamedTuple):
    """What goes between this rank and one other in one step: one flat buffer."""

    peer: int
    slices: tuple[Slice, ...]
    """Of this rank's own parameters: the trainer's when sending, the sampler's when receiving. Each
    is flattened row by row, one behind the other; both ends list them in the same order."""

    @property
    def num_elements(self) -> int:
        """Elements of the buffer."""
        return sum(s.rows * s.columns for s in self.slices)


class Step(NamedTuple):
    """One rank's part of one bucket. Every rank has as many steps, and they match by index."""

    copies: tuple[Move, ...]
    """Within the process."""
    sends: tuple[Transfer, ...]
    """By peer, ascending; never to this rank itself, never empty."""
    receives: tuple[Transfer, ...]
    """By peer, ascending."""
