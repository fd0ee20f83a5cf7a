"""Which layouts the matrix holds.

ALL crosses every layout up to four ranks (and some of eight) with the microbatch split, packing
on and off, and the distributed optimizer with overlapped communication on and off. CI is the part
of it that each run of the tests takes: every layout for one of the roles, so that each role meets
every axis, split and optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from tests.distributed.measure import PACKED, SMALL, UNPACKED, Layout

_AXES = (
    dict(),
    dict(tp=2),
    dict(tp=2, sp=True),
    dict(tp=4),
    dict(tp=4, sp=True),
    dict(pp=2),
    dict(pp=2, vpp=2),
    dict(pp=4),
    dict(dp=2),
    dict(dp=4),
    dict(tp=2, pp=2),
    dict(tp=2, pp=2, sp=True),
    dict(tp=2, pp=2, vpp=2),
    dict(tp=2, pp=2, vpp=2, sp=True),
    dict(tp=2, dp=2),
    dict(tp=2, dp=2, sp=True),
    dict(pp=2, dp=2),
    dict(pp=2, vpp=2, dp=2),
    dict(cp=2),
    dict(cp=4),
    dict(cp=2, tp=2),
    dict(cp=2, tp=2, sp=True),
    dict(cp=2, pp=2),
    dict(cp=2, pp=2, vpp=2),
    dict(cp=2, dp=2),
)
_EIGHT_RANKS = (
    dict(tp=2, pp=2, dp=2),
    dict(tp=2, pp=2, dp=2, sp=True),
    dict(tp=2, pp=2, vpp=2, dp=2, sp=True),
    dict(cp=4, tp=2),
    dict(cp=4, tp=2, sp=True),
    dict(cp=4, pp=2),
    dict(cp=4, pp=2, vpp=2),
    dict(cp=4, dp=2),
    dict(cp=2, tp=2, dp=2, sp=True),
    dict(cp=2, tp=2, pp=2, vpp=2, sp=True),
)
_BUDGETS = (PACKED, SMALL, UNPACKED)
DISTRIBUTED = dict(distributed=True, overlap=True)
_RECOMPUTE = (
    Layout(recompute="full", budget=SMALL),
    Layout(recompute="selective", budget=SMALL),
    Layout(tp=2, sp=True, recompute="full"),
    Layout(tp=2, pp=2, sp=True, recompute="selective", budget=SMALL),
    Layout(cp=2, recompute="full", budget=SMALL),
    Layout(cp=2, tp=2, sp=True, recompute="selective"),
    Layout(pp=2, recompute="block 1", budget=SMALL),
    Layout(pp=2, vpp=2, recompute="block 1", budget=SMALL),
    Layout(tp=2, pp=2, sp=True, recompute="uniform 2"),
)


def _optimizers(axes: dict) -> tuple[dict, ...]:
    """The distributed optimizer is the same as the other where no rank has the same parameters."""
    plain = (dict(), dict(overlap=True), DISTRIBUTED)
    return plain if axes.get("dp", 1) * axes.get("cp", 1) > 1 else plain[:1]


_CROSS = tuple(
    Layout(**axes, **optimizer, budget=budget)
    for axes in _AXES + _EIGHT_RANKS
    for optimizer in _optimizers(axes)
    for budget in _BUDGETS
)
ALL = tuple((role, layout) for layout in _CROSS + _RECOMPUTE for role in ("actor", "critic"))

CI = (
    ("actor", Layout()),
    ("critic", Layout(budget=UNPACKED)),
    ("actor", Layout(tp=2)),
    ("critic", Layout(tp=2, sp=True, budget=UNPACKED)),
    ("critic", Layout(tp=4, budget=SMALL)),
    ("actor", Layout(tp=4, sp=True)),
    ("critic", Layout(pp=2, budget=UNPACKED)),
    ("actor", Layout(pp=2, vpp=2)),
    ("actor", Layout(pp=4, budget=SMALL)),
    ("actor", Layout(dp=2, overlap=True, budget=UNPACKED)),
    ("critic", Layout(dp=4, **DISTRIBUTED)),
    ("actor", Layout(tp=2, pp=2)),
    ("critic", Layout(tp=2, pp=2, sp=True, budget=SMALL)),
    ("critic", Layout(tp=2, pp=2, vpp=2)),
    ("actor", Layout(tp=2, pp=2, vpp=2, sp=True, budget=SMALL)),
    ("critic", Layout(tp=2, dp=2, overlap=True, budget=SMALL)),
    ("actor", Layout(tp=2, dp=2, sp=True, **DISTRIBUTED)),
    ("actor", Layout(pp=2, dp=2, **DISTRIBUTED, budget=SMALL)),
    ("critic", Layout(pp=2, vpp=2, dp=2, overlap=True)),
    ("critic", _RECOMPUTE[0]),
    ("actor", _RECOMPUTE[3]),
    ("actor", Layout(cp=2)),
    ("critic", Layout(cp=2, budget=SMALL, **DISTRIBUTED)),
    ("critic", Layout(cp=4)),
    ("actor", Layout(cp=4, budget=UNPACKED, **DISTRIBUTED)),
    ("critic", Layout(cp=2, tp=2, overlap=True, budget=UNPACKED)),
    ("actor", Layout(cp=2, tp=2, sp=True, **DISTRIBUTED, budget=SMALL)),
    ("critic", Layout(cp=2, tp=2, sp=True)),
    ("critic", Layout(cp=2, pp=2, **DISTRIBUTED)),
    ("actor", Layout(cp=2, pp=2, overlap=True, budget=SMALL)),
    ("actor", Layout(cp=2, pp=2, vpp=2)),
    ("actor", Layout(cp=2, dp=2, **DISTRIBUTED, budget=SMALL)),
    ("critic", Layout(cp=2, dp=2, overlap=True)),
    ("critic", _RECOMPUTE[4]),
    ("actor", _RECOMPUTE[5]),
    ("actor", _RECOMPUTE[6]),
    ("critic", _RECOMPUTE[7]),
    ("critic", _RECOMPUTE[8]),
)

_BFLOAT16 = (
    Layout(dtype="bfloat16"),
    Layout(dtype="bfloat16", tp=2, sp=True),
    Layout(dtype="bfloat16", pp=2, vpp=2, budget=SMALL),
    Layout(dtype="bfloat16", dp=2, **DISTRIBUTED, budget=SMALL),
    Layout(dtype="bfloat16", cp=2, **DISTRIBUTED, budget=SMALL),
)
_ROLES = ("critic", "critic", "actor", "actor", "actor")
_OTHER_ROLES = ("actor", "actor", "critic", "critic", "critic")
BFLOAT16 = tuple(zip(_ROLES, _BFLOAT16, strict=True))
BFLOAT16_REST = tuple(zip(_OTHER_ROLES, _BFLOAT16, strict=True))


def name(layout: Layout) -> str:
    """For people: `TP2 PP2 SP distributed, small microbatches`."""
    words = [
        f"TP{layout.tp}" * (layout.tp > 1),
        f"PP{layout.pp}" * (layout.pp > 1),
        f"VPP{layout.vpp}" * (layout.vpp is not None),
        f"DP{layout.dp}" * (layout.dp > 1),
        f"CP{layout.cp}" * (layout.cp > 1),
        f"EP{layout.ep}" * (layout.ep > 1),
        "SP" * layout.sp,
        "distributed" * layout.distributed,
        "overlap" * layout.overlap,
        f"{layout.recompute} recompute" * (layout.recompute != "none"),
        layout.dtype * (layout.dtype != "float32"),
    ]
    split = {PACKED: "packed", SMALL: "small microbatches", UNPACKED: "not packed"}
    return f"{' '.join(filter(None, words)) or 'one process'}, {split[layout.budget]}"


def named(value: str | Layout) -> str:
    """Test ids, of roles and layouts."""
    return value if isinstance(value, str) else name(value)


def slow(cases: Iterable[Sequence]) -> list:
    """The same, in the slow tests alone."""
    return [pytest.param(*one, marks=pytest.mark.slow) for one in cases]
