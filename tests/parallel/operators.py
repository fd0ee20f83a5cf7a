"""Watches torch's operators: which ran, and how much memory their results held at once."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Counts what operators create, and still hold, while it is entered.

    What an operator allocates and frees inside itself is not seen.
    """

    def __init__(self):
        super().__init__()
        self.names = []
        self.peak_bytes = 0
        """Most bytes alive at once of all storages created."""
        self._alive = {}

    @property
    def collectives(self):
        return [name for name in self.names if name.startswith("c10d")]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {s._cdata for s in _storages([args, kwargs])}
        result = function(*args, **(kwargs or {}))
        self.names.append(str(function))
        self._alive = {key: x for key, x in self._alive.items() if not x[0].expired()}
        for storage in _storages(result):
            if storage._cdata not in given and storage._cdata not in self._alive:
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return result


def _storages(value):
    leaves = torch.utils._pytree.tree_leaves(value)
    return [x.untyped_storage() for x in leaves if isinstance(x, torch.Tensor)]
