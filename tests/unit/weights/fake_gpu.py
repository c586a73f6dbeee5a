"""GPUs whose memory is the host's, for transports that need some."""

import ctypes

from toys import Rank

from rl_memory_plugins.errors import DeviceMemoryError, UnsupportedError
from rl_memory_plugins.memory.fingerprint import memory_view
from rl_memory_plugins.trainer import ModelSource
from rl_memory_plugins.weights.cuda_ipc import Allocation


class FakeGpu:
    """Has the methods of `cuda_ipc.CudaGpu`. What `denied` names fails as a driver's refusal."""

    def __init__(self, index=0, capacity=1 << 24):
        self.index = index
        self.capacity = capacity
        self.denied = set()
        self.memory = {}  # by address: the buffer and its serial
        self.opened = []  # every handle that was opened, in order
        self.mapped = []  # addresses that are open
        self.registered = []
        self.copied = []  # the bytes and the stream of each call that copies
        self._serials = 0

    def allocate(self, nbytes):
        if nbytes > self.free_bytes():
            raise DeviceMemoryError("full", needed_bytes=nbytes, free_bytes=self.free_bytes(), margin_bytes=0)
        memory = ctypes.create_string_buffer(nbytes)
        self._serials += 1
        self.memory[ctypes.addressof(memory)] = memory, self._serials
        return ctypes.addressof(memory)

    def free(self, address):
        assert address not in self.mapped, "freed while open"
        del self.memory[address]

    def free_bytes(self):
        return self.capacity - sum(len(memory) for memory, _ in self.memory.values())

    def lacks(self, nbytes):
        return self.free_bytes() < nbytes

    def find(self, address):
        if "export" in self.denied:
            return None
        for base, (memory, serial) in self.memory.items():
            if base <= address < base + len(memory):
                return Allocation(base.to_bytes(64, "big"), base, len(memory), serial)
        return None

    def open(self, handle):
        self._refuse("open")
        address = int.from_bytes(handle, "big")
        if address not in self.memory:
            raise UnsupportedError("invalid handle")
        assert address not in self.mapped, "opened twice"
        self.opened.append(handle)
        self.mapped.append(address)
        return address

    def bytes_from(self, address):
        for base, (memory, _) in self.memory.items():
            if base <= address < base + len(memory):
                return base + len(memory) - address
        raise UnsupportedError("no such memory")

    def close(self, address):
        self.mapped.remove(address)

    def register(self, address, nbytes):
        self._refuse("register")
        self.registered.append(address)

    def unregister(self, address):
        self.registered.remove(address)

    def reaches(self, other):
        return "reach" not in self.denied

    def copy(self, target, source, nbytes, stream):
        self.copied.append((nbytes, stream))
        ctypes.memmove(target, source, nbytes)

    def copy_many(self, targets, sources, sizes, stream):
        self.copied.append((list(sizes), stream))
        for target, source, nbytes in zip(targets, sources, sizes, strict=True):
            ctypes.memmove(target, source, nbytes)

    def view(self, address, nbytes):
        return memory_view(address, nbytes)

    def synchronize(self):
        pass

    def _refuse(self, call):
        if call in self.denied:
            raise UnsupportedError(f"{call} is denied")

    def place(self, tensors, *, per_allocation=1):
        """Copies of the tensors in this GPU's memory, so many to an allocation."""
        placed, items = {}, list(tensors.items())
        for start in range(0, len(items), per_allocation):
            group = items[start : start + per_allocation]
            memory = self.allocate(sum(-(-tensor.nbytes // 256) * 256 for _, tensor in group))
            for name, tensor in group:
                view = self.view(memory, tensor.nbytes).view(tensor.dtype).view(tensor.shape)
                placed[name] = view.copy_(tensor)
                memory += -(-tensor.nbytes // 256) * 256
        return placed


def gpu_rank(model=None, rank=0, **options):
    made = Rank(model, rank, **options)
    made.manager.device.name = f"GPU-{rank}"
    return made


class OneByOne:
    """A source that makes each tensor when its turn comes."""

    def __init__(self, tensors):
        self._source = ModelSource(tensors)
        self.specs = self._source.specs

    def tensors(self):
        for name, tensor in self._source.tensors():
            yield name, tensor.clone()
