"""Every parameter's gradient, in every layout, equals the float64 reference's.

Actor (clipped policy, entropy, each alone; the positive-example NLL without a policy loss, as given
responses are trained on; together with IcePop and the KL to a reference policy, token- and
sample-level; DIS and DPPO where one axis is above 1) and critic
(plain and clipped value loss, and values in a range), on responses of 1 to 300 tokens of which two
in twenty are correct and four are episodes of several turns; and what GAE makes of the critic's
values, counted in tokens and in turns. The layouts are in cases.py, the reference in
float64.py, what runs in the processes in measure.py.

    bash tests/run.sh tests/distributed              every layout for one of the roles
    bash tests/run.sh tests/distributed -m slow      the rest of the cross

Not exercised: NCCL and CUDA, Transformer Engine's layers, more than eight ranks, more than four on
one axis.
"""

from typing import NamedTuple

import pytest
import torch

from tests.distributed.cases import ALL, BFLOAT16, BFLOAT16_REST, CI, name, named, slow
from tests.distributed.measure import PACKED, SMALL, UNPACKED, Layout, losses_of, measure
from tests.distributed.mutations import MUTATIONS
from tests.distributed.problem import INSERTED, LENGTHS, LOSSES, ON_ONE_AXIS


class Tolerances(NamedTuple):
    """Relative errors against float64."""

    gradient: float
    """|gradient - float64| / |float64| of each parameter and of all together, in 2-norms."""
    loss: float
    output: float
    """|difference| of a log-probability, an entropy (nats) or a value."""
    advantage: float
    """|advantages - float64| / |float64| and the same of returns, in 2-norms."""
    update: float | None
    """Of an update's norm: the parameter that it is added to is rounded at 6e-8 of its own size.
    None: the parameter is rounded to more than the update (its float32 main copy is not)."""


TOLERANCES = {
    "float32": Tolerances(5e-6, 2e-6, 1e-5, 3e-6, 1e-3),
    "bfloat16": Tolerances(8e-2, 3e-2, 0.2, 4e-2, None),
}


class Differs(AssertionError):
    """A layout computes something else than the reference."""


def check(workers, references, record, role, layout, *, variant="", mutation=""):
    """Compare one layout with the reference; Differs where it differs."""
    measured = record.find(role, layout, variant, mutation)
    if measured is None:
        path, file, problem = references.get(role, variant)
        (measured, *_) = workers.run(
            layout.world_size, measure, path, file, role, problem, layout, mutation
        )
        record.add(role, layout, variant, mutation, measured)
    allowed = TOLERANCES[layout.dtype]
    within(measured.outputs, allowed.output, "output")
    for unit, error in measured.advantages.items():
        within(error, allowed.advantage, f"advantages, GAE by {unit}")
    for loss, errors in measured.gradients.items():
        within(measured.losses[loss], allowed.loss, f"loss {loss!r}")
        for parameter, error in errors.items():
            within(error, allowed.gradient, f"loss {loss!r}, gradient of {parameter}")
    within(measured.grad_norm, allowed.gradient, "gradient norm")
    for parameter, error in measured.updates.items() if allowed.update else []:
        within(error, allowed.update, f"update of {parameter}")
    return measured


def within(error, tolerance, what):
    if not error <= tolerance:
        raise Differs(f"{what}: error {error:.1e}, tolerance {tolerance:.0e}")


def depth(layout):
    """The variant that has a layer for each chunk of the pipeline, and two to recompute as one."""
    return "deep" if layout.pp * (layout.vpp or 1) > 2 or " " in layout.recompute else ""


@pytest.mark.parametrize("role,layout", CI, ids=named)
def test_gradients_equal_float64(workers, references, record, role, layout):
    check(workers, references, record, role, layout, variant=depth(layout))


@pytest.mark.slow
@pytest.mark.parametrize(
    "role,layout", [x for x in ALL if x not in CI or not depth(x[1])], ids=named
)
def test_gradients_equal_float64_in_the_whole_cross(workers, references, record, role, layout):
    check(workers, references, record, role, layout, variant="deep")


def test_each_run_takes_every_layout_and_each_role_every_axis():
    def shapes(cases):
        return {x._replace(budget=PACKED, distributed=False, overlap=False) for _, x in cases}

    small = [(role, x) for role, x in ALL if x.world_size < 8 and x.recompute == "none"]
    assert set(CI) <= set(ALL) and shapes(CI) >= shapes(small)
    assert {x.recompute for _, x in CI} == {
        "none", "full", "selective", "block 1", "uniform 2",
    }  # fmt: skip
    for role in ("actor", "critic"):
        mine = [x for r, x in CI if r == role]
        assert {x.budget for x in mine} == {PACKED, SMALL, UNPACKED}
        assert {(x.distributed, x.overlap) for x in mine} == {
            (False, False),
            (False, True),
            (True, True),
        }
        assert any(x.tp == 4 for x in mine) and any(x.pp > 1 and x.vpp for x in mine)
        assert any(x.cp == 4 for x in mine)
        for one, other in (
            ("tp", "pp"), ("tp", "dp"), ("pp", "dp"), ("tp", "sp"), ("sp", "pp"),
            ("cp", "tp"), ("cp", "pp"), ("cp", "dp"), ("cp", "sp"),
        ):  # fmt: skip
            found = [x for x in mine if x.sp >= ("sp" in (one, other))]
            found = [x for x in found if all(getattr(x, a) > 1 for a in {one, other} - {"sp"})]
            assert found, f"no layout of the {role} has {one} and {other}"
        extra = {*LOSSES[role]} & {*ON_ONE_AXIS}
        mine = [x for x in mine if extra <= {*losses_of(role, x)}]
        assert all(any(getattr(x, axis) > 1 for x in mine) for axis in ("tp", "pp", "dp", "cp"))
        assert len({x.budget for x in mine}) > 1


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(tp=2, sp=True), Layout(pp=2, budget=SMALL), Layout(tp=2, pp=2)],
    ids=name,
)
def test_tied_embeddings(workers, references, record, layout):
    check(workers, references, record, "actor", layout, variant="tied")


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_other_observations_are_context_alone(workers, references, record, role):
    """The reference has the same ids, and no loss, count or average of it has observations."""
    before, after = (references.get(role, variant) for variant in ("", "other observations"))
    assert torch.equal(before[2].targets, after[2].targets)
    assert not torch.equal(before[2].tokens, after[2].tokens)
    outputs = [torch.load(file, weights_only=False).outputs for _, file, _ in (before, after)]
    moved = (outputs[0] != outputs[1]).view(len(outputs[0]), -1).any(-1)
    for i, response in enumerate(moved.split([length for _, length in LENGTHS])):
        seen = INSERTED[i][0][0] if i in INSERTED else len(response)
        assert not response[:seen].any() and response[seen:].all()
    for layout in (Layout(), Layout(tp=2, sp=True), Layout(cp=2, budget=SMALL)):
        check(workers, references, record, role, layout, variant="other observations")


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_key_value_head_for_each_head(workers, references, record, role):
    check(workers, references, record, role, Layout(tp=4, sp=True), variant="mha")


@pytest.mark.parametrize("role,layout", [*BFLOAT16, *slow(BFLOAT16_REST)], ids=named)
def test_bfloat16_with_float32_gradients(workers, references, record, role, layout):
    check(workers, references, record, role, layout, variant="bfloat16")


def test_correct_responses_are_rare_and_uneven(workers, references, record):
    # Some ranks and microbatches have none; the NLL is still divided by all correct tokens.
    measured = check(workers, references, record, "actor", Layout(dp=2, budget=SMALL))
    assert sorted(measured.num_correct) == [0, 2]
    assert len(measured.tokens[0]) > 2
    measured = check(workers, references, record, "actor", Layout(dp=4))
    assert sorted(measured.num_correct) == [0, 0, 1, 1]


@pytest.mark.parametrize("role", ["actor", pytest.param("critic", marks=pytest.mark.slow)])
def test_padding_and_empty_microbatches_change_nothing(workers, references, record, role):
    layout = Layout(tp=2, pp=2, vpp=2, sp=True, budget=SMALL)
    measured = check(workers, references, record, role, layout, variant="deep")
    assert any(tokens % 2 for tokens in measured.tokens[0]), "nothing had to be padded"
    layout = Layout(pp=2, vpp=2, budget=PACKED)
    measured = check(workers, references, record, role, layout, variant="deep")
    assert len(measured.tokens[0]) % 2, "no microbatch had to be added"
    layout = Layout(dp=2, overlap=True, budget=UNPACKED)
    measured = check(workers, references, record, role, layout)
    assert any(0 in rank for rank in measured.tokens), "no rank ran out of responses"


_CP_AND_DP = Layout(cp=2, dp=2, distributed=True, overlap=True, budget=SMALL)

# Role and layout in which each mistake shows, and what must differ there.
WHERE_IT_SHOWS = {
    "NLL over the microbatch's own count": ("actor", Layout(budget=SMALL), "loss 'positive NLL'"),
    "mean of microbatch means": ("critic", Layout(budget=SMALL), "loss 'value'"),
    "counts of one data-parallel rank": ("actor", Layout(dp=2), "loss 'policy'"),
    "places without observations": ("critic", Layout(), "output"),
    "one turn of each response": ("critic", Layout(), "advantages, GAE by turn"),
    "rewards of the last token alone": ("critic", Layout(), "advantages, GAE by token"),
    "whitened on one data-parallel rank": ("critic", Layout(dp=2), "advantages, GAE by token"),
    "V shifted by one token": ("critic", Layout(), "output"),
    "values scaled by the temperature": ("critic", Layout(), "output"),
    "unmarked sequence-parallel head": ("critic", Layout(tp=2, sp=True), "of score.weight"),
    "labels shifted after the split": ("actor", Layout(cp=2), "output"),
    "counts over context-parallel ranks": ("actor", _CP_AND_DP, "loss 'policy'"),
    "rotary positions of a contiguous cut": ("actor", Layout(cp=2), "output"),
    "gradients summed over half of the ranks": ("critic", Layout(cp=2), "gradient of"),
    "keys without other ranks' queries": ("critic", Layout(cp=2), "gradient of"),
    "the same loss counted by each rank": ("critic", Layout(cp=2), "gradient of"),
    "values in the ranks' order": ("critic", Layout(cp=2), "output"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_known_mistake_turns_the_matrix_red(workers, references, record, mutation):
    role, layout, where = WHERE_IT_SHOWS[mutation]
    check(workers, references, record, role, layout)
    with pytest.raises(Differs, match=where):
        check(workers, references, record, role, layout, mutation=mutation)
