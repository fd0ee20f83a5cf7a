"""Sections of tools/gpu_smoke.py: actor and critic against the CPU's numbers.

The reference is computed on the CPU in float32, one response in each forward pass; what is compared
with it sees all responses packed into one. Both read the same weights from the same files.

Bounds come from rounding. A number passes through n roundings, each with a relative error of at
most the unit roundoff u and a sign of its own, so that they add up to u sqrt(n); twice that is
allowed, for the reference rounds too, and differences (residuals, the softmax's backward) lose
digits.
  float32   u = 2^-24. Rounded is every partial sum: the products in a row (six in a layer and the
            output, forward and backward) times the longest sum's terms. Sums of TF32 products
            (u = 2^-11) would be far outside.
  bfloat16  u = 2^-8 (8 bits of which one is implied). Sums are float32, and what is rounded is each
            operation's result: twelve in a layer (two norms, query-key-value product, rotation,
            probabilities, their product, output, gate and up, activation, down, two residuals) and
            the output, forward and backward.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tools.smoke.models import (
    build_role,
    exact_float32,
    make_config,
    random_batch,
    whole_mini_batch,
    write_random_hf,
)
from tools.smoke.report import Row, judged
from tools.smoke.sizes import Sizes
from vapo_megatron.models.build import Role
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.parallel import groups
from vapo_megatron.roles.actor import Actor
from vapo_megatron.weights.gather import full_gradients

ROLES: tuple[Role, ...] = ("actor", "critic")
UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8}


class Numbers(NamedTuple):
    """What a role computes; float32, on the CPU."""

    outputs: Tensor
    """[T, 2] log-probabilities and entropies, or [T, 1] values."""
    gradients: dict[str, Tensor]
    """By HF name, of the role's loss."""


def reference(sizes: Sizes, directory: Path) -> list[Row]:
    """Write weights and what float32 makes of them, one response at a time."""
    found = {}
    for seed, role in enumerate(ROLES):
        write_random_hf(directory / role, sizes.parity_shape, role, seed)
        found[role] = compute(sizes, directory, role, "float32", packed=False, old=None)
    torch.save({role: numbers._asdict() for role, numbers in found.items()}, _file(directory))
    return []


def parity(sizes: Sizes, directory: Path) -> list[Row]:
    """Compare this device's float32 and bfloat16, packed, with the reference."""
    exact_float32()
    saved = torch.load(_file(directory), weights_only=True)
    rows = []
    for dtype in UNIT_ROUNDOFF:
        bound = rounding_bound(sizes.parity_shape, dtype)
        for role in ROLES:
            expected = Numbers(**saved[role])
            found = compute(
                sizes, directory, role, dtype, packed=True, old=expected.outputs[:, 0].clone()
            )
            error = output_error(found.outputs, expected.outputs)
            rows.append(judged("parity", f"{role} {dtype}, forward", "error", error, bound))
            errors = {
                name: relative(found.gradients[name], gradient)
                for name, gradient in expected.gradients.items()
            }
            worst = max(errors, key=lambda name: errors[name])
            what = f"{worst} error"
            rows.append(judged("parity", f"{role} {dtype}, backward", what, errors[worst], bound))
    return rows


def compute(
    sizes: Sizes, directory: Path, role: Role, dtype: str, *, packed: bool, old: Tensor | None
) -> Numbers:
    """Run one role forward, and forward and backward.

    Args:
        sizes, directory: of the weights.
        role: "actor" or "critic".
        dtype: of parameters and activations.
        packed: all responses in one forward pass; else each in its own.
        old: old_logprobs [T]; None: those that are computed here.
    """
    shape, lengths = sizes.parity_shape, sizes.parity_lengths
    model = build_role(role, shape, make_config(dtype, hf_path=str(directory / role)))
    batch = random_batch(lengths, shape.vocab_size, seed=2)
    plan = [list(range(len(lengths)))] if packed else [[i] for i in range(len(lengths))]
    microbatches = whole_mini_batch(batch, plan).microbatches
    if isinstance(model, Actor):
        outputs = torch.stack(model.compute_logprobs(microbatches), -1)
        batch = batch.replace(old_logprobs=outputs[:, 0] if old is None else old)
    else:
        outputs = model.compute_values(microbatches)[:, None]
    model.compute_gradients(whole_mini_batch(batch, plan))
    named = full_gradients(model.trained.chunks, shape, groups.current(), role)
    return Numbers(outputs, {name: gradient.float().cpu().clone() for name, gradient in named})


def relative(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected| in 2-norms."""
    difference = found.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


def output_error(found: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference [T, n] over the first column's standard deviation.

    Its mean, -log V for log-probabilities, would hide errors.
    """
    difference = (found.double() - expected.double()).square().mean().sqrt()
    return float(difference / expected[:, 0].double().std())


def rounding_bound(shape: ModelShape, dtype: str) -> float:
    """Largest relative error that rounding explains; see the module's docstring."""
    if dtype == "float32":
        longest = max(shape.ffn_hidden_size, shape.hidden_size, shape.vocab_size)
        roundings = 2 * (6 * shape.num_layers + 1) * longest
    else:
        roundings = 2 * (12 * shape.num_layers + 1)
    return 2 * UNIT_ROUNDOFF[dtype] * math.sqrt(roundings)


def _file(directory: Path) -> Path:
    return directory / "reference.pt"
