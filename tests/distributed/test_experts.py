"""A mixture of experts computes what the float64 reference does, wherever its experts are.

The reference and what is compared are those of test_matrix.py. In it no token's choice of experts
is close to a tie (conftest.py), so every layout must choose the same.
"""

import itertools

import pytest
import torch

from tests.distributed import float64
from tests.distributed import measure as measuring
from tests.distributed.cases import DISTRIBUTED, named, slow
from tests.distributed.measure import SMALL, UNPACKED, Layout
from tests.distributed.problem import ACTOR_LOSSES, SEQUENCES
from tests.distributed.test_matrix import TOLERANCES, Differs, check

LAYOUTS = (
    ("actor", Layout(dp=2, ep=2, budget=SMALL)),
    ("actor", Layout(tp=2, sp=True)),
    ("critic", Layout(tp=2, sp=True, ep=2)),
    ("critic", Layout(cp=2, ep=2, **DISTRIBUTED, budget=SMALL)),
    ("critic", Layout(pp=2, vpp=2, dp=2, ep=2, **DISTRIBUTED)),
)
MORE = (
    ("actor", Layout(dp=2, ep=2, recompute="full", budget=SMALL)),
    ("critic", Layout(dp=4, ep=2, **DISTRIBUTED)),
    ("actor", Layout(tp=2, sp=True, dp=2, ep=4, overlap=True)),
    ("actor", Layout(pp=2, dp=2, ep=2, budget=SMALL)),
    ("actor", Layout()),
    ("critic", Layout(budget=SMALL)),
    ("critic", Layout(dp=2, budget=SMALL)),
    ("critic", Layout(dp=2, ep=2, **DISTRIBUTED)),
    ("actor", Layout(tp=2, sp=True, ep=2, budget=UNPACKED)),
    ("actor", Layout(cp=2, ep=2)),
    ("actor", Layout(dp=4, ep=4, budget=SMALL)),
    ("critic", Layout(tp=2, sp=True, dp=2, ep=4, overlap=True)),
    ("actor", Layout(tp=2, sp=True, dp=2, ep=2, **DISTRIBUTED, budget=SMALL)),
    ("critic", Layout(tp=2, sp=True, pp=2, ep=2)),
    ("critic", Layout(tp=2, sp=True, ep=2, recompute="selective")),
    ("actor", Layout(cp=2, tp=2, sp=True, ep=4, budget=SMALL)),
    ("critic", Layout(tp=2, sp=True, pp=2, vpp=2, ep=2, recompute="block 1")),
)
SOME = (
    ("actor", Layout(dp=2, ep=2)),
    ("critic", Layout(tp=2, sp=True, ep=2)),
    ("critic", Layout(pp=2, vpp=2)),
)


@pytest.mark.parametrize("role,layout", [*LAYOUTS, *slow(MORE)], ids=named)
def test_gradients_equal_float64(workers, references, record, role, layout):
    check(workers, references, record, role, layout, variant="experts")


@pytest.mark.parametrize("role,layout", [*SOME[:1], *slow(SOME[1:])], ids=named)
def test_dense_layers_between(workers, references, record, role, layout):
    check(workers, references, record, role, layout, variant="some experts")


@pytest.mark.parametrize(
    ("mutation", "layout", "where"),
    [
        ("experts of dense ranks", Layout(tp=2, sp=True), "gradient of .*experts"),
        ("weights of the chosen", Layout(), "output"),
    ],
)
def test_a_known_mistake_turns_it_red(workers, references, record, mutation, layout, where):
    with pytest.raises(Differs, match=where):
        check(
            workers, references, record, "actor", layout, variant="some experts", mutation=mutation
        )


# Router replay

REPLAYED = (
    Layout(tp=2, sp=True, ep=2, budget=SMALL),
    Layout(pp=2, vpp=2, budget=SMALL, recompute="block 1"),
)
MORE_REPLAYED = (
    Layout(budget=SMALL),
    Layout(dp=2, ep=2, budget=SMALL),
    Layout(cp=2, ep=2, budget=SMALL),
    Layout(pp=2, dp=2, ep=2, budget=SMALL),
    Layout(pp=2, vpp=2, budget=SMALL),
    Layout(dp=2, ep=2, budget=SMALL, recompute="full"),
    Layout(tp=2, sp=True, pp=2, ep=2, budget=SMALL, recompute="uniform 2"),
)
SMOOTH = "entropy"
"""A loss without clips: the replayed model is far from the problem's old log-probabilities."""


def replayed(hf_path, file, problem, layout, replay):
    """Errors of the gradients after all routers were turned round, and the share of other routes;
    a worker's function.

    r3 replays the reference's own, as the sampler's; but for each sequence's last token, which a
    sampler does not read.
    """
    from vapo_megatron.data.rollout import UNKNOWN_ROUTE
    from vapo_megatron.models.hf_config import read_model_shape
    from vapo_megatron.models.partition import microbatch_options
    from vapo_megatron.parallel import groups
    from vapo_megatron.roles.actor import Actor

    config = measuring.make_config(layout, hf_path, {"router_replay": replay})
    here = groups.initialize(config.parallel)
    mine = measuring._plan(layout)[here.dp_rank]
    actor = Actor(read_model_shape(hf_path), config, here, hf_path)
    if replay != "r3":
        measuring._outputs(actor, "actor", problem, mine, here)
    with torch.no_grad():
        for chunk in actor.placed.model:
            for name, parameter in chunk.named_parameters():
                if ".router." in name:
                    parameter.neg_()
    routes, outputs, expected = torch.load(file, weights_only=False)
    error = 0.0
    if replay == "r3":
        of_sequences = routes[actor.replay.layers].split(SEQUENCES, 1)
        own = torch.cat([of_sequences[p].clone() for m in mine for p in m], 1)
        ends = torch.tensor([SEQUENCES[p] for m in mine for p in m]).cumsum(0) - 1
        own[:, ends] = UNKNOWN_ROUTE
        batch = measuring.select(problem.batch(), [p for m in mine for p in m])
        actor.replay.hold(
            own, measuring._microbatches(batch, mine, config, here),
            parts=layout.tp, part=here.tp_rank,
            **microbatch_options(config.model, config.parallel, here),
        )  # fmt: skip
        found = measuring._outputs(actor, "actor", problem, mine, here)
        error = float((found - outputs[measuring._rows(mine)]).abs().max()) if mine else 0.0
    loss, found = measuring._gradients(
        actor, "actor", problem, mine, here, ACTOR_LOSSES[SMOOTH]
    )  # fmt: skip
    other, held = None, 0
    if actor.replay is not None:
        other = actor.replay.take_other_fraction()
        held = sum(routes.nbytes for routes in actor.replay._held.values())
    errors = measuring._compared(found, expected.gradients)
    return {**errors, "outputs": error}, loss - expected.loss, other, held


@pytest.fixture(scope="module")
def turned_round(references, tmp_path_factory):
    """(model, file of the expected gradients, problem) with routers turned round and replayed."""
    path, _, problem = references.get("actor", "experts")
    file = tmp_path_factory.mktemp("replayed") / "expected.pt"
    torch.save(tuple(float64.replayed(path, problem, SMOOTH)), file)
    return path, str(file), problem


@pytest.mark.parametrize(
    ("layout", "replay"),
    [
        *zip(REPLAYED, ("r3", "r2"), strict=True),
        *slow(zip(REPLAYED, ("r2", "r3"), strict=True)),
        *slow(itertools.product(MORE_REPLAYED, ("r2", "r3"))),
    ],
    ids=named,
)
def test_routes_are_replayed_where_their_tokens_are(workers, turned_round, layout, replay):
    arguments = (*turned_round, layout, replay)
    found = workers.run(layout.world_size, replayed, *arguments)
    for errors, loss, other, _ in found:
        assert max(errors.values()) < TOLERANCES["float32"].gradient
        assert abs(loss) < 1e-5
        # The chance that two of eight experts are best either way round is nil.
        assert other > 0.99
    # A byte for each of a token's two experts in four layers; some ranks pad their last tokens.
    whole = 4 * 2 * sum(SEQUENCES)
    held = sum(held for *_, held in found)
    assert held == whole if layout.tp == layout.cp == layout.dp == 1 else held < 1.1 * whole


def test_without_replay_the_router_chooses_anew(workers, turned_round):
    ((errors, _, other, _),) = workers.run(1, replayed, *turned_round, Layout(budget=SMALL), "off")
    assert max(errors.values()) > 0.1 and other is None
