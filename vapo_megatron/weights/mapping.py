"""The name table: every direction (HF -> Megatron, Megatron -> HF, sync into vLLM) reads it.

A row says which HF tensors make one Megatron parameter, how (see layout.py) and for which models.
Megatron names come in two versions: Transformer Engine fuses each layer norm into the projection
after it. `{}` stands for the layer: numbered within the model chunk in Megatron names, within the
whole model in HF names.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vapo_megatron.config.phases import VALUE_ROLES
from vapo_megatron.weights.layout import Kind

if TYPE_CHECKING:
    from vapo_megatron.models.hf_config import ModelShape

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
VALUE_HEAD = "score.weight"
VALUE_HEAD_BIAS = "score.bias"
"""Not in the table, because it is no parameter but a constant (models/value_head.py)."""

Shapes = tuple[tuple[int, ...], ...]


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
    is_copy: bool = False
    """A second copy of an HF tensor that another row owns: loaded, never exported."""

    @property
    def is_in_layer(self) -> bool:
        """Does every layer have it? Then `{}` in its names stands for the layer's number."""
        return "{}" in self.hf[0]


def _q(s: ModelShape) -> int:
    return s.num_attention_heads * s.head_dim


def _kv(s: ModelShape) -> int:
    return s.num_key_value_heads * s.head_dim


def _norm(s: ModelShape) -> Shapes:
    return ((s.hidden_size,),)


def _vocabulary(s: ModelShape) -> Shapes:
    return ((s.vocab_size, s.hidden_size),)


_LAYER = "decoder.layers.{}."
_HF_LAYER = "model.layers.{}."

TABLE: tuple[Row, ...] = (
    Row(("embedding.word_embeddings.weight",), (EMBEDDING,), "vocabulary", _vocabulary),
    Row((_LAYER + "input_layernorm.weight", _LAYER + "self_attention.linear_qkv.layer_norm_weight"),
        (_HF_LAYER + "input_layernorm.weight",), "replicated", _norm),
    Row((_LAYER + "self_attention.linear_qkv.weight",),
        tuple(_HF_LAYER + f"self_attn.{x}_proj.weight" for x in "qkv"), "qkv",
        lambda s: ((_q(s), s.hidden_size), (_kv(s), s.hidden_size), (_kv(s), s.hidden_size))),
    Row((_LAYER + "self_attention.linear_qkv.bias",),
        tuple(_HF_LAYER + f"self_attn.{x}_proj.bias" for x in "qkv"), "qkv",
        lambda s: ((_q(s),), (_kv(s),), (_kv(s),)), when=lambda s, role: s.qkv_bias),
    Row((_LAYER + "self_attention.q_layernorm.weight",),
        (_HF_LAYER + "self_attn.q_norm.weight",), "replicated",
        lambda s: ((s.head_dim,),), when=lambda s, role: s.qk_norm),
    Row((_LAYER + "self_attention.k_layernorm.weight",),
        (_HF_LAYER + "self_attn.k_norm.weight",), "replicated",
        lambda s: ((s.head_dim,),), when=lambda s, role: s.qk_norm),
    Row((_LAYER + "self_attention.linear_proj.weight",),
        (_HF_LAYER + "self_attn.o_proj.weight",), "row", lambda s: ((s.hidden_size, _q(s)),)),
    Row((_LAYER + "pre_mlp_layernorm.weight", _LAYER + "mlp.linear_fc1.layer_norm_weight"),
        (_HF_LAYER + "post_attention_layernorm.weight",), "replicated", _norm),
    Row((_LAYER + "mlp.linear_fc1.weight",),
        (_HF_LAYER + "mlp.gate_proj.weight", _HF_LAYER + "mlp.up_proj.weight"), "gate_up",
        lambda s: ((s.ffn_hidden_size, s.hidden_size),) * 2),
    Row((_LAYER + "mlp.linear_fc2.weight",),
        (_HF_LAYER + "mlp.down_proj.weight",), "row",
        lambda s: ((s.hidden_size, s.ffn_hidden_size),)),
    Row(("decoder.final_layernorm.weight",), ("model.norm.weight",), "replicated", _norm),
    Row(("output_layer.weight",), (OUTPUT,), "vocabulary", _vocabulary,
        when=lambda s, role: role == "actor" and not s.tied),
    Row(("output_layer.weight",), (EMBEDDING,), "vocabulary", _vocabulary,
        when=lambda s, role: role == "actor" and s.tied, is_copy=True),
    Row(("output_layer.weight",), (VALUE_HEAD,), "replicated", lambda s: ((1, s.hidden_size),),
        when=lambda s, role: role in VALUE_ROLES),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LocalParameter:
    """A parameter of this rank, with its row of the table."""

    name: str
    """Within its model chunk."""
    data: Tensor
    """The model's own storage; bfloat16 where the optimizer keeps float32 main parameters."""
    row: Row
    hf_names: tuple[str, ...]
    """With the layer's number in the whole model."""


def rows(shape: ModelShape, role: str) -> list[Row]:
    """Return the table's rows for one model."""
    return [row for row in TABLE if row.when(shape, role)]


def rows_in_order(shape: ModelShape, role: str) -> list[tuple[Row, int | None]]:
    """Return (row, layer) in the order of the model's layers, without copies.

    The layer is None outside the layers.
    """
    own = [row for row in rows(shape, role) if not row.is_copy]
    first, *last = ((row, None) for row in own if not row.is_in_layer)
    in_layers = [row for row in own if row.is_in_layer]
    layers = [(row, layer) for layer in range(shape.num_layers) for row in in_layers]
    return [first, *layers, *last]


def hf_tensors(shape: ModelShape, role: str) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every HF tensor of the model, in the order of its layers."""
    return {
        name.format(layer): size
        for row, layer in rows_in_order(shape, role)
        for name, size in zip(row.hf, row.shapes(shape), strict=True)
    }


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """Return the GPTModel inside DDP and mixed-precision wrappers."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


def wait_for_parameters(chunks: Sequence[torch.nn.Module]) -> None:
    """Gather the updated parameters that overlap_param_gather leaves to the next forward pass.

    Collective over data-parallel ranks; does nothing to chunks without DDP.
    """
    for chunk in chunks:
        settings = getattr(chunk, "ddp_config", None)
        if settings is not None and settings.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)  # type: ignore[operator]


def local_parameters(
    chunks: Sequence[torch.nn.Module], shape: ModelShape, role: str
) -> list[LocalParameter]:
    """Match every parameter of this rank's model chunks with its row, in the model's order.

    Layers are numbered by the model (`layer_number`, from 1), so that any pipeline layout works.
    """
    by_name = {name: row for row in rows(shape, role) for name in row.megatron}
    found = []
    for chunk in map(unwrap, chunks):
        for name, parameter in chunk.named_parameters():
            match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
            layer, key = 0, name
            if match:
                layer = chunk.decoder.layers[int(match[1])].layer_number - 1  # type: ignore
                key = _LAYER + match[2]
            row = by_name.get(key)
            assert row is not None, f"parameter {name} of the {role} is not in the name table"
            hf_names = tuple(n.format(layer) for n in row.hf)
            found.append(LocalParameter(name, parameter.data, row, hf_names))
    return found
