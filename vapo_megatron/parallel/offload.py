"""A model's tensors on the device or in host memory, by turns.

Four things can be on the device, each with all before it; the rest has no device memory at all:

    "nothing"
    "parameters"   as the model computes with them
    "state"        main parameters and Adam's moments, too
    "training"     gradient buffers, too, which are zero when they come

Storages are emptied and filled again where they are: every view of them (DDP's buckets, the
distributed optimizer's shards, gradients' accumulators) stays what it was, and may not be read
while its storage is empty.

Host memory is one buffer of exactly the bytes of parameters and optimizer state, laid out by their
order. torch's own pinned memory would be rounded up to a power of two. Parameters that were only
read are not copied back.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from vapo_megatron.config import ParallelConfig
from vapo_megatron.config.phases import Held
from vapo_megatron.errors import ConfigError
from vapo_megatron.parallel import backend
from vapo_megatron.parallel.memory import available_host_bytes
from vapo_megatron.parallel.optimizer import inner_optimizers, make_optimizer_state
from vapo_megatron.parallel.reduce import gather_objects

ORDER: tuple[Held, ...] = get_args(Held)
GB = 1e9
_EXPANDABLE = "expandable_segments"


def is_on(parallel: ParallelConfig) -> bool:
    """Does the configuration ask for it? null: on a GPU, where the roles and vLLM take turns."""
    if parallel.offload is None:
        return backend.device().type == "cuda"
    return parallel.offload


PARTS = ("parameters", "state", "gradients")
"""PARTS[i] comes with ORDER[i + 1]."""


class Storages(NamedTuple):
    """A model's device memory, each storage once."""

    parameters: list[torch.UntypedStorage]
    state: list[torch.UntypedStorage]
    gradients: list[torch.UntypedStorage]


def find_storages(chunks: Sequence[torch.nn.Module], optimizer: Any) -> Storages:
    """Find everything that grows with the model.

    Scalars, such as torch Adam's step counts, stay where they are.

    Args:
        chunks: with DDP around them, if anything of them is trained.
        optimizer: megatron-core's, whose state has been made; None: nothing is trained.
    """
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    learning: list[Any] = [p for p in parameters if p.requires_grad]
    state: list[Tensor] = []
    for inner in inner_optimizers(optimizer) if optimizer is not None else []:
        for group in inner.param_groups:
            for main in group["params"]:
                state += [main, *(t for t in inner.state[main].values() if torch.is_tensor(t))]
    seen: set[int] = set()
    return Storages(
        _distinct([p.data for p in parameters], seen),
        _distinct([t for t in state if t.dim() > 0], seen),
        _distinct([p.main_grad for p in learning], seen),
    )


def _distinct(tensors: Sequence[Tensor], seen: set[int]) -> list[torch.UntypedStorage]:
    """List the storages that were not seen before."""
    found = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            found.append(storage)
    return found


class Offload:
    """One model's turns. `held` is what is on the device: at first everything."""

    def __init__(self, chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
        """Take the host memory; nothing is copied yet.

        Args:
            chunks, optimizer: see find_storages; Adam's state is made here, zero as its first step
                would make it.
        """
        if optimizer is not None:
            make_optimizer_state(optimizer)
        self._chunks, self._optimizer = chunks, optimizer
        self.held: Held = "training"
        self._storages = find_storages(chunks, optimizer)
        self._sizes = [_sizes(part) for part in self._storages]
        self.num_bytes = sum(self._sizes[0] + self._sizes[1])
        """Of the host buffer."""
        self._buffer = HostBuffer(self.num_bytes)

    @property
    def has_changed(self) -> bool:
        """Whether what is on the device may differ from what lies in host memory."""
        return ORDER.index(self.held) >= ORDER.index("state")

    def hold(self, wanted: Held) -> None:
        """Let exactly this be on the device.

        Gradients are dropped, so that they must not be needed any more. Parameters that
        overlap_param_gather has not fetched must have been fetched.
        """
        before, after = ORDER.index(self.held), ORDER.index(wanted)
        if after < before:
            self._leave(before, after)
        elif before < after:
            self._come(before, after)
        self.held = wanted

    def _leave(self, before: int, after: int) -> None:
        if self.has_changed and after < ORDER.index("state"):
            # Loading a checkpoint may have given the optimizer other tensors.
            self._storages = find_storages(self._chunks, self._optimizer)
            found = [_sizes(part) for part in self._storages[:2]]
            assert found == self._sizes[:2], "a tensor of the model has changed its size"
            _copy((away, mine) for mine, away in self._pairs(PARTS[:2]))
        _empty(self._storages[after:before])

    def _come(self, before: int, after: int) -> None:
        for part, sizes in list(zip(self._storages, self._sizes))[before:after]:
            for storage, size in zip(part, sizes, strict=True):
                storage.resize_(size)
        _copy(self._pairs(PARTS[before:after]))
        if after == ORDER.index("training"):
            for storage in self._storages.gradients:
                _bytes_of(storage).zero_()

    def close(self) -> None:
        """Give the memory of device and host back, whatever is held; the model is lost."""
        _empty(self._storages)
        self._buffer.close()

    def _pairs(self, parts: Sequence[str]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the bytes of each storage of these parts, on the device and in the buffer."""
        start = 0
        for name, part, sizes in zip(PARTS[:2], self._storages, self._sizes):
            for storage, size in zip(part, sizes, strict=True):
                if name in parts:
                    yield _bytes_of(storage), self._buffer.tensor[start : start + size]
                start += size


def _sizes(part: list[torch.UntypedStorage]) -> list[int]:
    return [storage.nbytes() for storage in part]


def _empty(parts: Sequence[list[torch.UntypedStorage]]) -> None:
    """Take the device memory away; what torch keeps for itself, nobody else can have."""
    for part in parts:
        for storage in part:
            storage.resize_(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """View a whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy (to, from) after what was launched before, one right after the other; wait for all."""
    for to, source in pairs:
        to.copy_(source, non_blocking=True)
    backend.synchronize()


class HostBuffer:
    """Host memory of an exact size, pinned where there is a GPU; pages come when they are used."""

    def __init__(self, num_bytes: int) -> None:
        """Take it.

        Raises:
            ConfigError: CUDA cannot pin so much.
        """
        # Its own pages, which nothing else can have pinned.
        memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A child would get a copy of every pinned page, or this process one that CUDA does not see.
        memory.madvise(mmap.MADV_DONTFORK)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self._pinned = False
        if torch.cuda.is_available():
            cuda, size = torch.cuda.cudart(), self.tensor.numel()
            error = cuda.cudaHostRegister(self.tensor.data_ptr(), size, 0)
            if int(error) != 0:
                raise ConfigError(
                    f"parallel.offload=true: CUDA cannot pin {size / GB:.3g} GB of host memory "
                    f"({cuda.cudaGetErrorString(error)}); raise the limit of locked memory "
                    "(ulimit -l), use more nodes, or set parallel.offload=false"
                )
            self._pinned = True

    def close(self) -> None:
        """Give it back. Safe to call twice."""
        if self._pinned:
            self._pinned = False
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
        self.tensor = torch.empty(0, dtype=torch.uint8)


def check_host_memory(
    needed: Mapping[str, int], parallel: ParallelConfig, remedies: Sequence[str]
) -> None:
    """Refuse a run whose processes together need more than their node has. Collective.

    Args:
        needed: bytes of this process, by what they are for; the same names on every rank.
        parallel: host_memory_gb is used.
        remedies: what to set to need less.

    Raises:
        ConfigError: on every rank, with what the first such node needs and has.
    """
    found = gather_objects((list(needed.values()), available_host_bytes()))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", len(found)))
    for first in range(0, len(found), local_size):
        of_node = found[first : first + local_size]
        parts = [sum(part) / GB for part in zip(*(n for n, _ in of_node))]
        available, source = min(a for _, a in of_node) / GB, "are available"
        if parallel.host_memory_gb is not None:
            available, source = parallel.host_memory_gb, "are allowed by parallel.host_memory_gb"
        if sum(parts) > available:
            each = ", ".join(f"{part:.3g} for {what}" for part, what in zip(parts, needed))
            raise ConfigError(
                f"this run needs {sum(parts):.3g} GB of host memory on the node of rank {first} "
                f"({each}), but {available:.3g} GB {source}; use more nodes, raise "
                f"parallel.host_memory_gb, or set {' or '.join(remedies)}"
            )


@contextlib.contextmanager
def expandable_segments() -> Iterator[None]:
    """Let the body's GPU allocations grow in place, so that lengths that vary leave no gaps.

    Only while the trainer computes: vLLM's pool cannot lie in such segments (it reads the setting,
    and turns it off, when it allocates), and the buffers that its CUDA graphs share between
    processes cannot either, which nothing in vLLM looks after. A user who sets the option in the
    environment decides for both.
    """
    users = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if not torch.cuda.is_available() or _EXPANDABLE in users:
        yield
        return
    # torch forgets every option that a new string does not name.
    now = torch._C._accelerator_getAllocatorSettings()
    others = [field for field in now.split(",") if field and _EXPANDABLE not in field]
    torch._C._accelerator_setAllocatorSettings(",".join([*others, f"{_EXPANDABLE}:True"]))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(",".join([*others, f"{_EXPANDABLE}:False"]))
