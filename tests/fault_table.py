"""What came of each fault that tests have injected, as a table."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Fault:
    """One that was injected; a test fills in what came of it."""

    name: str
    where: str
    survived: bool = False
    lost_updates: int | None = None
    """Optimizer updates that had been saved, or were due, and that the run ended without."""


def table(faults: list[Fault]) -> list[str]:
    """Return the table's lines; faults of one name and place share one."""
    rows = [("fault", "where", "injected", "survived", "lost updates")]
    for name, where in dict.fromkeys((f.name, f.where) for f in faults):
        rows.append(
            (name, where, *_numbers([f for f in faults if (f.name, f.where) == (name, where)]))
        )
    rows.append(("all", "", *_numbers(faults)))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths)) for row in rows]
    rule = "-" * len(lines[0])
    return ["", lines[0], rule, *lines[1:-1], rule, lines[-1]]


def _numbers(faults: list[Fault]) -> tuple[str, str, str]:
    lost = [f.lost_updates for f in faults]
    total = "unknown" if None in lost else str(sum(lost))
    return str(len(faults)), str(sum(f.survived for f in faults)), total
