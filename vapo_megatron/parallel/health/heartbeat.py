"""Rules that find a dead or hanging rank from all ranks' heartbeats. No clocks, no I/O.

All ranks go through the same phases in the same order, so their positions compare: the rank that is
furthest behind holds up the others, which wait for it in later phases. Only the ranks furthest
behind are measured against their phase's limit, from the moment they became that. A rank that waits
for a slow one is thus never taken for a hanging one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from vapo_megatron.config.phases import PHASES, START


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
    failure: str = ""
    """The error that ends this rank."""
    is_over: bool = False
    """The rank has finished; no more heartbeats are expected."""


def describe(rank: int, heartbeat: Heartbeat) -> str:
    """Return, for example, "rank 1 (host, process 12) in critic_update of step 3"."""
    step = f" of step {heartbeat.step}" if heartbeat.step else ""
    return f"rank {rank} ({heartbeat.place}) in {heartbeat.phase}{step}"


class Monitor:
    """Tracks when each rank's heartbeat last changed, and when the slowest rank last advanced."""

    def __init__(self, silence_seconds: float) -> None:
        self._silence_seconds = silence_seconds
        self._beats: dict[int, tuple[int, float]] = {}
        self._lowest: tuple[tuple[int, int], float] = ((-1, -1), 0.0)

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
        if not running:
            return ""
        lowest = min(heartbeat.position for heartbeat in running.values())
        if lowest != self._lowest[0]:
            self._lowest = (lowest, now)
        slowest = {rank: h for rank, h in running.items() if h.position == lowest}
        seconds = now - self._lowest[1]
        if seconds <= max(heartbeat.limit_seconds for heartbeat in slowest.values()):
            return ""
        # Of ranks at the same position, those in a collective wait for the others.
        culprits = {rank: h for rank, h in slowest.items() if not h.in_collective} or slowest
        return "; ".join(
            f"{describe(rank, h)} has made no progress for {seconds:.0f} s, longer than "
            f"timeouts.{PHASES[h.phase].limit}={h.limit_seconds:g}"
            for rank, h in culprits.items()
        )
