"""Dion and Muon in layouts: three updates against float64, replicas, collectives, what is owned.

The reference has whole Hugging Face matrices on one process, and the gradients of the layout that
it is compared with, whose own exactness is tests/distributed's. Checkpoints are in
tests/run/checkpoint. Not exercised: a GPU.
"""

import collections

import pytest
import torch
import torch.distributed as dist

from tests.parallel.training import LEARNING_RATE, Layout, Trained, make_config
from tests.weights.tiny_hf import write_tiny_hf
from vapo_megatron.algorithm.dion import dion_step, muon_step
from vapo_megatron.algorithm.update_size import rank_of
from vapo_megatron.parallel import groups
from vapo_megatron.parallel.matrix_weights import Part, initial_basis
from vapo_megatron.parallel.optimizer import optimizer_step, set_learning_rate
from vapo_megatron.parallel.optimizer_state import state_tensors
from vapo_megatron.parallel.owners import Item, owners, share_out

SHAPE = {"hidden": 32, "heads": 4, "ffn": 48, "vocab": 60, "num_layers": 4}
FRACTION, MOMENTUM, DECAY, CLIP, FACTOR, SEED = 0.25, 0.9, 0.3, 0.05, 2.0, 5
HALVES = (((0, 1, 2),), ((3, 4, 5, 6),))
LAYOUTS = {
    "one": Layout(),
    "TP2": Layout(tp=2),
    "TP2 SP": Layout(tp=2, sp=True),
    "PP2": Layout(pp=2, split=(((0, 1, 2), (3, 4, 5, 6)),)),
    "VPP2": Layout(pp=2, vpp=2, split=(((0, 1, 2), (3, 4, 5, 6)),)),
    "DP2": Layout(dp=2, split=HALVES),
    "DP2 overlap": Layout(dp=2, overlap=True, split=HALVES),
    "TP2 DP2": Layout(tp=2, dp=2, split=HALVES),
    "CP2": Layout(cp=2),
}


CASES = [
    *((name, "dion", "actor", 2) for name in LAYOUTS),
    *((name, "muon", "actor", 2) for name in ("one", "TP2", "VPP2", "TP2 DP2", "CP2")),
    *((name, "dion", "critic", 2) for name in ("one", "TP2 DP2")),
    # Ranks without a part of the keys or the values.
    *(("TP2", method, "actor", 1) for method in ("dion", "muon")),
]
"""Layout, method, role, key-value heads."""


@pytest.fixture(scope="module")
def hf_paths(tmp_path_factory):
    path = tmp_path_factory.mktemp("matrices")
    return {n: str(write_tiny_hf(path / str(n), kv_heads=n, **SHAPE)) for n in (1, 2)}


def _config(layout, method, **optimizer):
    methods = {"actor_method": method, "critic_method": method}
    own = {
        "matrix_rank_fraction": FRACTION, "matrix_momentum": MOMENTUM, "weight_decay": DECAY,
        "actor_clip_grad": CLIP, "critic_clip_grad": CLIP, "matrix_rate_factor": FACTOR,
        "adam_eps": 1e-8,
    }  # fmt: skip
    config = make_config(layout, optimizer={**methods, **own, **optimizer})
    return config.model_copy(update={"seed": SEED})


class Counter:
    """Counts the collectives of an update, by kind and number of ranks."""

    def __enter__(self):
        self.found, self._kept = collections.Counter(), {}
        for name in ("all_reduce", "all_gather_into_tensor", "broadcast"):
            self._kept[name] = getattr(dist, name)
            setattr(dist, name, self._counting(name))
        return self

    def _counting(self, name):
        def call(*arguments, group=None, **options):
            self.found[name, dist.get_world_size(group)] += 1
            return self._kept[name](*arguments, group=group, **options)

        return call

    def __exit__(self, *_):
        for name, function in self._kept.items():
            setattr(dist, name, function)


def _updates(hf_path, layout, method, role):
    """Weights before and after each of three updates, their gradients, and what else is seen."""
    config = _config(layout, method)
    groups.initialize(config.parallel)
    trained = Trained(hf_path, layout, role, config)
    weights, gradients = [trained.full_tensors()], []
    for update in range(3):
        set_learning_rate(trained.optimizer, LEARNING_RATE * (update + 1))
        trained.forward_backward()
        gradients.append(trained.full_gradients())
        with Counter() as counter:
            optimizer_step(trained.optimizer)
        weights.append(trained.full_tensors())
    mine = [p.detach().clone() for chunk in trained.chunks for p in chunk.parameters()]
    return weights, gradients, counter.found, mine, owned_names(trained)


def owned_names(trained):
    pieces = trained.optimizer.owned
    return [(f"{p.weight.name} {p.index}", p.weight.layer, bool(p.weight.parts)) for p in pieces]


def is_matrix(name):
    return "proj.weight" in name


def expected(weights, gradients, method):
    """What three updates make of whole matrices, in float64."""
    found = {name: tensor.double().clone() for name, tensor in weights.items()}
    first = {n: t.clone() for n, t in found.items()}
    others = [n for n in found if not is_matrix(n)]
    copies = {n: found[n].requires_grad_() for n in others}
    decays = [n for n in others if copies[n].dim() > 1]
    optimizer = make_config(Layout()).optimizer
    adamw = torch.optim.AdamW(
        [
            {"params": [copies[n] for n in decays], "weight_decay": DECAY},
            {"params": [copies[n] for n in others if n not in decays], "weight_decay": 0.0},
        ],
        betas=(optimizer.adam_beta1, optimizer.adam_beta2), eps=1e-8,
    )  # fmt: skip
    momenta = {n: torch.zeros_like(t) for n, t in found.items() if is_matrix(n)}
    bases = {}
    for update, of_update in enumerate(gradients):
        given = {n: g.double() for n, g in of_update.items()}
        norm = torch.cat([g.flatten() for g in given.values()]).norm()
        assert norm > CLIP, "nothing would be clipped"
        given = {n: g * (CLIP / (norm + 1e-6)) for n, g in given.items()}
        rate = LEARNING_RATE * (update + 1)
        for name, momentum in momenta.items():
            shared = {
                "learning_rate": rate * FACTOR,
                "momentum_factor": MOMENTUM,
                "weight_decay": DECAY,
            }
            if method == "muon":
                muon_step(found[name], given[name], momentum, **shared)
                continue
            # The sharded dimension is the basis's: rows of o_proj's and down_proj's transpose.
            by_columns = "o_proj" in name or "down_proj" in name
            size = momentum.shape[1 if by_columns else 0]
            if name not in bases:
                part = Part(name, tuple(momentum.shape), (), (0, size))
                rank = rank_of(momentum.shape, FRACTION)
                bases[name] = initial_basis(part, rank, SEED).double()
            dion_step(
                found[name], given[name], momentum, bases[name], transposed=not by_columns, **shared
            )
        for group in adamw.param_groups:
            group["lr"] = rate
        for name, copy in copies.items():
            copy.grad = given[name]
        adamw.step()
    return {n: (t.detach(), (t.detach() - first[n]).abs().max()) for n, t in found.items()}


@pytest.mark.parametrize("name, method, role, kv_heads", CASES)
def test_three_updates_equal_float64(hf_paths, workers, name, method, role, kv_heads):
    layout = LAYOUTS[name]
    results = workers.run(layout.world_size, _updates, hf_paths[kv_heads], layout, method, role)
    weights, gradients = results[0][:2]
    reference = expected(weights[0], gradients, method)
    errors = {False: {}, True: {}}
    for n, tensor in weights[3].items():
        wanted, size = reference[n]
        errors[is_matrix(n)][n] = float((tensor.double() - wanted).abs().max() / size)
    largest = {matrix: max(of.values()) for matrix, of in errors.items()}
    print(f"{name} {method} {role}: {largest[True]:.1e} of an update, AdamW's {largest[False]:.1e}")
    assert len(errors[True]) == 7 * SHAPE["num_layers"]
    assert largest[True] < 1e-5, errors[True]
    # An embedding's elements are large beside an update, and float32 rounds them.
    assert largest[False] < 2e-5, errors[False]
    # Replicas have the same bits.
    for rank, result in enumerate(results):
        # Context-parallel ranks hold the same parameters, too.
        copies = layout.dp * layout.cp
        twin = rank % layout.tp + (rank // (layout.tp * copies)) * layout.tp * copies
        for own, other in zip(result[3], results[twin][3], strict=True):
            assert torch.equal(own, other)


def _not_finite(hf_path, method):
    """What an update with a gradient that is not finite changes of weights and state."""
    layout = LAYOUTS["one"]
    groups.initialize(_config(layout, method).parallel)
    trained = Trained(hf_path, layout, "actor", _config(layout, method))
    set_learning_rate(trained.optimizer, LEARNING_RATE)
    trained.forward_backward()
    optimizer_step(trained.optimizer)
    before = [t.clone() for t in state_tensors(trained.optimizer)]
    steps = trained.optimizer.optimizer.num_steps
    trained.forward_backward()
    trained.chunks[0].buffers[0].grad_data[7] = torch.inf
    norm = optimizer_step(trained.optimizer)
    after = state_tensors(trained.optimizer)
    same = all(map(torch.equal, before, after))
    trained.forward_backward()
    assert optimizer_step(trained.optimizer).isfinite()
    moved = not all(map(torch.equal, before, state_tensors(trained.optimizer)))
    return float(norm), same, moved, trained.optimizer.optimizer.num_steps - steps, len(before)


@pytest.mark.parametrize("method", ["dion", "muon"])
def test_a_gradient_that_is_not_finite_changes_nothing(hf_paths, workers, method):
    ((norm, same, moved, steps, count),) = workers.run(1, _not_finite, hf_paths[2], method)
    assert norm == float("inf") and same and moved and steps == 1
    assert count > 60


def test_collectives_are_those_of_layers(hf_paths, workers):
    """Matrices of a layer share theirs, and all that is gathered does."""
    for method, each in (("dion", 2), ("muon", 6)):
        results = workers.run(4, _updates, hf_paths[2], LAYOUTS["TP2 DP2"], method, "actor")
        for _, _, counted, _, owned in results:
            layers = {layer for _, layer, matrix in owned if matrix}
            assert counted["all_reduce", 2] == each * len(layers)
            assert counted["all_gather_into_tensor", 2] == 1
            assert counted["all_reduce", 4] == 1 and counted["broadcast", 2] == 0
    owned = [{name for name, *_ in result[4]} for result in results]
    assert owned[0] == owned[1] and owned[2] == owned[3] and not owned[0] & owned[2]


def test_owners_share_the_work():
    assert share_out([5.0, 1.0, 4.0, 2.0], [0.0, 0.0]) == [0, 0, 1, 1]
    # Who has something already gets less.
    loads = [6.0, 0.0]
    assert share_out([3.0, 3.0, 1.0], loads) == [1, 1, 0] and loads == [7.0, 6.0]


def test_matrices_go_by_work_and_the_rest_by_memory():
    """Work of (m + n) r: 60 and 24 of the matrices; then the embedding goes to who has less."""
    items = [Item((), 500), Item(((20, 10),), 200), Item(((8, 4),), 32), Item((), 10), Item((), 10)]
    assert owners(items, "dion", 0.2, 2) == [1, 0, 1, 0, 0]
    assert owners(items, "muon", 0.2, 1) == [0] * 5


def test_a_basis_is_that_of_the_name_and_the_seed():
    def draw(name, seed, *bounds):
        return initial_basis(Part(name, (600, 700), (), bounds), 3, seed)

    whole = draw("a", 1, 0, 600)
    assert whole.shape == (600, 3) and float(whole.std()) == pytest.approx(1, abs=0.1)
    for bounds in ((0, 300), (300, 600), (250, 260), (256, 512), (40, 40)):
        assert torch.equal(draw("a", 1, *bounds), whole[slice(*bounds)])
    assert not torch.equal(draw("b", 1, 0, 600), whole)
    assert not torch.equal(draw("a", 2, 0, 600), whole)
