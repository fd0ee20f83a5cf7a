"""Plans how the trainer's shards become the engine's: who sends which slice to whom.

A process is a rank of the trainer, of the engine, or of both. It receives exactly the part of its
vLLM shard that is not in its own Megatron shard, once: from a rank of its own node if one holds it,
otherwise across nodes. With relays, no node receives an element twice: ranks of a node that need
the same elements each receive a part across nodes and relay it to the others. Ranks that hold the
same elements and are equally near share the sending. Each link class (same node, across nodes) is
balanced by itself, because they are different wires: the busiest sender sends the fewest bytes
possible on each, up to a matrix row. Slices are assigned in order, so that few of them are cut, and
only between matrix rows.

A plan is data, the same on every rank, computed from sizes alone: no process group, no GPU, no
randomness. Layers of one pipeline stage that are alike are planned once and repeated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vapo_megatron.config.lora import LoraConfig
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.weights.adapter_table import adapter_rows, targets_of
from vapo_megatron.weights.holders import Member, TrainerLayout, cut_rank
from vapo_megatron.weights.reshard.plan import ENGINE, Block, Layer, Move, Plan, Slice
from vapo_megatron.weights.reshard.shards import Piece, trainer_pieces
from vapo_megatron.weights.reshard.vllm_layout import (
    adapter_pieces,
    check_rollout_layout,
    engine_pieces,
)
from vapo_megatron.weights.table import Row, layer_rows, rows

Home = tuple[int, str | None]
"""Where a stage keeps a piece: chunk and, if it is not the piece's, name of the parameter."""


def make_plan(
    shape: ModelShape,
    trainer: TrainerLayout,
    rollout_tp_size: int,
    *,
    gpus_per_node: int,
    bytes_per_element: int = 2,
    relay: bool = True,
    rollout_workers: range | None = None,
    experts_apart: bool = False,
    lora: LoraConfig | None = None,
) -> Plan:
    """Plan a weight sync from the trainer's shards to the engine's.

    Args:
        trainer: see holders.trainer_layout; its ranks are the first.
        rollout_tp_size: consecutive ranks that form one vLLM replica.
        gpus_per_node: consecutive ranks that share a node.
        bytes_per_element: of the weights, to count bytes; moves count elements.
        relay: what several ranks of a node need from other nodes is sent to the node once, and
            relayed there; without, it is sent to each of them.
        rollout_workers: ranks that sample; None: those that train.
        experts_apart: rollout.expert_parallel.
        lora: plan for the adapters' matrices, whole on every rank, in place of the weights.

    Raises:
        ConfigError: vLLM does not support this layout.
    """
    rollout_workers = range(trainer.world_size) if rollout_workers is None else rollout_workers
    check_rollout_layout(shape, rollout_tp_size, len(rollout_workers), experts_apart)
    planner = _BlockPlanner(
        shape, trainer, rollout_tp_size, gpus_per_node, relay, rollout_workers, experts_apart, lora
    )
    table = rows(shape, "actor") if lora is None else []
    blocks = []
    for stage, chunks in enumerate(trainer.layers):
        alike: dict[tuple[Row, ...], list[Layer]] = {}
        for chunk, (first, stop) in enumerate(chunks):
            for i, number in enumerate(range(first, stop)):
                of_layer = layer_rows(shape, "actor", number)
                if lora is not None:
                    of_layer = adapter_rows(shape, lora)
                alike.setdefault(of_layer, []).append(Layer(number, chunk, i))
        for in_layer, layers in alike.items():
            blocks.append(planner.block(in_layer, {stage: (0, None)}, tuple(layers)))
    outside: dict[tuple[tuple[int, Home], ...], list[Row]] = {}
    for row in table:
        if not row.is_in_layer and not row.is_copy:
            outside.setdefault(tuple(_homes(row, table, trainer).items()), []).append(row)
    # These last: two stages hold a tied embedding, which evens out their loads.
    for homes, some in outside.items():
        blocks.append(planner.block(some, dict(homes)))
    return Plan(planner.world_size, gpus_per_node, bytes_per_element, tuple(blocks))


def _homes(row: Row, table: list[Row], trainer: TrainerLayout) -> dict[int, Home]:
    """Find the stages that hold a row outside the layers, and where they keep it."""
    homes: dict[int, Home] = {}
    for home in [row, *(other for other in table if other.is_copy and other.hf == row.hf)]:
        stage, chunk = trainer.home(home)
        homes.setdefault(stage, (chunk, home.megatron[0] if home.is_copy else None))
    return homes


class _Demand(NamedTuple):
    """A slice that a rank of the engine needs from the trainer."""

    rank: int
    """The rank that needs it."""
    source: Slice
    destination: Slice
    member: Member | None
    """Who holds it in each stage that has it; None: all ranks."""

    def part(self, first: int, num_rows: int) -> _Demand:
        """Return some of its rows."""
        source, destination = (x.part(first, num_rows) for x in (self.source, self.destination))
        return self._replace(source=source, destination=destination)


class _Candidates(NamedTuple):
    """Ranks any of which can send a slice."""

    near: bool
    """They are on the destination's node."""
    ranks: tuple[int, ...]


@dataclasses.dataclass
class _BlockPlanner:
    """Plans block after block, with each rank's load so far."""

    shape: ModelShape
    trainer: TrainerLayout
    rollout_tp_size: int
    gpus_per_node: int
    relay: bool
    rollout_workers: range
    experts_apart: bool
    lora: LoraConfig | None

    def __post_init__(self) -> None:
        self.world_size = max(self.trainer.world_size, self.rollout_workers.stop)
        self.loads = {near: [0] * self.world_size for near in (True, False)}
        """Elements that each rank sends so far, within its node (True) and across nodes (False)."""
        self._found: dict[tuple[int, Member | None, tuple[int, ...]], _Candidates] = {}

    def block(
        self, some: Sequence[Row], homes: dict[int, Home], layers: tuple[Layer, ...] = ()
    ) -> Block:
        """Plan some rows of the table for all destinations.

        Args:
            some: rows that the same stages hold.
            homes: those stages, and where they keep them.
            layers: that repeat this block; empty outside the layers.
        """
        # Each layer is balanced by itself, so that any few of them are.
        loads = {near: [0] * len(x) for near, x in self.loads.items()} if layers else self.loads
        demands = self._demands(some)
        moves: list[Move] = []
        missing: list[_Demand] = []
        far: list[_Demand] = []
        for demand in demands:
            candidates = self._candidates(demand, homes)
            if demand.rank in candidates.ranks:
                moves.append(self._move(demand, demand.rank, homes))
            else:
                (missing if candidates.near else far).append(demand)
        relays: list[Move] = []
        if self.relay:
            far, relays = self._divide(far)
        moves += self._assign(missing + far, loads, homes)
        if layers:
            for near, total in self.loads.items():
                total[:] = (t + len(layers) * x for t, x in zip(total, loads[near], strict=True))
        return Block(tuple(sorted(moves)), tuple(sorted(relays)), layers)

    def _demands(self, some: Sequence[Row]) -> list[_Demand]:
        """List what each rank's engine shard shares with each trainer shard."""
        by_tp_rank: list[list[_Demand]] = [[] for _ in range(self.rollout_tp_size)]
        for row in some:
            for member in self.trainer.slices(row):
                held = trainer_pieces(row, self.shape, self.trainer, cut_rank(member))
                for rollout_tp_rank, found in enumerate(by_tp_rank):
                    wanted = self._wanted(row, rollout_tp_rank)
                    found += [
                        _Demand(rollout_tp_rank, *both, member)
                        for there in held
                        for here in wanted
                        if (both := _overlap(there, here))
                    ]
        return [
            demand._replace(rank=rank)
            for place, rank in enumerate(self.rollout_workers)
            for demand in by_tp_rank[place % self.rollout_tp_size]
        ]

    def _wanted(self, row: Row, rollout_tp_rank: int) -> list[Piece]:
        """List what a rank of the engine has of a row."""
        if self.lora is not None:
            return adapter_pieces(row, self.shape, targets_of(self.shape, self.lora))
        return engine_pieces(
            row, self.shape, self.rollout_tp_size, rollout_tp_rank, self.experts_apart
        )

    def _candidates(self, demand: _Demand, homes: dict[int, Home]) -> _Candidates:
        """Find the nearest ranks that hold a slice."""
        member, stages = demand.member, tuple(homes)
        node = demand.rank // self.gpus_per_node
        found = self._found.get((node, member, stages))
        if found is None:
            holders = self.trainer.holders(stages, member)
            near = tuple(holder for holder in holders if holder // self.gpus_per_node == node)
            found = _Candidates(bool(near), near or holders)
            self._found[node, member, stages] = found
        return found

    def _divide(self, far: list[_Demand]) -> tuple[list[_Demand], list[Move]]:
        """Send what several ranks of a node need to the node once.

        Returns:
            What each rank receives across nodes, and the relays within the node.
        """
        same: dict[tuple[int, Slice, Member | None], list[_Demand]] = {}
        for demand in far:
            node = demand.rank // self.gpus_per_node
            same.setdefault((node, demand.source, demand.member), []).append(demand)
        shared: dict[tuple[int, ...], list[list[_Demand]]] = {}
        for alike in same.values():
            shared.setdefault(tuple(demand.rank for demand in alike), []).append(alike)
        received: list[_Demand] = []
        relays: list[Move] = []
        for ranks, everything in shared.items():
            # What every trainer rank holds is small: it is not split.
            split = [alike for alike in everything if alike[0].member is not None]
            replicated = [alike for alike in everything if alike[0].member is None]
            total = sum(alike[0].source.num_elements for alike in split)
            turns = [
                (split[index], place, first, num_rows)
                for index, place, first, num_rows in _assign_rows(
                    [alike[0].source for alike in split], [total / len(ranks)] * len(ranks)
                )
            ]
            turns += [
                (alike, index % len(ranks), 0, alike[0].source.rows)
                for index, alike in enumerate(replicated)
            ]
            for alike, place, first, num_rows in turns:
                parts = [demand.part(first, num_rows) for demand in alike]
                receiver = parts.pop(place)
                received.append(receiver)
                relays += [
                    Move(part.rank, receiver.rank, receiver.destination, part.destination)
                    for part in parts
                ]
        return received, relays

    def _assign(
        self, demands: list[_Demand], loads: dict[bool, list[int]], homes: dict[int, Home]
    ) -> list[Move]:
        """Choose the senders, and add to their loads."""
        moves: list[Move] = []
        by_senders: dict[_Candidates, list[_Demand]] = {}
        for demand in demands:
            if demand.member is not None:
                by_senders.setdefault(self._candidates(demand, homes), []).append(demand)
        for (near, ranks), some in by_senders.items():
            quotas = _quotas(
                [loads[near][rank] for rank in ranks], [x.source.num_elements for x in some]
            )
            for index, turn, first, num_rows in _assign_rows([x.source for x in some], quotas):
                part = some[index].part(first, num_rows)
                loads[near][ranks[turn]] += part.source.num_elements
                moves.append(self._move(part, ranks[turn], homes))
        # Replicated parameters (norms) are too small for a message of their own: they go with one
        # that their destination receives anyway.
        traffic: dict[int, dict[int, int]] = {}
        for move in moves:
            sources = traffic.setdefault(move.destination_rank, {})
            sources[move.source_rank] = sources.get(move.source_rank, 0) + move.source.num_elements
        for demand in demands:
            if demand.member is None:
                near, ranks = self._candidates(demand, homes)
                sources = {r: n for r, n in traffic.get(demand.rank, {}).items() if r in ranks}
                load = loads[near]
                source = max(sources or ranks, key=lambda r: (sources.get(r, 0), -load[r], -r))
                load[source] += demand.source.num_elements
                moves.append(self._move(demand, source, homes))
        return moves

    def _move(self, demand: _Demand, source_rank: int, homes: dict[int, Home]) -> Move:
        """Build the move of a slice from one trainer rank."""
        chunk, name = homes[self.trainer.stage(source_rank)]
        source = demand.source
        if chunk or name:
            source = source._replace(chunk=chunk, parameter=name or source.parameter)
        return Move(demand.rank, source_rank, source, demand.destination)


def _overlap(there: Piece, here: Piece) -> tuple[Slice, Slice] | None:
    """Intersect a trainer's and an engine's piece, in the coordinates of the HF tensor."""
    if there.tensor != here.tensor:
        return None
    row, column = max(there.row, here.row), max(there.column, here.column)
    num_rows = min(there.row + there.rows, here.row + here.rows) - row
    num_columns = min(there.column + there.columns, here.column + here.columns) - column
    if num_rows <= 0 or num_columns <= 0:
        return None
    source, destination = (
        Slice(
            chunk,
            piece.parameter,
            piece.local_row + row - piece.row,
            piece.local_column + column - piece.column,
            num_rows,
            num_columns,
        )
        for piece, chunk in ((there, 0), (here, ENGINE))
    )
    return source, destination


def _assign_rows(
    slices: Sequence[Slice], quotas: Sequence[float]
) -> Iterator[tuple[int, int, int, int]]:
    """Assign slices in order: each turn takes rows until its quota is full.

    Yields:
        (index of the slice, turn, first row, number of rows).
    """
    turns = [turn for turn, quota in enumerate(quotas) if quota > 0]
    place, left = 0, quotas[turns[0]] if turns else 0.0
    for index, part in enumerate(slices):
        first = 0
        while first < part.rows:
            fitting = part.rows - first
            if place + 1 < len(turns):
                fitting = min(fitting, round(left / part.columns))
            if fitting > 0:
                yield index, turns[place], first, fitting
                first += fitting
                left -= fitting * part.columns
            else:
                # The next turn makes up for rounding.
                place += 1
                left += quotas[turns[place]]


def _quotas(loads: list[int], sizes: list[int]) -> list[float]:
    """Divide a sum so that the largest resulting load is smallest: fill up to a common level."""
    ascending, total = sorted(loads), sum(sizes)
    level = 0.0
    for count in range(1, len(loads) + 1):
        level = (total + sum(ascending[:count])) / count
        if count == len(loads) or level <= ascending[count]:
            break
    return [max(0.0, level - load) for load in loads]
