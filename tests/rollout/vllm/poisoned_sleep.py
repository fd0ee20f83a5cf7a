"""Sleep level 2 on a CPU, where vLLM's build frees nothing: what a GPU would lose is spoilt.

vLLM's CPU worker falls asleep and wakes by the code of its GPU worker, which saves the named
buffers and restores them. Only the allocator beneath is a stand-in: as cuMem does, it tags memory
by when it was allocated, "weights" while the model is loaded and "kv_cache" with the cache. It
fills both with garbage as vLLM falls asleep, and a part again as it wakes, because memory that is
mapped anew has nothing of what was written meanwhile.

Does not show: memory that is not mapped (a GPU's process would end where this one computes with
garbage), CUDA graphs, what cuMem keeps of other memory, NaN in the KV cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GARBAGE = {"weights": 0xFF, "kv_cache": 0x7F}
"""Each byte. Weights: NaN in every floating-point type, -1 as an integer. KV cache: 3.4e38 in
float32 and bfloat16, with which no attention that uses it is right. vLLM's on a CPU multiplies the
values that it masks, such as those behind a sequence's end, by 0: NaN would remain NaN."""


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    found = [t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
    return {storage.data_ptr(): storage for storage in found}


class _Allocated(TorchDispatchMode):
    """Notes the memory of every tensor that is made in the body."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        given = _storages((args, kwargs))
        self.storages |= {at: s for at, s in _storages(result).items() if at not in given}
        return result


class PoisonedMemory:
    """One worker's memory by tag, with the methods of vLLM's SleepModeBackend that it calls."""

    def __init__(self) -> None:
        self._by_tag = {"weights": _Allocated(), "kv_cache": _Allocated()}

    def pool(self, tag: str) -> contextlib.AbstractContextManager[Any]:
        """Tag what is allocated in the body; other memory is kept."""
        return self._by_tag.get(tag, contextlib.nullcontext())

    def suspend(self, level: int) -> None:
        """Lose everything."""
        assert level == 2, f"sleep level {level}"
        self.resume(list(self._by_tag))

    def resume(self, tags: list[str] | None) -> None:
        """Map parts anew: their contents are undefined."""
        for tag in self._by_tag if tags is None else tags:
            assert self._by_tag[tag].storages, f"no memory has the tag {tag}"
            for storage in self._by_tag[tag].storages.values():
                storage.fill_(GARBAGE[tag])


@contextlib.contextmanager
def _without_a_device() -> Iterator[None]:
    """Let the GPU worker measure nothing, where there is no GPU."""
    nothing = {"synchronize": lambda: None, "get_memory_info": lambda: (0, 0)}
    with mock.patch.multiple(torch.accelerator, **nothing):
        yield


def poison_sleep() -> None:
    """Let engines that this process builds from now on sleep so."""
    # Before vLLM, whose environment it sets.
    import vapo_megatron.rollout.vllm.engine  # noqa: F401 I001
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    def memory(worker: Any) -> PoisonedMemory:
        worker._sleep_mode_backend = worker._sleep_mode_backend or PoisonedMemory()
        return worker._sleep_mode_backend

    def sleep(worker: Any, level: int = 1) -> None:
        with _without_a_device():
            Worker.sleep(worker, level)

    changed: Any = CPUWorker
    changed.sleep_mode_backend = property(memory)
    changed._maybe_get_memory_pool_context = lambda worker, tag: memory(worker).pool(tag)
    changed.sleep, changed.wake_up = sleep, Worker.wake_up
