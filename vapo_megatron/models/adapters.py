"""Adapters (LoRA) beside megatron-core's parallel linear layers.

A linear layer y = W x becomes y = W x + alpha / r B A x, with a pair A [r, in], B [out, r] for each
Hugging Face matrix in W (LoRA, arXiv 2106.09685, equation 3). What is sent between tensor-parallel
ranks has r columns for each pair:

    W cut by rows (qkv, gate and up)   A is the same on every rank, B is cut as W is
    W cut by columns (o, down)         A is cut as W is; A x is summed over ranks; B is the same

With sequence parallelism each rank applies the matrix that is the same on all to its own part of
the sequence, so that its gradient is partial, and `sequence_parallel` has megatron-core sum it.
"""

from __future__ import annotations

import vapo_megatron.parallel  # noqa: F401  prepares megatron-core for this machine

# isort: split
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.functional import linear, rms_norm


class Pairs(NamedTuple):
    """The matrices of a linear layer's weight, as this rank holds it."""

    targets: Sequence[str]
    """q_proj, k_proj, v_proj; gate_proj, up_proj; or one."""
    num_rows: Sequence[int]
    """Of each on this rank."""
    num_groups: int
    """The rows of all of them take turns so often."""
    by_columns: bool
    """Is the weight cut by columns?"""


class Adapter(torch.nn.Module):
    """The adapters of one linear layer.

    Args:
        weight: of that layer, this rank's part [out, in].
        pairs: its matrices.
        initial: A of each that has an adapter, by its name, float32 [r, in of this rank].
        factor: alpha / r.
        sequence_parallel: of the model.
    """

    def __init__(
        self,
        weight: Tensor,
        pairs: Pairs,
        initial: dict[str, Tensor],
        factor: float,
        *,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        assert sum(pairs.num_rows) == weight.shape[0], f"{pairs} are not {list(weight.shape)}"
        self.pairs, self.factor, self._sequence_parallel = pairs, factor, sequence_parallel
        self.rank = next(iter(initial.values())).shape[0]
        self.A = torch.nn.ParameterDict(
            {name: torch.nn.Parameter(first.to(weight)) for name, first in initial.items()}
        )
        self.B = torch.nn.Parameter(weight.new_zeros(weight.shape[0], self.rank))
        cut = list(self.A.values()) if pairs.by_columns else [self.B]
        whole = [self.B] if pairs.by_columns else list(self.A.values())
        for parameter in cut:
            dim = int(pairs.by_columns)
            set_tensor_model_parallel_attributes(parameter, True, dim, 1)
        for parameter in whole:
            parameter.sequence_parallel = sequence_parallel  # type: ignore

    def forward(self, inputs: Tensor) -> Tensor:
        """Return alpha / r B A x [..., out], as the linear layer returns W x.

        Args:
            inputs: [..., in], as the linear layer gets them.
        """
        narrow = linear(inputs, torch.cat(list(self.A.values()))) * self.factor
        if self.pairs.by_columns and self._sequence_parallel:
            narrow = reduce_scatter_to_sequence_parallel_region(narrow)
        elif self.pairs.by_columns:
            narrow = reduce_from_tensor_model_parallel_region(narrow)
        elif self._sequence_parallel:
            narrow = gather_from_sequence_parallel_region(narrow)
        else:
            narrow = copy_to_tensor_model_parallel_region(narrow)
        of_target = dict(zip(self.A, narrow.split(self.rank, -1), strict=True))
        groups = self.pairs.num_groups
        outputs = []
        for target, own in zip(self.pairs.targets, self._turns(self.B), strict=True):
            rows = own.flatten(0, 1)
            if target in of_target:
                product = linear(of_target[target], rows)
            else:
                product = narrow.new_zeros(*narrow.shape[:-1], len(rows))
            outputs.append(product.unflatten(-1, (groups, len(rows) // groups)))
        return torch.cat(outputs, -1).flatten(-2)

    def _turns(self, matrix: Tensor) -> Sequence[Tensor]:
        """Return views [groups, rows, ...] of each target's rows of [out, ...]."""
        groups = self.pairs.num_groups
        sizes = [count // groups for count in self.pairs.num_rows]
        return matrix.unflatten(0, (groups, sum(sizes))).split(sizes, 1)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return W + alpha / r B A of this rank [out, in], added in float32, in the type of W."""
        total = weight.to(torch.float32, copy=True)
        turns = zip(self.pairs.targets, self._turns(total), self._turns(self.B), strict=True)
        for target, view, rows in turns:
            if target in self.A:
                view += rows.float() @ self.A[target].float() * self.factor
        return total.to(weight.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Describe the parameters to megatron-core's checkpoints, cut as the layer's weight is."""
        by_columns = self.pairs.by_columns
        state = self.state_dict(prefix="", keep_vars=True)
        axes = {name: 1 for name in state if name != "B"} if by_columns else {"B": 0}
        found = make_sharded_tensors_for_checkpoint(state, prefix, axes, sharded_offsets)
        if len(self.pairs.targets) == 2:
            # This rank's gate rows, then its up rows: megatron-core's gated MLP keeps them so.
            key = f"{prefix}B"
            found[key] = apply_swiglu_sharded_factory(found[key], sharded_offsets)
        return found


def attach(parent: torch.nn.Module, name: str, adapter: Adapter) -> None:
    """Have the linear layer `name` of a module add what its adapter returns."""
    layer = parent.get_submodule(name)
    parent.add_module(f"{name}_adapter", adapter)
    norm = getattr(layer, "layer_norm_weight", None)

    def add(module: torch.nn.Module, given: tuple[Any, ...], output: tuple[Any, ...]) -> Any:
        inputs = given[0]
        if norm is not None:
            # Transformer Engine norms inside the layer; what it computes there is not returned.
            inputs = rms_norm(inputs, norm.shape, norm, module.eps)  # type: ignore[arg-type]
        return output[0] + adapter(inputs), *output[1:]

    layer.register_forward_hook(add)


def prepare_frozen(chunk: torch.nn.Module) -> None:
    """Change what comes before and after layers with adapters, but not its values.

    The embedding's output needs no gradient by itself, and recomputation of a function whose inputs
    need none returns outputs that have none. It is also a transposed view, and so is the gradient
    of the last hidden states: torch multiplies such a one with a matrix that needs no gradient
    token by token, and not as one product.

    Args:
        chunk: without DDP; the first one has an embedding, the last one an output layer.
    """

    def straight(tensor: Tensor) -> Tensor:
        """[S, 1, H] without the strides of a transposed view, as its gradient will be."""
        return tensor.reshape(-1, tensor.shape[-1]).unsqueeze(1) if tensor.shape[1] == 1 else tensor

    def after_embedding(module: torch.nn.Module, given: tuple[Any, ...], output: Tensor) -> Tensor:
        output = straight(output)
        if torch.is_grad_enabled() and not output.requires_grad:
            output = output.detach().requires_grad_()
        return output

    if (embedding := getattr(chunk, "embedding", None)) is not None:
        embedding.register_forward_hook(after_embedding)
    if (last := getattr(chunk, "output_layer", None)) is not None:
        last.register_forward_pre_hook(lambda _, given: (straight(given[0]), *given[1:]))
