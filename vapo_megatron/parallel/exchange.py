"""Moves rollouts from the ranks that sampled them to the ranks that train on them.

Before: the first rank of each vLLM replica holds its replica's scored rollouts; other ranks hold
none. After `gather_summary`: every rank holds lengths, verdicts and rewards of all responses (a few
bytes each). After `exchange`: every rank holds the tokens of the responses that its data-parallel
rank trains on, and of no others. The payload moves once; its sizes follow from the summary.

With placement=disaggregated `group` joins trainers and rollout workers, and the latter take part
without receiving anything.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from vapo_megatron.data.batch import RolloutBatch, StepSummary, bounds
from vapo_megatron.data.columns import PER_TOKEN, SAMPLED
from vapo_megatron.data.rollout import ScoredRollout
from vapo_megatron.parallel import backend
from vapo_megatron.parallel.groups import Ranks

_GATHERED = [field for field in dataclasses.fields(StepSummary) if field.metadata]
"""What a response's row says after its position."""
_NO_TRAINER = -1
"""In place of a data-parallel rank."""


def gather_summary(
    local: Sequence[ScoredRollout], num_responses: int, group: ProcessGroup | None = None
) -> StepSummary:
    """Share lengths, verdicts and rewards of all responses.

    Args:
        local: this rank's rollouts; empty on ranks that are not the first of their vLLM replica.
        num_responses: P*G, over all ranks.
        group: of all ranks that sample or train; None: the world.

    Returns:
        In position order.

    Raises:
        RuntimeError: on every rank, when the engine left out responses.
    """
    world_size = dist.get_world_size(group)
    counts = _all_gather(torch.tensor([len(local)]), group).flatten()
    # Numbers that are not there, on ranks with fewer rollouts than others, are not read.
    rows = torch.full((int(counts.max()), 1 + len(_GATHERED)), -1.0, dtype=torch.float64)
    for row, item in zip(rows, local):
        told = [field.metadata["read"](item) for field in _GATHERED]
        row[:] = torch.tensor([item.rollout.position, *told], dtype=torch.float64)
    gathered = _all_gather(rows, group)
    held = torch.cat([gathered[r, : counts[r]] for r in range(world_size)])
    sources = torch.arange(world_size).repeat_interleave(counts)
    order = held[:, 0].argsort()
    positions, *columns = held[order].unbind(1)
    _check_positions(positions.long().tolist(), num_responses)
    read: dict[str, Any] = {
        field.name: _read(column, field) for field, column in zip(_GATHERED, columns)
    }
    if (of_critic := read["critic_prompt_lengths"]) is not None:
        read["critic_prompt_lengths"] = of_critic.where(of_critic >= 0, read["prompt_lengths"])
    return StepSummary(**read, sources=sources[order])


def _read(column: Tensor, field: dataclasses.Field[Any]) -> Tensor | None:
    """Return a column in its dtype; None where no response has what may be missing."""
    missing = field.metadata["missing"]
    if missing is not None:
        has = ~column.isnan() if math.isnan(missing) else column != missing
        if not has.any():
            return None
    return column.to(field.metadata["dtype"])


def _check_positions(found: Sequence[int], num_responses: int) -> None:
    missing = sorted(set(range(num_responses)) - set(found))
    if missing:
        listed = ", ".join(map(str, missing[:9])) + (", ..." if len(missing) > 9 else "")
        raise RuntimeError(
            f"the engine left out {len(missing)} of {num_responses} responses, at positions "
            f"{listed}; restart the run, which resumes from its latest checkpoint"
        )
    assert len(found) == num_responses, "a response was sampled twice"


def exchange(
    local: Sequence[ScoredRollout],
    summary: StepSummary,
    wanted: Sequence[Sequence[int]],
    ranks: Ranks | None,
    group: ProcessGroup | None = None,
) -> RolloutBatch:
    """Send each response to the ranks that train on it.

    Args:
        local: this rank's rollouts.
        summary: from gather_summary.
        wanted: per data-parallel rank, the positions that it trains on, in the order of its batch.
        ranks: this rank's place; None: it trains on nothing.
        group: as for gather_summary.

    Returns:
        The batch of wanted[ranks.dp_rank], on the CPU.
    """
    dp_rank = _NO_TRAINER if ranks is None else ranks.dp_rank
    own = () if ranks is None else wanted[ranks.dp_rank]
    dp_ranks = _all_gather(torch.tensor([dp_rank]), group).flatten().tolist()
    sources, names = summary.sources.tolist(), summary.travelling
    of_critic = summary.critic_prompt_lengths
    lengths = summary.seen_lengths + len(names) * summary.response_lengths
    sizes = (lengths if of_critic is None else lengths + of_critic).tolist()
    mine = {item.rollout.position: _pack(item, names, of_critic is not None) for item in local}
    pieces: list[np.ndarray] = []
    send_sizes = []
    for dp_rank in dp_ranks:
        asked = () if dp_rank == _NO_TRAINER else wanted[dp_rank]
        outgoing = [mine[p] for p in asked if p in mine]
        pieces += outgoing
        send_sizes.append(sum(map(len, outgoing)))
    arriving = [[p for p in own if sources[p] == r] for r in range(len(dp_ranks))]
    receive_sizes = [sum(sizes[p] for p in part) for part in arriving]
    sent = torch.from_numpy(np.concatenate([*pieces, np.empty(0, np.int32)]))
    received = torch.empty(sum(receive_sizes), dtype=torch.int32)
    sent, received = sent.to(backend.device()), received.to(backend.device())
    dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=group)
    order = [p for part in arriving for p in part]
    payload = dict(zip(order, received.cpu().split([sizes[p] for p in order])))
    return _unpack(payload, summary, own)


def _pack(item: ScoredRollout, names: Sequence[str], with_critic_prompt: bool) -> np.ndarray:
    """int32 [sequence + columns * response (+ critic's prompt)]: ids, the columns' bits, ids."""
    prompt = item.rollout.prompt
    parts = [item.rollout.sequence, *(item.column(name).view(np.int32) for name in names)]
    if with_critic_prompt:
        own = prompt.critic_token_ids
        parts.append(np.array(prompt.token_ids if own is None else own, dtype=np.int32))
    return np.concatenate(parts)


def _unpack(
    payload: dict[int, Tensor], summary: StepSummary, wanted: Sequence[int]
) -> RolloutBatch:
    index = torch.tensor(wanted, dtype=torch.long)
    names, lengths = summary.travelling, summary.response_lengths[index]
    seen = summary.seen_lengths[index]
    parts: list[list[Tensor]] = [[torch.empty(0, dtype=torch.int32)] for _ in range(len(names) + 2)]
    for position, sequence, response in zip(wanted, seen.tolist(), lengths.tolist()):
        sizes = [sequence, *[response] * len(names)]
        rest = len(payload[position]) - sum(sizes)
        for held, part in zip(parts, payload[position].split([*sizes, rest])):
            held.append(part)
    tokens, *columns, critic_prompts = map(torch.cat, parts)
    of_critic: dict[str, Tensor] = {}
    if summary.critic_prompt_lengths is not None:
        of_critic = {"critic_prompts": critic_prompts.long(),
                     "critic_prompt_lengths": summary.critic_prompt_lengths[index]}  # fmt: skip
    arrived = {
        SAMPLED[name]: bits.view(getattr(torch, PER_TOKEN[SAMPLED[name]].dtype))
        for name, bits in zip(names, columns)
    }
    return RolloutBatch(
        tokens=tokens.long(),
        sequence_cu_seqlens=bounds(seen),
        cu_seqlens=bounds(lengths),
        positions=index,
        prompt_lengths=summary.prompt_lengths[index],
        rewards=summary.rewards[index],
        is_correct=summary.is_correct[index],
        truncated=summary.truncated[index],
        loss_mask=torch.ones(int(lengths.sum()), dtype=torch.bool),
        **arrived,
        **of_critic,
    )


def _all_gather(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """[...] on each rank of a group -> [ranks, ...] on the CPU of every rank."""
    world_size = dist.get_world_size(group)
    tensor = tensor.to(backend.device()).contiguous()
    out = tensor.new_empty(world_size * tensor.numel())
    dist.all_gather_into_tensor(out, tensor.flatten(), group=group)
    return out.view(world_size, *tensor.shape).cpu()
