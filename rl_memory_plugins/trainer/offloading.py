"""Moving modules and optimisers to host memory and back, with the host memory kept between cycles.

A tensor is moved by its storage: the bytes are copied out and the storage is resized to nothing; loading
resizes it again and copies the bytes in. Tensor objects, views and all that refers to them stay as they are:
FSDP's flat parameters and their shards, DTensors, tied weights, Megatron's buffers, the optimiser's references.
Until it is loaded again such a tensor must not be computed with; `host_view` reads it where it is. Save and load
checkpoints while it is loaded: `torch.save` writes the empty storage without an error, and `torch.load` of that file
fails; `load_state_dict` writes to memory that is not there, which may end the process.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from rl_memory_plugins.errors import DeviceMemoryError, InvalidRequestError, UnsupportedError
from rl_memory_plugins.memory.backup import PagedArena
from rl_memory_plugins.memory.fingerprint import memory_view
from rl_memory_plugins.memory.pinned import PinnedArena
from rl_memory_plugins.weights.cuda_ipc import release_mapped
from rl_memory_plugins.weights.manifest import align

Target: TypeAlias = (
    torch.nn.Module | torch.optim.Optimizer | Mapping[str, torch.Tensor] | Sequence[torch.Tensor] | torch.Tensor
)

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


HOST_MARGIN_BYTES = 256 << 20
"""Host memory that an offload leaves free: without any, the kernel ends a process, and often another one."""


class Moved(NamedTuple):
    """One move. `seconds` is 0.0 where there was nothing to move."""

    bytes: int = 0
    seconds: float = 0.0


class _Buffer:
    """Room for the storages of one move."""

    def __init__(self, host: _HostMemory, address: int) -> None:
        self.host, self.address = host, address


class _HostMemory:
    """The arena of an offloader; closed once neither it nor anything away needs the memory."""

    def __init__(self, arena: PagedArena) -> None:
        self.arena = arena
        self._used: dict[int, weakref.ref[_Buffer]] = {}
        weakref.finalize(self, arena.close).atexit = False

    def buffer(self, nbytes: int) -> _Buffer:
        for address in [address for address, used in self._used.items() if used() is None]:
            del self._used[address]
            self.arena.release(address)
        buffer = _Buffer(self, self.arena.acquire(nbytes))
        self._used[buffer.address] = weakref.ref(buffer)
        return buffer


class _Away(NamedTuple):
    nbytes: int
    host: Any  # uint8, [nbytes]
    buffer: _Buffer  # which the bytes lie in


_away: weakref.WeakKeyDictionary[Any, _Away] = weakref.WeakKeyDictionary()
"""The host copy of every offloaded storage, which is of size zero. It lives as long as the storage: an offloader may go
before."""


def on_accelerator(tensor: torch.Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta")


class Offloader:
    """Moves the tensors of some modules and optimisers, together.

    Every call looks at what the targets hold then: state that an optimiser made since is moved too.
    Save and load checkpoints while everything is loaded; see the module.

    Args:
        *targets: Modules (parameters, gradients, buffers; plain, FSDP1 or FSDP2), optimisers (their state), or
            tensors: one, or mappings, lists and tuples of them. What only an optimiser's `param_groups` hold (FP32
            master weights), their gradients, and Megatron's `main_grad` buffers are given as lists.
        moves: Which tensors to move; by default those that are not in host memory anyway.
        gradients: Of modules, move their gradients only (`True`) or all but them (`False`); by default both.

    Raises:
        InvalidRequestError: a target of another kind, of which nothing would be moved.
    """

    def __init__(
        self,
        *targets: Target,
        moves: Callable[[torch.Tensor], bool] = on_accelerator,
        gradients: bool | None = None,
    ) -> None:
        for target in targets:
            _check(target)
        self._targets = targets
        self._moves = moves
        self._gradients = gradients
        self._host: _HostMemory | None = None
        self._moved: weakref.WeakSet[Any] = weakref.WeakSet()  # storages, which the targets may have dropped since

    @property
    def offloaded_bytes(self) -> int:
        return sum(_away[storage].nbytes for storage in self._absent())

    def resident_bytes(self, device: torch.device) -> int:
        """Of what `offload` would move away from this device now."""
        return sum(storage.nbytes() for storage in self._present() if storage.device == device)

    def offload(self) -> Moved:
        """Copy to host memory and free the device memory (to torch's cache; see `aggressive_empty_cache`).

        A `torch.save` of the targets, or of their `state_dict()`, cannot be read until `load`; see the module.

        Raises:
            HostMemoryError: not enough host memory; nothing was moved.
            UnsupportedError: a tensor of a class that keeps its memory elsewhere and has no `__tensor_flatten__`;
                nothing was moved.
            WeightUpdateError: an engine keeps this memory open and does not answer; nothing was moved.
        """
        start = time.perf_counter()
        storages = self._present()
        if not storages:
            return Moved()
        release_mapped()  # what engines keep open of this memory would stay in use
        host = self._host_for(storages[0].device)
        buffer = host.buffer(sum(align(storage.nbytes()) for storage in storages))
        batch = {}
        end = buffer.address
        for storage in storages:
            nbytes = storage.nbytes()
            batch[storage] = _Away(nbytes, memory_view(end, nbytes), buffer)
            end += align(nbytes)
        _synchronize(storages)  # another stream than this one may still write them
        for storage, one in batch.items():
            one.host.copy_(_bytes_of(storage), non_blocking=True)
        _synchronize(storages)
        for storage, one in batch.items():
            storage.resize_(0)
            _away[storage] = one
            self._moved.add(storage)
        return Moved(sum(one.nbytes for one in batch.values()), time.perf_counter() - start)

    def load(self) -> Moved:
        """Take device memory again and copy everything back, also what another offloader moved of the targets.

        Raises:
            DeviceMemoryError: not enough device memory; everything is still in host memory.
        """
        start = time.perf_counter()
        storages = self._absent()
        if not storages:
            return Moved()
        total = sum(_away[storage].nbytes for storage in storages)
        try:
            for storage in storages:
                storage.resize_(_away[storage].nbytes)
        except torch.OutOfMemoryError as error:
            for storage in storages:
                storage.resize_(0)
            raise DeviceMemoryError(f"no device memory to load {total} bytes: {error}", needed_bytes=total) from None
        for storage in storages:
            _bytes_of(storage).copy_(_away[storage].host, non_blocking=True)
        _synchronize(storages)
        for storage in storages:
            del _away[storage]
        return Moved(total, time.perf_counter() - start)

    def close(self) -> None:
        """Load what is away and give the host memory back."""
        self.load()
        self._host = None

    def _present(self) -> list[Any]:
        """Every storage that holds something to move, once; what FSDP has gathered for computing is freed first."""
        for target in self._targets:
            if isinstance(target, torch.nn.Module):
                _reshard(target)
        storages: dict[Any, None] = {}
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            # A storage of size zero is away already, or FSDP has freed it.
            if storage.nbytes() and storage not in storages and storage.resizable() and self._moves(tensor):
                if not _has_memory(storage):
                    raise UnsupportedError(f"{type(tensor).__name__} does not say where its memory is")
                storages[storage] = None
        return list(storages)

    def _absent(self) -> list[Any]:
        """Every storage that is away, once."""
        storages = dict.fromkeys([*self._moved, *(tensor.untyped_storage() for tensor in self._tensors())])
        return [storage for storage in storages if storage in _away]

    def _tensors(self) -> Iterator[torch.Tensor]:
        for target in self._targets:
            for tensor in tensors_of(target, self._gradients):
                yield from _plain(tensor)

    def _host_for(self, device: torch.device) -> _HostMemory:
        if self._host is None:
            if device.type == "cuda":
                index = torch.cuda.current_device() if device.index is None else device.index
                self._host = _HostMemory(PinnedArena(index, margin_bytes=HOST_MARGIN_BYTES))
            else:
                self._host = _HostMemory(PagedArena(margin_bytes=HOST_MARGIN_BYTES))
        return self._host


def _check(target: Any) -> None:
    """Refuse what holds no tensors that are found, and would be left where it is without a word."""
    found = isinstance(target, (torch.nn.Module, torch.optim.Optimizer, Mapping, list, tuple, torch.Tensor))
    items = target if isinstance(target, (list, tuple)) else ()
    if not found or any(isinstance(item, (torch.nn.Module, torch.optim.Optimizer)) for item in items):
        raise InvalidRequestError(
            f"a {type(target).__name__} like this cannot be offloaded: give each module and each torch.optim.Optimizer "
            "by itself, and tensors by themselves or in mappings, lists and tuples",
            field="targets",
            got=type(target).__name__,
        )


def tensors_of(target: Target, gradients: bool | None = None) -> Iterator[torch.Tensor]:
    """All tensors that a target keeps; see `Offloader` for `gradients`."""
    if isinstance(target, torch.nn.Module):
        # Not the methods of the target itself: Megatron's DDP has a list under the name `buffers`.
        parameters = list(torch.nn.Module.parameters(target))
        if gradients is not True:
            yield from parameters
            yield from torch.nn.Module.buffers(target)
        if gradients is not False:
            yield from (parameter.grad for parameter in parameters if parameter.grad is not None)
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


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with storages of their own that a tensor consists of: a DTensor's part on this rank, a quantised
    tensor's values and scales, a sparse one's indices and values; any other itself.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):  # a DTensor names its mesh too
                yield from _plain(part)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in _COMPRESSED:
        first, second = _COMPRESSED[tensor.layout]
        yield from (getattr(tensor, first)(), getattr(tensor, second)(), tensor.values())
    else:
        yield tensor


def _has_memory(storage: Any) -> bool:
    try:
        return bool(storage.data_ptr())
    except RuntimeError:  # of a tensor that only wraps others
        return False


def _bytes_of(storage: Any) -> torch.Tensor:
    """A storage as a tensor: uint8, [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize(storages: Iterable[Any]) -> None:
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or, where its storage is offloaded, the same tensor over the host copy.

    The view is good until the storage is loaded.

    Raises:
        UnsupportedError: an offloaded tensor that consists of others, as quantised ones do.
    """
    away = _away.get(tensor.untyped_storage())
    if away is None:
        if hasattr(tensor, "__tensor_flatten__") and any(part.untyped_storage() in _away for part in _plain(tensor)):
            raise UnsupportedError(f"an offloaded {type(tensor).__name__} cannot be read: load it first")
        return tensor
    host = away.host
    whole = host[: len(host) // tensor.element_size() * tensor.element_size()].view(tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class temporarily_loaded:
    """Offloaded tensors on the device for a moment; what is written is lost, unless they are loaded meanwhile."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._loaded: list[Any] = []

    def __enter__(self) -> None:
        for tensor in self._tensors:
            storage = tensor.untyped_storage()
            away = _away.get(storage)
            if away is not None and not storage.nbytes():
                storage.resize_(away.nbytes)
                self._loaded.append(storage)
                _bytes_of(storage).copy_(away.host)

    def __exit__(self, *_: object) -> None:
        _synchronize(self._loaded)
        for storage in self._loaded:
            if storage in _away:  # else it was loaded meanwhile, and what is here is all there is of it
                storage.resize_(0)


_offloaders: weakref.WeakKeyDictionary[Any, Offloader] = weakref.WeakKeyDictionary()


def offload(target: torch.nn.Module | torch.optim.Optimizer) -> Moved:
    """Offload one module or optimiser; see `Offloader.offload`. The host memory is kept for the next time."""
    return _offloader_of(target).offload()


def load(target: torch.nn.Module | torch.optim.Optimizer) -> Moved:
    """Load what `offload` moved; see `Offloader.load`."""
    return _offloader_of(target).load()


def _offloader_of(target: torch.nn.Module | torch.optim.Optimizer) -> Offloader:
    if target not in _offloaders:
        _offloaders[target] = Offloader(weakref.proxy(target))
    return _offloaders[target]
