"""A GPU on paper: torch.cuda answers for it, and process groups take its tensors alone.

`labelled_gpu` labels tensors (labels.py) and stands in for what torch lacks without a GPU of
torch.cuda and NCCL. Where megatron-core is imported inside it, it is not translated
(parallel/megatron_on_cpu.py), and what it asks of "cuda" is seen as it is.

A group that asks for NCCL, or does not say, is a gloo group whose collectives refuse tensors of the
host and what else NCCL refuses; one that asks for gloo refuses the GPU's.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from tests.parallel.labels import CPU, WrongDevice, label_of, labelled
from tests.parallel.late import OUT_OF_PLACE, flat, operations_replaced
from vapo_megatron.parallel import cpu_cuda

GIB = 2**30
NCCL_DTYPES = {
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip
_VARLEN = "torch.nn.attention.varlen"


class Seen(NamedTuple):
    """What ran on the GPU."""

    collectives: collections.Counter[str]
    """By ProcessGroup's method, over groups of GPUs."""
    only_cuda: list[str]
    """Operators that a CPU lacks."""


@contextlib.contextmanager
def labelled_gpu(index: int = 0) -> Iterator[Seen]:
    """Let this process have GPU `index` of a node, and no compiler."""
    groups = _Groups()
    with contextlib.ExitStack() as stack:

        def put(owner: Any, name: str, value: Any, **options: bool) -> None:
            stack.enter_context(mock.patch.object(owner, name, value, **options))

        for name, value in _torch_cuda(index).items():
            put(torch.cuda, name, value)
        put(torch, "compile", cpu_cuda.compile)
        for name, position in (("init_process_group", 0), ("new_group", 2)):
            put(dist, name, groups.starting(getattr(dist, name), position))
        put(c10d, "_get_object_coll_device", groups.device_type)
        # A barrier's tensor, which torch makes for itself.
        put(torch._C, "_get_accelerator", lambda *_: CPU)
        # A CUDA build's Adam would ask it for its stream.
        put(torch._C, "_accelerator_getAccelerator", lambda: None)
        recorder = torch._C._distributed_c10d
        put(recorder, "_dump_nccl_trace", recorder._dump_fr_trace, create=True)
        stack.enter_context(operations_replaced(groups.checking))
        only_cuda = stack.enter_context(labelled())
        # Not mock.patch.dict, which would forget what is imported meanwhile.
        stack.callback(sys.modules.pop, _VARLEN)
        attend = _varlen_attention(only_cuda)
        sys.modules[_VARLEN] = SimpleNamespace(varlen_attn=attend)  # type: ignore[assignment]
        yield Seen(groups.collectives, only_cuda)


def _torch_cuda(index: int) -> dict[str, Any]:
    """By name, what stands in for torch.cuda's."""
    current = [index]
    pinning = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 8,
        "current_device": lambda: current[0],
        "set_device": lambda device: current.__setitem__(0, torch.device(device).index),
        "get_device_capability": lambda *_: (9, 0),
        # A place in which no machine has a device.
        "get_device_properties": lambda *_: SimpleNamespace(
            pci_domain_id=0xFFFF, pci_bus_id=0xFF, pci_device_id=0x1F
        ),
        "mem_get_info": lambda *_: (40 * GIB, 80 * GIB),
        "memory_reserved": lambda *_: 20 * GIB,
        "max_memory_reserved": lambda *_: 30 * GIB,
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "cudart": lambda: pinning,
        "synchronize": cpu_cuda.synchronize,
        "current_stream": cpu_cuda.current_stream,
        "manual_seed": cpu_cuda.manual_seed,
        "get_rng_state": cpu_cuda.get_rng_state,
        "random": cpu_cuda.random,
        "default_generators": [torch.default_generator] * 8,
        "_lazy_call": cpu_cuda._lazy_call,
    }


def _varlen_attention(only_cuda: list[str]) -> Callable[..., Tensor]:
    """torch.nn.attention.varlen.varlen_attn, causal, a sequence at a time."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor,
        max_q: int, max_k: int, *, scale: float, window_size: tuple[int, int], enable_gqa: bool,
    ) -> Tensor:  # fmt: skip
        only_cuda.append("varlen_attn")
        heads, groups = query.size(1), key.size(1)
        assert {x.dtype for x in (query, key, value)} < {torch.bfloat16, torch.float16}
        assert {x.dtype for x in (cu_seq_q, cu_seq_k)} == {torch.int32}
        assert {x.device for x in (query, key, value, cu_seq_q, cu_seq_k)} == {query.device}
        assert query.is_cuda and window_size == (-1, 0) and enable_gqa == (heads != groups)
        bounds, outputs = cu_seq_q.tolist(), []
        assert max_q == max_k >= max(b - a for a, b in itertools.pairwise(bounds))
        key, value = (x.repeat_interleave(heads // groups, dim=1) for x in (key, value))
        for first, last in itertools.pairwise(bounds):
            q, k, v = (x[None, first:last].transpose(1, 2) for x in (query, key, value))
            output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
            outputs.append(output.transpose(1, 2)[0])
        return torch.cat(outputs)

    return attend


class _Groups:
    """Process groups that check labels."""

    def __init__(self) -> None:
        self._of_hosts: set[str] = set()
        """Names of the groups that asked for gloo."""
        self.collectives: collections.Counter[str] = collections.Counter()

    def starting(self, start: Callable, position: int) -> Callable:
        """Let init_process_group or new_group, whose backend is at `position`, start gloo."""

        def start_group(*arguments: Any, **named: Any) -> Any:
            values = list(arguments)
            if position < len(values):
                backend, values[position] = values[position], "gloo"
            else:
                backend, named["backend"] = named.get("backend"), "gloo"
            assert backend in ("nccl", "gloo", None), backend
            group = start(*values, **named)
            if backend == "gloo" and isinstance(group, ProcessGroup):
                self._of_hosts.add(group.group_name)
            return group

        return start_group

    def device_type(self, group: ProcessGroup | None = None) -> str:
        """Whose tensors the group takes; None: the default group."""
        group = dist.group.WORLD if group is None else group
        assert group is not None
        return "cpu" if group.group_name in self._of_hosts else "cuda"

    def checking(self, name: str, original: Callable) -> Callable:
        """Let a method of ProcessGroup check what it is given."""

        def start(group: ProcessGroup, tensors: Any, *rest: Any, **named: Any) -> Any:
            on_gpus = self.device_type(group) == "cuda"
            for tensor in flat([tensors, rest[0] if name in OUT_OF_PLACE else []]):
                _check(name, tensor, on_gpus)
            self.collectives[name] += on_gpus
            if name == "send":
                # NCCL's stream keeps what is sent; gloo would read what a schedule has freed.
                tensors = [tensor.clone() for tensor in tensors]
            return original(group, tensors, *rest, **named)

        return start


def _check(name: str, tensor: Tensor, on_gpus: bool) -> None:
    wanted = torch.device("cuda", torch.cuda.current_device()) if on_gpus else CPU
    if (found := label_of(tensor)) != wanted:
        raise WrongDevice(f"{name} takes tensors on {wanted}, found one on {found}")
    if on_gpus and tensor.dtype not in NCCL_DTYPES:
        raise WrongDevice(f"{name}: NCCL has no {tensor.dtype}")
    if on_gpus and not tensor.is_contiguous():
        raise WrongDevice(f"{name}: NCCL takes contiguous tensors, found strides {tensor.stride()}")
