"""CPU tensors that pass for a GPU's, so that what a GPU would refuse is refused without one.

Every tensor computes on the CPU, with its true numbers. Its storage carries a label, the device
that it pretends to be on, and within `labelled` Python sees the label: `.device`, `.is_cuda` and
`.type()` answer by it, `device=`, `.to()`, `.cuda()` and `torch.device` contexts set it, and a move
copies. Each operator that reaches a device, forward and backward, checks the labels of its tensors
and hands them on, by the rules of a GPU:

    all tensors of an operator are on one device, but for 0-d tensors of the host in pointwise
    operators, and for copies; numpy and generators are the host's alone; a tensor's gradient is
    where the tensor is

One rule is stricter: an index on the host into a GPU's tensor is refused too. torch would copy it
there by itself, and wait for that.

Operators that only CUDA has, products into a wider dtype (torch's out_dtype), are written here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
aten = torch.ops.aten


class WrongDevice(RuntimeError):
    """What a GPU would refuse."""


def label_of(tensor: Tensor) -> torch.device:
    """The device that it passes for."""
    with torch._C.DisableTorchFunction():
        return _label(tensor)


def _label(tensor: Tensor) -> torch.device:
    """label_of where no function mode looks on."""
    return getattr(tensor.untyped_storage(), "label", CPU)


def put_label(tensor: Tensor, device: torch.device) -> Tensor:
    """Let the tensor, and all that share its memory, pass for this device's; return it."""
    with torch._C.DisableTorchFunction():
        tensor.untyped_storage().label = device
    return tensor


def to_device(asked: Any) -> torch.device:
    """Resolve what `device=` takes; "cuda" is the current GPU."""
    device = torch.device("cuda", asked) if isinstance(asked, int) else torch.device(asked)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


@contextlib.contextmanager
def labelled() -> Iterator[list[str]]:
    """Label and check this thread's tensors; yields the names of operators that only CUDA has."""
    operators = _Operators()
    requests = _Requests(operators)
    engine = _Engine(torch.autograd.Variable._execution_engine, requests)
    with mock.patch.object(torch.autograd.Variable, "_execution_engine", engine):
        with requests, operators:
            yield operators.only_cuda


def _tensors(values: Any) -> list[Tensor]:
    """Those in nested lists, tuples and dicts; torch's tree_leaves takes most of a step's time."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    return [tensor for value in values for tensor in _tensors(value)]


# Moves.


class _Move(torch.autograd.Function):
    """A copy on another device, whose gradient goes back to where the tensor was."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        ctx.origin = label_of(tensor), tensor.dtype
        return put_label(tensor.detach().to(dtype, copy=True), device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.to(*ctx.origin), None, None


def _moved(
    tensor: Tensor,
    device: torch.device,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    copy: bool = False,
    **named: Any,
) -> Tensor:
    """Tensor.to(device, ...)."""
    dtype = dtype or tensor.dtype
    if label_of(tensor) == device:
        return tensor.to(dtype, copy=copy, **named)
    if tensor.requires_grad and torch.is_grad_enabled():
        return _Move.apply(tensor, device, dtype)
    return put_label(tensor.detach().to(dtype, copy=True, **named), device)


def _to(tensor: Tensor, *arguments: Any, **named: Any) -> Tensor:
    """Tensor.to with any arguments."""
    if "other" in named:
        arguments = (named.pop("other"), *arguments)
    if arguments and isinstance(arguments[0], Tensor):
        other, *rest = arguments
        return _moved(tensor, label_of(other), other.dtype, *rest, **named)
    if named.get("device") is not None:
        return _moved(tensor, to_device(named.pop("device")), *arguments, **named)
    if arguments and not isinstance(arguments[0], torch.dtype):
        return _moved(tensor, to_device(arguments[0]), *arguments[1:], **named)
    return tensor.to(*arguments, **named)


def _cuda(tensor: Tensor, device: Any = None, *_: Any, **__: Any) -> Tensor:
    return _moved(tensor, to_device("cuda" if device is None else device))


# Questions.


def _type(tensor: Tensor, dtype: Any = None) -> Any:
    if dtype is not None:
        assert isinstance(dtype, torch.dtype), f".type({dtype}) may be a move, and is not labelled"
        return tensor.type(dtype)
    name = tensor.type()
    return name if label_of(tensor) == CPU else name.replace("torch.", "torch.cuda.")


def _numpy(name: str) -> Callable:
    def read(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        if label_of(tensor) != CPU:
            raise WrongDevice(f"numpy cannot read a tensor on {label_of(tensor)}")
        return getattr(tensor, name)(*arguments, **named)

    return read


def _set_gradient(tensor: Tensor, gradient: Tensor | None) -> None:
    if gradient is not None and label_of(gradient) != label_of(tensor):
        raise WrongDevice(f"gradient on {label_of(gradient)} of a tensor on {label_of(tensor)}")
    tensor.grad = gradient


_ANSWERS: dict[Any, Callable] = {
    Tensor.device.__get__: label_of,
    Tensor.is_cuda.__get__: lambda tensor: label_of(tensor).type == "cuda",
    Tensor.is_cpu.__get__: lambda tensor: label_of(tensor) == CPU,
    Tensor.get_device: lambda tensor: -1 if label_of(tensor) == CPU else label_of(tensor).index,
    Tensor.type: _type,
    Tensor.to: _to,
    Tensor.cpu: lambda tensor, **_: _moved(tensor, CPU),
    Tensor.cuda: _cuda,
    Tensor.pin_memory: lambda tensor, *_: tensor.clone(),
    Tensor.numpy: _numpy("numpy"),
    Tensor.__array__: _numpy("__array__"),
    Tensor.grad.__set__: _set_gradient,
    Tensor.new_tensor: lambda tensor, *arguments, device=None, **named: put_label(
        tensor.new_tensor(*arguments, **named),
        label_of(tensor) if device is None else to_device(device),
    ),
}
_OF_DATA = (torch.tensor, torch.as_tensor, torch.asarray)


class _Requests(TorchFunctionMode):
    """Sees each function of torch that is called from Python, but not what they call in turn."""

    def __init__(self, operators: _Operators) -> None:
        super().__init__()
        self._operators = operators

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if answer := _ANSWERS.get(function):
            return answer(*args, **named)
        of_tensor = function in _OF_DATA and isinstance(args[0], Tensor)
        asked = named.get("device")
        if asked is None and function in _device._device_constructors():
            asked = _device.CURRENT_DEVICE or (label_of(args[0]) if of_tensor else CPU)
        if asked is None or function is torch.device:
            return self.calling(function, args, named)
        device = to_device(asked)
        if of_tensor:
            copy = function is torch.tensor
            return _moved(args[0], device, named.get("dtype"), copy=copy)
        if named.get("generator") is not None and device.type == "cuda":
            raise WrongDevice(f"{function.__name__}: the host's generator for a tensor on {device}")
        if device.type != "meta":
            # Named, or a torch.device context would name its own.
            named["device"] = CPU
            named.pop("pin_memory", None)
        return put_label(function(*args, **named), device)

    def calling(self, function: Callable, arguments: tuple, named: dict) -> Any:
        """Call it; what torch makes for itself is on the GPU if one of the arguments is."""
        labels = {_label(value) for value in _tensors([arguments, named])}
        before = self._operators.makes
        self._operators.makes = next(iter(labels - {CPU}), CPU)
        try:
            return function(*arguments, **named)
        finally:
            self._operators.makes = before


class _Engine:
    """Autograd's engine, with the function mode on also inside torch.autograd.backward."""

    def __init__(self, engine: Any, requests: _Requests) -> None:
        self._engine, self._requests = engine, requests

    def run_backward(self, *arguments: Any, **named: Any) -> Any:
        """What the name says."""
        is_on = self._requests in _get_current_function_mode_stack()
        with contextlib.nullcontext() if is_on else self._requests:
            return self._requests.calling(self._engine.run_backward, arguments, named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


# Operators.

_COPIES = {aten.copy_, aten.copy, aten._foreach_copy_, aten.set_}
_TAKE_NUMBERS_TOO = {
    aten.fill_, aten.fill, aten.masked_fill_, aten.masked_fill, aten.index_put_, aten.index_put,
}  # fmt: skip
"""Beside pointwise ones: operators that take a 0-d tensor of the host."""


class _Operators(TorchDispatchMode):
    """Sees each operator that reaches a device."""

    makes = CPU
    """Where torch makes what it needs for itself."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch would import its compiler, to be kept from compiling this

    def __init__(self) -> None:
        super().__init__()
        self.only_cuda: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        named = kwargs or {}
        if function.namespace == "c10d" or function.overloadpacket in _COPIES:
            return function(*args, **named)
        with torch._C.DisableTorchFunction():
            device = _device_of(function, args, named, self.makes)
            if device.type == "cuda" and function in _ONLY_CUDA:
                self.only_cuda.append(function.name())
                function = _ONLY_CUDA[function]
            result = function(*args, **named)
            if device != CPU:
                for tensor in _tensors(result):
                    tensor.untyped_storage().label = device
        return result


def _device_of(function: Any, args: tuple, kwargs: dict, makes: torch.device) -> torch.device:
    """Check an operator's tensors and return the device of its results; makes: if it has none.

    Raises:
        WrongDevice: a GPU would.
    """
    tensors = _tensors([args, kwargs])
    labels = {_label(tensor) for tensor in tensors}
    if len(labels) > 1 and _takes_numbers(function):
        written = set(map(id, _written(function, args, kwargs)))
        tensors = [t for t in tensors if t.dim() or _label(t) != CPU or id(t) in written]
        labels = {_label(tensor) for tensor in tensors}
    if len(labels) > 1:
        each = ", ".join(f"{list(t.shape)} on {_label(t)}" for t in tensors)
        raise WrongDevice(f"{function.name()} takes tensors of one device, found {each}")
    device = labels.pop() if labels else makes
    if device.type == "cuda" and kwargs.get("generator") is not None:
        raise WrongDevice(f"{function.name()}: the host's generator for a tensor on {device}")
    return device


def _takes_numbers(function: Any) -> bool:
    if function.name().startswith("aten::_foreach_"):
        return True
    return torch.Tag.pointwise in function.tags or function.overloadpacket in _TAKE_NUMBERS_TOO


def _written(function: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    """What the operator writes to."""
    found = []
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += _tensors(value)
    return found


# What only CUDA has.

_NARROW = (torch.bfloat16, torch.float16)


def _mm(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
    assert a.dtype == b.dtype in _NARROW and out.dtype == out_dtype == torch.float32
    return out.copy_(a.to(out_dtype) @ b.to(out_dtype))


def _addmm(
    c: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype,
    *, beta: float = 1, alpha: float = 1, out: Tensor,
) -> Tensor:  # fmt: skip
    assert a.dtype == b.dtype in _NARROW and out.dtype == c.dtype == out_dtype == torch.float32
    assert alpha == 1
    # As cuBLAS: what is there with beta 0 may be NaN.
    return out.copy_(a.to(out_dtype) @ b.to(out_dtype) + (beta * c if beta else 0))


_ONLY_CUDA = {aten.mm.dtype_out: _mm, aten.addmm.dtype_out: _addmm}
