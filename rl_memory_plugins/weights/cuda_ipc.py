"""Memory of one process that another one reads or writes on the same GPU: 64-byte handles of the CUDA driver.

Such a handle exports a whole allocation of cuMemAlloc, which cudaMalloc and torch's caching allocator rest on.
Memory mapped through virtual memory management (torch's expandable segments, pausable regions) and memory of
cudaMallocAsync have none. The driver is called through ctypes: a trainer needs nothing but torch installed.
"""

from __future__ import annotations

import ctypes
import functools
import os
import secrets
import select
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from rl_memory_plugins.errors import DeviceMemoryError, UnsupportedError, WeightUpdateError
from rl_memory_plugins.memory.cuda_device import gpu_name
from rl_memory_plugins.memory.fingerprint import memory_view
from rl_memory_plugins.weights.wire import Connection

_OUT_OF_MEMORY = 2
_LAZY_ENABLE_PEER_ACCESS = 1
_HOST_REGISTER_PORTABLE = 1
_BUFFER_ID = 7
_IS_LEGACY_CUDA_IPC_CAPABLE = 10
_MAX_FOUND = 4096
_SWITCH_INTERVAL_S = 50e-6

_NONCE = secrets.token_hex(8)


def process_id() -> str:
    """Tells this process from all others, in whatever PID namespace they are."""
    return f"{os.getpid()}-{_NONCE}"


class Allocation(NamedTuple):
    """One allocation of the process that made it.

    `serial` tells it from a later one at the same address, which may have the same handle.
    """

    handle: bytes
    address: int
    nbytes: int
    serial: int


def allocations_of(description: dict[str, Any]) -> list[Allocation]:
    """Those that a trainer's buffer names.

    Raises:
        WeightUpdateError: what it names are no CUDA IPC handles.
    """
    allocations = [Allocation(*one) for one in description["allocations"]]
    if any(not isinstance(one.handle, bytes) or len(one.handle) != 64 or one.nbytes < 1 for one in allocations):
        raise WeightUpdateError("the trainer's handles are not CUDA IPC handles")
    return allocations


class Gpu(Protocol):
    """What this module needs of a GPU; tests bring their own."""

    def allocate(self, nbytes: int) -> int: ...
    def free(self, address: int) -> None: ...
    def free_bytes(self) -> int:
        """What torch can still allocate here."""

    def find(self, address: int) -> Allocation | None:
        """The allocation that holds the address; None if it cannot be exported."""

    def open(self, handle: bytes) -> int:
        """The address, in this process, of another process's allocation."""

    def bytes_from(self, address: int) -> int:
        """Bytes from an address of this process to the end of its allocation, which may be another process's.

        Raises:
            UnsupportedError: it lies in none.
        """

    def close(self, address: int) -> None: ...
    def register(self, address: int, nbytes: int) -> None:
        """Page-lock host memory."""

    def unregister(self, address: int) -> None: ...
    def view(self, address: int, nbytes: int) -> torch.Tensor: ...
    def synchronize(self) -> None: ...


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


class CudaGpu:
    """A GPU of this process, by the driver. Its methods may be called by any thread.

    Args:
        index: torch's ordinal.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._found: dict[int, Allocation] = {}  # by serial, of which the driver never uses one twice
        try:
            self._api = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise UnsupportedError(f"there is no CUDA driver: {error}") from None
        torch.cuda.synchronize(index)  # the primary context exists from here on
        device = ctypes.c_int()
        self._context = ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        with self._current():
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes), needed_bytes=nbytes)
        return address.value

    def free(self, address: int) -> None:
        with self._current():
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def free_bytes(self) -> int:
        unused = torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index)
        return int(torch.cuda.mem_get_info(self.index)[0] + unused)

    def find(self, address: int) -> Allocation | None:
        capable, serial = ctypes.c_int(), ctypes.c_uint64()
        base, nbytes, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        pointer = ctypes.c_uint64(address)
        with self._current():
            attribute = self._api.cuPointerGetAttribute
            if attribute(ctypes.byref(serial), _BUFFER_ID, pointer):
                return None
            known = self._found.get(serial.value)
            if known is not None and known.address <= address < known.address + known.nbytes:
                return known
            if attribute(ctypes.byref(capable), _IS_LEGACY_CUDA_IPC_CAPABLE, pointer) or not capable.value:
                return None
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), pointer)
            if self._api.cuIpcGetMemHandle(ctypes.byref(handle), base):
                return None
        if len(self._found) >= _MAX_FOUND:
            self._found.clear()
        found = self._found[serial.value] = Allocation(bytes(handle), base.value, nbytes.value, serial.value)
        return found

    def open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        with self._current():
            self._call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(address),
                _Handle.from_buffer_copy(handle),
                _LAZY_ENABLE_PEER_ACCESS,
            )
        return address.value

    def bytes_from(self, address: int) -> int:
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        with self._current():
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(address))
        return base.value + nbytes.value - address

    def close(self, address: int) -> None:
        with self._current():
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def register(self, address: int, nbytes: int) -> None:
        # not the runtime's function, whose failure would surface again in torch's next check for errors
        with self._current():
            self._call(
                "cuMemHostRegister_v2",
                ctypes.c_void_p(address),
                ctypes.c_size_t(nbytes),
                _HOST_REGISTER_PORTABLE,
            )

    def unregister(self, address: int) -> None:
        with self._current():
            self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def view(self, address: int, nbytes: int) -> torch.Tensor:
        view: torch.Tensor = memory_view(address, nbytes, f"cuda:{self.index}")
        return view

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._api.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any, needed_bytes: int = 0) -> None:
        code = getattr(self._api, name)(*arguments)
        if code == 0:
            return
        text = ctypes.c_char_p()
        self._api.cuGetErrorName(code, ctypes.byref(text))
        error = (text.value or b"?").decode()
        if code == _OUT_OF_MEMORY and needed_bytes:
            free = int(torch.cuda.mem_get_info(self.index)[0])
            raise DeviceMemoryError(
                f"no {needed_bytes} bytes of GPU memory for staging weights",
                needed_bytes=needed_bytes,
                free_bytes=free,
                margin_bytes=0,
            )
        raise UnsupportedError(f"{name} answered {error} ({code})", cuda_error=error)


def local_gpus(*, initialise: bool = False) -> dict[str, int]:
    """The GPUs that this process sees: their names (`CudaDevice.name`) and torch's ordinals.

    Args:
        initialise: Whether CUDA may be initialised for this, which takes GPU memory. None are seen otherwise
            unless the process uses CUDA already.
    """
    if torch.version.cuda is None or not (torch.cuda.is_initialized() or initialise):
        return {}
    return {gpu_name(index): index for index in range(torch.cuda.device_count())}


@functools.cache
def _open_gpu(index: int) -> CudaGpu:
    return CudaGpu(index)


def local_gpu(name: str) -> Gpu:
    """A GPU by its name, wherever it stands in this process's order.

    Raises:
        UnsupportedError: this process does not see it.
    """
    index = local_gpus(initialise=torch.cuda.is_available()).get(name)
    if index is None:
        raise UnsupportedError(f"this process does not see the device {name}", device=name)
    return _open_gpu(index)


class Mappings:
    """Allocations of another process, opened in this one; each handle once.

    What is open may be kept from one update to the next, as long as the trainer holds the connection that it
    was kept with: memory that its owner frees or dies with stays in use while anybody has it open. Not for use
    by two sessions at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[Any, ...], tuple[Gpu, torch.Tensor]] = {}
        self._lease: Connection | None = None

    def __len__(self) -> int:
        return len(self._open)

    def open(self, gpu: Gpu, process: str, allocations: Sequence[Allocation]) -> list[torch.Tensor]:
        """The allocations' bytes, for one that stayed open the same tensor; closes whatever else was open.

        Raises:
            UnsupportedError: the driver denies it. Nothing is open then.
            WeightUpdateError: an allocation has fewer bytes than the trainer says. Nothing is open then.
        """
        if process == process_id():  # a handle cannot be opened by the process that exported it
            self.close()
            for one in allocations:
                _require_bytes(gpu, one.address, one)
            return [gpu.view(one.address, one.nbytes) for one in allocations]
        keys = [(process, *one) for one in allocations]
        with self._lock:
            self._lease = None  # until `keep`, the allocations are this session's
            try:
                self._close(self._open.keys() - set(keys))
                for key, one in zip(keys, allocations, strict=True):
                    if key not in self._open:
                        self._open[key] = (gpu, _opened(gpu, one))
            except BaseException:
                self._close(set(self._open))
                raise
            return [self._open[key][1] for key in keys]

    def keep(self, connection: Connection) -> None:
        """Leave open what is open until the trainer closes the connection, which is ours from here on."""
        with self._lock:
            self._lease = connection
        threading.Thread(target=self._close_after, args=(connection,), name="rl-memory-mappings", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._lease = None
            self._close(set(self._open))

    def _close_after(self, connection: Connection) -> None:
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        poll.poll()
        with self._lock, _taking_turns():
            if self._lease is connection:
                self._lease = None
                self._close(set(self._open))
        connection.close()  # which tells the trainer that its memory is its own again

    def _close(self, keys: set[tuple[Any, ...]]) -> None:
        for gpu in {id(self._open[key][0]): self._open[key][0] for key in keys}.values():
            gpu.synchronize()
        for key in keys:
            gpu, memory = self._open.pop(key)
            gpu.close(memory.data_ptr())


def _opened(gpu: Gpu, allocation: Allocation) -> torch.Tensor:
    address = gpu.open(allocation.handle)
    try:
        _require_bytes(gpu, address, allocation)
        return gpu.view(address, allocation.nbytes)
    except BaseException:
        gpu.close(address)
        raise


def _require_bytes(gpu: Gpu, address: int, allocation: Allocation) -> None:
    """The trainer's word for a size is not enough: reading on behind the end is a fault that no process survives."""
    found = gpu.bytes_from(address)
    if allocation.nbytes > found:
        raise WeightUpdateError(
            f"the trainer offers {allocation.nbytes} bytes of an allocation that has {found}",
            reason="wrong size",
            nbytes=allocation.nbytes,
            got=found,
        )


_turns = threading.Lock()


@contextmanager
def _taking_turns() -> Iterator[None]:
    """For a background thread that calls the driver many times: each call gives the interpreter away.

    A thread that spins, such as SGLang's idle scheduler, gives it back after Python's switch interval, 5 ms each time:
    800 allocations took 12 s to close.
    """
    with _turns:
        former = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        try:
            yield
        finally:
            sys.setswitchinterval(former)


class _Leases:
    """The trainer's ends of the connections with which receivers keep its memory open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: dict[str, Connection] = {}

    def hold(self, receiver: str, connection: Connection) -> None:
        with self._lock:
            previous = self._connections.pop(receiver, None)
            self._connections[receiver] = connection
        if previous is not None:
            previous.close()

    def release(self, timeout_s: float) -> None:
        with self._lock:
            connections = dict(self._connections)
        for connection in connections.values():
            connection.finish()
        for receiver, connection in connections.items():
            connection.await_end(timeout_s)
            with self._lock:  # not before: whoever tries again must wait for those that have not answered
                if self._connections.get(receiver) is connection:
                    del self._connections[receiver]
            connection.close()


leases = _Leases()


def release_mapped(timeout_s: float = 10.0) -> None:
    """Have all engines close what they keep open of this process's memory (`keep_mapped`).

    To be called before such memory is freed, moved or paused: it stays in use otherwise.

    Raises:
        WeightUpdateError: an engine did not do so in time. The next call waits for it again.
    """
    leases.release(timeout_s)


def require_device(description: dict[str, Any], device: str) -> None:
    """Refuse memory of another GPU than the receiver's own.

    Raises:
        WeightUpdateError: with both names in its details.
    """
    if description.get("device") != device:
        raise WeightUpdateError(
            f"the trainer offers memory of {description.get('device')} to a receiver on {device}",
            reason="wrong device",
            device=device,
            got=description.get("device"),
        )
