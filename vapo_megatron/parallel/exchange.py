"""Moves rollouts from the ranks that sampled them to the ranks that train on them.

Before: the first rank of each vLLM replica holds its replica's scored rollouts; other ranks hold
none. After `gather_summary`: every rank holds lengths, verdicts and rewards of all responses (a few
bytes each). After `exchange`: every rank holds the tokens of the responses that its data-parallel
rank trains on, and of no others. The payload moves once; its sizes follow from the summary.

Where the samplers are processes of their own, `group` joins them with the trainers, and they take
part without receiving anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from vapo_megatron.data.batch import (
    PENDING,
    STATUSES,
    RolloutBatch,
    ScoredRollout,
    StepSummary,
    bounds,
)
from vapo_megatron.parallel import backend
from vapo_megatron.parallel.groups import Ranks

_COLUMNS = 9
"""Position, prompt length, response length, status, truncated, reward, prompt index, length of the
critic's prompt or -1."""
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
        RuntimeError: on every rank, when the sampler left out responses.
    """
    world_size = dist.get_world_size(group)
    rows = torch.full((num_responses, _COLUMNS), -1.0, dtype=torch.float64)
    for row, item in zip(rows, local):
        r = item.rollout
        lengths = (len(r.prompt.token_ids), len(r.token_ids))
        row[:] = torch.tensor(
            [
                r.position,
                *lengths,
                (*STATUSES, PENDING).index(item.status),
                r.truncated,
                item.reward,
                r.prompt.index,
                -1 if r.prompt.critic_token_ids is None else len(r.prompt.critic_token_ids),
                math.nan if item.score is None else item.score,
            ],
            dtype=torch.float64,
        )
    counts = _all_gather(torch.tensor([len(local)]), group).flatten()
    most = int(counts.max())
    gathered = _all_gather(rows[:most], group)
    held = torch.cat([gathered[r, : counts[r]] for r in range(world_size)])
    sources = torch.arange(world_size).repeat_interleave(counts)
    order = held[:, 0].argsort()
    held, sources = held[order], sources[order]
    _check_positions(held[:, 0].long().tolist(), num_responses)
    prompts, of_critic = held[:, 1].long(), held[:, 7].long()
    has_own = bool((of_critic >= 0).any())
    return StepSummary(
        prompt_lengths=prompts,
        response_lengths=held[:, 2].long(),
        statuses=held[:, 3].long(),
        truncated=held[:, 4].bool(),
        rewards=held[:, 5].float(),
        prompt_indices=held[:, 6].long(),
        sources=sources,
        critic_prompt_lengths=torch.where(of_critic < 0, prompts, of_critic) if has_own else None,
        scores=None if held[:, 8].isnan().all() else held[:, 8].float(),
    )


def _check_positions(found: Sequence[int], num_responses: int) -> None:
    missing = sorted(set(range(num_responses)) - set(found))
    if missing:
        shown = ", ".join(map(str, missing[:9])) + (", ..." if len(missing) > 9 else "")
        raise RuntimeError(
            f"the sampler left out {len(missing)} of {num_responses} responses, at positions "
            f"{shown}; restart the run, which resumes from its latest checkpoint"
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
    sources = summary.sources.tolist()
    sizes = (summary.prompt_lengths + 2 * summary.response_lengths).tolist()
    of_critic = summary.critic_prompt_lengths
    if of_critic is not None:
        sizes = [size + length for size, length in zip(sizes, of_critic.tolist())]
    mine = {item.rollout.position: _pack(item, of_critic is not None) for item in local}
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


def _pack(item: ScoredRollout, with_critic_prompt: bool) -> np.ndarray:
    """int32 [prompt + 2 * response (+ critic's prompt)]: ids, the log-probabilities' bits, ids."""
    r = item.rollout
    tokens = (np.array(ids, dtype=np.int32) for ids in (r.prompt.token_ids, r.token_ids))
    parts = [*tokens, np.array(r.logprobs, dtype=np.float32).view(np.int32)]
    if with_critic_prompt:
        own = r.prompt.critic_token_ids
        parts.append(np.array(r.prompt.token_ids if own is None else own, dtype=np.int32))
    return np.concatenate(parts)


def _unpack(
    payload: dict[int, Tensor], summary: StepSummary, wanted: Sequence[int]
) -> RolloutBatch:
    index = torch.tensor(wanted, dtype=torch.long)
    lengths = summary.response_lengths[index]
    sequence_lengths = summary.prompt_lengths[index] + lengths
    empty = torch.empty(0, dtype=torch.int32)
    ends = list(zip(wanted, sequence_lengths.tolist(), (sequence_lengths + lengths).tolist()))
    tokens = [payload[p][:n] for p, n, _ in ends]
    logprobs = [payload[p][n:end] for p, n, end in ends]
    of_critic: dict[str, Tensor] = {}
    if summary.critic_prompt_lengths is not None:
        prompts = torch.cat([*(payload[p][end:] for p, _, end in ends), empty]).long()
        of_critic = {"critic_prompts": prompts,
                     "critic_prompt_lengths": summary.critic_prompt_lengths[index]}  # fmt: skip
    return RolloutBatch(
        tokens=torch.cat([*tokens, empty]).long(),
        sequence_cu_seqlens=bounds(sequence_lengths),
        cu_seqlens=bounds(lengths),
        positions=index,
        rewards=summary.rewards[index],
        is_correct=summary.is_correct[index],
        truncated=summary.truncated[index],
        rollout_logprobs=torch.cat([*logprobs, empty]).view(torch.float32),
        loss_mask=torch.ones(int(lengths.sum()), dtype=torch.bool),
        **of_critic,
    )


def _all_gather(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """[...] on each rank of a group -> [ranks, ...] on the CPU of every rank."""
    world_size = dist.get_world_size(group)
    tensor = tensor.to(backend.device()).contiguous()
    out = tensor.new_empty(world_size * tensor.numel())
    dist.all_gather_into_tensor(out, tensor.flatten(), group=group)
    return out.view(world_size, *tensor.shape).cpu()
