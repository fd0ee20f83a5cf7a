"""Mixtures of experts on megatron-core: what is configured, and what they need without a GPU.

A router scores all experts in float32 and takes the best few of each token; tokens travel to the
ranks that hold their experts and back (all-to-all over the "ep" axis of parallel/groups.py). A loss
is a sum over the whole mini-batch, so nothing may depend on the forward pass that a token is in:
the auxiliary losses and the bias updates that balance the experts' load do, and are off; also
because they move the router for reasons of their own, after which the sampler's routes differ.
"""

from __future__ import annotations

import vapo_megatron.parallel  # noqa: F401  prepares megatron-core for this machine

# isort: split
from typing import Any

import torch

from vapo_megatron.config import ParallelConfig
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.parallel import backend


def experts_config(
    shape: ModelShape, parallel: ParallelConfig, *, on_gpu: bool, transformer_engine: bool
) -> dict[str, Any]:
    """Return megatron-core's fields for a model's experts; none for a dense model."""
    experts = shape.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        # The softmax over all experts, not over the chosen ones; the same if those add up to 1.
        "moe_router_pre_softmax": not experts.normalized,
        "moe_layer_freq": [int(layer in experts.layers) for layer in range(shape.num_layers)],
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "moe_grouped_gemm": transformer_engine,
        "moe_permute_fusion": on_gpu and transformer_engine,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": 1,
    }


def mark_experts(chunk: torch.nn.Module) -> None:
    """Have DDP and the optimizer reduce experts' gradients over the ranks that hold the same ones.

    megatron-core marks them where EP > 1 alone. Without it tensor-parallel ranks hold the same
    experts, too, and give them different tokens.
    """
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]


def prepare_experts() -> None:
    """Let megatron-core's mixtures of experts run where there is no Transformer Engine, or no GPU.

    Its router asks for a function that is not defined without Transformer Engine (0.16). On a GPU
    it copies the numbers of tokens to the host as numpy arrays, which the collectives take for
    split sizes; without one it would leave them tensors.
    """
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if backend.device().type == "cpu":
        token_dispatcher.maybe_move_tensor_to_cpu = _on_cpu


def _on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
