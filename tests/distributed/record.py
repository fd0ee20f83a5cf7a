"""The largest errors of a test run, printed at its end."""

from __future__ import annotations

from tests.distributed.measure import Measured


class Record:
    """Collects what was compared, float32 and bfloat16 apart."""

    def __init__(self) -> None:
        self._worst: dict[str, tuple[float, str]] = {}
        self._counts: dict[str, list[int]] = {}

    def add(self, dtype: str, where: str, measured: Measured) -> None:
        """Take one measurement."""
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
