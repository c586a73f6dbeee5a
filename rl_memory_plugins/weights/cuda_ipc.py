"""CUDA IPC: GPU memory of one process that another process opens. These are the driver's calls.

A 64-byte handle of the CUDA driver exports a whole allocation of cuMemAlloc. cudaMalloc and torch's caching allocator
use cuMemAlloc. Memory from virtual memory management (torch's expandable segments, pausable regions) and from
cudaMallocAsync has no such handle. This module calls the driver through ctypes: a trainer needs only torch.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from rl_memory_plugins.errors import DeviceMemoryError, UnsupportedError, WeightUpdateError
from rl_memory_plugins.memory.cuda_device import gpu_name
from rl_memory_plugins.memory.fingerprint import memory_view

_OUT_OF_MEMORY = 2
_PEER_ACCESS_ALREADY_ENABLED = 704
_LAZY_ENABLE_PEER_ACCESS = 1
_HOST_REGISTER_PORTABLE = 1
_IN_STREAM_ORDER = 1
_BUFFER_ID = 7
_IS_LEGACY_CUDA_IPC_CAPABLE = 10
_MAX_EXPORTED = 4096

_NONCE = secrets.token_hex(8)


def process_id() -> str:
    """An identifier of this process that is unique across PID namespaces."""
    return f"{os.getpid()}-{_NONCE}"


class Allocation(NamedTuple):
    """One GPU allocation, as its owner describes it."""

    handle: bytes  # 64 bytes
    address: int
    nbytes: int
    serial: int  # differs from that of a later allocation at the same address, which may have the same handle


def allocations_of(description: dict[str, Any], device: str) -> list[Allocation]:
    """The allocations in the description of a trainer's buffer for a receiver on `device`.

    Raises:
        WeightUpdateError: the buffer is on another device; a handle has the wrong type or size; or an allocation is
            empty.
    """
    if description.get("device") != device:
        raise WeightUpdateError(
            f"the trainer offered memory on {description.get('device')} to a receiver on {device}",
            reason="wrong device",
            device=device,
            got=description.get("device"),
        )
    allocations = [Allocation(*one) for one in description["allocations"]]
    if any(not isinstance(one.handle, bytes) or len(one.handle) != 64 or one.nbytes < 1 for one in allocations):
        raise WeightUpdateError("the trainer's handles are not CUDA IPC handles")
    return allocations


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


class _CopyAttributes(ctypes.Structure):
    """`CUmemcpyAttributes`; the hints are for managed memory."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


class CudaGpu:
    """A GPU of this process, through the driver. Any thread may call the methods. Tests replace this class.

    Args:
        index: The GPU's ordinal in torch.

    Raises:
        UnsupportedError: the CUDA driver cannot be loaded, or refuses a call.
    """

    _refused_together = False  # whether the driver has refused many copies at once

    def __init__(self, index: int) -> None:
        self.index = index
        self._exported: dict[int, Allocation] = {}  # by serial; the driver never reuses a serial
        try:
            self._api = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise UnsupportedError(f"the CUDA driver cannot be loaded: {error}") from None
        torch.cuda.synchronize(index)  # creates the primary context
        device = ctypes.c_int()
        self._context = ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        self._call_in_context("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes), needed_bytes=nbytes)
        return address.value

    def free(self, address: int) -> None:
        self._call_in_context("cuMemFree_v2", ctypes.c_uint64(address))

    def reaches(self, other: CudaGpu) -> bool:
        """Whether this GPU may write to the memory of another one. Allows it if it can be."""
        with self._current():
            code = self._api.cuCtxEnablePeerAccess(other._context, 0)
        return code in (0, _PEER_ACCESS_ALREADY_ENABLED)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Begin to copy memory of this GPU, on a stream of this GPU.

        Unlike torch's copy to another GPU, it makes no stream of that GPU wait, nor waits for one.
        """
        self._call_in_context(
            "cuMemcpyAsync",
            ctypes.c_uint64(target),
            ctypes.c_uint64(source),
            ctypes.c_size_t(nbytes),
            ctypes.c_void_p(stream),
        )

    def copy_many(self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int) -> None:
        """Begin many copies of memory of this GPU, on a stream of this GPU that is not the default one.

        The link is busy from the first to the last. Copies of 3 MiB by a call for each leave it idle for a quarter of
        the time, and those of 1 MiB for half of it (two H200s). Where the driver is older than CUDA 12.8, or refuses
        the copies together, each copy is a call of its own.

        Args:
            targets, sources, sizes: Addresses and bytes of each copy, of at least one byte.
        """
        names = ("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync")  # of CUDA 13 and 12.8
        name = next((one for one in names if hasattr(self._api, one)), None)
        if name is not None:
            try:
                self._copy_together(name, targets, sources, sizes, stream)
                return
            except UnsupportedError as error:  # the driver may still accept the copies one by one
                if not self._refused_together:
                    self._refused_together = True
                    logging.getLogger(__name__).warning(
                        "copies on a GPU are made one by one, which takes longer: %s", error
                    )
        for target, source, nbytes in zip(targets, sources, sizes, strict=True):
            self.copy(target, source, nbytes, stream)

    def _copy_together(
        self, name: str, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int
    ) -> None:
        count = len(targets)
        # The older one has one more argument: where it tells which copy has failed.
        failed = (ctypes.byref(ctypes.c_size_t()),) if name == "cuMemcpyBatchAsync" else ()
        self._call_in_context(
            name,
            (ctypes.c_uint64 * count)(*targets),
            (ctypes.c_uint64 * count)(*sources),
            (ctypes.c_size_t * count)(*sizes),
            ctypes.c_size_t(count),
            ctypes.byref(_CopyAttributes(order=_IN_STREAM_ORDER)),
            ctypes.byref(ctypes.c_size_t(0)),  # the first copy to which the attributes apply
            ctypes.c_size_t(1),
            *failed,
            ctypes.c_void_p(stream),
        )

    def lacks(self, nbytes: int) -> bool:
        """Whether torch cannot allocate so many bytes on this GPU."""
        missing = nbytes - int(torch.cuda.mem_get_info(self.index)[0])
        if missing <= 0:  # torch's own figures take longer to get
            return False
        return missing > int(torch.cuda.memory_reserved(self.index)) - int(torch.cuda.memory_allocated(self.index))

    def find(self, address: int) -> Allocation | None:
        """The allocation that contains the address; `None` if CUDA IPC cannot export it."""
        capable, serial = ctypes.c_int(), ctypes.c_uint64()
        base, nbytes, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        pointer = ctypes.c_uint64(address)
        with self._current():
            attribute = self._api.cuPointerGetAttribute
            if attribute(ctypes.byref(serial), _BUFFER_ID, pointer):
                return None
            known = self._exported.get(serial.value)
            if known is not None and known.address <= address < known.address + known.nbytes:
                return known
            if attribute(ctypes.byref(capable), _IS_LEGACY_CUDA_IPC_CAPABLE, pointer) or not capable.value:
                return None
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), pointer)
            if self._api.cuIpcGetMemHandle(ctypes.byref(handle), base):
                return None
        if len(self._exported) >= _MAX_EXPORTED:
            self._exported.clear()
        found = self._exported[serial.value] = Allocation(bytes(handle), base.value, nbytes.value, serial.value)
        return found

    def open(self, handle: bytes) -> int:
        """Map another process's allocation. Returns its address in this process."""
        address = ctypes.c_uint64()
        exported = _Handle.from_buffer_copy(handle)
        self._call_in_context("cuIpcOpenMemHandle_v2", ctypes.byref(address), exported, _LAZY_ENABLE_PEER_ACCESS)
        return address.value

    def bytes_from(self, address: int) -> int:
        """Bytes from an address to the end of its allocation, which may be another process's.

        Raises:
            UnsupportedError: no allocation contains the address.
        """
        base, nbytes, pointer = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64(address)
        self._call_in_context("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), pointer)
        return base.value + nbytes.value - address

    def close(self, address: int) -> None:
        self._call_in_context("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock host memory."""
        # not cudaHostRegister: torch's next error check would raise its failure again
        self._call_in_context(
            "cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _HOST_REGISTER_PORTABLE
        )

    def unregister(self, address: int) -> None:
        self._call_in_context("cuMemHostUnregister", ctypes.c_void_p(address))

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

    def _call_in_context(self, name: str, *arguments: Any, needed_bytes: int = 0) -> None:
        with self._current():
            self._call(name, *arguments, needed_bytes=needed_bytes)

    def _call(self, name: str, *arguments: Any, needed_bytes: int = 0) -> None:
        code = getattr(self._api, name)(*arguments)
        if code == 0:
            return
        if code == _OUT_OF_MEMORY and needed_bytes:
            raise DeviceMemoryError(
                f"cannot allocate {needed_bytes} bytes of GPU memory to stage weights",
                needed_bytes=needed_bytes,
                free_bytes=int(torch.cuda.mem_get_info(self.index)[0]),
                margin_bytes=0,
            )
        text = ctypes.c_char_p()
        self._api.cuGetErrorName(code, ctypes.byref(text))
        error = (text.value or b"?").decode()
        raise UnsupportedError(f"{name} failed with {error} ({code})", cuda_error=error)


def local_gpus(*, initialise: bool = False) -> dict[str, int]:
    """The GPUs that this process sees: torch's ordinal by name (`CudaDevice.name`).

    Args:
        initialise: Allow this call to initialise CUDA, which takes GPU memory. Otherwise the result is empty unless the
            process uses CUDA already.
    """
    if torch.version.cuda is None or not (torch.cuda.is_initialized() or initialise):
        return {}
    return {gpu_name(index): index for index in range(torch.cuda.device_count())}


_open_gpu = functools.cache(CudaGpu)


def local_gpu(name: str) -> CudaGpu:
    """The GPU with this name. Its ordinal may differ between processes.

    Raises:
        UnsupportedError: this process does not see the GPU.
    """
    index = local_gpus(initialise=torch.cuda.is_available()).get(name)
    if index is None:
        raise UnsupportedError(f"this process does not see the device {name}", device=name)
    return _open_gpu(index)
