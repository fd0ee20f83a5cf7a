"""Which experts a router chose for a token, remembered and chosen again: router replay.

The policy's update computes in another arithmetic and, after the first mini-batch, with other
weights than its log-probabilities were computed with. Then a router may choose other experts for a
token, and its ratio jumps. algorithm.router_replay sends each token to the experts that were chosen
before:

    r2  in the update, those of the pass that computed old_logprobs
    r3  in that pass and in the update, those that vLLM chose as it sampled

The weights of these experts come from the router as it is now, so that its gradient flows. Source:
R2 and R3 as in arXiv 2510.11370; megatron-core's RouterReplay, whose place at a router `Routes`
takes. That class acts on all routers of a process, those of the critic among them, and keeps each
target until it is told to forget.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import Module

from vapo_megatron.data.microbatch import Microbatch, sources
from vapo_megatron.data.rollout import UNKNOWN_ROUTE
from vapo_megatron.parallel.reduce import sum_over_world

Mode = Literal["live", "record", "score", "update"]
"""Nothing; remember what is chosen; choose what is held, without and with gradients."""


class Routes:
    """What one router of this rank chooses, and is to choose, in the forward pass at hand."""

    def __init__(self, num_experts: int) -> None:
        self.mode: Mode = "live"
        self.taken: Tensor | None = None
        """[tokens, experts per token] of the latest pass that was recorded, uint8 or int16."""
        self.target: Tensor | None = None
        """The same, to be chosen again; None: the router chooses, as where it is unknown."""
        self.counts: Tensor | int = 0
        """int64 [2]: tokens that were replayed, and those for which the live router chose others;
        on the device."""
        self._dtype = dtype_of(num_experts)
        self._unknown = unknown(self._dtype)
        self._recomputed: deque[Tensor | None] = deque()

    def forget(self, mode: Mode) -> None:
        """Begin or end something."""
        self.mode, self.taken, self.target = mode, None, None
        self._recomputed.clear()

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
        target, again = self.target, False
        if self.mode == "update":
            if not torch.is_grad_enabled():
                # Recomputation: the pass without gradients comes first, the other when it is
                # backpropagated; the passes of a layer come back in their order.
                self._recomputed.append(target)
            elif self._recomputed:
                target, again = self._recomputed.popleft(), True
        live = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.mode == "record":
            self.taken = live[1].to(self._dtype)
        if target is None:
            return live
        assert len(target) == len(scores), "another forward pass than is replayed"
        known = target[:, :1] != self._unknown
        chosen = target.long().where(known, live[1])
        if not again:
            other = (chosen.sort(-1).values != live[1].sort(-1).values).any(-1)
            self.counts = self.counts + torch.stack([known.sum(), other.sum()])
        return scores.gather(1, chosen), chosen


def dtype_of(num_experts: int) -> torch.dtype:
    """Return the smallest type of an expert's number that has another one for none."""
    return torch.uint8 if num_experts <= UNKNOWN_ROUTE else torch.int16


def unknown(dtype: torch.dtype) -> int:
    """Return what stands where there is no expert's number."""
    return UNKNOWN_ROUTE if dtype == torch.uint8 else -1


class RouterReplay:
    """The routers of a model's chunks on this rank, and what they chose, by forward pass."""

    def __init__(self, chunks: Sequence[Module], num_experts: int) -> None:
        self._of_chunk: dict[int, list[Routes]] = {}
        self.layers: list[int] = []
        """Number of each router's layer, from 0, in the order of `routes`."""
        for chunk in chunks:
            routers: list[Any] = [m for m in chunk.modules() if hasattr(m, "router_replay")]
            for router in routers:
                router.router_replay = Routes(num_experts)
            self._of_chunk[id(chunk)] = [router.router_replay for router in routers]
            self.layers += [router.layer_number - 1 for router in routers]
        self._held: dict[tuple[int, int], Tensor] = {}
        """(chunk, number of the pass) -> [routers, tokens, experts per token], in host memory."""
        self._recording: dict[int, int | None] = {}
        """The pass that each chunk is in."""

    @property
    def routes(self) -> list[Routes]:
        """Of all routers."""
        return [routes for of_chunk in self._of_chunk.values() for routes in of_chunk]

    def begin(self, chunk: Module, microbatch: Microbatch) -> None:
        """Say which forward pass of a chunk, without DDP, comes next; schedule.py calls it."""
        key, of_chunk = id(chunk), self._of_chunk[id(chunk)]
        if not of_chunk:
            return
        if of_chunk[0].mode == "record":
            self._keep(key)
            self._recording[key] = microbatch.number
            return
        targets: Sequence[Tensor | None] = [None] * len(of_chunk)
        if microbatch.number is not None:
            held = self._held[key, microbatch.number]
            targets = held.to(microbatch.tokens.device, non_blocking=True).unbind()
        for routes, target in zip(of_chunk, targets, strict=True):
            routes.target = target

    def hold(
        self,
        routes: Tensor,
        microbatches: Sequence[Microbatch],
        *,
        parts: int,
        part: int,
        **options: Any,
    ) -> None:
        """Hold routes that come from elsewhere, cut as the tokens that this rank's routers see.

        Args:
            routes: [routers, S, experts per token], uint8, of all microbatches' tokens, whole.
            microbatches: of a step.
            parts, part: into how many sequence parallelism cuts S', and which is this rank's.
            options: of make_microbatches, with which these were made.
        """
        self._held.clear()
        sizes = [len(of_chunk) for of_chunk in self._of_chunk.values()]
        first = 0
        for microbatch in microbatches:
            own = sources(microbatch.batch, **options).chunk(parts)[part]
            is_real = own >= 0
            of_pass = routes.new_full((len(routes), len(own), routes.shape[2]), UNKNOWN_ROUTE)
            of_pass[:, is_real] = routes[:, first + own[is_real]]
            for key, of_chunk in zip(self._of_chunk, of_pass.split(sizes), strict=True):
                self._held[key, cast(int, microbatch.number)] = of_chunk
            first += len(microbatch.batch.tokens)

    def _keep(self, key: int) -> None:
        """Move what a chunk has recorded into host memory, all its routers' at once."""
        number = self._recording.pop(key, None)
        if number is not None:
            taken = [routes.taken for routes in self._of_chunk[key]]
            self._held[key, number] = torch.stack([t for t in taken if t is not None]).cpu()

    @contextlib.contextmanager
    def during(self, mode: Mode) -> Iterator[None]:
        """Record or replay in the body. Recording forgets what was recorded before."""
        if mode == "record":
            self._held.clear()
        for routes in self.routes:
            routes.forget(mode)
        try:
            yield
            for key in self._of_chunk:
                self._keep(key)
        finally:
            self._recording.clear()
            for routes in self.routes:
                routes.forget("live")

    def take_other_fraction(self) -> float:
        """Return the share of (token, layer) that the live routers chose otherwise. Collective.

        Summed over all ranks, which have tokens or layers of their own, since the last call, of
        the tokens whose routes are known; what r2 has recorded of padding is.
        """
        found = torch.zeros(2, dtype=torch.long)
        for routes in self.routes:
            found += torch.as_tensor(routes.counts).cpu()
            routes.counts = 0
        total, other = sum_over_world(found).tolist()
        return other / max(total, 1)
