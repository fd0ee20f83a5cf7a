"""The plan that turns the trainer's shards into the sampler's: who sends which rectangle to whom.

Every process is a rank of the trainer and of the sampler. A rank receives exactly the part of its
vLLM shard that is not in its own Megatron shard, once: from a rank of its own node where one holds
it, otherwise across nodes. Ranks that hold the same elements and are equally near share what they
send: each link class (same node, across nodes) is balanced by itself, because they are different
wires. That gives the largest sender the fewest bytes possible on each, up to a matrix row.

A plan is data, the same on every rank, computed from descriptions alone: no process group, no GPU,
no random number. Layers that one pipeline stage holds are planned once and repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from vapo_megatron.weights.mapping import EMBEDDING, Row, rows
from vapo_megatron.weights.plan import Block, Layer, Move, Plan, Slice
from vapo_megatron.weights.shards import (
    Piece,
    TrainerLayout,
    check_sampler,
    sampler_pieces,
    trainer_pieces,
)

if TYPE_CHECKING:
    from vapo_megatron.models.hf_config import ModelShape


def make_plan(
    shape: ModelShape,
    trainer: TrainerLayout,
    sampler_tp_size: int,
    *,
    gpus_per_node: int,
    bytes_per_element: int = 2,
) -> Plan:
    """Plan the way of the actor's weights from the trainer's shards into the sampler's.

    Args:
        shape: of the model.
        trainer: see shards.trainer_layout; the sampler runs on the same ranks.
        sampler_tp_size: ranks of one vLLM replica, which are consecutive.
        gpus_per_node: consecutive ranks that share a node.
        bytes_per_element: of the weights, for counts of bytes; moves count elements.

    Raises:
        ConfigError: vLLM could not lay out the model so.
    """
    check_sampler(shape, sampler_tp_size, trainer.world_size)
    planner = _Planner(shape, trainer, sampler_tp_size, gpus_per_node)
    table = rows(shape, "actor")
    in_layer = [row for row in table if "{}" in row.hf[0]]
    blocks = []
    for stage, chunks in enumerate(trainer.layers):
        layers = tuple(
            Layer(first + i, chunk, i)
            for chunk, (first, stop) in enumerate(chunks)
            for i in range(stop - first)
        )
        blocks.append(planner.block(in_layer, {stage: (0, None)}, layers))
    outside: dict[tuple[tuple[int, _Home], ...], list[Row]] = {}
    for row in table:
        if "{}" not in row.hf[0] and not row.is_copy:
            outside.setdefault(tuple(_homes(row, table, trainer).items()), []).append(row)
    # A tied embedding has senders in two stages: it comes last, when their other loads are known.
    for homes, some in sorted(outside.items(), key=lambda x: len(x[0])):
        blocks.append(planner.block(some, dict(homes)))
    return Plan(trainer.world_size, gpus_per_node, bytes_per_element, tuple(blocks))


_Home = tuple[int, str | None]
"""Chunk and, where it is not the piece's, name of the parameter in which a stage keeps a piece."""


def _homes(row: Row, table: list[Row], trainer: TrainerLayout) -> dict[int, _Home]:
    """Find the stages that hold a row outside the layers, and where."""
    last = trainer.pp_size - 1
    if row.hf != (EMBEDDING,):
        return {last: (trainer.last_chunk, None)}
    homes: dict[int, _Home] = {0: (0, None)}
    copies = [other for other in table if other.is_copy and other.hf == row.hf]
    if copies and last > 0:
        homes[last] = (trainer.last_chunk, copies[0].megatron[0])
    return homes


class _Overlap(NamedTuple):
    """What a sampler's shard has in common with a trainer's."""

    source: Slice
    destination: Slice
    tp_rank: int | None
    """Of the trainer; None: every tensor-parallel rank holds it."""

    @property
    def num_elements(self) -> int:
        return self.source.rows * self.source.columns


class _Candidates(NamedTuple):
    """Ranks of which any one could send an overlap."""

    near: bool
    """They share the destination's node."""
    ranks: tuple[int, ...]


class _Planner:
    """Plans block after block, knowing what every rank sends so far."""

    def __init__(
        self, shape: ModelShape, trainer: TrainerLayout, sampler_tp_size: int, gpus_per_node: int
    ) -> None:
        self.shape = shape
        self.trainer = trainer
        self.sampler_tp_size = sampler_tp_size
        self.gpus_per_node = gpus_per_node
        self.loads = {near: [0] * trainer.world_size for near in (True, False)}
        """Elements that each rank sends within its node (True) and across nodes (False)."""
        self._found: dict[tuple[int, int | None, tuple[int, ...]], _Candidates] = {}

    def block(
        self, some: list[Row], homes: dict[int, _Home], layers: tuple[Layer, ...] = ()
    ) -> Block:
        """Plan some rows of the table for all destinations.

        Args:
            some: rows that the same stages hold.
            homes: those stages, and where they keep them.
            layers: that repeat this block; none outside the layers.
        """
        # A layer is balanced by itself, so that any few of them are.
        loads = {near: [0] * len(x) for near, x in self.loads.items()} if layers else self.loads
        moves: list[Move] = []
        cut: dict[_Candidates, list[tuple[int, _Overlap]]] = {}
        whole: list[tuple[_Candidates, int, _Overlap]] = []
        overlaps = [self._overlaps(some, tp_rank) for tp_rank in range(self.sampler_tp_size)]
        for rank in range(self.trainer.world_size):
            for overlap in overlaps[rank % self.sampler_tp_size]:
                candidates = self._candidates(rank, overlap.tp_rank, tuple(homes))
                if rank in candidates.ranks:
                    moves.append(self._move(rank, rank, overlap, homes, 0, overlap.source.rows))
                elif overlap.tp_rank is None:
                    whole.append((candidates, rank, overlap))
                else:
                    cut.setdefault(candidates, []).append((rank, overlap))
        # Fewest candidates first: who has more to choose from evens out what they did.
        for candidates, demands in sorted(cut.items(), key=lambda x: len(x[0].ranks)):
            moves += self._share(candidates.ranks, loads[candidates.near], demands, homes)
        moves += self._attach(whole, moves, loads, homes)
        if layers:
            for near, total in self.loads.items():
                total[:] = (t + len(layers) * x for t, x in zip(total, loads[near], strict=True))
        return Block(tuple(sorted(moves)), layers)

    def _overlaps(self, some: list[Row], sampler_tp_rank: int) -> list[_Overlap]:
        """List what one sampler shard takes from the trainer, by the trainer's tp_rank."""
        found = []
        for row in some:
            wanted = sampler_pieces(row, self.shape, self.sampler_tp_size, sampler_tp_rank)
            tp_ranks = [None] if row.kind == "replicated" else range(self.trainer.tp_size)
            for tp_rank in tp_ranks:
                held = trainer_pieces(row, self.shape, self.trainer, tp_rank or 0)
                for there in held:
                    for here in wanted:
                        if overlap := _overlap(there, here, tp_rank):
                            found.append(overlap)
        return found

    def _candidates(self, rank: int, tp_rank: int | None, stages: tuple[int, ...]) -> _Candidates:
        """Find the nearest ranks that hold an overlap."""
        trainer = self.trainer
        node = rank // self.gpus_per_node
        found = self._found.get((node, tp_rank, stages))
        if found is None:
            holders = tuple(
                trainer.rank(stage, dp_rank, t)
                for stage in stages
                for dp_rank in range(trainer.dp_size)
                for t in (range(trainer.tp_size) if tp_rank is None else (tp_rank,))
            )
            near = tuple(holder for holder in holders if holder // self.gpus_per_node == node)
            found = _Candidates(bool(near), near or holders)
            self._found[node, tp_rank, stages] = found
        return found

    def _share(
        self,
        candidates: tuple[int, ...],
        loads: list[int],
        demands: list[tuple[int, _Overlap]],
        homes: dict[int, _Home],
    ) -> Iterator[Move]:
        """Divide demands that the same candidates can meet, and add to their loads.

        The demands stand in a row, and each candidate takes the next stretch of it, so few
        destinations have more than one source, and few rectangles are cut (between rows).
        """
        total = sum(overlap.num_elements for _, overlap in demands)
        quotas = _quotas([loads[candidate] for candidate in candidates], total)
        turns = [turn for turn in zip(candidates, quotas, strict=True) if turn[1] > 0]
        source, left = turns.pop(0)
        for destination, overlap in demands:
            first, columns = 0, overlap.source.columns
            while first < overlap.source.rows:
                fitting = overlap.source.rows - first
                if turns:
                    fitting = min(fitting, round(left / columns))
                if fitting > 0:
                    yield self._move(destination, source, overlap, homes, first, fitting)
                    loads[source] += fitting * columns
                    first += fitting
                    left -= fitting * columns
                else:
                    # What rounding gave too much or too little, the next candidate makes up for.
                    source, more = turns.pop(0)
                    left += more

    def _attach(
        self,
        demands: list[tuple[_Candidates, int, _Overlap]],
        moves: list[Move],
        loads: dict[bool, list[int]],
        homes: dict[int, _Home],
    ) -> list[Move]:
        """Let what every tensor-parallel rank holds travel with what a destination gets anyway.

        These are norms: too small to be worth a message of their own, or to unbalance a sender.
        """
        found = []
        traffic: dict[int, dict[int, int]] = {}
        for move in moves:
            sources = traffic.setdefault(move.destination_rank, {})
            sources[move.source_rank] = sources.get(move.source_rank, 0) + move.num_elements
        for (near, ranks), destination, overlap in demands:
            sources = traffic.get(destination, {})
            known = [rank for rank in sources if rank in ranks]
            if known:
                source = max(known, key=lambda rank: (sources[rank], -rank))
            else:
                source = min(ranks, key=lambda rank: (loads[near][rank], rank))
            loads[near][source] += overlap.num_elements
            found.append(self._move(destination, source, overlap, homes, 0, overlap.source.rows))
        return found

    def _move(
        self,
        destination_rank: int,
        source_rank: int,
        overlap: _Overlap,
        homes: dict[int, _Home],
        first: int,
        num_rows: int,
    ) -> Move:
        """Build the move of some rows of an overlap."""
        stage = source_rank // (self.trainer.tp_size * self.trainer.dp_size)
        chunk, parameter = homes[stage]
        source = overlap.source._replace(
            chunk=chunk,
            parameter=parameter or overlap.source.parameter,
            row=overlap.source.row + first,
            rows=num_rows,
        )
        destination = overlap.destination._replace(
            row=overlap.destination.row + first, rows=num_rows
        )
        return Move(destination_rank, source_rank, source, destination)


def _overlap(there: Piece, here: Piece, tp_rank: int | None) -> _Overlap | None:
    """Intersect what the trainer and what the sampler hold, in the coordinates of the HF tensor."""
    if there.tensor != here.tensor:
        return None
    row, column = max(there.row, here.row), max(there.column, here.column)
    num_rows = min(there.row + there.rows, here.row + here.rows) - row
    num_columns = min(there.column + there.columns, here.column + here.columns) - column
    if num_rows <= 0 or num_columns <= 0:
        return None
    source, destination = (
        Slice(
            0,
            piece.parameter,
            piece.local_row + row - piece.row,
            piece.local_column + column - piece.column,
            num_rows,
            num_columns,
        )
        for piece in (there, here)
    )
    return _Overlap(source, destination, tp_rank)


def _quotas(loads: list[int], total: int) -> list[float]:
    """Divide a total so that the largest load becomes as small as possible: the lowest rise."""
    ascending = sorted(loads)
    level = 0.0
    for count in range(1, len(loads) + 1):
        level = (total + sum(ascending[:count])) / count
        if count == len(loads) or level <= ascending[count]:
            break
    return [max(0.0, level - load) for load in loads]
