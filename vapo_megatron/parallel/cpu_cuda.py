"""Stand-in for `torch.cuda` that megatron-core sees without a GPU (see megatron_on_cpu.py).

Only what megatron-core calls in training, and would do something else without a GPU, is defined
here. Everything else is looked up in the real `torch.cuda`, which reports that there is no GPU.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")


def current_device() -> torch.device:
    """The CPU, where megatron-core expects a device index: both are accepted as `device=`."""
    return _CPU


def synchronize(*_: Any, **__: Any) -> None:
    """CPU operators have finished when they return."""


def current_stream(device: Any = None) -> torch.cpu.Stream:
    """The CPU's only stream; megatron-core 0.19 has it wait for events that only a GPU has."""
    return torch.cpu.current_stream()


class Stream(torch.cpu.Stream):
    """Of the CPU, which works in order; the dispatcher of experts' tokens copies on one."""

    def record_event(self) -> Stream:  # type: ignore[override]
        """Return what can be waited for."""
        return self

    def synchronize(self) -> None:
        """Nothing is in flight."""


def stream(wanted: Any) -> contextlib.AbstractContextManager[None]:
    """Work on the only stream."""
    return contextlib.nullcontext()


def manual_seed(seed: int) -> None:
    """Seed the CPU generator."""
    torch.manual_seed(seed)


def get_rng_state(device: Any = None) -> torch.Tensor:
    """State of the CPU generator."""
    return torch.get_rng_state()


random = types.SimpleNamespace(get_rng_state=get_rng_state)
default_generators = {_CPU: torch.default_generator}


def compile(function: Callable | None = None, **_: Any) -> Callable:
    """Return the function itself: the real `torch.compile` needs a C++ toolchain and minutes."""
    return function if function is not None else lambda f: f


def _lazy_call(function: Callable, **_: Any) -> None:
    """Call as soon as CUDA is initialised: at once."""
    function()


def __getattr__(name: str) -> Any:
    return getattr(torch.cuda, name)
