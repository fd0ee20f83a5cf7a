"""Which CUDA calls offload makes, in which order, recorded by a stand-in.

Not exercised: CUDA itself; tools/gpu_smoke.py's section `offload` does that on a GPU.
"""

import mmap
from types import SimpleNamespace

import pytest
import torch

from vapo_megatron.errors import ConfigError
from vapo_megatron.parallel.offload import HostBuffer, Offload


class Cuda:
    """Records the calls; memory stays on the host."""

    def __init__(self, monkeypatch, error=0):
        self.asked, self.error = [], error
        note = self.asked.append
        for name, stand_in in {
            "is_available": lambda: True,
            "cudart": lambda: self,
            "synchronize": lambda: note("synchronize"),
            "empty_cache": lambda: note("give back"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        copy, resize = torch.Tensor.copy_, torch.UntypedStorage.resize_

        def noted_copy(to, source, non_blocking=False):
            note(f"copy {non_blocking=}")
            return copy(to, source, non_blocking)

        def noted_resize(storage, size):
            note(f"resize to {size}")
            return resize(storage, size)

        monkeypatch.setattr(torch.Tensor, "copy_", noted_copy)
        monkeypatch.setattr(torch.UntypedStorage, "resize_", noted_resize)

    def cudaHostRegister(self, pointer, size, flags):
        self.asked.append(("pin", pointer, size, flags))
        return self.error

    def cudaHostUnregister(self, pointer):
        self.asked.append(("unpin", pointer))

    def cudaGetErrorString(self, error):
        return f"error {error} in words"


def an_offload():
    """Of one float32 parameter of 4 x 4: 64 bytes; its main parameter is itself; two moments."""
    model = torch.nn.Linear(4, 4, bias=False)
    model.weight.main_grad = torch.ones(4, 4)
    optimizer = SimpleNamespace(optimizer=torch.optim.Adam(model.parameters()))
    return model, Offload(list(model.parameters()), optimizer)


def test_nothing_is_freed_or_used_before_it_is_copied(monkeypatch):
    cuda = Cuda(monkeypatch)
    model, offload = an_offload()
    before = model.weight.detach().clone()
    assert offload.num_bytes == 64 * 3
    cuda.asked.clear()
    offload.hold("nothing")
    copies = [*["copy non_blocking=True"] * 3, "synchronize"]
    assert cuda.asked == [*copies, *["resize to 0"] * 4, "give back"]
    cuda.asked.clear()
    offload.hold("state")
    assert cuda.asked == [*["resize to 64"] * 3, *copies]
    assert torch.equal(model.weight.detach(), before)
    cuda.asked.clear()
    offload.hold("nothing")
    offload.hold("parameters")
    cuda.asked.clear()
    offload.hold("nothing")
    assert cuda.asked == ["resize to 0", "give back"], "only read: nothing is copied"


def test_closing_gives_all_back_whatever_is_held(monkeypatch):
    cuda = Cuda(monkeypatch)
    model, offload = an_offload()
    (pinned,) = [a for a in cuda.asked if a[0] == "pin"]
    assert pinned[1] == offload._buffer.tensor.data_ptr() and pinned[2:] == (64 * 3, 0)
    cuda.asked.clear()
    offload.close()
    assert cuda.asked == [*["resize to 0"] * 4, "give back", ("unpin", pinned[1])]
    offload.close()
    assert cuda.asked.count(("unpin", pinned[1])) == 1
    assert model.weight.untyped_storage().nbytes() == 0


def test_memory_that_cannot_be_pinned_is_a_users_mistake(monkeypatch):
    cuda = Cuda(monkeypatch, error=2)
    with pytest.raises(ConfigError) as error:
        HostBuffer(5_000_000_000)
    assert str(error.value) == (
        "parallel.offload=true: CUDA cannot pin 5 GB of host memory (error 2 in words); raise the "
        "limit of locked memory (ulimit -l), use more nodes, or set parallel.offload=false"
    )
    assert [a[0] for a in cuda.asked] == ["pin"]


def test_pinned_pages_stay_with_this_process(monkeypatch):
    advised = []

    class Memory(mmap.mmap):
        def madvise(self, option):
            advised.append(option)
            super().madvise(option)

    monkeypatch.setattr("vapo_megatron.parallel.offload.mmap.mmap", Memory)
    buffer = HostBuffer(10)
    assert advised == [mmap.MADV_DONTFORK] and buffer.tensor.numel() == 10
    buffer.close()
