"""Collectives as late as NCCL's may be: what they receive is there after wait() and not before.

gloo on a CPU usually finishes before the next line reads the result, so code that forgets to wait
passes. Here every operation of a process group works on copies. Until wait() its results are NaN
(integers: the largest), and what it sends must not change.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast", "reduce", "recv", "recv_anysource")
"""ProcessGroup's methods whose first argument is both sent and received."""

OUT_OF_PLACE = (
    "allgather", "allgather_coalesced", "all_gather_single", "all_gather_single_coalesced",
    "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "all_to_all_single", "alltoall", "gather", "scatter",
)  # fmt: skip
"""Those with results first, then what is sent."""


class Late:
    """What was started, by method; `pending`: started and not waited for, sends apart."""

    def __init__(self) -> None:
        self.started: collections.Counter[str] = collections.Counter()
        self.pending = 0


class _Work:
    """A work whose results arrive in wait()."""

    def __init__(self, work: Any, arrive: Callable[[], None]) -> None:
        self._work, self._arrive, self._has_arrived = work, arrive, False

    def wait(self, *arguments: Any) -> Any:
        done = self._work.wait(*arguments)
        if not self._has_arrived:
            self._has_arrived = True
            self._arrive()
        return done

    def is_completed(self) -> bool:
        return False


def flat(tensors: Any) -> list[Tensor]:
    """The tensors of a tensor or of nested lists."""
    if isinstance(tensors, Tensor):
        return [tensors]
    return [tensor for part in tensors for tensor in flat(part)]


def _cloned(tensors: Any) -> Any:
    if isinstance(tensors, Tensor):
        return tensors.clone()
    return [_cloned(part) for part in tensors]


def _spoil(tensor: Tensor) -> None:
    if tensor.dtype.is_floating_point:
        tensor.fill_(torch.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _receiving(name: str, original: Callable, late: Late) -> Callable:
    def start(group: ProcessGroup, results: Any, *rest: Any, **named: Any) -> _Work:
        late.started[name] += 1
        late.pending += 1
        arriving = _cloned(results)
        if name in OUT_OF_PLACE:
            sent, *rest = rest
            kept = _cloned(sent)
            work = original(group, arriving, _cloned(sent), *rest, **named)
        else:
            sent = kept = []
            work = original(group, arriving, *rest, **named)
        with torch.no_grad():
            for tensor in flat(results):
                _spoil(tensor)
            # A shard that is sent may lie in the buffer that receives, or the other way round.
            for tensor, value in zip(flat(sent), flat(kept), strict=True):
                tensor.copy_(value)

        @torch.no_grad()
        def arrive() -> None:
            late.pending -= 1
            for tensor, value in zip(flat(results), flat(arriving), strict=True):
                tensor.copy_(value)

        return _Work(work, arrive)

    return start


def _sending(original: Callable, late: Late) -> Callable:
    def start(group: ProcessGroup, tensors: list[Tensor], *rest: Any, **named: Any) -> _Work:
        late.started["send"] += 1
        kept = _cloned(tensors)

        def arrive() -> None:
            same = all(torch.equal(t, k) for t, k in zip(tensors, kept))
            assert same, "a buffer was overwritten while it was being sent"

        return _Work(original(group, _cloned(tensors), *rest, **named), arrive)

    return start


@contextlib.contextmanager
def late_collectives() -> Iterator[Late]:
    """Make all of this process's collectives late."""
    late = Late()

    def replaced(name: str, original: Callable) -> Callable:
        return _sending(original, late) if name == "send" else _receiving(name, original, late)

    with operations_replaced(replaced):
        yield late


@contextlib.contextmanager
def operations_replaced(replaced: Callable[[str, Callable], Callable]) -> Iterator[None]:
    """Let replaced(name, method) stand for each of ProcessGroup's methods that move tensors."""
    # From the class's dictionary: what getattr returns would not be bound when it is put back.
    originals = {name: vars(ProcessGroup)[name] for name in (*IN_PLACE, *OUT_OF_PLACE, "send")}
    try:
        for name in originals:
            setattr(ProcessGroup, name, replaced(name, getattr(ProcessGroup, name)))
        yield
    finally:
        for name, original in originals.items():
            setattr(ProcessGroup, name, original)
