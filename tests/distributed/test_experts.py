"""A mixture of experts computes what the float64 reference does, wherever its experts are.

The reference and what is compared are those of test_matrix.py. In it no token's choice of experts
is close to a tie (conftest.py), so every layout must choose the same.
"""

import pytest

from tests.distributed.cases import name
from tests.distributed.measure import SMALL, UNPACKED, Layout
from tests.distributed.test_matrix import check

_DISTRIBUTED = dict(distributed=True, overlap=True)
LAYOUTS = (
    ("actor", Layout()),
    ("critic", Layout(budget=SMALL)),
    ("critic", Layout(dp=2, budget=SMALL)),
    ("actor", Layout(dp=2, ep=2, budget=SMALL)),
    ("critic", Layout(dp=2, ep=2, **_DISTRIBUTED)),
    ("actor", Layout(tp=2, sp=True)),
    ("critic", Layout(tp=2, sp=True, ep=2)),
    ("actor", Layout(tp=2, sp=True, ep=2, budget=UNPACKED)),
    ("actor", Layout(cp=2, ep=2)),
    ("critic", Layout(cp=2, ep=2, **_DISTRIBUTED, budget=SMALL)),
    ("actor", Layout(dp=4, ep=4, budget=SMALL)),
    ("critic", Layout(dp=4, ep=2, **_DISTRIBUTED)),
    ("critic", Layout(tp=2, sp=True, dp=2, ep=4, overlap=True)),
    ("actor", Layout(tp=2, sp=True, dp=2, ep=2, **_DISTRIBUTED, budget=SMALL)),
    ("actor", Layout(pp=2, dp=2, ep=2, budget=SMALL)),
    ("critic", Layout(pp=2, vpp=2, dp=2, ep=2, **_DISTRIBUTED)),
    ("critic", Layout(tp=2, sp=True, pp=2, ep=2)),
    ("actor", Layout(dp=2, ep=2, recompute="full", budget=SMALL)),
    ("critic", Layout(tp=2, sp=True, ep=2, recompute="selective")),
)
SOME = (
    ("actor", Layout(dp=2, ep=2)),
    ("critic", Layout(tp=2, sp=True, ep=2)),
    ("critic", Layout(pp=2, vpp=2)),
)


def _named(value):
    return value if isinstance(value, str) else name(value)


@pytest.mark.parametrize("role,layout", LAYOUTS, ids=_named)
def test_gradients_equal_float64(workers, references, record, role, layout):
    check(workers, references, record, role, layout, variant="experts")


@pytest.mark.parametrize("role,layout", SOME, ids=_named)
def test_dense_layers_between(workers, references, record, role, layout):
    check(workers, references, record, role, layout, variant="some experts")
