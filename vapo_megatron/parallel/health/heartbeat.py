"""Which process of a run has stopped: rules over what each of them says of itself, without clocks.

All ranks go through the same phases in the same order, so that their positions compare: who has
come least far holds up the others, which wait for it in phases of their own. Only the least far
ones are measured against their phase's limit, and only from when they came to be that: a process
that waits is never taken for one that hangs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from vapo_megatron.config.phases import PHASES, START


@dataclasses.dataclass(frozen=True)
class Standing:
    """What a process says of itself, again and again."""

    place: str
    """For people: its host and process id."""
    beat: int = 0
    """Grows as long as it lives."""
    position: tuple[int, int] = (0, 0)
    """Phases begun or ended, and updates made; the same sequence on all ranks."""
    phase: str = START
    step: int = 0
    limit_seconds: float = 0.0
    """Of its phase."""
    waits: bool = False
    """It is inside a collective."""
    failure: str = ""
    """The error that ends it."""
    is_over: bool = False
    """It has nothing left to do; nothing is expected of it any more."""


def where(rank: int, standing: Standing) -> str:
    """Say who and where: "rank 1 (host, process 12) in critic_update of step 3"."""
    step = f" of step {standing.step}" if standing.step else ""
    return f"rank {rank} ({standing.place}) in {standing.phase}{step}"


class Observer:
    """Remembers since when each rank has been silent, and the least far one has not moved."""

    def __init__(self, silence_seconds: float) -> None:
        self._silence_seconds = silence_seconds
        self._beats: dict[int, tuple[int, float]] = {}
        self._lowest: tuple[tuple[int, int], float] = ((-1, -1), 0.0)

    def silent(
        self, standings: Mapping[int, Standing], now: float, at_most: float | None = None
    ) -> str:
        """Name ranks without a sign of life for too long, or for their phase's limit; else "".

        Args:
            standings: by rank.
            now: seconds.
            at_most: a shorter limit.
        """
        found = []
        for rank, standing in standings.items():
            beat, since = self._beats.get(rank, (-1, now))
            if standing.beat != beat:
                self._beats[rank] = (standing.beat, now)
                continue
            limit = min(self._silence_seconds, standing.limit_seconds, at_most or math.inf)
            if now - since > limit and not standing.is_over:
                seconds = f"{now - since:.0f} s"
                found.append(f"{where(rank, standing)} is dead or stopped, silent for {seconds}")
        return "; ".join(found)

    def overdue(self, standings: Mapping[int, Standing], now: float) -> str:
        """Name the ranks that hold up all others for longer than their phase may take; else ""."""
        at_work = {rank: s for rank, s in standings.items() if not s.is_over}
        if not at_work:
            return ""
        lowest = min(standing.position for standing in at_work.values())
        if lowest != self._lowest[0]:
            self._lowest = (lowest, now)
        last = {rank: s for rank, s in at_work.items() if s.position == lowest}
        seconds = now - self._lowest[1]
        if seconds <= max(standing.limit_seconds for standing in last.values()):
            return ""
        # Where all have come equally far, those that wait in a collective wait for the others.
        culprits = {rank: s for rank, s in last.items() if not s.waits} or last
        return "; ".join(
            f"{where(rank, s)} has made no progress for {seconds:.0f} s, longer than "
            f"timeouts.{PHASES[s.phase].limit}={s.limit_seconds:g}"
            for rank, s in culprits.items()
        )
