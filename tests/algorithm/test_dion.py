"""Dion's and Muon's update of a matrix against numbers of another program, and spread columns.

matrix_updates.json is from float64 numpy, which agrees with the published code of Dion to 1.5e-7,
and has the coefficients of Muon's. Not exercised: which weights are matrices, and their shards
(tests/parallel/test_matrix_optimizer.py).
"""

import json
import threading
from pathlib import Path

import pytest
import torch

from vapo_megatron.algorithm.dion import (
    Matrix,
    dion_step,
    dion_update,
    muon_step,
    muon_update,
    newton_schulz,
)
from vapo_megatron.algorithm.update_size import rank_of, scale_factor

KNOWN = json.loads((Path(__file__).parent / "matrix_updates.json").read_text())


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def close(found, expected):
    return torch.allclose(found, tensor(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", KNOWN["dion"])
def test_dion_by_known_steps(name):
    case = KNOWN["dion"][name]
    weight, basis = tensor(case["X0"]), tensor(case["Q0"])
    momentum = torch.zeros_like(weight)
    for step in case["steps"]:
        dion_step(
            weight, tensor(step["G"]), momentum, basis, learning_rate=case["lr"],
            momentum_factor=case["mu"], weight_decay=case["weight_decay"], scale=case["scale"],
            transposed=case["transposed"],
        )  # fmt: skip
        assert close(weight, step["X"]) and close(momentum, step["M"])


def test_what_the_rank_misses_stays_in_the_momentum():
    gradient = torch.diag(tensor([2.0, 1.0]))
    weight, momentum = torch.zeros_like(gradient), torch.zeros_like(gradient)
    dion_step(
        weight, gradient, momentum, tensor([[1.0], [0.0]]), learning_rate=1.0, scale="spectral"
    )
    assert close(weight, [[-1, 0], [0, 0]]) and close(momentum, [[2 * 0.95, 0], [0, 1]])


def test_without_a_gradient_a_weight_only_decays():
    case = KNOWN["zero_gradient"]
    weight, basis = tensor(case["X0"]), tensor(case["Q0"])
    momentum = torch.zeros_like(weight)
    dion_step(
        weight, torch.zeros_like(weight), momentum, basis, learning_rate=case["lr"],
        weight_decay=case["weight_decay"],
    )  # fmt: skip
    assert close(weight, case["X"]) and close(momentum, case["M"]) and close(basis, case["Q"])
    before = weight.clone()
    muon_step(weight, torch.zeros_like(weight), torch.zeros_like(weight), learning_rate=1.0)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6])
def test_directions_without_content_give_no_update(size, dtype):
    case = KNOWN["rank_deficient"]
    gradient, basis = (size * tensor(case["G"])).to(dtype), tensor(case["Q0"]).to(dtype)
    weight = torch.zeros_like(gradient)
    dion_step(weight, gradient, torch.zeros_like(weight), basis, learning_rate=1.0)
    factor = scale_factor((3, 2), 2, "rms")
    assert close(-weight.double() / factor, case["update_wanted"])
    assert basis[:, 1].tolist() == [0.0, 1.0]


def test_ranks_and_scales():
    for case in KNOWN["ranks"]:
        assert rank_of(case["shape"], case["fraction"]) == case["rank"]
    # .1 * 30 is 3.0000000000000004 to a computer.
    assert rank_of((30, 40), 0.1) == 3 and rank_of((31, 40), 0.1) == 4 and rank_of((2, 2), 0.1) == 1
    for case in KNOWN["scale_factors"]:
        for scale in ("rms", "spectral"):
            found = scale_factor(case["shape"], case["rank"], scale)
            assert found == pytest.approx(case[scale], rel=1e-12)
        full = scale_factor(case["shape"], min(case["shape"]), "rms")
        assert full == pytest.approx(case["moonlight"], rel=1e-12)


def test_newton_schulz_by_known_numbers():
    gradient = tensor(KNOWN["newton_schulz"]["G"])
    (found,) = newton_schulz([gradient])
    assert close(found, KNOWN["newton_schulz"]["result"])
    # Rows and columns are alike to it.
    (turned,) = newton_schulz([gradient.T])
    assert close(turned.T, KNOWN["newton_schulz"]["result"])


def test_muon_adds_up_momentum_and_decays():
    first, second = tensor(KNOWN["newton_schulz"]["G"]), torch.eye(3, 4, dtype=torch.float64)
    weight, momentum = torch.ones_like(first), torch.zeros_like(first)
    expected = torch.ones_like(first)
    kept = torch.zeros_like(first)
    for gradient in (first, second):
        muon_step(
            weight, gradient, momentum, learning_rate=0.1, momentum_factor=0.9, weight_decay=0.5
        )
        kept = 0.9 * kept + gradient
        expected = 0.95 * expected - 0.1 * 0.2 * 2.0 * newton_schulz([kept])[0]
    assert close(weight, expected.tolist()) and close(momentum, kept.tolist())


class Sums:
    """Adds tensors up over threads, each in the part of a rank."""

    def __init__(self, size):
        self.barrier, self.lists, self.size, self.calls = threading.Barrier(size), {}, size, 0

    def of(self, rank):
        def add(tensors):
            self.lists[rank] = [t.clone() for t in tensors]
            self.barrier.wait(20)
            for own, *parts in zip(tensors, *(self.lists[r] for r in range(self.size))):
                own.copy_(sum(parts))
            self.calls += rank == 0
            self.barrier.wait(20)

        return add


@pytest.mark.parametrize("update, calls", [(dion_update, 2), (muon_update, 6)])
def test_columns_of_ranks_make_the_whole_update(update, calls):
    """Ranks with 3, 0 and 2 of 5 columns, two matrices at once."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    whole = [Matrix(draw(4, 5), draw(4, 5), draw(4, 5), draw(5, rank), 0.7) for rank in (2, 3)]
    cuts = ((0, 3), (3, 3), (3, 5))
    parts = [
        [
            Matrix(*(t[:, a:b].clone() for t in one[:3]), one[3][a:b].clone(), one[4])
            for one in ((m.weight, m.gradient, m.momentum, m.basis, m.factor) for m in whole)
        ]
        for a, b in cuts
    ]
    sums, given = Sums(len(cuts)), {"learning_rate": 0.3, "weight_decay": 0.1}
    threads = [
        threading.Thread(target=update, args=[mine], kwargs={**given, "sum_columns": sums.of(rank)})
        for rank, mine in enumerate(parts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    update(whole, **given)
    assert sums.calls == calls
    for index, one in enumerate(whole):
        for name, dim in (("weight", 1), ("momentum", 1), ("basis", 0)):
            found = torch.cat([getattr(mine[index], name) for mine in parts], dim)
            assert torch.allclose(found, getattr(one, name), rtol=0, atol=1e-12), name
