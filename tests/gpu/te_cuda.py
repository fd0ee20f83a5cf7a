"""Stand-in for torch.cuda that Transformer Engine sees in tests: an H100 on the CPU.

te_site.py copies it beside Transformer Engine as `transformer_engine_cuda`.
"""

import contextlib
import types

import torch

_CPU = torch.device("cpu")
_H100 = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132)


def is_available():
    return True


def current_device():
    return _CPU


def get_device_properties(device=None):
    return _H100


def get_device_capability(device=None):
    return _H100.major, _H100.minor


def is_current_stream_capturing():
    return False


def synchronize(*_):
    pass


def stream(_):
    return contextlib.nullcontext()


def _lazy_init():
    pass


def _lazy_call(function, **_):
    function()


def compile(function=None, **_):
    return function if function is not None else lambda f: f


get_rng_state, set_rng_state, manual_seed = (
    torch.get_rng_state,
    torch.set_rng_state,
    torch.manual_seed,
)
default_generators = {_CPU: torch.default_generator}


def __getattr__(name):
    return getattr(torch.cuda, name)
