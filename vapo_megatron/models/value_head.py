"""The critic's output: one float32 value per token, the same on every tensor-parallel rank."""

from __future__ import annotations

import vapo_megatron.parallel  # noqa: F401  prepares megatron-core for this machine

# isort: split
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class ValueHead(torch.nn.Linear):
    """V(s) = w . h(s) + b, computed in float32. Replaces GPTModel's output projection.

    b exists only for a reward model that has one (set_bias): a float32 constant, saved and exported
    but not trained.

    The weight has the model's dtype, because megatron-core's checkpoints cannot hold a float32
    parameter of a bfloat16 model; its main copy in the optimizer is float32, as all others.

    Every tensor-parallel rank holds the same weight [1, H]. Without sequence parallelism each sees
    all of h and computes the same gradient. With it each sees its part of the sequence: the values
    are gathered forward and each rank keeps its part of their gradient backward, so the weight's
    gradient is partial; its attribute `sequence_parallel` tells megatron-core to sum it over the
    group.

    Args:
        config: of the model that it belongs to.
        init_std: standard deviation of the initial weights; 0 starts at V = 0.
        seed: of the initial weights, the same on every rank.
    """

    def __init__(self, config: TransformerConfig, init_std: float = 0.0, seed: int = 0) -> None:
        super().__init__(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
        self.sequence_parallel = config.sequence_parallel
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        with torch.no_grad():
            draw = torch.randn(
                self.weight.shape, generator=torch.Generator().manual_seed(seed), device="cpu"
            )
            self.weight.copy_(init_std * draw)

    def set_bias(self, bias: Tensor) -> None:
        """Add this constant [1] to every value from now on."""
        self._parameters.pop("bias", None)
        self.register_buffer("bias", bias.to(device=self.weight.device, dtype=torch.float32))

    def forward(  # type: ignore[override]
        self, input_: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        """Take hidden states [S_local, 1, H]; return float32 values [S, 1, 1] and no bias."""
        values = torch.nn.functional.linear(input_.float(), self.weight.float(), self.bias)
        if self.sequence_parallel:
            values = tensor_parallel.gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False
            )
        return values, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Describe the weight to megatron-core's checkpoints: the same on all of tp_group."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets)


def values_of(output: Tensor) -> Tensor:
    """The critic's output on the last stage -> float32 [S], the same on all of tp_group."""
    return output.reshape(-1)
