"""The largest errors of a test run, printed at its end."""

from __future__ import annotations

from tests.distributed.cases import name
from tests.distributed.measure import Layout, Measured


class Record:
    """Keeps what was measured, so that tests share it, and the worst of it by dtype."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, Layout, str, str], Measured] = {}
        self._worst: dict[str, tuple[float, str]] = {}
        self._counts: dict[str, list[int]] = {}

    def find(self, role: str, layout: Layout, variant: str, mutation: str) -> Measured | None:
        """Return what was measured earlier."""
        return self._held.get((role, layout, variant, mutation))

    def add(
        self, role: str, layout: Layout, variant: str, mutation: str, measured: Measured
    ) -> None:
        """Keep one measurement; one with a mistake does not count."""
        self._held[role, layout, variant, mutation] = measured
        if mutation:
            return
        dtype, where = layout.dtype, f"{role}, {name(layout)}"
        cases, gradients = self._counts.get(dtype, [0, 0])
        for loss, errors in measured.gradients.items():
            gradients += len(errors)
            parameter = max(errors, key=errors.__getitem__)
            found = errors[parameter], f"{parameter}, loss {loss!r}, {where}"
            self._worst[dtype] = max(self._worst.get(dtype, (0.0, "")), found)
        self._counts[dtype] = [cases + 1, gradients]

    def lines(self) -> list[str]:
        """One line for each dtype."""
        return [
            f"gradients against float64, {dtype}: {gradients} in {cases} layouts and models, "
            f"largest relative error of a parameter {self._worst[dtype][0]:.1e} "
            f"({self._worst[dtype][1]})"
            for dtype, (cases, gradients) in self._counts.items()
        ]
