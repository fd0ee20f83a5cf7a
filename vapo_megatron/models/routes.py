"""Which experts a router chose for a token, remembered and chosen again: router replay.

The policy's update computes in another arithmetic and, after the first mini-batch, with other
weights than its log-probabilities were computed with. Then a router may choose other experts for a
token, and its ratio jumps. With algorithm.router_replay=r2 the update sends each token to the
experts of the pass that computed old_logprobs. The weights of these experts come from the router as
it is now, so that its gradient flows. Source: R3 and R2 as in arXiv 2510.11370; megatron-core's
RouterReplay, whose place at a router `Routes` takes. That class acts on all routers of a process,
those of the critic among them, and keeps each target until it is told to forget.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module

from vapo_megatron.data.microbatch import Microbatch
from vapo_megatron.parallel.reduce import sum_over_world

Mode = Literal["live", "record", "replay"]


class Routes:
    """What one router of this rank remembers, by forward pass: its own tokens' experts alone."""

    def __init__(self, num_experts: int) -> None:
        self.mode: Mode = "live"
        self.number: int | None = None
        """Of the forward pass that comes next; None: one that is not remembered."""
        self.held: dict[int, Tensor] = {}
        """uint8 or int16 [tokens, experts per token], on the CPU."""
        self.counts = torch.zeros(2, dtype=torch.long)
        """Tokens that were replayed, and those for which the live router chose others."""
        self._dtype = torch.uint8 if num_experts <= 256 else torch.int16
        self._recomputed: deque[int | None] = deque()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] = torch.topk,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and numbers of each token's experts; megatron-core's router calls it.

        Args:
            scores: [tokens, experts].
            topk, num_groups, group_topk: of the router.
            default_compute_topk: what the router does by itself.
        """
        number = self.number
        again = False
        if self.mode == "replay":
            if not torch.is_grad_enabled():
                # Recomputation: the pass without gradients comes first, the other when it is
                # backpropagated; the passes of a layer come back in their order.
                self._recomputed.append(number)
            elif self._recomputed:
                number, again = self._recomputed.popleft(), True
        live = default_compute_topk(scores, topk, num_groups, group_topk)
        if number is None or self.mode == "live":
            return live
        if self.mode == "record":
            self.held[number] = live[1].to(self._dtype).cpu()
            return live
        chosen = self.held[number].to(scores.device).long()
        assert len(chosen) == len(scores), "another forward pass than was recorded"
        if not again:
            other = (chosen.sort(-1).values != live[1].sort(-1).values).any(-1)
            self.counts += torch.stack([torch.tensor(len(other)), other.sum().cpu()])
        return scores.gather(1, chosen), chosen


class RouterReplay:
    """The routers of a model's chunks on this rank."""

    def __init__(self, chunks: Sequence[Module], num_experts: int) -> None:
        self._of_chunk: dict[int, list[Routes]] = {}
        for chunk in chunks:
            routers: list[Any] = [m for m in chunk.modules() if hasattr(m, "router_replay")]
            for router in routers:
                router.router_replay = Routes(num_experts)
            self._of_chunk[id(chunk)] = [router.router_replay for router in routers]

    @property
    def routes(self) -> list[Routes]:
        """Of all routers."""
        return [routes for of_chunk in self._of_chunk.values() for routes in of_chunk]

    def begin(self, chunk: Module, microbatch: Microbatch) -> None:
        """Say which forward pass of a chunk, without DDP, comes next; schedule.py calls it."""
        for routes in self._of_chunk[id(chunk)]:
            routes.number = microbatch.number

    @contextlib.contextmanager
    def during(self, mode: Mode) -> Iterator[None]:
        """Record or replay in the body. Recording forgets what was recorded before."""
        for routes in self.routes:
            routes.mode = mode
            if mode == "record":
                routes.held.clear()
                routes.counts.zero_()
        try:
            yield
        finally:
            for routes in self.routes:
                routes.mode, routes.number = "live", None
                routes._recomputed.clear()

    def other_fraction(self) -> float:
        """Return the share of (token, layer) that the live routers chose otherwise. Collective.

        Summed over all ranks, which have tokens or layers of their own, since the last recording;
        padding counts.
        """
        counts = [routes.counts for routes in self.routes] or [torch.zeros(2, dtype=torch.long)]
        total, other = sum_over_world(torch.stack(counts).sum(0)).tolist()
        return other / max(total, 1)
