"""Moves the sampler's routes to the ranks that replay them (algorithm.router_replay=r3).

Before: the first rank of each vLLM replica holds its rollouts' routes, of all layers. After: every
rank holds those of the sequences that its data-parallel rank trains on, of the layers of its own
pipeline stage alone. They are many bytes, 384 a token for Qwen3-30B-A3B against some 20 of
everything else, so that they travel apart from it, layer by layer: a buffer on a device has one
layer's at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from vapo_megatron.data.batch import StepSummary
from vapo_megatron.data.rollout import UNKNOWN_ROUTE, ScoredRollout
from vapo_megatron.parallel import backend
from vapo_megatron.parallel.groups import Ranks


def exchange_routes(
    local: Sequence[ScoredRollout],
    summary: StepSummary,
    wanted: Sequence[Sequence[int]],
    layers: Sequence[int],
    per_token: int,
    ranks: Ranks | None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Send each sequence's routes to the ranks that train on it, each its own layers. Collective.

    Args:
        local, summary, wanted, ranks, group: as for exchange.
        layers: whose routers are on this rank, from 0, in the order of the result; none without
            ranks.
        per_token: experts that a layer gives each token.

    Returns:
        uint8 [layers, S, per_token], on the CPU; S as RolloutBatch.tokens.
    """
    world = dist.get_world_size(group)
    told: list[tuple[int | None, list[int]]] = [(None, [])] * world
    dist.all_gather_object(told, (None if ranks is None else ranks.dp_rank, [*layers]), group)
    mine = {item.rollout.position: item.rollout for item in local}
    outgoing = [
        [mine[p] for p in ([] if dp_rank is None else wanted[dp_rank]) if p in mine]
        for dp_rank, _ in told
    ]
    own = [] if ranks is None else wanted[ranks.dp_rank]
    sources, lengths = summary.sources.tolist(), summary.seen_lengths.tolist()
    arriving = [[p for p in own if sources[p] == rank] for rank in range(world)]
    rows = [sum(lengths[p] for p in part) for part in arriving]
    index = _rows_in_order([p for part in arriving for p in part], own, lengths)
    found = torch.empty((len(layers), sum(rows), per_token), dtype=torch.uint8)
    for number in range(max(len(of_rank) for _, of_rank in told)):
        # Of each rank, what it is sent and where the layer stands in it.
        sent = [
            (parts, of_rank[number] * per_token) if number < len(of_rank) else ([], 0)
            for parts, (_, of_rank) in zip(outgoing, told, strict=True)
        ]
        sizes = [sum(lengths[r.position] for r in parts) * per_token for parts, _ in sent]
        outbox = np.full((sum(sizes) // per_token, per_token), UNKNOWN_ROUTE, np.uint8)
        row = 0
        for rollout, column in ((r, column) for parts, column in sent for r in parts):
            # An episode that failed at once has none; a last token is read by nobody.
            if (routes := rollout.routes) is not None:
                outbox[row : row + len(routes)] = routes[:, column : column + per_token]
            row += lengths[rollout.position]
        is_here = number < len(layers)
        counts = [n * per_token * is_here for n in rows]
        inbox = torch.empty(sum(counts), dtype=torch.uint8, device=backend.device())
        outgoing_bytes = torch.from_numpy(outbox.ravel()).to(backend.device())
        dist.all_to_all_single(inbox, outgoing_bytes, counts, sizes, group=group)
        if is_here:
            found[number] = inbox.view(-1, per_token).cpu()[index]
    return found


def _rows_in_order(arrived: Sequence[int], wanted: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Return int64 [S]: where the rows of sequences that arrive in one order stand in another's.

    Args:
        arrived, wanted: the same positions in both orders.
        lengths: rows of each, by position.
    """
    starts, total = dict[int, int](), 0
    for position in arrived:
        starts[position] = total
        total += lengths[position]
    parts = [torch.arange(starts[p], starts[p] + lengths[p]) for p in wanted]
    return torch.cat([*parts, torch.empty(0, dtype=torch.long)])
