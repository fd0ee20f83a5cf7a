"""State and time of the optimizer of matrices, Dion or Muon, on the rank that owns most.

Counted as parallel/matrix_optimizer.py keeps it, in bytes for each element: a momentum of 4 where
AdamW has 8, 4 for the float32 copy of a bfloat16 weight, and for Dion the basis, 4 r for each row
of the dimension that is cut.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from vapo_megatron.algorithm.update_size import NEWTON_SCHULZ, rank_of
from vapo_megatron.config import VapoConfig
from vapo_megatron.config.phases import Role
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.parallel.owners import Item, num_pieces, owners
from vapo_megatron.planning.cluster import Cluster
from vapo_megatron.weights.holders import TrainerLayout, shard_dim
from vapo_megatron.weights.table import Row


class Kind(NamedTuple):
    """What the state and the time depend on besides the layout."""

    method: str
    fraction: float
    main_bytes: int
    """Of the float32 copy: 4, or 0 where parameters are float32."""


def kind_of(config: VapoConfig, role: Role) -> Kind | None:
    """Return how a role's matrices are updated; None: as all else, by AdamW."""
    if role not in ("actor", "critic"):
        return None
    method = config.optimizer.method(role)
    if method == "adamw":
        return None
    main = 4 if config.model.dtype == "bfloat16" else 0
    return Kind(method, config.optimizer.matrix_rank_fraction, main)


def matrices_of(row: Row, shape: ModelShape) -> tuple[tuple[int, int], ...]:
    """Return (out, in) of the matrices in a parameter; see weights/matrices.py."""
    if not row.is_layer_matrix(shape):
        return ()
    return tuple((size[0], size[1]) for size in row.shapes(shape))


def state_bytes_of(row: Row, elements: int, shape: ModelShape, kind: Kind, tp_size: int) -> int:
    """Return the bytes of a parameter's state and float32 copy, on one tensor-parallel rank."""
    found, dim = matrices_of(row, shape), shard_dim(row.kind)
    if not found:
        return elements * (8 + kind.main_bytes)
    bases = 0
    if kind.method == "dion":
        bases = sum(size[dim or 0] * rank_of(size, kind.fraction) for size in found)
    return elements * (4 + kind.main_bytes) + 4 * bases // tp_size


def of_owners(
    parameters: Sequence[tuple[Row, int]], shape: ModelShape, kind: Kind, layout: TrainerLayout
) -> list[list[tuple[Row, int]]]:
    """Return what each of the ranks with the same parameters owns, of a vocabulary some rows.

    Args:
        parameters: rows and elements of a rank's, in the model's order.
        shape, kind: of the model and its optimizer.
        layout: of the trainer.
    """
    rows = layout.vocab_rows // layout.tp_size
    pieces = []
    for row, elements in parameters:
        count = num_pieces(rows, layout.dp_size) if row.kind == "vocabulary" else 1
        pieces += [(row, elements // count)] * count
    items = [Item(matrices_of(row, shape), elements) for row, elements in pieces]
    found: list[list[tuple[Row, int]]] = [[] for _ in range(layout.dp_size)]
    for one, owner in zip(
        pieces, owners(items, kind.method, kind.fraction, layout.dp_size), strict=True
    ):
        found[owner].append(one)
    return found


def most_state_bytes(
    parameters: Sequence[tuple[Row, int]], shape: ModelShape, kind: Kind, layout: TrainerLayout
) -> int:
    """Return the bytes of the rank that owns most; arguments as of_owners has them."""
    size = functools.partial(state_bytes_of, shape=shape, kind=kind, tp_size=layout.tp_size)
    return max(
        sum(size(row, elements) for row, elements in owned)
        for owned in of_owners(parameters, shape, kind, layout)
    )


def update_flops(row: Row, shape: ModelShape, kind: Kind, tp_size: int) -> float:
    """Return the FLOPs of an update of a parameter's matrices on one tensor-parallel rank.

    Of X [m, n] whose n columns are spread: with Dion M Q, M^T P, P R^T and P Q^T, and the QR of
    [m, r], which every rank makes (2 m r^2, and as many for the basis); with Muon five times a Gram
    matrix [m, m], its square and a product with X.
    """
    total = 0.0
    for size in matrices_of(row, shape):
        n = size[shard_dim(row.kind) or 0]
        m = size[0] * size[1] // n
        if kind.method == "dion":
            r = rank_of(size, kind.fraction)
            total += 8 * m * n * r / tp_size + 4 * m * r * r
        else:
            total += len(NEWTON_SCHULZ) * (4 * m * m * n / tp_size + 2 * m**3)
    return total


def update_seconds(
    parameters: Sequence[tuple[Row, int]],
    shape: ModelShape,
    kind: Kind,
    layout: TrainerLayout,
    cluster: Cluster,
) -> float:
    """Predict the updates of the matrices of the rank that owns most; products are in float32."""
    rate = cluster.rate("float32")
    return max(
        sum(update_flops(row, shape, kind, layout.tp_size) for row, _ in owned) / rate
        for owned in of_owners(parameters, shape, kind, layout)
    )


def layer_bytes(parameters: Sequence[tuple[Row, int]], shape: ModelShape) -> int:
    """Return the bytes of the matrices of a layer in float32, the largest of what is copied."""
    of_kinds = itertools.groupby(
        sorted((row.hf[0], elements) for row, elements in parameters if matrices_of(row, shape)),
        key=lambda one: one[0],
    )
    return 4 * sum(next(group)[1] for _, group in of_kinds)
