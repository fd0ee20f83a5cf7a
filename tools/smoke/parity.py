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
from vapo_megatron.config import VapoConfig
from vapo_megatron.config.phases import Role
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.parallel import groups
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.parallel.minibatches import MiniBatch, packed_multiple
from vapo_megatron.roles.actor import Actor
from vapo_megatron.roles.critic import Critic
from vapo_megatron.weights.gather import full_gradients

ROLES: tuple[Role, ...] = ("actor", "critic")
UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8}


class Numbers(NamedTuple):
    """What a role computes; float32, on the CPU."""

    outputs: Tensor
    """[T, 2] log-probabilities and entropies, or [T, 1] values."""
    gradients: dict[str, Tensor]
    """By HF name, of the role's loss."""

    @property
    def gradient_norm(self) -> float:
        """2-norm over all tensors."""
        norms = [gradient.double().norm() for gradient in self.gradients.values()]
        return float(torch.stack(norms).norm())


def reference(sizes: Sizes, directory: Path) -> list[Row]:
    """Write weights and what float32 makes of them, one response at a time."""
    found = {}
    for seed, role in enumerate(ROLES):
        write_random_hf(directory / role, sizes.parity_shape, role, seed)
        config = make_config("float32", hf_path=str(directory / role))
        found[role] = compute(sizes, role, config, packed=False, old=None)[0]
    torch.save({role: numbers._asdict() for role, numbers in found.items()}, _file(directory))
    return []


def parity(sizes: Sizes, directory: Path) -> list[Row]:
    """Compare this device's float32 and bfloat16, packed, with the reference."""
    exact_float32()
    rows = []
    for dtype in UNIT_ROUNDOFF:
        for role in ROLES:
            expected = load_reference(directory, role)
            config = make_config(dtype, hf_path=str(directory / role))
            old = expected.outputs[:, 0].clone()
            found, *_ = compute(sizes, role, config, packed=True, old=old)
            bound = rounding_bound(sizes.parity_shape, dtype)
            rows += compared("parity", f"{role} {dtype}", found, expected, bound)
    return rows


def load_reference(directory: Path, role: Role) -> Numbers:
    """Return what `reference` has computed."""
    return Numbers(**torch.load(_file(directory), weights_only=True)[role])


def compared(section: str, case: str, found: Numbers, expected: Numbers, bound: float) -> list[Row]:
    """Judge the outputs, and the gradient that differs most."""
    error = output_error(found.outputs, expected.outputs)
    worst, largest = worst_gradient(found, expected)
    return [
        judged(section, f"{case}, forward", "error", error, bound),
        judged(section, f"{case}, backward", f"{worst} error", largest, bound),
    ]


def worst_gradient(found: Numbers, expected: Numbers) -> tuple[str, float]:
    """Return the name of the parameter whose gradient differs most, and by how much."""
    errors = {
        name: relative(found.gradients[name], gradient)
        for name, gradient in expected.gradients.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    return worst, errors[worst]


def compute(
    sizes: Sizes,
    role: Role,
    config: VapoConfig,
    ranks: Ranks | None = None,
    *,
    packed: bool,
    old: Tensor | None,
) -> tuple[Numbers, Actor | Critic, MiniBatch]:
    """Run one role forward, and forward and backward, over the configuration's layout.

    Args:
        sizes: of the model and the responses.
        role: "actor" or "critic".
        config: model.hf_path has the weights.
        ranks: the process groups of its layout; None: they are built here.
        packed: this rank's responses in two forward passes if its layout is a pipeline, else in
            one; False: each in its own.
        old: old_logprobs [T] of all responses; None: those that are computed here.

    Returns:
        The numbers, whose outputs are those of this data-parallel rank's responses and whose
        gradients are of all; the model; and the mini-batch, whose old_logprobs or values are the
        model's own.
    """
    shape, lengths = sizes.parity_shape, sizes.parity_lengths
    model = build_role(role, shape, config, ranks)
    ranks = groups.current()
    first, count = share(len(lengths), ranks.dp_size, ranks.dp_rank)
    batch = random_batch(lengths, shape.vocab_size, seed=2)
    tokens = slice(int(batch.cu_seqlens[first]), int(batch.cu_seqlens[first + count]))
    batch = batch.narrow(first, count)
    passes = min(count, ranks.pp_size) if packed else count
    plan = [list(range(*bounds)) for bounds in cuts(count, passes)]
    multiple = packed_multiple(config.parallel, config.model.fp8)
    microbatches = whole_mini_batch(batch, plan, multiple).microbatches
    if isinstance(model, Actor):
        outputs = torch.stack(model.compute_logprobs(microbatches), -1)
        own = batch.replace(old_logprobs=outputs[:, 0].contiguous())
        batch = own if old is None else batch.replace(old_logprobs=old[tokens])
    else:
        outputs = model.compute_values(microbatches)[:, None]
        own = batch
    model.compute_gradients(whole_mini_batch(batch, plan, multiple))
    named = full_gradients(model.placed.chunks, shape, groups.current(), role)
    gradients = {name: gradient.float().cpu().clone() for name, gradient in named}
    return Numbers(outputs, gradients), model, whole_mini_batch(own, plan, multiple)


def cuts(count: int, parts: int) -> list[tuple[int, int]]:
    """Return the bounds of consecutive parts whose sizes differ by at most one."""
    bounds = [count * i // parts for i in range(parts + 1)]
    return list(zip(bounds, bounds[1:]))


def share(count: int, dp_size: int, dp_rank: int) -> tuple[int, int]:
    """Return (first, number) of a data-parallel rank's responses."""
    first, end = cuts(count, dp_size)[dp_rank]
    return first, end - first


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


def rounding_bound(shape: ModelShape, dtype: str, *, passes: int = 2) -> float:
    """Largest relative error that rounding explains; see the module's docstring.

    passes: 2, forward and backward; 1, forward alone.
    """
    if dtype == "float32":
        longest = max(shape.ffn_hidden_size, shape.hidden_size, shape.vocab_size)
        roundings = passes * (6 * shape.num_layers + 1) * longest
    else:
        roundings = passes * (12 * shape.num_layers + 1)
    return 2 * UNIT_ROUNDOFF[dtype] * math.sqrt(roundings)


def _file(directory: Path) -> Path:
    return directory / "reference.pt"
