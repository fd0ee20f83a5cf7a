"""Executes a resharding plan: copies the trainer's live weights into the engine's.

Before: every rank holds its shard of the trainer, and a shard of the engine with older weights.
During: in each step a rank packs the slices that each peer is missing into one message, in the
engine's type, unpacks the messages that it receives, and copies what it holds itself. Buffers are
doubled: one step is unpacked and the next one packed while messages are in flight. After: every
rank holds its shard of the engine, and the buffers are freed. No full tensor is ever formed.

In the group that joins trainers and rollout workers (parallel/worlds.py) a step's messages are one
all-to-all, because that group supports no point-to-point calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from vapo_megatron.weights.reshard.plan import Slice, Step, Transfer

Weights = Mapping[tuple[int, str], Tensor]
"""This rank's parameters by a slice's (chunk, parameter): the trainer's and the engine's."""


Transfers = tuple[Transfer, ...]


class _Posted(NamedTuple):
    """A step in flight."""

    step: Step
    works: Sequence[dist.Work]
    received: list[Tensor]
    """The buffer of each of step.receives."""


def view_of(weights: Weights, part: Slice) -> Tensor:
    """Return the view [rows, columns] of a slice of a parameter of one or two dimensions."""
    matrix = weights[part.chunk, part.parameter].detach()
    if matrix.dim() == 1:
        matrix = matrix.unsqueeze(1)
    return matrix.narrow(0, part.row, part.rows).narrow(1, part.column, part.columns)


@torch.no_grad()
def execute(
    steps: Sequence[Step],
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device,
    group: ProcessGroup | None = None,
) -> int:
    """Fill this rank's engine shard. Collective over all ranks, each with its own steps.

    Every message of a step is posted before any is waited for, and steps are posted in order, so
    no order of arrival can deadlock. While a step is packed, the one before it is in flight and all
    earlier ones are unpacked, as relays need (plan.RELAY_LAG). Memory: two steps' messages, sent
    and received.

    Args:
        steps: from steps.steps_of.
        weights: the trainer's are read, the engine's written in place.
        dtype: of the engine's weights and of the messages; others are rounded to it.
        device: of all messages.
        group: of all ranks; None: the world.

    Returns:
        Bytes received from other ranks.
    """
    send, receive = (
        [_buffer(messages[turn::2], dtype, device) for turn in range(2)]
        for messages in ([s.sends for s in steps], [s.receives for s in steps])
    )
    posted: _Posted | None = None
    num_bytes = 0
    for turn, step in enumerate(steps):
        sent = _split(send[turn % 2], step.sends)
        for matrix, part in _parts(sent, step.sends):
            matrix.copy_(view_of(weights, part))
        received = _split(receive[turn % 2], step.receives)
        if group is None:
            current = _Posted(step, _post(step, sent, received), received)
        else:
            work = _post_jointly(step, send[turn % 2], receive[turn % 2], group)
            current = _Posted(step, [work], received)
        for move in step.copies:
            view_of(weights, move.destination).copy_(view_of(weights, move.source))
        num_bytes += _finish(posted, weights)
        posted = current
    return num_bytes + _finish(posted, weights)


def _buffer(messages: Sequence[Transfers], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate what the largest of some steps' transfers need."""
    sizes = [sum(t.num_elements for t in transfers) for transfers in messages]
    return torch.empty(max(sizes, default=0), dtype=dtype, device=device)


def _split(buffer: Tensor, transfers: Transfers) -> list[Tensor]:
    """Cut the start of a flat buffer into one message per transfer, in the order of the peers."""
    sizes = [t.num_elements for t in transfers]
    return list(buffer[: sum(sizes)].split(sizes)) if sizes else []


def _parts(messages: Sequence[Tensor], transfers: Transfers) -> Iterator[tuple[Tensor, Slice]]:
    """Yield the matrix [rows, columns] of each slice within its message."""
    for message, transfer in zip(messages, transfers, strict=True):
        flat = message.split([part.num_elements for part in transfer.slices])
        for vector, part in zip(flat, transfer.slices, strict=True):
            yield vector.view(part.rows, part.columns), part


def _post(step: Step, sent: list[Tensor], received: list[Tensor]) -> list[dist.Work]:
    operations = [
        dist.P2POp(operation, message, transfer.peer)
        for operation, messages, transfers in (
            (dist.isend, sent, step.sends),
            (dist.irecv, received, step.receives),
        )
        for message, transfer in zip(messages, transfers, strict=True)
    ]
    return dist.batch_isend_irecv(operations) if operations else []


def _post_jointly(step: Step, sent: Tensor, received: Tensor, group: ProcessGroup) -> dist.Work:
    """Post a step's messages, which lie in the buffers by peer, as one all-to-all."""
    receives, sends = (
        [sizes.get(peer, 0) for peer in range(group.size())]
        for sizes in (
            {t.peer: t.num_elements for t in step.receives},
            {t.peer: t.num_elements for t in step.sends},
        )
    )
    into, out = received[: sum(receives)], sent[: sum(sends)]
    work = dist.all_to_all_single(into, out, receives, sends, group=group, async_op=True)
    assert work is not None, "this rank is in the group"
    return work


def _finish(posted: _Posted | None, weights: Weights) -> int:
    """Wait for a step's messages and unpack those received; return the bytes received."""
    if posted is None:
        return 0
    for work in posted.works:
        work.wait()
    for matrix, part in _parts(posted.received, posted.step.receives):
        view_of(weights, part).copy_(matrix)
    return sum(message.nbytes for message in posted.received)
