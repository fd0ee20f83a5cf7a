"""Stand-in for `torch.cuda` that megatron-core sees without a GPU (see megatron_on_cpu.py).

Only what megatron-core calls in training is defined here. Everything else is looked up in the real
`torch.cuda`, which reports that there is no GPU.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

_CPU = torch.device("cpu")


def current_device() -> torch.device:
    """The CPU, where megatron-core expects a device index: both are accepted as `device=`."""
    return _CPU


def device_count() -> int:
    """One device a process."""
    return 1


def is_available() -> bool:
    """No GPU: megatron-core's own CPU branches are the right ones."""
    return False


def is_current_stream_capturing() -> bool:
    """There are no CUDA graphs."""
    return False


def set_device(device: Any) -> None:
    """Nothing to choose from."""


def synchronize(*_: Any, **__: Any) -> None:
    """CPU operators have finished when they return."""


def empty_cache() -> None:
    """There is no caching allocator."""


def manual_seed(seed: int) -> None:
    """Seed the CPU generator."""
    torch.manual_seed(seed)


def get_rng_state(device: Any = None) -> torch.Tensor:
    """State of the CPU generator."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    """Set the CPU generator's state."""
    torch.set_rng_state(state)


random = types.SimpleNamespace(get_rng_state=get_rng_state, set_rng_state=set_rng_state)
default_generators = {key: torch.default_generator for key in (_CPU, None, 0)}


def compile(function: Callable | None = None, **_: Any) -> Callable:
    """Return the function itself: the real `torch.compile` needs a C++ toolchain and minutes."""
    return function if function is not None else lambda f: f


def _lazy_init() -> None:
    """Initialise CUDA."""


def _lazy_call(function: Callable, **_: Any) -> None:
    """Call as soon as CUDA is initialised: at once."""
    function()


def device(*_: Any) -> contextlib.AbstractContextManager:
    """`with torch.cuda.device(...)`."""
    return contextlib.nullcontext()


def stream(*_: Any) -> contextlib.AbstractContextManager:
    """`with torch.cuda.stream(...)`."""
    return contextlib.nullcontext()


class Event:
    """Work on a CPU is in program order: every event has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Do nothing."""

    wait = synchronize = record

    def query(self) -> bool:
        """Has it happened?"""
        return True


class Stream:
    """Work on a CPU is in program order: nothing waits."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        """Do nothing."""

    wait_event = synchronize = wait_stream

    def record_event(self, *_: Any) -> Event:
        """Return an event that has happened."""
        return Event()

    def query(self) -> bool:
        """Is all work done?"""
        return True


ExternalStream = Stream


def current_stream(*_: Any) -> Stream:
    """Return the only stream."""
    return Stream()


default_stream = current_stream


@contextlib.contextmanager
def _range(*_: Any) -> Iterator[None]:
    yield


nvtx = types.SimpleNamespace(
    range_push=lambda *_: None, range_pop=lambda *_: None, range=_range, mark=lambda *_: None
)


def __getattr__(name: str) -> Any:
    return getattr(torch.cuda, name)
