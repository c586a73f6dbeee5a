"""Moving modules and optimisers to host memory and back, with the host memory kept between cycles.

A tensor is moved by its storage: the bytes are copied out and the storage is resized to nothing; loading
resizes it again and copies the bytes in. Tensor objects, views and all that refers to them stay as they are:
FSDP's flat parameters and their shards, DTensors, tied weights, Megatron's buffers, the optimiser's references.
Until it is loaded again such a tensor must not be computed with; `host_view` reads it where it is.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from rl_memory_plugins.errors import DeviceMemoryError
from rl_memory_plugins.memory.backup import PagedArena
from rl_memory_plugins.memory.fingerprint import memory_view
from rl_memory_plugins.memory.pinned import PinnedArena
from rl_memory_plugins.weights.cuda_ipc import release_mapped
from rl_memory_plugins.weights.manifest import align

Target: TypeAlias = torch.nn.Module | torch.optim.Optimizer | Mapping[str, torch.Tensor] | Sequence[torch.Tensor]


class Moved(NamedTuple):
    """One move. `seconds` is 0.0 where there was nothing to move."""

    bytes: int = 0
    seconds: float = 0.0


class _Away(NamedTuple):
    storage: Any  # torch.UntypedStorage, of size zero
    nbytes: int
    host: Any  # uint8, [nbytes]


_away: dict[int, Any] = {}
"""The host copy of every offloaded storage, by the storage's identity."""


def on_accelerator(tensor: torch.Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta")


class Offloader:
    """Moves the tensors of some modules and optimisers, together.

    Every call looks at what the targets hold then: state that an optimiser made since is moved too.

    Args:
        *targets: Modules (parameters, gradients, buffers; plain, FSDP1 or FSDP2), optimisers (their state), or
            tensors.
        moves: Which tensors to move; by default those that are not in host memory anyway.
    """

    def __init__(self, *targets: Target, moves: Callable[[torch.Tensor], bool] = on_accelerator) -> None:
        self._targets = targets
        self._moves = moves
        self._arena: PagedArena | None = None
        self._buffers: list[int] = []
        self._batch: list[_Away] = []

    @property
    def offloaded_bytes(self) -> int:
        return sum(one.nbytes for one in self._batch)

    def offload(self) -> Moved:
        """Copy to host memory and free the device memory (to torch's cache; see `aggressive_empty_cache`).

        Raises:
            HostMemoryError: not enough host memory; nothing was moved.
            WeightUpdateError: an engine keeps this memory open and does not answer; nothing was moved.
        """
        start = time.perf_counter()
        storages = list(self._storages())
        if not storages:
            return Moved()
        release_mapped()  # what engines keep open of this memory would stay in use
        arena = self._arena_for(storages[0].device)
        address = arena.acquire(sum(align(storage.nbytes()) for storage in storages))
        batch = []
        end = address
        for storage in storages:
            nbytes = storage.nbytes()
            batch.append(_Away(storage, nbytes, memory_view(end, nbytes)))
            end += align(nbytes)
        for one in batch:
            one.host.copy_(_bytes_of(one.storage), non_blocking=True)
        _synchronize(storages)
        for one in batch:
            one.storage.resize_(0)
            _away[one.storage._cdata] = one.host
        self._buffers.append(address)
        self._batch += batch
        return Moved(sum(one.nbytes for one in batch), time.perf_counter() - start)

    def load(self) -> Moved:
        """Take device memory again and copy everything back.

        Raises:
            DeviceMemoryError: not enough device memory; everything is still in host memory.
        """
        start = time.perf_counter()
        if not self._batch:
            return Moved()
        batch = self._batch
        try:
            for one in batch:
                one.storage.resize_(one.nbytes)
        except torch.OutOfMemoryError as error:
            for one in batch:
                one.storage.resize_(0)
            raise DeviceMemoryError(
                f"no device memory to load {self.offloaded_bytes} bytes: {error}",
                needed_bytes=self.offloaded_bytes,
            ) from None
        for one in batch:
            _bytes_of(one.storage).copy_(one.host, non_blocking=True)
        _synchronize([one.storage for one in batch])
        moved = self.offloaded_bytes
        for one in batch:
            del _away[one.storage._cdata]
        batch.clear()
        assert self._arena is not None
        for address in self._buffers:
            self._arena.release(address)
        self._buffers = []
        return Moved(moved, time.perf_counter() - start)

    def close(self) -> None:
        """Load what is away and give the host memory back."""
        self.load()
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _storages(self) -> Iterator[Any]:
        """Every storage that holds something to move, once."""
        seen = set()
        for target in self._targets:
            for tensor in tensors_of(target):
                local = _local(tensor)
                storage = local.untyped_storage()
                # A storage of size zero is away already, or FSDP has freed it.
                if storage.nbytes() and storage._cdata not in seen and storage.resizable() and self._moves(local):
                    seen.add(storage._cdata)
                    yield storage

    def _arena_for(self, device: torch.device) -> PagedArena:
        if self._arena is None:
            if device.type == "cuda":
                index = torch.cuda.current_device() if device.index is None else device.index
                self._arena = PinnedArena(index)
            else:
                self._arena = PagedArena()
            weakref.finalize(self, _forget, self._arena, self._batch).atexit = False
        return self._arena


def _forget(arena: PagedArena, batch: list[_Away]) -> None:
    """What is away goes with its offloader."""
    for one in batch:
        _away.pop(one.storage._cdata, None)
    batch.clear()
    arena.close()


def tensors_of(target: Target) -> Iterator[torch.Tensor]:
    """All tensors that a target keeps; what FSDP has gathered for computing is freed first."""
    if isinstance(target, torch.nn.Module):
        _reshard(target)
        for parameter in target.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from target.buffers()
    elif isinstance(target, torch.optim.Optimizer):
        for state in target.state.values():
            yield from _nested(state)
    else:
        yield from _nested(target)


def _nested(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _nested(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _nested(item)


def _reshard(module: torch.nn.Module) -> None:
    """After a forward without a backward the root is still whole."""
    for child in module.modules():
        if hasattr(child, "unshard") and hasattr(child, "reshard"):  # FSDP2's mixin
            child.reshard()
        handle = getattr(child, "_handle", None)
        if handle is not None and hasattr(handle, "reshard") and handle.uses_sharded_strategy:  # FSDP1
            whole = getattr(handle.flat_param, "_full_param_padded", None)
            if whole is not None and whole.untyped_storage().nbytes():
                handle.reshard(True)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's part on this rank; other tensors as they are."""
    return getattr(tensor, "_local_tensor", tensor)


def _bytes_of(storage: Any) -> torch.Tensor:
    """A storage as a tensor: uint8, [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize(storages: Iterable[Any]) -> None:
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or, where its storage is offloaded, the same tensor over the host copy.

    The view is good until the storage is loaded.
    """
    host = _away.get(tensor.untyped_storage()._cdata)
    if host is None:
        return tensor
    whole = host[: len(host) // tensor.element_size() * tensor.element_size()].view(tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class borrowed:
    """Offloaded tensors on the device for a moment; what is written to them is lost."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._borrowed: list[Any] = []

    def __enter__(self) -> None:
        for tensor in self._tensors:
            storage = tensor.untyped_storage()
            host = _away.get(storage._cdata)
            if host is not None and not storage.nbytes():
                storage.resize_(len(host))
                self._borrowed.append(storage)
                _bytes_of(storage).copy_(host)

    def __exit__(self, *_: object) -> None:
        _synchronize(self._borrowed)
        for storage in self._borrowed:
            storage.resize_(0)


_offloaders: weakref.WeakKeyDictionary[Any, Offloader] = weakref.WeakKeyDictionary()


def offload(target: torch.nn.Module | torch.optim.Optimizer) -> Moved:
    """Offload one module or optimiser; see `Offloader.offload`. The host memory is kept for the next time."""
    if target not in _offloaders:
        _offloaders[target] = Offloader(weakref.proxy(target))
    return _offloaders[target].offload()


def load(target: torch.nn.Module | torch.optim.Optimizer) -> Moved:
    """Load what `offload` moved; see `Offloader.load`."""
    offloader = _offloaders.get(target)
    return Moved() if offloader is None else offloader.load()
