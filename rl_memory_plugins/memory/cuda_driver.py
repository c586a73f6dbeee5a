"""The CUDA driver's virtual memory management for one GPU: physical memory, addresses, and their mappings."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from rl_memory_plugins.errors import DeviceMemoryError, EngineFaultError, UnsupportedError
from rl_memory_plugins.memory.allocator import out_of_device_memory


class Driver:
    """Calls of the CUDA driver for one GPU, from any thread: `context` makes the primary context current.

    Args:
        index: torch's ordinal of the GPU.

    Raises:
        UnsupportedError: cuda-bindings is not installed, or the GPU has no virtual memory management.
    """

    def __init__(self, index: int) -> None:
        try:
            self._api = api = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise UnsupportedError(
                f"allocator=vmm needs cuda-bindings ({error}): pip install 'rl_memory_plugins[cuda]'"
            ) from error
        torch.cuda.synchronize(index)  # creates the primary context
        self._ok = api.CUresult.CUDA_SUCCESS
        self._out_of_memory = api.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        # torch's ordinal equals the driver's: both count the devices of CUDA_VISIBLE_DEVICES in its order
        device = self._check(api.cuDeviceGet(index))
        if not self._attribute("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", device):
            raise UnsupportedError(f"GPU {index} has no virtual memory management: use allocator=tms")
        self._context = self._check(api.cuDevicePrimaryCtxRetain(device))
        self._properties = api.CUmemAllocationProp()
        self._properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = index
        if self._attribute("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED", device):
            self._properties.allocFlags.gpuDirectRDMACapable = 1
        self._access = api.CUmemAccessDesc()
        self._access.location = self._properties.location
        self._access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(self._check(api.cuMemGetAllocationGranularity(self._properties, minimum)))
        self.unmap_address = address_of_function(ctypes.CDLL("libcuda.so.1").cuMemUnmap)

    def _attribute(self, name: str, device: Any) -> int:
        attribute = getattr(self._api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._check(self._api.cuDeviceGetAttribute(attribute, device)))

    def _check(self, result: tuple[Any, ...]) -> Any:
        """The value of a call.

        Raises:
            DeviceMemoryError: the driver is out of memory.
            EngineFaultError: any other error code.
        """
        if result[0] == self._ok:
            return result[1] if len(result) > 1 else None
        if result[0] == self._out_of_memory:
            raise out_of_device_memory("the CUDA driver is out of memory", self.free_bytes())
        raise EngineFaultError(f"the CUDA driver returned {result[0].name}", cuda_error=result[0].name)

    @contextmanager
    def context(self) -> Iterator[None]:
        self._check(self._api.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            self._api.cuCtxPopCurrent()

    def free_bytes(self) -> int:
        with self.context():
            return int(self._api.cuMemGetInfo()[1])

    def allocate(self, nbytes: int) -> int:
        """Reserve an address range and map new memory to it. Returns the address.

        Raises:
            DeviceMemoryError: the GPU has too little free memory; nothing was changed.
        """
        with self.context():
            handle = self.create(nbytes)
            try:
                address = int(self._check(self._api.cuMemAddressReserve(nbytes, self.granularity, 0, 0)))
            except BaseException:
                self.release(handle)
                raise
            try:
                self.map(address, nbytes, handle)
            except BaseException:
                if self.is_mapped(address):
                    self.unmap(address, nbytes)
                self.free_address(address, nbytes)
                raise
            return address

    def create(self, nbytes: int) -> Any:
        """Allocate physical memory, and return its handle. Raises as `allocate` does."""
        return self._check(self._api.cuMemCreate(nbytes, self._properties, 0))

    def release(self, handle: Any) -> None:
        self._check(self._api.cuMemRelease(handle))

    def reclaim(self) -> None:
        """Make the driver reclaim unmapped memory that it has scrubbed. Otherwise the next `create` reclaims it, which
        takes up to 30 ms after 80 GB were unmapped.
        """
        with self.context(), suppress(DeviceMemoryError):
            self.release(self.create(self.granularity))

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        """Map the handle's memory at the address. The mapping owns the memory from now on.

        On an error nothing is mapped, and the memory is released. After an interrupt it may be mapped: see `is_mapped`.
        """
        try:
            self._check(self._api.cuMemMap(address, nbytes, 0, handle, 0))
            try:
                self._check(self._api.cuMemSetAccess(address, nbytes, [self._access], 1))
            except BaseException:
                self.unmap(address, nbytes)
                raise
        finally:
            self.release(handle)

    def unmap(self, address: int, nbytes: int) -> None:
        self._check(self._api.cuMemUnmap(address, nbytes))

    def free_address(self, address: int, nbytes: int) -> None:
        with self.context():
            self._check(self._api.cuMemAddressFree(address, nbytes))

    def is_mapped(self, address: int) -> bool:
        answer = self._api.cuMemGetAccess(self._properties.location, address)[0]
        return bool(answer != self._api.CUresult.CUDA_ERROR_INVALID_VALUE)


def address_of_function(function: Any) -> int:
    """The address of a ctypes function or callback."""
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
