"""Rules that find a dead or hanging rank from all ranks' heartbeats. No clocks, no I/O.

All ranks go through the same phases in the same order, so their positions compare: the rank that is
furthest behind holds up the others, which wait for it in later phases. Only the ranks furthest
behind are measured against their phase's limit, from the moment they became last, so a rank that
waits for a straggler is never blamed.

Among equally advanced ranks, those inside a collective wait for the others. With NCCL a waiting
rank cannot be recognized, so the message lists where every rank is.

With placement=disaggregated, trainers and rollout workers go through different phases: ranks are
compared within their world, and not while they report that they wait for the other world. If both
worlds wait for each other, all ranks are named.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from vapo_megatron.config.phases import PHASES, START

PLACES = 8
"""How many groups of ranks a line names."""


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """A rank's periodic status."""

    place: str
    """Host and process id, for messages."""
    beat: int = 0
    """Counts up while the process is alive."""
    position: tuple[int, int] = (0, 0)
    """(phases entered or left, updates tried); the same sequence on all ranks."""
    phase: str = START
    step: int = 0
    limit_seconds: float = 0.0
    """Time limit of the phase."""
    in_collective: bool = False
    """It is in a function of torch.distributed; says nothing of a rank that `runs_ahead`."""
    runs_ahead: bool = False
    """Its collectives return before they are done, as NCCL's do: whoever waits for another rank is
    in the next .item() or synchronize, like one that waits for its own kernels."""
    where: str = ""
    """The code that its main thread is in."""
    failure: str = ""
    """The error that ends this rank."""
    is_over: bool = False
    """The rank has finished; no more heartbeats are expected."""
    world: str = ""
    """Trainer or rollout worker, where these are processes of their own."""
    waits: bool = False
    """It waits for the other world."""


def describe(rank: int, heartbeat: Heartbeat) -> str:
    """Return, for example, "rank 1 (host, process 12) in critic_update of step 3"."""
    world = f"{heartbeat.world}, " if heartbeat.world else ""
    step = f" of step {heartbeat.step}" if heartbeat.step else ""
    return f"rank {rank} ({world}{heartbeat.place}) in {heartbeat.phase}{step}"


class Monitor:
    """Tracks when each rank's heartbeat last changed, and when the slowest rank last advanced."""

    def __init__(self, silence_seconds: float) -> None:
        self._silence_seconds = silence_seconds
        self._beats: dict[int, tuple[int, float]] = {}
        self._lowest: dict[str, tuple[tuple[tuple[int, int], ...], float]] = {}
        """Of each world, the position of the slowest rank and since when."""

    def silent(
        self, heartbeats: Mapping[int, Heartbeat], now: float, at_most: float | None = None
    ) -> str:
        """Name ranks whose heartbeat has stopped; "" if there are none.

        A limit of at_most seconds may be shorter than silence_seconds and the phase's own.
        """
        found = []
        for rank, heartbeat in heartbeats.items():
            beat, since = self._beats.get(rank, (-1, now))
            if heartbeat.beat != beat:
                self._beats[rank] = (heartbeat.beat, now)
                continue
            limit = min(self._silence_seconds, heartbeat.limit_seconds, at_most or math.inf)
            if now - since > limit and not heartbeat.is_over:
                what = f"is dead or stopped, silent for {now - since:.0f} s"
                found.append(f"{describe(rank, heartbeat)} {what}")
        return "; ".join(found)

    def overdue(self, heartbeats: Mapping[int, Heartbeat], now: float) -> str:
        """Name ranks that have held up all others for longer than their phase may take; else ""."""
        running = {rank: h for rank, h in heartbeats.items() if not h.is_over}
        worlds: dict[str, dict[int, Heartbeat]] = {}
        for rank, heartbeat in running.items():
            worlds.setdefault(heartbeat.world, {})[rank] = heartbeat
        found = [self._overdue(world, ranks, now) for world, ranks in worlds.items()]
        if len(worlds) > 1:
            found.append(self._deadlocked(running, now))
        return next(filter(None, found), "")

    def _seconds_at(self, key: str, position: tuple[tuple[int, int], ...], now: float) -> float:
        """Return how long something has been where it is."""
        if self._lowest.get(key, ((), 0.0))[0] != position:
            self._lowest[key] = (position, now)
        return now - self._lowest[key][1]

    def _overdue(self, world: str, running: Mapping[int, Heartbeat], now: float) -> str:
        lowest = min(heartbeat.position for heartbeat in running.values())
        slowest = {rank: h for rank, h in running.items() if h.position == lowest}
        if all(heartbeat.waits for heartbeat in slowest.values()):
            # Only the other world is measured; this one starts again once it continues.
            self._lowest.pop(world, None)
            return ""
        seconds = self._seconds_at(world, (lowest,), now)
        if seconds <= max(heartbeat.limit_seconds for heartbeat in slowest.values()):
            return ""
        if any(heartbeat.runs_ahead for heartbeat in slowest.values()):
            why = "NCCL does not say who waits for whom"
            return _held_up(running, min(slowest), seconds, why)
        # Of ranks at the same position, those in a collective wait for the others.
        here = {rank: h for rank, h in slowest.items() if not h.waits}
        culprits = {rank: h for rank, h in here.items() if not h.in_collective} or here
        return "; ".join(
            f"{describe(rank, h)} has made no progress for {seconds:.0f} s, longer than "
            f"timeouts.{PHASES[h.phase].limit}={h.limit_seconds:g}"
            for rank, h in culprits.items()
        )

    def _deadlocked(self, running: Mapping[int, Heartbeat], now: float) -> str:
        """Name all ranks if each has waited for the other world for longer than its phase may."""
        if not all(heartbeat.waits for heartbeat in running.values()):
            self._lowest.pop("both", None)
            return ""
        seconds = self._seconds_at("both", tuple(h.position for h in running.values()), now)
        if seconds <= max(heartbeat.limit_seconds for heartbeat in running.values()):
            return ""
        return _held_up(
            running, min(running), seconds, "trainers and rollout workers wait for each other"
        )


def _held_up(running: Mapping[int, Heartbeat], slowest: int, seconds: float, why: str) -> str:
    """Say where all ranks are, those first that share their place with the fewest others."""
    places: dict[tuple[str, str], list[int]] = {}
    for rank, heartbeat in sorted(running.items()):
        places.setdefault((heartbeat.phase, heartbeat.where), []).append(rank)
    found = []
    for (phase, where), ranks in sorted(places.items(), key=lambda item: len(item[1])):
        host = f" ({running[ranks[0]].place})" if len(ranks) == 1 else ""
        found.append(f"{_numbers(ranks)}{host} in {phase} at {where}")
    more = f"; and {len(found) - PLACES} more places" if len(found) > PLACES else ""
    first = running[slowest]
    what = f"step {first.step}" if first.step else "the start"
    return (
        f"{what} has made no progress for {seconds:.0f} s, longer than "
        f"timeouts.{PHASES[first.phase].limit}={first.limit_seconds:g}, and {why}: "
        f"{'; '.join(found[:PLACES])}{more}"
    )


def _numbers(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> "ranks 0-2,5"."""
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    spans = [f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, ends, strict=True)]
    return f"rank{'s' * (len(ranks) > 1)} {','.join(spans)}"
