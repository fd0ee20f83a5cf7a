"""Cuts a resharding plan into steps that send and receive a bounded number of bytes per rank.

All pipeline stages send in every step: the first layer of each stage (or a part of it), then the
second, and so on. A relay is sent RELAY_LAG steps after its source arrived, overlapping that step's
traffic between nodes. The result is the same on every rank.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from vapo_megatron.errors import ConfigError
from vapo_megatron.weights.reshard.plan import RELAY_LAG, Layer, Move, Plan, Slice, Step, Transfer

BUCKET_BYTES = 512 << 20


class Unit(NamedTuple):
    """The smallest part of a step: one part of every move, or every relay, of some blocks."""

    blocks: tuple[tuple[int, Layer | None], ...]
    """(index in the plan, which of its layers)."""
    is_relay: bool
    part: int
    parts: int
    """Each move is cut into this many, along its rows."""


class Counts(NamedTuple):
    """Bytes of one step."""

    sent: np.ndarray
    """[2, world_size] int64: bytes that each rank sends within its node and across nodes."""
    received: np.ndarray
    """The same, received."""
    copied: np.ndarray
    """[world_size] int64: bytes copied within each process."""

    @classmethod
    def zero(cls, plan: Plan) -> Counts:
        """Return those of an empty step."""
        shapes = ((2, plan.world_size), (2, plan.world_size), (plan.world_size,))
        return cls(*(np.zeros(shape, np.int64) for shape in shapes))

    def plus(self, other: Counts) -> Counts:
        """Return the sum."""
        return Counts(*(x + y for x, y in zip(self, other, strict=True)))

    @property
    def largest(self) -> int:
        """What the busiest rank sends or receives."""
        return int(max(self.sent.sum(0).max(), self.received.sum(0).max()))


class Bucket(NamedTuple):
    """The units of one step, and their bytes."""

    units: list[Unit]
    counts: Counts


def buckets(plan: Plan, bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Pack units, in order, into as few buckets as possible.

    Args:
        plan: from make_plan.
        bucket_bytes: limit of what a rank sends, and of what it receives, in one bucket.

    Raises:
        ConfigError: a rank's smallest unit, a row of each of its matrices, is larger.
    """

    @functools.cache
    def divided(blocks: tuple[int, ...], is_relay: bool) -> list[Counts]:
        return _divide(plan, blocks, is_relay, bucket_bytes)

    waiting = collections.deque(
        (Unit(blocks, False, part, len(all_counts)), counts)
        for blocks in _order(plan)
        for all_counts in [divided(tuple(index for index, _ in blocks), False)]
        for part, counts in enumerate(all_counts)
    )
    relaying: collections.deque[tuple[int, Unit, Counts]] = collections.deque()
    found: list[Bucket] = []
    while waiting or relaying:
        units: list[Unit] = []
        total = Counts.zero(plan)
        # Relays first: they forward what arrived RELAY_LAG buckets ago.
        while relaying and relaying[0][0] <= len(found):
            if (both := total.plus(relaying[0][2])).largest > bucket_bytes and units:
                break
            total = both
            units.append(relaying.popleft()[1])
        while waiting:
            unit, counts = waiting[0]
            if (both := total.plus(counts)).largest > bucket_bytes and units:
                break
            total = both
            units.append(unit)
            waiting.popleft()
            # A relay may start only once all parts of its blocks have arrived.
            if unit.part == unit.parts - 1:
                relays = divided(tuple(index for index, _ in unit.blocks), True)
                for part, counts in enumerate(relays):
                    later = Unit(unit.blocks, True, part, len(relays))
                    relaying.append((len(found) + RELAY_LAG, later, counts))
        found.append(Bucket(units, total))
    return found


def steps_of(plan: Plan, rank: int, bucket_bytes: int = BUCKET_BYTES) -> list[Step]:
    """List one rank's part of every bucket; see `buckets` for arguments and errors."""
    mine = [
        [
            [m for m in moves if rank in (m.source_rank, m.destination_rank)]
            for moves in (block.moves, block.relays)
        ]
        for block in plan.blocks
    ]
    steps = []
    for bucket in buckets(plan, bucket_bytes):
        copies: list[Move] = []
        sends: dict[int, list[Slice]] = {}
        receives: dict[int, list[Slice]] = {}
        for move in _moves_of(plan, mine, bucket):
            if move.source_rank == move.destination_rank:
                copies.append(move)
            elif move.source_rank == rank:
                sends.setdefault(move.destination_rank, []).append(move.source)
            else:
                receives.setdefault(move.source_rank, []).append(move.destination)
        steps.append(Step(tuple(copies), _transfers(sends), _transfers(receives)))
    return steps


def _transfers(slices: dict[int, list[Slice]]) -> tuple[Transfer, ...]:
    return tuple(Transfer(peer, tuple(slices[peer])) for peer in sorted(slices))


def _moves_of(plan: Plan, mine: list[list[list[Move]]], bucket: Bucket) -> Iterator[Move]:
    """Yield one rank's moves of a bucket; `mine`: its (moves, relays) of each block."""
    for unit in bucket.units:
        for index, layer in unit.blocks:
            moves = _parts(mine[index][unit.is_relay], unit.part, unit.parts)
            yield from plan.blocks[index].at(layer, moves)


def _order(plan: Plan) -> Iterator[tuple[tuple[int, Layer | None], ...]]:
    """Yield blocks that go together: all outside the layers, then one layer of each stage."""
    yield tuple((index, None) for index, block in enumerate(plan.blocks) if not block.layers)
    for i in range(max(len(block.layers) for block in plan.blocks)):
        yield tuple(
            (index, block.layers[i])
            for index, block in enumerate(plan.blocks)
            if i < len(block.layers)
        )


def _divide(plan: Plan, blocks: tuple[int, ...], is_relay: bool, bucket_bytes: int) -> list[Counts]:
    """Divide the moves, or relays, of some blocks into the fewest parts within the limit."""
    moves = [
        m for i in blocks for m in (plan.blocks[i].relays if is_relay else plan.blocks[i].moves)
    ]
    if not moves:
        return []
    table = np.array(
        [(m.source_rank, m.destination_rank, m.source.rows, m.source.columns) for m in moves]
    )
    most_rows = int(table[:, 2].max())
    parts = 1
    while True:
        counts = [_count(plan, table, part, parts) for part in range(parts)]
        largest = max(x.largest for x in counts)
        if largest <= bucket_bytes:
            return counts
        if parts >= most_rows:
            raise ConfigError(
                f"rollout.sync_bucket_bytes={bucket_bytes} must hold what a rank sends or receives "
                f"at once, at least {largest} bytes here; raise it"
            )
        parts = min(most_rows, max(parts + 1, -(-parts * largest // bucket_bytes)))


def _count(plan: Plan, table: np.ndarray, part: int, parts: int) -> Counts:
    """Count the bytes of one part of the moves in `table`: sources, destinations, rows, columns."""
    source, destination, rows, columns = table.T
    first, stop = _bounds(rows, part, parts)
    sizes = (stop - first) * columns * plan.bytes_per_element
    counts = Counts.zero(plan)
    near = source // plan.gpus_per_node == destination // plan.gpus_per_node
    here = source == destination
    np.add.at(counts.copied, source[here], sizes[here])
    for across, chosen in enumerate((near & ~here, ~near)):
        np.add.at(counts.sent[across], source[chosen], sizes[chosen])
        np.add.at(counts.received[across], destination[chosen], sizes[chosen])
    return counts


def _parts(moves: Sequence[Move], part: int, parts: int) -> Iterator[Move]:
    """Yield an equal share of the rows of each move."""
    for move in moves:
        first, stop = _bounds(move.source.rows, part, parts)
        if first < stop:
            source, destination = (
                x.part(first, stop - first) for x in (move.source, move.destination)
            )
            yield move._replace(source=source, destination=destination)


def _bounds(rows: Any, part: int, parts: int) -> tuple[Any, Any]:
    return rows * part // parts, rows * (part + 1) // parts
