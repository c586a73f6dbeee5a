"""How many bytes of tensors that operators made are alive, and were at most."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self._made = {}
        self.peak = 0

    def now(self):
        self._made = {key: value for key, value in self._made.items() if not value[0].expired()}
        return sum(nbytes for _, nbytes in self._made.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in given:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now())
        return result


def _storages(values):
    for value in tree_leaves(values):
        value = getattr(value, "_local_tensor", value)
        value = getattr(value, "elem", value)  # a collective's result that is waited for
        if isinstance(value, torch.Tensor):
            yield value.untyped_storage()
