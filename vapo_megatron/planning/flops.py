"""Model FLOPs of forward and backward passes, and model FLOPs utilization.

Counted are the matrix multiplications, with two FLOPs per multiply-add:

    layer       2 (H (q + 2 k) + q H + 3 H F)    per token; q = heads * d, k = key-value heads * d
    attention   4 q                              per layer and pair of a query and a key it attends
    output      2 V H (actor), 2 H (critic)      per position whose output is computed

Of a mixture of experts the router and the experts that a token is sent to count.

A causal sequence of l tokens has l (l + 1) / 2 pairs, and packed sequences do not attend to each
other. The backward pass has two multiplications for each one of the forward pass, so training
counts three times the forward pass. For a sequence of l tokens with every output computed that is

    6 * matrix parameters + 12 * layers * q * (l + 1) / 2    per token,

PaLM's count (arXiv 2204.02311, appendix B: 6 N + 12 L H Q T) with only the causal half of each
sequence's pairs, and without parameters outside matrix multiplications (embedding, norms, biases).
Model FLOPs utilization is PaLM's as well: recomputation does not count.

With adapters (model.lora) a frozen matrix has no gradient, so that its backward pass has one
multiplication for the forward pass's one; A and B, 2 r (inputs + outputs) a token, have two.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

from vapo_megatron.config.phases import Role
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.planning.adapters import linear_layers
from vapo_megatron.planning.parameters import Adapters
from vapo_megatron.weights.table import OUTPUT_LAYER, layer_rows, rows

BF16_PEAK_FLOPS = {
    "A100": 312e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "H20": 148e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "GB300": 2500e12,
}
"""Dense bfloat16 FLOP/s without sparsity, from NVIDIA's data sheets; SXM unless named. Blackwell's
sheets state sparse figures for a system: half of 36 PFLOP/s over the 8 GPUs of an HGX B200 or B300,
half of 360 over the 72 of a GB200 or GB300 NVL72. H20 as its sellers state it: NVIDIA has no public
data sheet."""


def forward_flops(
    shape: ModelShape,
    sequence_lengths: Sequence[int],
    *,
    role: Literal["actor", "critic"],
    num_outputs: int | None = None,
) -> int:
    """Count the FLOPs of a forward pass over packed sequences.

    Args:
        shape: the model.
        sequence_lengths: prompt + response tokens of each sequence.
        role: decides the output: vocabulary or value head.
        num_outputs: positions whose log-probability or value is computed, which for the trainer's
            actor are the response tokens. None: all positions.
    """
    outputs = sum(sequence_lengths) if num_outputs is None else num_outputs
    products = 2 * sum(_matrix_elements(shape)) * sum(sequence_lengths)
    attention = shape.num_layers * _attention_flops(shape, sequence_lengths)
    return products + attention + output_forward_flops(shape, outputs, role=role)


def training_flops(
    shape: ModelShape,
    sequence_lengths: Sequence[int],
    *,
    role: Literal["actor", "critic"],
    num_outputs: int | None = None,
    adapters: Adapters | None = None,
) -> int:
    """Count the FLOPs of a forward and backward pass; arguments as in forward_flops.

    Args:
        adapters: that are trained in place of all but a value head; None: all is trained.
    """
    every = 3 * forward_flops(shape, sequence_lengths, role=role, num_outputs=num_outputs)
    if adapters is None:
        return every
    tokens = sum(sequence_lengths)
    frozen = 2 * sum(_matrix_elements(shape)) * tokens
    if role == "actor":
        outputs = tokens if num_outputs is None else num_outputs
        frozen += output_forward_flops(shape, outputs, role=role)
    of_layer = 2 * sum(layer.products(1) for layer in linear_layers(shape, adapters, 1))
    added = shape.num_layers * of_layer * tokens
    return every - frozen + 3 * int(added)


def layer_forward_flops(shape: ModelShape, sequence_lengths: Sequence[int], layer: int = 0) -> int:
    """Count one transformer layer's FLOPs in a forward pass over packed sequences."""
    products = 2 * _matrix_elements(shape)[layer] * sum(sequence_lengths)
    return products + _attention_flops(shape, sequence_lengths)


@functools.lru_cache(maxsize=16)
def _matrix_elements(shape: ModelShape) -> list[int]:
    """Count the elements of each layer's matrices."""
    chosen = 0 if shape.experts is None else shape.experts.per_token
    return [
        sum(
            row.elements(shape)
            for row in layer_rows(shape, "actor", layer)
            # Experts are alike: the first ones stand for those that a token is sent to.
            if row.is_matrix(shape) and (row.expert is None or row.expert < chosen)
        )
        for layer in range(shape.num_layers)
    ]


def _attention_flops(shape: ModelShape, sequence_lengths: Sequence[int]) -> int:
    """Count one layer's products of queries with keys, and of their weights with values."""
    return 4 * shape.num_attention_heads * shape.head_dim * causal_pairs(sequence_lengths)


def output_forward_flops(shape: ModelShape, num_outputs: int, *, role: Role) -> int:
    """Count the FLOPs of the output projection or the value head at `num_outputs` positions."""
    (output,) = (row for row in rows(shape, role) if row.megatron == OUTPUT_LAYER)
    return 2 * output.elements(shape) * num_outputs


def causal_pairs(sequence_lengths: Sequence[int]) -> int:
    """Count the pairs of a query and a key at or before it in the same sequence."""
    return sum(length * (length + 1) // 2 for length in sequence_lengths)


def utilization(flops: float, seconds: float, peak_flops: float) -> float:
    """Return the model FLOPs utilization (MFU), flops / (seconds * peak_flops), in [0, 1].

    Args:
        flops: model FLOPs of all devices together.
        seconds: time they took.
        peak_flops: peak FLOP/s of all devices together.
    """
    return flops / (seconds * peak_flops)


def bf16_peak_flops(device_name: str) -> float | None:
    """Return a GPU's peak from BF16_PEAK_FLOPS; None for a GPU that is not in the table.

    Args:
        device_name: as returned by torch.cuda.get_device_name ("NVIDIA H100 80GB HBM3").
    """
    known = [name for name in BF16_PEAK_FLOPS if name in device_name]
    return BF16_PEAK_FLOPS[max(known, key=len)] if known else None
