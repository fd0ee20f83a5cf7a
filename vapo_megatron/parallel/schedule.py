"""Forward and backward passes over microbatches, with any pipeline.

Before: every rank of a model-parallel group (the TP x PP ranks of one replica) holds the same
microbatches; its context-parallel ranks hold each their part of the same ones. After
`forward_only`: every rank holds the results for all of them. After `forward_backward`: its gradient
buffers hold the sum over all microbatches and all data-parallel ranks, and it holds the metrics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor

from vapo_megatron.data.batch import RolloutBatch
from vapo_megatron.data.microbatch import Microbatch, make_microbatch
from vapo_megatron.parallel import backend, groups
from vapo_megatron.parallel.gradient_buffers import gradient_buffers
from vapo_megatron.parallel.minibatches import FP8_MULTIPLE
from vapo_megatron.parallel.reduce import (
    broadcast_from_last_stage,
    broadcast_metrics_from_last_stage,
)

Head = Callable[[Tensor, Microbatch], Tensor]
LossFunction = Callable[[Tensor, Microbatch], tuple[Tensor, dict[str, Tensor]]]
Before = Callable[[torch.nn.Module, Microbatch], None]
"""Called before each forward pass, with the model chunk without DDP."""


def forward_only(
    chunks: Sequence[torch.nn.Module],
    microbatches: Sequence[Microbatch],
    head: Head,
    *,
    per_response: bool = False,
    before: Before | None = None,
) -> list[Tensor]:
    """Run the pipeline forward without gradients.

    Args:
        chunks: this rank's model chunks, DDP-wrapped or not.
        microbatches: on any device; some or all of them may be empty.
        head: (last stage's output, microbatch on the device) -> [T] or [T, width], with T the
            microbatch's response tokens, those of other context-parallel ranks among them
            (parallel/context.py gathers them); called on the last stage only.
        per_response: head returns [B] or [B, width], a row for each response, instead.
        before: see Before.

    Returns:
        What head returned, float32, on the device, in the order of the microbatches, on every rank
        of the model-parallel group. One broadcast carries all of them.
    """
    ranks = groups.current()

    def collect(microbatch: Microbatch, output: Tensor, non_loss_data: bool = True) -> Tensor:
        return head(output, microbatch).float()

    with torch.no_grad():
        results = _run(chunks, microbatches, collect, before, forward_only=True)
    lengths = [m.batch.num_responses if per_response else m.outputs.numel() for m in microbatches]
    return broadcast_from_last_stage(results[: len(lengths)], lengths, ranks)


def forward_backward(
    chunks: Sequence[DistributedDataParallel],
    microbatches: Sequence[Microbatch],
    loss_function: LossFunction,
    before: Before | None = None,
) -> dict[str, Tensor]:
    """Leave the gradient of the sum of all losses in the chunks' gradient buffers.

    Each loss is a sum over tokens divided by a count over the whole mini-batch: all microbatches
    of all data-parallel ranks. This is the place that knows what megatron-core does with it:

    1. loss function   returns (loss, 0, metrics). Of a pair (loss, metrics) megatron-core divides
                       the loss by the number of microbatches; of a triple it does not, when
                       calculate_per_token_loss is set.                                       x 1
    2. backward        there is no gradient scaler in float32 and bfloat16.                   x 1
    3. microbatches    DDP adds each parameter's gradient to its main_grad, float32.          sum
    4. data parallel   all-reduce or reduce-scatter with SUM over the data-parallel and
                       context-parallel ranks; the factor before it is 1 when
                       calculate_per_token_loss was set as DDP was built (else 1/(dp cp)).    sum
    5. finalize        partial gradients (norms under sequence parallelism, the tied embedding's
                       two copies) are summed over their ranks; the division by the number of
                       tokens is left out, as build_ddp's finalize passes none.               x 1
    6. optimizer       clips; nothing else.

    So each parameter's gradient is the plain sum of all losses' gradients, whatever the microbatch
    split, packing, DP, TP, PP or SP. Context-parallel ranks compute the same losses, of whole
    responses, but each starts backward at the outputs of its own tokens alone: their sum is the
    gradient of one of these losses, and counts and metrics are summed over DP only.

    Args:
        chunks: this rank's, from build_ddp.
        microbatches: at least one. Where the virtual pipeline needs more, empty ones are added.
        loss_function: (last stage's output, microbatch on the device) -> (loss, detached 0-d
            metrics); called on the last stage only. For a microbatch without response tokens its
            loss is 0 with the graph intact.
        before: see Before.

    Returns:
        Each metric summed over this data-parallel rank's microbatches, or the maximum of one whose
        name ends in _max, on every rank of the model-parallel group.
    """
    assert microbatches, "a mini-batch needs a microbatch on every data-parallel rank"
    _assert_nothing_divides(chunks)
    for chunk in chunks:
        chunk.zero_grad_buffer()
        # The optimizer sets .grad to main_grad; left there, backward would accumulate twice.
        chunk.zero_grad(set_to_none=True)

    def evaluate(microbatch: Microbatch, output: Tensor) -> tuple[Tensor, Tensor, dict]:
        loss, metrics = loss_function(output, microbatch)
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), metrics

    totals: dict[str, Tensor] = {}
    for metrics in _run(chunks, microbatches, evaluate, before, forward_only=False):
        for name, value in metrics.items():
            reduce = torch.maximum if name.endswith("_max") else torch.add
            totals[name] = reduce(totals[name], value) if name in totals else value
    return broadcast_metrics_from_last_stage(totals, groups.current())


def _assert_nothing_divides(chunks: Sequence[Any]) -> None:
    """Check points 1, 4 and 5 of forward_backward's chain."""
    config = get_model_config(chunks[0])
    assert config.calculate_per_token_loss and config.finalize_model_grads_func is not None
    factors = {buffer.gradient_scaling_factor for buffer in gradient_buffers(chunks)}
    assert factors <= {1.0}, f"gradients would be scaled by {factors}"


def _run(
    chunks: Sequence[torch.nn.Module],
    microbatches: Sequence[Microbatch],
    after: Callable[..., Any],
    before: Before | None,
    *,
    forward_only: bool,
) -> list[Any]:
    """Call megatron-core's schedule; returns, on the last stage, `after` of each microbatch."""
    if not microbatches:
        return []
    ranks = groups.current()
    padded = _pad_to_groups(microbatches, ranks)

    def forward_step(data: Iterator[Microbatch], chunk: torch.nn.Module) -> tuple[Tensor, Any]:
        microbatch = next(data)
        if before is not None:
            before(getattr(chunk, "module", chunk), microbatch)
        output = chunk(
            input_ids=microbatch.tokens[None],
            position_ids=microbatch.position_ids[None],
            attention_mask=None,
            packed_seq_params=_packing(microbatch),
        )
        return output, partial(after, microbatch)

    device = backend.device()
    # Each microbatch is moved to the device when its forward pass starts.
    iterators = [(_moved(microbatch, device) for microbatch in padded) for _ in chunks]
    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(padded),
        # Unused: with variable_seq_lengths each shape is sent along.
        seq_length=padded[0].tokens.numel(),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    for chunk in chunks:
        # A later stage's model keeps its last input otherwise, and the gradient of it.
        get_attr_wrapped_model(chunk, "set_input_tensor")(None)
    return results


def _pad_to_groups(microbatches: Sequence[Microbatch], ranks: groups.Ranks) -> list[Microbatch]:
    """Add empty microbatches: the virtual pipeline runs groups of pp_size of them.

    An empty one is padding alone, of a length that sequence parallelism and FP8 can divide.
    """
    if ranks.vpp_size == 1:
        return list(microbatches)
    nothing = microbatches[0].batch.narrow(0, 0)
    # No loss reads it, so it does not matter whose function cuts it.
    empty = make_microbatch(
        nothing,
        multiple_of=ranks.tp_size * FP8_MULTIPLE,
        cp_size=ranks.cp_size,
        cp_rank=ranks.cp_rank,
    )
    return [*microbatches, *[empty] * (-len(microbatches) % ranks.pp_size)]


def _packing(microbatch: Microbatch) -> PackedSeqParams:
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=microbatch.model_cu_seqlens,
        cu_seqlens_kv=microbatch.model_cu_seqlens,
        max_seqlen_q=microbatch.max_seqlen,
        max_seqlen_kv=microbatch.max_seqlen,
    )


def _moved(data: Any, device: torch.device) -> Any:
    """Return a dataclass with its tensors, and those of the dataclasses in it, on the device."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    changed: dict[str, Any] = {}
    for field in dataclasses.fields(data):
        value = getattr(data, field.name)
        if isinstance(value, Tensor):
            changed[field.name] = move(value)
        elif isinstance(value, RolloutBatch):
            changed[field.name] = value.each(move)
        elif dataclasses.is_dataclass(value):
            changed[field.name] = _moved(value, device)
    return dataclasses.replace(data, **changed)
