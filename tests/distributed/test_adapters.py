"""Adapters (LoRA) learn what peft's do in float64, in every layout.

The reference is peft on transformers' model in float64; what is compared, and the reference's
losses, are those of test_matrix.py. A and B are peft's, random, so that both have a gradient.
"""

import pytest

from tests.distributed.cases import name
from tests.distributed.measure import SMALL, Layout
from tests.distributed.test_matrix import check

_DISTRIBUTED = dict(distributed=True, overlap=True)
LAYOUTS = (
    ("actor", Layout()),
    ("actor", Layout(tp=2, sp=True, budget=SMALL)),
    ("critic", Layout(tp=4, recompute="full")),
    ("critic", Layout(pp=2, vpp=2, dp=2, **_DISTRIBUTED)),
    ("actor", Layout(cp=2, budget=SMALL, recompute="full")),
)


def _named(value):
    return value if isinstance(value, str) else name(value)


@pytest.mark.parametrize("role,layout", LAYOUTS, ids=_named)
def test_gradients_equal_float64(workers, references, record, role, layout):
    check(workers, references, record, role, layout, variant="adapters")
