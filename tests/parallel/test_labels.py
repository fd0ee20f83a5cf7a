"""Labelled tensors and groups of GPUs on paper refuse what a GPU refuses, and nothing else.

Whether a GPU does so too has been read in torch's sources and not run.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.parallel.labelled_cuda import labelled_gpu
from tests.parallel.labels import CPU, WrongDevice

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu():
    with labelled_gpu():
        yield


def on_gpu():
    return torch.arange(6.0, device="cuda").view(2, 3)


class OnesOfTheHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.ones(2, 3)


def with_a_gradient(gradient):
    x = on_gpu().requires_grad_()
    x.grad = gradient


REFUSED = {
    "made without device=": lambda: on_gpu() + torch.zeros(3),
    "a mask left on the host": lambda: on_gpu() * torch.ones(2, 3, dtype=torch.bool),
    "the GPU's number in a host's tensor": lambda: torch.ones(3) + on_gpu().sum(),
    "into a host's number": lambda: torch.tensor(0.0).add_(on_gpu().sum()),
    "numbers of both, stacked": lambda: torch.stack([on_gpu().sum(), torch.tensor(1.0)]),
    "a product": lambda: on_gpu() @ torch.ones(3, 2),
    "a mask as an index": lambda: on_gpu()[torch.ones(2, dtype=torch.bool)],
    "out=": lambda: torch.mul(on_gpu(), 2, out=torch.empty(2, 3)),
    "another GPU": lambda: on_gpu() + torch.zeros(3, device="cuda:1"),
    "a view of it": lambda: on_gpu().t()[1:] + on_gpu().cpu().t()[1:],
    "in a backward pass": lambda: OnesOfTheHost.apply(on_gpu().requires_grad_()).sum().backward(),
    "a gradient": lambda: with_a_gradient(torch.ones(2, 3)),
    "numpy": lambda: on_gpu().numpy(),
    "numpy by itself": lambda: np.asarray(on_gpu()),
    "a generator": lambda: torch.rand(3, generator=torch.Generator(), device="cuda"),
    "a generator in place": lambda: on_gpu().normal_(generator=torch.Generator()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_gpu_refuses(gpu, name):
    with pytest.raises(WrongDevice):
        REFUSED[name]()


def _with_context():
    with torch.device("cuda"):
        return torch.zeros(3), torch.nn.Linear(2, 2).weight


ON_THE_GPU = {
    "a number of the host": lambda: on_gpu() * torch.tensor(2.0),
    "assigned to a mask": lambda: on_gpu().index_put_((on_gpu() > 2,), torch.tensor(1.0)),
    "a copy": lambda: on_gpu().copy_(torch.ones(2, 3)),
    "by .to": lambda: torch.ones(3).to("cuda", torch.float64, non_blocking=True),
    "by .to of another": lambda: torch.ones(3).to(on_gpu()),
    "by .cuda": lambda: torch.ones(3).cuda(0),
    "by an index": lambda: torch.ones(3, device=0),
    "in a context": _with_context,
    "like another": lambda: (torch.zeros_like(on_gpu()), on_gpu().new_tensor([1.0])),
    "a parameter": lambda: torch.nn.Parameter(on_gpu()[0]),
    "of a number": lambda: torch.as_tensor(on_gpu().sum()),
    "made by torch for itself": lambda: torch.nn.functional.scaled_dot_product_attention(
        on_gpu(), on_gpu(), on_gpu(), is_causal=True
    ),
}
ON_THE_HOST = {
    "by .cpu": lambda: on_gpu().cpu(),
    "by .to": lambda: on_gpu().to("cpu", copy=True),
    "like another": lambda: torch.zeros_like(on_gpu(), device="cpu"),
    "of a list": lambda: torch.tensor([float(x) for x in on_gpu().flatten()]),
    "by default": lambda: torch.arange(3),
    "a copy": lambda: torch.ones(2, 3).copy_(on_gpu()),
}


@pytest.mark.parametrize(
    ("make", "device"),
    [
        *(pytest.param(make, GPU, id=f"GPU, {name}") for name, make in ON_THE_GPU.items()),
        *(pytest.param(make, CPU, id=f"host, {name}") for name, make in ON_THE_HOST.items()),
    ],
)
def test_where_tensors_are(gpu, make, device):
    made = make()
    for tensor in made if isinstance(made, tuple) else (made,):
        assert tensor.device == device and tensor.is_cuda == (device == GPU)
        assert tensor.type().startswith("torch.cuda." if device == GPU else "torch.")


def test_a_move_copies_and_its_gradient_comes_back(gpu):
    x = on_gpu().requires_grad_()
    away = x.cpu()
    (away * torch.full((2, 3), 2.0)).sum().backward()
    assert x.grad.device == GPU and x.grad.tolist() == [[2.0] * 3] * 2
    away.detach().zero_()
    assert x.sum() == 15


def refused_by_groups():
    """By group, what it refuses; a worker's."""
    with labelled_gpu() as seen:
        groups = {"nccl": dist.new_group([0]), "gloo": dist.new_group([0], backend="gloo")}
        tensors = {
            "host": torch.ones(2),
            "GPU": on_gpu(),
            "strided": on_gpu().t(),
            "int16": on_gpu().to(torch.int16),
        }
        refused = {}
        for name, group in groups.items():
            refused[name] = set()
            for kind, tensor in tensors.items():
                try:
                    dist.all_reduce(tensor, group=group)
                    dist.all_gather_into_tensor(torch.empty_like(tensor), tensor, group=group)
                except WrongDevice:
                    refused[name].add(kind)
        into = torch.empty(2)
        try:
            dist.all_gather_into_tensor(into, torch.ones(2, device="cuda"), group=groups["nccl"])
        except WrongDevice:
            refused["into the host's"] = True
        objects = [None]
        dist.all_gather_object(objects, "any", group=groups["nccl"])
    return refused, objects, seen.collectives["allreduce"]


def test_groups_take_the_tensors_of_their_backend(workers):
    refused, objects, count = workers.run(1, refused_by_groups)[0]
    assert refused == {
        "nccl": {"host", "strided", "int16"},
        "gloo": {"GPU", "strided", "int16"},
        "into the host's": True,
    }
    assert objects == ["any"] and count == 1
