"""Moves modules and optimisers to host memory and back. The host memory is kept between cycles.

The unit of a move is a tensor's storage. An offload copies its bytes to the host and resizes it to zero; a load resizes
it back and copies the bytes to the device. Tensor objects, their views and all references stay valid: FSDP's flat
parameters and their shards, DTensors, tied weights, Megatron's buffers, the references of an optimiser.

An offloaded tensor must not be used in computations; `host_view` reads its host copy. Save and load checkpoints only
while everything is loaded: `torch.save` writes the empty storage without an error, and `torch.load` of that file fails;
`load_state_dict` writes to unmapped memory, which may crash the process.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch

from rl_memory_plugins.errors import DeviceMemoryError, StateConflictError, UnsupportedError
from rl_memory_plugins.memory.adoption import bytes_of, in_groups, make_room
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.emptied import HostCopy, host_copies
from rl_memory_plugins.memory.fingerprint import memory_view
from rl_memory_plugins.memory.interrupts import to_its_end
from rl_memory_plugins.memory.pinned import PinnedArena
from rl_memory_plugins.trainer.closed_memories import free_closed
from rl_memory_plugins.trainer.held_tensors import (
    Target,
    check_target,
    has_memory,
    on_accelerator,
    optimizers_in,
    plain_parts,
    reshard,
    tensors_of,
)
from rl_memory_plugins.trainer.sleepers import await_leaving, owned_elsewhere, that_may_sleep
from rl_memory_plugins.trainer.state_size import expected_state_bytes
from rl_memory_plugins.weights.manifest import align
from rl_memory_plugins.weights.open_allocations import release_mapped

HOST_MARGIN_BYTES = 256 << 20
"""Bytes of host memory that an offload leaves free. If host memory runs out, the kernel kills some process."""


class Moved(NamedTuple):
    """The bytes and seconds of one offload or load. Both are 0 if there was nothing to move."""

    bytes: int = 0
    seconds: float = 0.0


class _Buffer:
    """Host memory for the storages of one offload."""

    def __init__(self, host: _HostMemory, address: int) -> None:
        self.host, self.address = host, address


class _HostMemory:
    """The arena of an offloader. It is closed when neither the offloader nor an offloaded storage needs it.

    Unused buffers return to the arena at the next offload: a finaliser could run while this thread holds the arena's
    lock.
    """

    def __init__(self, arena: PagedArena) -> None:
        self.arena = arena
        self._largest = 0  # bytes of the largest buffer that was prepared or wanted
        self._buffers: dict[int, weakref.ref[_Buffer]] = {}
        weakref.finalize(self, _close, arena).atexit = False

    def prepare(self, nbytes: int) -> None:
        """Allocate so much in the background, instead of what was prepared before."""
        self._release_unused()
        if nbytes > max(self._largest, self.arena.held_bytes):
            self.arena.free_idle()
            self._largest = nbytes
            self.arena.prepare([nbytes])

    def buffer(self, nbytes: int) -> _Buffer:
        self._release_unused()
        if nbytes > self._largest:
            self.arena.free_idle()  # also what is still being allocated, and would be too small
        self._largest = max(self._largest, nbytes)
        buffer = _Buffer(self, self.arena.acquire(nbytes))
        self._buffers[buffer.address] = weakref.ref(buffer)
        return buffer

    def _release_unused(self) -> None:
        for address in [address for address, buffer in self._buffers.items() if buffer() is None]:
            del self._buffers[address]
            self.arena.release(address)


def _close(arena: PagedArena) -> None:
    """Free an arena whose owner is gone. The garbage collector may call this in any thread, also in one that holds the
    arena's lock while it allocates in the background: then another thread frees it."""
    if isinstance(arena, PinnedArena) and arena.is_preparing:
        with suppress(RuntimeError):  # no thread can start: the process ends, and the kernel frees the memory
            threading.Thread(target=arena.close, name="rl-memory-give-back").start()
    else:
        arena.close()


class Offloader:
    """Moves the tensors of modules and optimisers together.

    Each call reads the targets again and therefore also moves new state of an optimiser. Save and load checkpoints
    while everything is loaded; see the module's docstring.

    Args:
        *targets: Modules (their parameters, gradients and buffers; plain, FSDP1 or FSDP2), optimisers (their state),
            tensors, or mappings, lists and tuples of tensors. Pass as lists: tensors that only `param_groups` of an
            optimiser refer to (FP32 master weights), their gradients, and Megatron's `main_grad` buffers.
        moves: Selects the tensors to move; by default all tensors that are not on the CPU.
        gradients: For modules: `True` moves only gradients, `False` all but gradients, `None` both.

    Raises:
        InvalidRequestError: a target of another type, whose tensors would not be found.
    """

    def __init__(
        self,
        *targets: Target,
        moves: Callable[[torch.Tensor], bool] = on_accelerator,
        gradients: bool | None = None,
    ) -> None:
        for target in targets:
            check_target(target)
        self._targets = targets
        self._moves = moves
        self._gradients = gradients
        self._host: _HostMemory | None = None
        self._storages: weakref.WeakSet[Any] = weakref.WeakSet()  # offloaded; the targets may have dropped them

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that a `load` would copy to the device now."""
        return sum(host_copies[storage].content.nbytes for storage in self._offloaded())

    def resident_bytes(self, device: torch.device) -> int:
        """Bytes that an `offload` would move from this device now."""
        return sum(storage.nbytes() for storage in self._resident() if storage.device == device)

    def prepare(self) -> None:
        """Allocate host memory in the background for what an `offload` will move: the first then takes no longer than
        later ones. A `RolloutHandoff` calls this for the modules and optimisers that it gets. `close` frees the memory.

        An optimiser without state counts with the state that its first step will make, if it is of `torch.optim`.
        Gradients count if there are any. What cannot be allocated in advance is allocated by the offload. Do not call
        this between a forward and its backward: like an offload it frees the parameters that FSDP has gathered.

        Raises:
            UnsupportedError: as for `offload`.
        """
        self._reshard()
        storages = self._found()
        optimizers = optimizers_in(*self._targets)
        parameters = [
            parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
        ]
        device = next((one.device for one in [*storages, *filter(self._moves, parameters)]), None)
        if device is None:
            return
        nbytes = sum(align(storage.nbytes()) for storage in storages)
        expected = sum(expected_state_bytes(optimizer, device) for optimizer in optimizers)
        # An optimiser keeps up to three tensors for each parameter, and each begins at an aligned address.
        nbytes += expected and expected + 3 * align(1) * len(parameters)
        self._host_memory(device).prepare(nbytes)

    def offload(self) -> Moved:
        """Copy the tensors to the host and free their device memory (to torch's cache; see `aggressive_empty_cache`).

        Raises:
            HostMemoryError: too little host memory; nothing was moved.
            UnsupportedError: a tensor subclass has neither a storage nor `__tensor_flatten__`; nothing was moved.
            WeightUpdateError: an engine keeps this memory open and does not answer; nothing was moved.
            StateConflictError: a tensor belongs to a `PausableMemory`; nothing was moved.
        """
        start = time.perf_counter()
        storages = self._resident()
        if not storages:
            return Moved()
        release_mapped()  # memory that engines keep open by CUDA IPC would not be freed
        buffer = self._host_memory(storages[0].device).buffer(sum(align(storage.nbytes()) for storage in storages))
        copies = {}
        address = buffer.address
        for storage in storages:
            copies[storage] = HostCopy(memory_view(address, storage.nbytes()), buffer)
            address += align(storage.nbytes())
        _synchronize(storages)  # another stream may still write to the storages
        for storage, copy in copies.items():
            copy.content.copy_(bytes_of(storage), non_blocking=True)
        _synchronize(storages)
        try:
            host_copies.update(copies)
            self._storages.update(storages)
            for storage in storages:
                storage.resize_(0)
        except BaseException:
            to_its_end(lambda: _forget_copies_of_present(storages))
            raise
        free_closed()
        return Moved(sum(copy.content.nbytes for copy in copies.values()), time.perf_counter() - start)

    def load(self) -> Moved:
        """Copy all offloaded tensors of the targets back to the device, even if another offloader has moved them.

        Raises:
            DeviceMemoryError: too little device memory; everything is still in host memory.
        """
        start = time.perf_counter()
        copies = {storage: host_copies[storage].content for storage in self._offloaded()}
        if not copies:
            return Moved()
        total = sum(content.nbytes for content in copies.values())
        try:
            try:
                _fill(copies)
            except torch.OutOfMemoryError:
                await_leaving()
                _fill(copies)
            _synchronize(copies)
            for storage in copies:
                del host_copies[storage]
        except BaseException as error:
            to_its_end(lambda: _take_back(copies))
            if not isinstance(error, torch.OutOfMemoryError):
                raise
            raise DeviceMemoryError(
                f"too little device memory to load {total} bytes: {error}", needed_bytes=total
            ) from None
        return Moved(total, time.perf_counter() - start)

    def close(self) -> None:
        """Load all offloaded tensors and free the host memory."""
        self.load()
        self._host = None

    def _host_memory(self, device: torch.device) -> _HostMemory:
        if self._host is None:
            self._host = _HostMemory(_new_arena(device))
        return self._host

    def _resident(self) -> list[Any]:
        """All storages to offload, without duplicates. First frees the parameters that FSDP has gathered."""
        self._reshard()
        storages = self._found()
        is_elsewhere = owned_elsewhere() if storages else None
        if is_elsewhere is not None and any(is_elsewhere(storage.data_ptr()) for storage in storages):
            raise StateConflictError(
                "a tensor belongs to a PausableMemory: let its tag sleep instead, or close the memory first"
            )
        return storages

    def _reshard(self) -> None:
        for target in self._targets:
            if isinstance(target, torch.nn.Module):
                reshard(target)

    def _found(self) -> list[Any]:
        storages: dict[Any, None] = {}
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            # A storage of size zero is offloaded already, or FSDP has freed it.
            if storage.nbytes() and storage not in storages and storage.resizable() and self._moves(tensor):
                if not has_memory(storage):
                    raise UnsupportedError(
                        f"a {type(tensor).__name__} cannot be offloaded: it has no storage and no __tensor_flatten__"
                    )
                storages[storage] = None
        return list(storages)

    def _offloaded(self) -> list[Any]:
        """All offloaded storages, without duplicates."""
        storages = dict.fromkeys([*self._storages, *(tensor.untyped_storage() for tensor in self._tensors())])
        return [storage for storage in storages if storage in host_copies]

    def _tensors(self) -> Iterator[torch.Tensor]:
        for target in self._targets:
            for tensor in tensors_of(target, self._gradients):
                yield from plain_parts(tensor)


def _forget_copies_of_present(storages: Iterable[Any]) -> None:
    """Training may go on with what has not been emptied: no load and no source may take the copy for its content."""
    for storage in storages:
        if storage.nbytes():
            host_copies.pop(storage, None)


def _take_back(copies: Mapping[Any, Any]) -> None:
    """Free the device memory of what has not been loaded: its copy in host memory stays the content."""
    try:
        _synchronize(copies)  # the copies that have begun still write
    finally:
        for storage in copies:
            if storage in host_copies:
                storage.resize_(0)


def _fill(copies: Mapping[Any, Any]) -> None:
    """Give each of these storages its memory, and start the copy of its content."""
    for group in in_groups({storage: content.nbytes for storage, content in copies.items()}):
        with suppress(torch.OutOfMemoryError):  # torch may have room for the storages one by one
            make_room([copies[storage].nbytes for storage in group], group[0].device)
        for storage in group:
            storage.resize_(copies[storage].nbytes)
        for storage in group:  # torch allocates the next group meanwhile
            bytes_of(storage).copy_(copies[storage], non_blocking=True)


def _new_arena(device: torch.device) -> PagedArena:
    if device.type == "cuda":
        return PinnedArena(device.index, margin_bytes=HOST_MARGIN_BYTES)
    return PagedArena(margin_bytes=HOST_MARGIN_BYTES)


def _synchronize(storages: Iterable[Any]) -> None:
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def _sleeping_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    asked = that_may_sleep()
    if not asked or hasattr(tensor, "__tensor_flatten__") or not has_memory(tensor.untyped_storage()):
        return None
    found = (sleeper.host_bytes(tensor.untyped_storage()) for sleeper in asked)
    return next((content for content in found if content is not None), None)


def _is_away(part: torch.Tensor) -> bool:
    return part.untyped_storage() in host_copies or _sleeping_copy(part) is not None


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or, if its storage is offloaded or asleep, the same tensor over the host copy.

    The result is valid until the storage is loaded or awake.

    Raises:
        UnsupportedError: the tensor is offloaded and consists of several tensors, e.g. a quantised tensor.
    """
    if _all_are_here():
        return tensor
    copy = host_copies.get(tensor.untyped_storage())
    content = copy.content if copy is not None else _sleeping_copy(tensor)
    if content is None:
        if hasattr(tensor, "__tensor_flatten__") and any(_is_away(part) for part in plain_parts(tensor)):
            raise UnsupportedError(f"an offloaded {type(tensor).__name__} cannot be read: load it first")
        return tensor
    elements = content.nbytes // tensor.element_size()
    whole = content[: elements * tensor.element_size()].view(tensor.dtype)
    view = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    view = view.conj() if tensor.is_conj() else view
    return torch._neg_view(view) if tensor.is_neg() else view  # what is lazy is not in the bytes


def host_views(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """`host_view` of each."""
    return tensors if _all_are_here() else [host_view(tensor) for tensor in tensors]


def _all_are_here() -> bool:
    """Whether nothing at all is offloaded or asleep: the common case with thousands of tensors."""
    return not host_copies and not that_may_sleep()


@contextmanager
def temporarily_loaded(tensor: torch.Tensor) -> Iterator[None]:
    """A context with an offloaded tensor on the device. Writes inside are lost, unless `load` is called inside.

    Raises:
        UnsupportedError: the tensor is asleep in a `PausableMemory`, whose tags wake as a whole.
    """
    storage = tensor.untyped_storage()
    if _sleeping_copy(tensor) is not None:
        raise UnsupportedError("a tensor is asleep in a PausableMemory: wake its tag first")
    copy = host_copies.get(storage)
    if copy is None or storage.nbytes():
        yield
        return
    try:
        storage.resize_(copy.content.nbytes)
        bytes_of(storage).copy_(copy.content)
        yield
    finally:
        _synchronize([storage])
        if storage in host_copies:  # else the tensor was loaded inside the context
            storage.resize_(0)


_offloaders: weakref.WeakKeyDictionary[Any, Offloader] = weakref.WeakKeyDictionary()


def offload(target: torch.nn.Module | torch.optim.Optimizer) -> Moved:
    """Offload a module or optimiser; see `Offloader.offload`. Later calls reuse the host memory."""
    return _offloader_of(target).offload()


def load(target: torch.nn.Module | torch.optim.Optimizer) -> Moved:
    """Load a module or optimiser; see `Offloader.load`."""
    return _offloader_of(target).load()


def _offloader_of(target: torch.nn.Module | torch.optim.Optimizer) -> Offloader:
    if target not in _offloaders:
        _offloaders[target] = Offloader(weakref.proxy(target))
    return _offloaders[target]
