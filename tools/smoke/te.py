"""Section of tools/gpu_smoke.py: Transformer Engine's layers against the package's local ones.

Its attention of packed sequences against the same numbers written out in float64, as in
attention.py; then log-probabilities, values, gradients and one update of both roles in bfloat16,
through Transformer Engine and through model.layer_spec=local, from the same files. Each of the two
may be off by what rounding explains, so that they may differ by its square root of two.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tools.smoke import attention
from tools.smoke.models import make_config, start_groups
from tools.smoke.parity import ROLES, Numbers, compared, compute, rounding_bound
from tools.smoke.report import Row, judged, skipped
from tools.smoke.sizes import AttentionCase, Sizes
from vapo_megatron.config.phases import Role
from vapo_megatron.models.build import transformer_config
from vapo_megatron.models.known import known_shape

Layer = Callable[..., Any]


def transformer_engine(sizes: Sizes, directory: Path) -> list[Row]:
    """Compare attention and updates, or say why there is nothing to compare."""
    if importlib.util.find_spec("transformer_engine") is None:
        return [skipped("te", "transformer-engine is not installed; install the extra `gpu`")]
    if not torch.cuda.is_available():
        return [skipped("te", "transformer-engine needs a GPU")]
    rows = [packed_attention(case, attention_layer(case)) for case in sizes.attention]
    return rows + updates(sizes, directory, "transformer_engine", "local")


def packed_attention(case: AttentionCase, layer: Layer) -> Row:
    """Judge a layer's output and gradients, in bfloat16."""
    return attention.compared("te", "packed attention", case, "bfloat16", layer)


def attention_layer(case: AttentionCase) -> Layer:
    """Return Transformer Engine's attention as a model's layers call it."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    config = make_config("bfloat16", layer_spec="transformer_engine")
    start_groups(config)
    shape = dataclasses.replace(
        known_shape("Qwen2.5-0.5B"), num_attention_heads=case.heads,
        num_key_value_heads=case.groups, head_dim=case.head_dim,
    )  # fmt: skip
    layer = TEDotProductAttention(
        transformer_config(shape, config.model, config.parallel), 1, AttnMaskType.causal, "self"
    )

    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **packed: Any) -> Any:
        return layer(query, key, value, None, AttnMaskType.causal, **packed).flatten(1)

    return forward


def updates(sizes: Sizes, directory: Path, spec: str, base: str) -> list[Row]:
    """Compare both roles under one layer specification with another."""
    rows = []
    bound = math.sqrt(2) * rounding_bound(sizes.parity_shape, "bfloat16")
    for role in ROLES:
        expected, expected_norm, _ = _updated(sizes, directory, role, base)
        found, norm, optimizer = _updated(sizes, directory, role, spec, like=expected)
        rows += compared("te", f"{role}, {spec} against {base}", found, expected, bound)
        error = abs(norm / expected_norm - 1)
        rows.append(judged("te", f"{role}, update by {optimizer}", "norm, error", error, bound))
    return rows


def _updated(
    sizes: Sizes, directory: Path, role: Role, spec: str, like: Numbers | None = None
) -> tuple[Numbers, float, str]:
    """Return the numbers, an update's gradient norm, and the class of the optimizer.

    `like` has the old_logprobs of the loss whose gradient is compared; None: its own.
    """
    config = make_config("bfloat16", hf_path=str(directory / role), layer_spec=spec)
    old = None if like is None else like.outputs[:, 0].clone()
    numbers, model, mini_batch = compute(sizes, role, config, packed=True, old=old)
    norm = model.update([mini_batch])[f"{role}/grad_norm"]
    optimizer: Any = model.placed.optimizer
    inner = getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer
    return numbers, norm, f"{type(inner).__module__.split('.')[0]}'s {type(inner).__name__}"
