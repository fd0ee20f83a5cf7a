"""Adapters (LoRA) learn what peft's do in float64, in every layout.

The reference is peft on transformers' model in float64; what is compared, and the reference's
losses, are those of test_matrix.py. A and B are peft's, random, so that both have a gradient.
"""

import pytest

from tests.distributed.cases import DISTRIBUTED, named, slow
from tests.distributed.measure import SMALL, UNPACKED, Layout
from tests.distributed.test_matrix import Differs, check

LAYOUTS = (
    ("actor", Layout(tp=2, sp=True, budget=SMALL)),
    ("critic", Layout(tp=4, recompute="full")),
    ("critic", Layout(pp=2, vpp=2, dp=2, **DISTRIBUTED)),
)
MORE = (
    ("actor", Layout()),
    ("actor", Layout(cp=2, budget=SMALL, recompute="full")),
    ("actor", Layout(tp=2)),
    ("critic", Layout(tp=2, sp=True, recompute="selective", budget=UNPACKED)),
    ("critic", Layout(tp=4, sp=True)),
    ("actor", Layout(pp=2, budget=SMALL, recompute="block 1")),
    ("actor", Layout(pp=4)),
    ("critic", Layout(dp=2, budget=SMALL, **DISTRIBUTED)),
    ("actor", Layout(dp=4, overlap=True)),
    ("actor", Layout(tp=2, pp=2, vpp=2, sp=True, budget=SMALL)),
    ("critic", Layout(tp=2, pp=2, sp=True, recompute="uniform 2")),
    ("actor", Layout(tp=2, dp=2, sp=True, **DISTRIBUTED)),
    ("critic", Layout(cp=2, **DISTRIBUTED, budget=SMALL)),
    ("critic", Layout(cp=2, tp=2, sp=True)),
    ("actor", Layout(cp=2, pp=2, vpp=2)),
    ("critic", Layout(cp=4)),
)
OTHERS = (
    ("actor", Layout(tp=2, sp=True), "some adapters"),
    ("critic", Layout(tp=4), "some adapters"),
    ("critic", Layout(tp=2, sp=True, ep=2), "attention's adapters"),
    ("actor", Layout(pp=2, dp=2, ep=2, budget=SMALL), "attention's adapters"),
)


@pytest.mark.parametrize("role,layout", [*LAYOUTS, *slow(MORE)], ids=named)
def test_gradients_equal_float64(workers, references, record, role, layout):
    check(workers, references, record, role, layout, variant="adapters")


@pytest.mark.parametrize("role,layout,variant", [OTHERS[0], *slow(OTHERS[1:])], ids=named)
def test_adapters_of_some_matrices(workers, references, record, role, layout, variant):
    check(workers, references, record, role, layout, variant=variant)


@pytest.mark.parametrize(
    ("mutation", "layout", "where"),
    [
        ("unmarked adapters", Layout(tp=2, sp=True), "gradient of .*lora_"),
        pytest.param(
            "adapters' inputs of one rank",
            Layout(tp=2),
            "gradient of .*lora_",
            marks=pytest.mark.slow,
        ),
        ("nothing before adapters learns", Layout(recompute="full"), "gradient of .*layers.0"),
    ],
)
def test_a_known_mistake_turns_it_red(workers, references, record, mutation, layout, where):
    with pytest.raises(Differs, match=where):
        check(workers, references, record, "actor", layout, variant="adapters", mutation=mutation)
