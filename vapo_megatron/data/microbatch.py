"""A packed forward pass: some responses of a batch with the index tensors that the model needs."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from vapo_megatron.data.batch import RolloutBatch, bounds
from vapo_megatron.data.context_parallel import (
    Partition,
    places_of_tokens,
    ranks_order,
    rows_of_rank,
)


@dataclasses.dataclass(frozen=True)
class ContextParallelTokens:
    """Index tensors that need tokens of other context-parallel ranks.

    Outputs of all context-parallel ranks are concatenated in rank order, S' each.
    """

    targets: Tensor
    """int64 [T']: the response tokens that the rank's tokens predict; another may hold them."""
    outputs: Tensor
    """int64 [T]: position of each response token's prediction in the outputs of all ranks."""
    ends: Tensor
    """int64 [B]: position there of each sequence's last token."""


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """What one forward pass sees: a RolloutBatch and the index tensors that the model needs.

    S here may exceed the batch's token count. Sequence parallelism needs padding at the end, which
    is a sequence of its own that no loss uses. Context parallelism needs some at the end of each
    sequence, to which no token before it attends, and gives each rank S' = S / cp_size tokens and
    the T' response tokens that these predict; without it S' = S and T' = T.
    """

    batch: RolloutBatch
    """All B responses, whole."""
    tokens: Tensor
    """int64 [S']"""
    position_ids: Tensor
    """int64 [S']: restart at 0 in each sequence."""
    model_cu_seqlens: Tensor
    """int32: bounds of the sequences in S, the padding's included."""
    max_seqlen: int
    """In S."""
    predicting: Tensor
    """int64 [T']: position in S' whose output predicts a response token t, and gives V(s_t): the
    position before the token."""
    context_parallel: ContextParallelTokens | None
    """With context parallelism."""
    number: int | None = None
    """Among a step's forward passes on this rank; None: it is none of them."""

    @property
    def targets(self) -> Tensor:
        """int64 [T']: the response tokens that are predicted at `predicting`."""
        return (
            self.tokens[self.predicting + 1]
            if self.context_parallel is None
            else self.context_parallel.targets
        )

    @property
    def outputs(self) -> Tensor:
        """int64 [T]: position of each response token's prediction in the outputs of all ranks."""
        return self.predicting if self.context_parallel is None else self.context_parallel.outputs

    @property
    def ends(self) -> Tensor:
        """int64 [B]: position of each sequence's last token in the outputs of all ranks."""
        if self.context_parallel is not None:
            return self.context_parallel.ends
        return self.batch.sequence_cu_seqlens[1:].long() - 1


def sources(
    batch: RolloutBatch,
    *,
    multiple_of: int = 1,
    cp_size: int = 1,
    cp_rank: int = 0,
    partition: Partition = rows_of_rank,
) -> Tensor:
    """Return int64 [S']: which of the batch's tokens each of a forward pass's is; -1: padding.

    Arguments as for make_microbatch, whose `tokens` are these.
    """
    packed = _pack(batch, multiple_of, cp_size)
    found = torch.full((packed.total,), -1, device=packed.places.device)
    found[packed.places] = torch.arange(len(batch.tokens), device=packed.places.device)
    if cp_size == 1:
        return found
    return found[partition(packed.cu_seqlens, packed.total, cp_size, cp_rank)]


class _Packed(NamedTuple):
    """Where the tokens of a batch stand in S."""

    lengths: Tensor
    """int64: tokens of each sequence in S, the padding's at the end."""
    cu_seqlens: Tensor
    """int32: their bounds."""
    total: int
    """S."""
    starts: Tensor
    """int64 [B]"""
    places: Tensor
    """int64 [tokens of the batch]"""


def _pack(batch: RolloutBatch, multiple_of: int, cp_size: int) -> _Packed:
    """Pad sequences, and their end, to what the ranks can divide."""
    # Zig-zag: each sequence is padded to a multiple of 2 * cp_size, so that ranks get two equal
    # chunks each.
    chunks = 1 if cp_size == 1 else 2 * cp_size
    real = batch.sequence_lengths
    lengths = real + -real % chunks
    size, unit = int(lengths.sum()), math.lcm(multiple_of * cp_size, chunks)
    padding = -size % unit if size else unit  # A forward pass needs tokens.
    if padding:
        lengths = torch.cat([lengths, lengths.new_tensor([padding])])
    cu_seqlens = bounds(lengths)
    starts = cu_seqlens[: len(real)].long()
    shift = starts - batch.sequence_cu_seqlens[:-1].long()
    places = torch.arange(len(batch.tokens), device=real.device) + shift.repeat_interleave(real)
    return _Packed(lengths, cu_seqlens, size + padding, starts, places)


def make_microbatch(
    batch: RolloutBatch,
    *,
    multiple_of: int = 1,
    cp_size: int = 1,
    cp_rank: int = 0,
    partition: Partition = rows_of_rank,
) -> Microbatch:
    """Build the index tensors of a packed forward pass.

    Args:
        batch: its responses, at least 0.
        multiple_of: of S', the tokens of a rank. Sequence parallelism needs a multiple of the
            tensor-parallel size.
        cp_size, cp_rank: context-parallel ranks and this one's index; see context_parallel.py.
        partition: which tokens each of these ranks holds.
    """
    packed = _pack(batch, multiple_of, cp_size)
    lengths, cu_model, total, starts = packed[:4]
    tokens = batch.tokens
    if total > len(tokens):
        tokens = tokens.new_zeros(total).index_copy_(0, packed.places, batch.tokens)
    position_ids = torch.arange(total, device=tokens.device)
    position_ids -= cu_model[:-1].long().repeat_interleave(lengths)
    # The position before a token predicts it.
    predicting = batch.places + batch.per_token(starts) - 1
    context_parallel = None
    if cp_size > 1:
        order = ranks_order(cu_model, total, cp_size, partition)
        rows, places = order.chunk(cp_size)[cp_rank], places_of_tokens(order)
        outputs = places[predicting]
        is_own = outputs // len(rows) == cp_rank
        # Before tokens are split: a chunk's last token predicts one that another rank may hold.
        targets = tokens[predicting + 1][is_own]
        ends = places[starts + batch.sequence_lengths - 1]
        context_parallel = ContextParallelTokens(targets, outputs, ends)
        predicting = outputs[is_own] % len(rows)
        tokens, position_ids = tokens[rows], position_ids[rows]
    return Microbatch(
        batch, tokens, position_ids, cu_model, int(lengths.max()), predicting, context_parallel
    )
