"""What the adapters of a layer take, by models/adapters.py: tensors, FLOPs, traffic, messages.

For each linear layer with adapters, on one tensor-parallel rank and for each token: `inputs` and
`outputs` are the widths of its A and B, r is the rank, and P r the columns of what is between them,
for P pairs (3 of q, k and v, 2 of gate and up).

    saved for the backward pass   the input, which the frozen layer itself does not save; P r, of
                                  the whole microbatch beside a weight that is cut by rows, of a
                                  sequence-parallel part beside one that is cut by columns
    at one time, forward          3 outputs: what the layer returns, what B returns, and both joined
    FLOPs                         2 P r inputs + 2 r (rows of targets), forward; twice backward
    memory traffic                inputs + 6 outputs forward: read, written by B, joined, added;
                                  4 inputs + 2 outputs backward: two gradients of an input, added
    messages                      P r, gathered or summed over tensor-parallel ranks

Once a layer, not for each token: a copy of its A, joined, and where a weight's rows take turns (q,
k and v of several key-value heads) a copy of B.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vapo_megatron.config import VapoConfig
from vapo_megatron.config.phases import Role
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.planning.parameters import Adapters, adapters_of, rows_of
from vapo_megatron.weights.adapter_table import target_of


class AdaptedLinear(NamedTuple):
    """A linear layer with adapters, as one tensor-parallel rank holds it; widths in elements."""

    name: str
    """linear_qkv, linear_proj, linear_fc1 or linear_fc2."""
    rank: int
    pairs: int
    inputs: int
    outputs: int
    """Of the whole weight, of which some matrices may be no targets."""
    target_outputs: int
    by_columns: bool
    copies_b: bool

    @property
    def narrow(self) -> int:
        """P r."""
        return self.pairs * self.rank

    @property
    def copied(self) -> int:
        """Elements of the copies of A and B that its backward pass needs."""
        return self.narrow * self.inputs + self.copies_b * self.rank * self.outputs

    def products(self, parts: int) -> float:
        """Elements of A and B that a token is multiplied with, on average.

        Args:
            parts: sequence-parallel ranks, each of which applies to its own tokens the one that is
                the same on all of them; 1: all tokens are on each rank.
        """
        own_a, own_b = self._shares(parts)
        return self.narrow * self.inputs * own_a + self.rank * self.target_outputs * own_b

    def traffic(self, parts: int, *, forward: float, backward: float) -> float:
        """Elements that pass through memory for a token in so many passes; parts: see products."""
        own_a, own_b = self._shares(parts)
        inputs, outputs = self.inputs * own_a, self.outputs * own_b
        return forward * (inputs + 6 * outputs) + backward * (4 * inputs + 2 * outputs)

    def _shares(self, parts: int) -> tuple[float, float]:
        return (1.0, 1 / parts) if self.by_columns else (1 / parts, 1.0)


def adapted_layers(
    shape: ModelShape, config: VapoConfig, role: Role
) -> tuple[AdaptedLinear, ...] | None:
    """Return a layer's linear layers with adapters, on one rank; None: the role trains all."""
    adapters = adapters_of(shape, config, role)
    if adapters is None:
        return None
    return linear_layers(shape, adapters, config.parallel.tensor_model_parallel_size)


def linear_layers(shape: ModelShape, adapters: Adapters, tp_size: int) -> tuple[AdaptedLinear, ...]:
    """Return a layer's linear layers with these adapters, cut over tensor-parallel ranks."""
    found, inputs = [], []
    for row in rows_of(shape, adapters):
        module, _, matrix = row.megatron[0].partition("_adapter.")
        if matrix != "B":
            inputs.append((row.shapes(shape)[0][1], row.kind == "row"))
            continue
        width, by_columns = inputs[0]
        outputs = [size[0] for size in row.shapes(shape)]
        names = map(target_of, row.hf)
        used = [n for n, name in zip(outputs, names, strict=True) if name in adapters.targets]
        part = 1 if by_columns else tp_size
        found.append(
            AdaptedLinear(
                module.rpartition(".")[2], adapters.rank, len(inputs),
                inputs=width // tp_size if by_columns else width,
                outputs=sum(outputs) // part, target_outputs=sum(used) // part,
                by_columns=by_columns,
                copies_b=row.kind == "qkv" and shape.num_key_value_heads > tp_size,
            )
        )  # fmt: skip
        inputs = []
    return tuple(found)


def named(layers: Sequence[AdaptedLinear], name: str) -> AdaptedLinear | None:
    """Return the one of this name, if it has adapters."""
    return next((layer for layer in layers if layer.name == name), None)
