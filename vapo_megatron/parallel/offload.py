"""Offloads a model's tensors to host memory, and reloads them.

There are four levels of what is on the device, each with all of the one before; the rest takes no
device memory:

    "nothing"
    "parameters"   of the model
    "state"        main parameters and Adam's moments
    "training"     gradient buffers, zero when they are reloaded

Storages are resized in place: every view of them (DDP's buckets, the distributed optimizer's
shards, gradient accumulators) stays valid; its contents are undefined until reloaded.

Host memory is one buffer of exactly the bytes of parameters and optimizer state, in their order:
torch's pinned allocator would round it up to a power of two. Parameters that were only read are not
copied back.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.config import ParallelConfig
from vapo_megatron.config.phases import Held
from vapo_megatron.errors import ConfigError
from vapo_megatron.parallel import backend
from vapo_megatron.parallel.memory import available_host_bytes
from vapo_megatron.parallel.optimizer_state import make_optimizer_state, state_tensors
from vapo_megatron.parallel.reduce import gather_objects

ORDER: tuple[Held, ...] = get_args(Held)
GB = 1e9
_EXPANDABLE = "expandable_segments"


def is_on(parallel: ParallelConfig) -> bool:
    """Is offload enabled? null: on a GPU, which the roles and vLLM share."""
    if parallel.offload is None:
        return backend.device().type == "cuda"
    return parallel.offload


class Storages(NamedTuple):
    """A model's device memory, each storage once. Field i is what level i + 1 adds."""

    parameters: list[torch.UntypedStorage]
    state: list[torch.UntypedStorage]
    gradients: list[torch.UntypedStorage]


def find_storages(parameters: Iterable[torch.nn.Parameter], optimizer: Any) -> Storages:
    """Find all storages that grow with the model.

    Args:
        parameters: with DDP's gradients if they are trained.
        optimizer: megatron-core's, with its state initialized; None for a frozen model.
    """
    parameters = list(parameters)
    learning: list[Any] = [p for p in parameters if p.requires_grad]
    state = [] if optimizer is None else state_tensors(optimizer)
    seen: set[int] = set()
    return Storages(
        _distinct([p.data for p in parameters], seen),
        _distinct(state, seen),
        _distinct([p.main_grad for p in learning], seen),
    )


def _distinct(tensors: Sequence[Tensor], seen: set[int]) -> list[torch.UntypedStorage]:
    """List the storages not in `seen`, and add them."""
    found = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            found.append(storage)
    return found


class Offload:
    """Offloads one model. `held` is the level on the device, at first "training"."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], optimizer: Any) -> None:
        """Initialize Adam's state and allocate the host buffer; arguments as in find_storages."""
        if optimizer is not None:
            make_optimizer_state(optimizer)
        self._parameters, self._optimizer = parameters, optimizer
        self.held: Held = "training"
        self._storages = find_storages(parameters, optimizer)
        self._sizes = [_sizes(part) for part in self._storages]
        self.num_bytes = sum(self._sizes[0] + self._sizes[1])
        """Of the host buffer."""
        self._buffer = HostBuffer(self.num_bytes)

    @property
    def has_changed(self) -> bool:
        """Whether parameters on the device may differ from their copy in host memory."""
        return ORDER.index(self.held) >= ORDER.index("state")

    def hold(self, wanted: Held) -> None:
        """Have exactly this level on the device; gradients are dropped, not copied.

        All parameters that overlap_param_gather is fetching must have arrived.
        """
        before, after = ORDER.index(self.held), ORDER.index(wanted)
        if after < before:
            self._offload(before, after)
        elif before < after:
            self._reload(before, after)
        self.held = wanted

    def _offload(self, before: int, after: int) -> None:
        if self.has_changed and after < ORDER.index("state"):
            # Loading a checkpoint may have replaced the optimizer's tensors.
            self._storages = find_storages(self._parameters, self._optimizer)
            found = [_sizes(part) for part in self._storages[:2]]
            assert found == self._sizes[:2], "a tensor of the model has changed its size"
            _copy((away, mine) for mine, away in self._pairs(0, 2))
        _empty(self._storages[after:before])

    def _reload(self, before: int, after: int) -> None:
        for part, sizes in list(zip(self._storages, self._sizes))[before:after]:
            for storage, size in zip(part, sizes, strict=True):
                storage.resize_(size)
        _copy(self._pairs(before, after))
        if after == ORDER.index("training"):
            for storage in self._storages.gradients:
                _bytes_of(storage).zero_()

    def close(self) -> None:
        """Free the model's memory on device and host; the model is lost."""
        _empty(self._storages)
        self._buffer.close()

    def _pairs(self, first: int, last: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (bytes on the device, bytes in the host buffer) of each storage of these fields."""
        start = 0
        for field, (part, sizes) in enumerate(zip(self._storages[:2], self._sizes)):
            for storage, size in zip(part, sizes, strict=True):
                if first <= field < last:
                    yield _bytes_of(storage), self._buffer.tensor[start : start + size]
                start += size


def _sizes(part: list[torch.UntypedStorage]) -> list[int]:
    return [storage.nbytes() for storage in part]


def _empty(parts: Sequence[list[torch.UntypedStorage]]) -> None:
    """Free the device memory, also torch's cache of it, for other users of the GPU."""
    for part in parts:
        for storage in part:
            storage.resize_(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """View a whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy (to, from) pairs asynchronously, then wait for all."""
    for to, source in pairs:
        to.copy_(source, non_blocking=True)
    backend.synchronize()


class HostBuffer:
    """Host memory of an exact size, pinned if there is a GPU; pages are allocated at first use."""

    def __init__(
        self,
        num_bytes: int,
        setting: str = "parallel.offload=true",
        off: str = "parallel.offload=false",
    ) -> None:
        """Allocate and pin.

        Args:
            num_bytes: size.
            setting: the field that needs it, with its value.
            off: the same with the value for which nothing is pinned.

        Raises:
            ConfigError: CUDA cannot pin so much.
        """
        # Whole pages of its own: CUDA refuses to pin a page twice.
        memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # After a fork, copy-on-write could move this process off the pages that CUDA has pinned.
        memory.madvise(mmap.MADV_DONTFORK)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self._pinned = False
        if torch.cuda.is_available():
            cuda, size = torch.cuda.cudart(), self.tensor.numel()
            error = cuda.cudaHostRegister(self.tensor.data_ptr(), size, 0)
            if int(error) != 0:
                raise ConfigError(
                    f"{setting}: CUDA cannot pin {size / GB:.3g} GB of host memory "
                    f"({cuda.cudaGetErrorString(error)}); raise the limit of locked memory "
                    f"(ulimit -l), use more nodes, or set {off}"
                )
            self._pinned = True

    def close(self) -> None:
        """Free it; may be called twice."""
        if self._pinned:
            self._pinned = False
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
        self.tensor = torch.empty(0, dtype=torch.uint8)


def check_host_memory(
    needed: Mapping[str, int],
    parallel: ParallelConfig,
    remedies: Sequence[str],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Refuse a run whose processes need more host memory than their node has. Collective.

    Args:
        needed: bytes of this process, by purpose; the same names on every rank.
        parallel: host_memory_gb is used.
        remedies: settings that need less.
        group: of all processes of the run; None: the world.

    Raises:
        ConfigError: on every rank, with what the first such node needs and has.
    """
    found = gather_objects((list(needed.values()), available_host_bytes()), group)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", len(found)))
    for first in range(0, len(found), local_size):
        of_node = found[first : first + local_size]
        parts = [sum(part) / GB for part in zip(*(n for n, _ in of_node))]
        available, source = min(a for _, a in of_node) / GB, "are available"
        if parallel.host_memory_gb is not None:
            available, source = parallel.host_memory_gb, "are allowed by parallel.host_memory_gb"
        if sum(parts) > available:
            named = zip(parts, needed, strict=True)
            each = ", ".join(f"{part:.3g} for {what}" for part, what in named if part)
            raise ConfigError(
                f"this run needs {sum(parts):.3g} GB of host memory on the node of rank {first} "
                f"({each}), but {available:.3g} GB {source}; use more nodes, raise "
                f"parallel.host_memory_gb, or set {' or '.join(remedies)}"
            )


@contextlib.contextmanager
def expandable_segments() -> Iterator[None]:
    """Use expandable segments in the body, so that varying lengths do not fragment GPU memory.

    Only while the trainer computes: neither vLLM's pool nor the buffers that its CUDA graphs share
    between processes can be in such segments, and vLLM guards only the pool. A user who sets the
    option in the environment decides for both.
    """
    users = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if not torch.cuda.is_available() or _EXPANDABLE in users:
        yield
        return
    # A new string resets every option that it does not name.
    now = torch._C._accelerator_getAllocatorSettings()
    others = [field for field in now.split(",") if field and _EXPANDABLE not in field]
    torch._C._accelerator_setAllocatorSettings(",".join([*others, f"{_EXPANDABLE}:True"]))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(",".join([*others, f"{_EXPANDABLE}:False"]))
