"""The name table: every direction (HF -> Megatron, Megatron -> HF, sync into vLLM) reads it.

A row says which HF tensors make one Megatron parameter, how (see layout.py), for which models, in
which layers, and who holds it (see holders.py). Megatron names come in two versions: Transformer
Engine fuses each layer norm into the projection after it. `{}` stands for the layer: numbered
within the model chunk in Megatron names, within the whole model in HF names. Each expert has rows
of its own, in which it is numbered within the whole layer; a rank numbers those that it holds from
0 (shift_expert).

Imports no torch, so that planning counts from it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection
from typing import Any, Literal

from vapo_megatron.config.phases import VALUE_ROLES
from vapo_megatron.models.hf_config import ModelShape

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
VALUE_HEAD = "score.weight"
VALUE_HEAD_BIAS = "score.bias"
"""Not in the table, because it is no parameter but a constant (models/value_head.py)."""

OUTPUT_LAYER = ("output_layer.weight",)
"""Megatron's name of the output projection and of a value head."""

Shapes = tuple[tuple[int, ...], ...]
Kind = Literal["vocabulary", "qkv", "gate_up", "row", "replicated"]
Holder = Literal["dense", "expert"]
"""A key of holders.HOLDERS."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    megatron: tuple[str, ...]
    """Parameter names, one for each layer implementation."""
    hf: tuple[str, ...]
    kind: Kind
    shapes: Callable[[ModelShape], Shapes]
    """Shapes of the full HF tensors."""
    when: Callable[[ModelShape, str], bool] = lambda shape, role: True
    """Which models have it."""
    layers: Callable[[ModelShape], Collection[int]] = lambda shape: range(shape.num_layers)
    """Which layers have it, numbered from 0, if its names have `{}`."""
    holder: Holder = "dense"
    expert: int | None = None
    """Which expert's, numbered from 0 in its layer."""
    is_copy: bool = False
    """A second copy of an HF tensor that another row owns: loaded, never exported."""

    @property
    def is_attention(self) -> bool:
        """Is it of attention, which a norm before it is not?"""
        return ".self_attention." in self.megatron[0]

    @property
    def is_router(self) -> bool:
        """Does it choose experts?"""
        return ".router." in self.megatron[0]

    def is_matrix(self, shape: ModelShape) -> bool:
        """Has it two dimensions, so that inputs are multiplied with it?"""
        return len(self.shapes(shape)[0]) == 2

    def is_layer_matrix(self, shape: ModelShape) -> bool:
        """Is it one or more matrices of a layer, as Dion, Muon and FP8 take them?

        Not a router's, whose rows are scores of experts and which stays with AdamW.
        """
        return self.is_in_layer and self.is_matrix(shape) and self.kind != "replicated"

    def elements(self, shape: ModelShape) -> int:
        """Count the elements of its full HF tensors, in one layer."""
        return sum(map(math.prod, self.shapes(shape)))

    def count(self, shape: ModelShape) -> int:
        """Count how often a model has it: in each of its layers, or once outside them."""
        return len(self.layers(shape)) if self.is_in_layer else 1

    @property
    def is_in_layer(self) -> bool:
        """Do layers have it? Then `{}` in its names stands for the layer's number."""
        return "{}" in self.hf[0]


def _q(s: ModelShape) -> int:
    return s.num_attention_heads * s.head_dim


def _kv(s: ModelShape) -> int:
    return s.num_key_value_heads * s.head_dim


def _norm(s: ModelShape) -> Shapes:
    return ((s.hidden_size,),)


def _vocabulary(s: ModelShape) -> Shapes:
    return ((s.vocab_size, s.hidden_size),)


def _has_dense_layers(s: ModelShape, role: str) -> bool:
    return len(s.dense_layers) > 0


def _has_experts(s: ModelShape, role: str) -> bool:
    return s.experts is not None


def _dense_layers(s: ModelShape) -> Collection[int]:
    return s.dense_layers


def _expert_layers(s: ModelShape) -> Collection[int]:
    return s.expert_layers


def _router(s: ModelShape) -> Shapes:
    assert s.experts is not None
    return ((s.experts.count, s.hidden_size),)


def _expert_gate_up(s: ModelShape) -> Shapes:
    assert s.experts is not None
    return ((s.experts.ffn_hidden_size, s.hidden_size),) * 2


def _expert_down(s: ModelShape) -> Shapes:
    assert s.experts is not None
    return ((s.hidden_size, s.experts.ffn_hidden_size),)


LAYER = "decoder.layers.{}."
_HF_LAYER = "model.layers.{}."

TABLE: tuple[Row, ...] = (
    Row(("embedding.word_embeddings.weight",), (EMBEDDING,), "vocabulary", _vocabulary),
    Row((LAYER + "input_layernorm.weight", LAYER + "self_attention.linear_qkv.layer_norm_weight"),
        (_HF_LAYER + "input_layernorm.weight",), "replicated", _norm),
    Row((LAYER + "self_attention.linear_qkv.weight",),
        tuple(_HF_LAYER + f"self_attn.{x}_proj.weight" for x in "qkv"), "qkv",
        lambda s: ((_q(s), s.hidden_size), (_kv(s), s.hidden_size), (_kv(s), s.hidden_size))),
    Row((LAYER + "self_attention.linear_qkv.bias",),
        tuple(_HF_LAYER + f"self_attn.{x}_proj.bias" for x in "qkv"), "qkv",
        lambda s: ((_q(s),), (_kv(s),), (_kv(s),)), when=lambda s, role: s.qkv_bias),
    Row((LAYER + "self_attention.q_layernorm.weight",),
        (_HF_LAYER + "self_attn.q_norm.weight",), "replicated",
        lambda s: ((s.head_dim,),), when=lambda s, role: s.qk_norm),
    Row((LAYER + "self_attention.k_layernorm.weight",),
        (_HF_LAYER + "self_attn.k_norm.weight",), "replicated",
        lambda s: ((s.head_dim,),), when=lambda s, role: s.qk_norm),
    Row((LAYER + "self_attention.linear_proj.weight",),
        (_HF_LAYER + "self_attn.o_proj.weight",), "row", lambda s: ((s.hidden_size, _q(s)),)),
    Row((LAYER + "pre_mlp_layernorm.weight", LAYER + "mlp.linear_fc1.layer_norm_weight"),
        (_HF_LAYER + "post_attention_layernorm.weight",), "replicated", _norm,
        when=_has_dense_layers, layers=_dense_layers),
    # Before experts it is never fused.
    Row((LAYER + "pre_mlp_layernorm.weight",),
        (_HF_LAYER + "post_attention_layernorm.weight",), "replicated", _norm,
        when=_has_experts, layers=_expert_layers),
    Row((LAYER + "mlp.linear_fc1.weight",),
        (_HF_LAYER + "mlp.gate_proj.weight", _HF_LAYER + "mlp.up_proj.weight"), "gate_up",
        lambda s: ((s.ffn_hidden_size, s.hidden_size),) * 2,
        when=_has_dense_layers, layers=_dense_layers),
    Row((LAYER + "mlp.linear_fc2.weight",),
        (_HF_LAYER + "mlp.down_proj.weight",), "row",
        lambda s: ((s.hidden_size, s.ffn_hidden_size),),
        when=_has_dense_layers, layers=_dense_layers),
    Row((LAYER + "mlp.router.weight",), (_HF_LAYER + "mlp.gate.weight",), "replicated", _router,
        when=_has_experts, layers=_expert_layers),
    Row(("decoder.final_layernorm.weight",), ("model.norm.weight",), "replicated", _norm),
    Row(OUTPUT_LAYER, (OUTPUT,), "vocabulary", _vocabulary,
        when=lambda s, role: role not in VALUE_ROLES and not s.tied),
    Row(OUTPUT_LAYER, (EMBEDDING,), "vocabulary", _vocabulary,
        when=lambda s, role: role not in VALUE_ROLES and s.tied, is_copy=True),
    Row(OUTPUT_LAYER, (VALUE_HEAD,), "replicated", lambda s: ((1, s.hidden_size),),
        when=lambda s, role: role in VALUE_ROLES),
)  # fmt: skip


@functools.cache
def _expert_rows(expert: int) -> tuple[Row, Row]:
    """Return the rows of one expert; Transformer Engine's layers hold several in one module."""
    local, hf = f"mlp.experts.local_experts.{expert}.", _HF_LAYER + f"mlp.experts.{expert}."
    fused = LAYER + "mlp.experts.linear_{}.weight" + str(expert)
    where: Any = {"layers": _expert_layers, "holder": "expert", "expert": expert}
    return (
        Row((LAYER + local + "linear_fc1.weight", fused.replace("linear_{}", "linear_fc1")),
            (hf + "gate_proj.weight", hf + "up_proj.weight"), "gate_up", _expert_gate_up, **where),
        Row((LAYER + local + "linear_fc2.weight", fused.replace("linear_{}", "linear_fc2")),
            (hf + "down_proj.weight",), "row", _expert_down, **where),
    )  # fmt: skip


_EXPERT = re.compile(r"(\.experts\.(?:local_experts\.|linear_fc[12]\.weight)?)(\d+)")


def shift_expert(name: str, by: int) -> str:
    """Add to the expert's number in a Megatron or HF name, which may have none."""
    return _EXPERT.sub(lambda found: f"{found[1]}{int(found[2]) + by}", name)


def rows(shape: ModelShape, role: str) -> list[Row]:
    """Return the table's rows for one model, those of its experts last."""
    count = 0 if shape.experts is None else shape.experts.count
    found = [row for row in TABLE if row.when(shape, role)]
    return found + [row for expert in range(count) for row in _expert_rows(expert)]


def layer_rows(shape: ModelShape, role: str, layer: int) -> tuple[Row, ...]:
    """Return the rows of one layer, numbered from 0 in the whole model."""
    return tuple(r for r in rows(shape, role) if r.is_in_layer and layer in r.layers(shape))


def rows_in_order(shape: ModelShape, role: str) -> list[tuple[Row, int | None]]:
    """Return (row, layer) in the order of the model's layers, without copies.

    The layer is None outside the layers.
    """
    first, *last = ((r, None) for r in rows(shape, role) if not r.is_in_layer and not r.is_copy)
    layers = [(r, n) for n in range(shape.num_layers) for r in layer_rows(shape, role, n)]
    return [first, *layers, *last]


def hf_tensors(shape: ModelShape, role: str) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every HF tensor of the model, in the order of its layers."""
    return {
        name.format(layer): size
        for row, layer in rows_in_order(shape, role)
        for name, size in zip(row.hf, row.shapes(shape), strict=True)
    }


def parameter_count(shape: ModelShape, *, value_head: bool = False) -> int:
    """Count parameters as transformers does: a tied output projection once, no padding.

    With value_head, count a critic, which has H value weights in place of the output projection.
    """
    own = [row for row in rows(shape, "critic" if value_head else "actor") if not row.is_copy]
    return sum(row.elements(shape) * row.count(shape) for row in own)
