"""Rank, size and iterations of Dion's and Muon's updates; imports no torch, for planning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Scale = Literal["rms", "spectral"]

NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5
"""Coefficients of x, x^3 and x^5 in each of Muon's iterations: singular values come near 1, not to
it."""


def rank_of(shape: Sequence[int], fraction: float) -> int:
    """Return Dion's rank for a matrix: this fraction of the shorter side, rounded up."""
    # Binary fractions: .1 * 30 is a little more than 3.
    return math.ceil(round(fraction * min(shape), 6))


def scale_factor(shape: Sequence[int], rank: int, scale: Scale) -> float:
    """Return f, by which the orthonormal update is multiplied.

    "rms": .2 sqrt(out in / rank), with which the elements' root mean square is .2, about that of an
    AdamW update, so that its learning rates carry over; at full rank it is Moonlight's
    .2 sqrt(max(out, in)) (arXiv 2502.16982). "spectral": sqrt(out / in), Dion's own.

    Args:
        shape: (out, in) of the weight as Hugging Face has it.
        rank: of the update; min(shape) for Muon.
        scale: see above.
    """
    out, into = shape
    return math.sqrt(out / into) if scale == "spectral" else 0.2 * math.sqrt(out * into / rank)
