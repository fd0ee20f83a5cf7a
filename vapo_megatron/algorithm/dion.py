"""Dion and Muon: updates of whole matrices, orthonormal instead of elementwise.

Both keep a momentum M of the gradients G and move a weight X [m, n] by a matrix whose singular
values are all alike, where Adam divides each element by its own size:

    Dion   M <- M + G                            basis Q [n, r] of the row space, r <= min(m, n)
           P  = an orthonormal basis of M Q      [m, r]
           R  = M^T P                            [n, r]
           M <- M - (1 - mu) P R^T               what the rank misses stays in M
           Q <- R, its columns divided by their norms
           X <- (1 - rate wd) X - rate f P Q^T
    Muon   M <- mu M + G
           X <- (1 - rate wd) X - rate f NS(M)   five iterations of Newton-Schulz

f is update_size.scale_factor. Columns may be spread over ranks, each with some of X, G and M and
the same rows of Q; the sums over all columns are then the caller's (`Sum`), one call for all
matrices of a list.

Sources: Dion, arXiv 2504.05295, algorithm 1. Muon, arXiv 2502.16982, which the scale "rms" is from
as well. That columns of R without content are left out is this package's: the published code
divides them by 1e-8, and what is noise then becomes an update of the same size as the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vapo_megatron.algorithm.update_size import NEWTON_SCHULZ, Scale, scale_factor

Sum = Callable[[list[Tensor]], None]
"""Adds tensors of the same shapes over all ranks with columns of the matrices, in place."""

LEAST_COLUMN = 1e-6
"""Norm of a column of R, as a share of the largest, below which it has no content."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A weight [m, n] with its gradient and state, or some of its columns; float32 or wider."""

    weight: Tensor
    gradient: Tensor
    momentum: Tensor
    basis: Tensor | None
    """Q [n, r]; None: for Muon."""
    factor: float
    """From scale_factor, of the whole matrix."""


def _on_one_rank(tensors: list[Tensor]) -> None:
    """Sum over one rank."""


def dion_update(
    matrices: Sequence[Matrix],
    *,
    learning_rate: float,
    momentum_factor: float = 0.95,
    weight_decay: float = 0.0,
    sum_columns: Sum = _on_one_rank,
) -> None:
    """Update weights, momenta and bases in place.

    Without momentum a weight only decays, and its basis stays.

    Args:
        matrices: with their bases.
        learning_rate: of this update.
        momentum_factor: mu.
        weight_decay: decoupled.
        sum_columns: see Sum; called twice.
    """
    bases = [one.basis for one in matrices if one.basis is not None]
    assert len(bases) == len(matrices), "Dion needs a basis for each matrix"
    for one in matrices:
        one.momentum.add_(one.gradient)
    products = [one.momentum @ basis for one, basis in zip(matrices, bases)]
    sum_columns(products)
    lefts = [torch.linalg.qr(product).Q for product in products]
    rights = [one.momentum.T @ left for one, left in zip(matrices, lefts)]
    squares = [right.square().sum(0) for right in rights]
    sum_columns(squares)
    for one, basis, left, right, square in zip(matrices, bases, lefts, rights, squares):
        norms = square.sqrt()
        has_content = norms > LEAST_COLUMN * norms.max()
        one.momentum.addmm_(left, right.T, alpha=momentum_factor - 1)
        basis.copy_(torch.where(has_content, right / norms.where(has_content, 1.0), basis))
        one.weight.mul_(1 - learning_rate * weight_decay)
        one.weight.addmm_(left * has_content, basis.T, alpha=-learning_rate * one.factor)


def muon_update(
    matrices: Sequence[Matrix],
    *,
    learning_rate: float,
    momentum_factor: float = 0.95,
    weight_decay: float = 0.0,
    sum_columns: Sum = _on_one_rank,
) -> None:
    """Update weights and momenta in place.

    Args:
        matrices: their bases are not used.
        learning_rate, momentum_factor, weight_decay: as dion_update has them.
        sum_columns: see Sum; called once, and once in each iteration, with [m, m] of each matrix.
    """
    for one in matrices:
        one.momentum.mul_(momentum_factor).add_(one.gradient)
    updates = newton_schulz([one.momentum for one in matrices], sum_columns)
    for one, update in zip(matrices, updates):
        one.weight.mul_(1 - learning_rate * weight_decay)
        one.weight.add_(update, alpha=-learning_rate * one.factor)


def newton_schulz(matrices: Sequence[Tensor], sum_columns: Sum = _on_one_rank) -> list[Tensor]:
    """Bring all singular values of each [m, n] near 1 (between .68 and 1.13); 0 stays 0.

    Args:
        matrices: or some of their columns.
        sum_columns: see muon_update.
    """
    squares = [matrix.square().sum() for matrix in matrices]
    sum_columns(squares)
    found = [
        matrix / square.sqrt().clamp(min=torch.finfo(matrix.dtype).tiny)
        for matrix, square in zip(matrices, squares)
    ]
    for a, b, c in NEWTON_SCHULZ:
        grams = [matrix @ matrix.T for matrix in found]
        sum_columns(grams)
        found = [
            torch.addmm(matrix, b * gram + c * gram @ gram, matrix, beta=a)
            for matrix, gram in zip(found, grams)
        ]
    return found


def dion_step(
    weight: Tensor,
    gradient: Tensor,
    momentum: Tensor,
    basis: Tensor,
    *,
    learning_rate: float,
    momentum_factor: float = 0.95,
    weight_decay: float = 0.0,
    scale: Scale = "rms",
    transposed: bool = False,
) -> None:
    """Make Dion's update of one whole matrix; see dion_update.

    Args:
        weight: [out, in] as Hugging Face has it; updated in place, as momentum and basis are.
        gradient: [out, in], summed over the batch.
        momentum: [out, in].
        basis: [in, r]; with transposed [out, r].
        learning_rate, momentum_factor, weight_decay: see dion_update.
        scale: see scale_factor.
        transposed: the update is that of the transposed matrix.
    """
    factor = scale_factor(weight.shape, basis.shape[1], scale)
    x, g, m = (each.T if transposed else each for each in (weight, gradient, momentum))
    dion_update(
        [Matrix(x, g, m, basis, factor)], learning_rate=learning_rate,
        momentum_factor=momentum_factor, weight_decay=weight_decay,
    )  # fmt: skip


def muon_step(
    weight: Tensor,
    gradient: Tensor,
    momentum: Tensor,
    *,
    learning_rate: float,
    momentum_factor: float = 0.95,
    weight_decay: float = 0.0,
    scale: Scale = "rms",
) -> None:
    """Make Muon's update of one whole matrix [out, in]; arguments as dion_step has them."""
    factor = scale_factor(weight.shape, min(weight.shape), scale)
    muon_update(
        [Matrix(weight, gradient, momentum, None, factor)], learning_rate=learning_rate,
        momentum_factor=momentum_factor, weight_decay=weight_decay,
    )  # fmt: skip
