"""What the driver is asked, and how often; the rest needs a GPU (`tests/gpu`)."""

import ctypes
from contextlib import nullcontext

import pytest

from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.weights import cuda_ipc
from rl_memory_plugins.weights.cuda_ipc import CudaGpu

SIZE = 1 << 21


class Driver:
    """Allocations of one size, by address: their serials. Counts its calls."""

    def __init__(self):
        self.allocations = {}
        self.exportable = True
        self.asked = 0

    def _base(self, address):
        return next((base for base in self.allocations if base <= address.value < base + SIZE), None)

    def cuCtxPushCurrent_v2(self, context):
        return 0

    def cuCtxPopCurrent_v2(self, context):
        return 0

    def cuPointerGetAttribute(self, out, attribute, address):
        base = self._base(address)
        if base is None:
            return 1
        known = {cuda_ipc._BUFFER_ID: self.allocations[base], cuda_ipc._IS_LEGACY_CUDA_IPC_CAPABLE: self.exportable}
        out._obj.value = int(known[attribute])
        return 0

    def cuMemGetAddressRange_v2(self, base, nbytes, address):
        if self._base(address) is None:
            return 500
        base._obj.value, nbytes._obj.value = self._base(address), SIZE
        return 0

    def cuGetErrorName(self, code, text):
        return 0

    def cuIpcGetMemHandle(self, handle, base):
        self.asked += 1
        handle._obj.reserved = base.value.to_bytes(8, "big").strip(b"\0")
        return 0


def gpu_of(driver):
    gpu = CudaGpu.__new__(CudaGpu)  # which would load the real one
    gpu._api, gpu._context, gpu._exported = driver, ctypes.c_void_p(), {}
    return gpu


def test_an_allocation_that_is_known_is_not_asked_for_again():
    driver = Driver()
    gpu, base = gpu_of(driver), 5 * SIZE
    driver.allocations[base] = 7
    first = gpu.find(base + 10)
    assert (first.address, first.nbytes, first.serial) == (base, SIZE, 7)
    assert gpu.find(base) is first and gpu.find(base + SIZE - 1) is first
    assert driver.asked == 1


def test_another_allocation_at_the_same_address_is_found_anew():
    driver = Driver()
    gpu, base = gpu_of(driver), 5 * SIZE
    driver.allocations[base] = 7
    gpu.find(base)
    driver.allocations[base] = 8
    assert gpu.find(base).serial == 8
    driver.allocations.clear()
    assert gpu.find(base) is None
    driver.allocations[base], driver.exportable = 9, False  # mapped memory, whatever lay there before
    assert gpu.find(base) is None
    assert driver.asked == 2


def test_the_driver_says_how_many_bytes_there_are():
    driver = Driver()
    gpu, base = gpu_of(driver), 5 * SIZE
    driver.allocations[base] = 7
    assert gpu.bytes_from(base) == SIZE
    assert gpu.bytes_from(base + 10) == SIZE - 10
    with pytest.raises(UnsupportedError, match="500"):
        gpu.bytes_from(base + SIZE)


def test_what_is_known_is_bounded(monkeypatch):
    monkeypatch.setattr(cuda_ipc, "_MAX_EXPORTED", 3)
    driver = Driver()
    gpu = gpu_of(driver)
    for number in range(1, 11):
        driver.allocations[number * SIZE] = number
        assert gpu.find(number * SIZE).serial == number
        assert len(gpu._exported) <= 3


@pytest.mark.parametrize(("code", "reaches"), [(0, True), (704, True), (217, False)], ids=["now", "already", "no link"])
def test_a_gpu_reaches_another_one_if_the_driver_allows_it(code, reaches):
    driver = Driver()
    driver.cuCtxEnablePeerAccess = lambda context, flags: code
    assert gpu_of(driver).reaches(gpu_of(driver)) is reaches


def test_a_copy_to_another_gpu_is_given_to_a_stream():
    driver, copied = Driver(), []
    driver.cuMemcpyAsync = lambda *arguments: copied.append([one.value for one in arguments]) or 0
    gpu_of(driver).copy(0x1000, 0x2000, 512, 7)
    gpu_of(driver).copy(0x1000, 0x2000, 512, 0)
    assert copied == [[0x1000, 0x2000, 512, 7], [0x1000, 0x2000, 512, None]]  # None: the default stream
    driver.cuMemcpyAsync = lambda *arguments: 700
    with pytest.raises(UnsupportedError, match="cuMemcpyAsync failed"):
        gpu_of(driver).copy(0x1000, 0x2000, 512, 7)


@pytest.mark.parametrize("release", ["latest", "12.8", "12.0"])
def test_many_copies_are_one_call_where_the_driver_has_it(release):
    driver, calls, each = Driver(), [], []

    def batch(targets, sources, sizes, count, attributes, first, number, *rest):
        assert (attributes._obj.order, attributes._obj.flags, first._obj.value, number.value) == (1, 0, 0, 1)
        assert len(rest) == (1 if release == "latest" else 2)
        calls.append((list(targets), list(sources), list(sizes), count.value, rest[-1].value))
        return 0

    driver.cuMemcpyAsync = lambda *arguments: each.append([one.value for one in arguments]) or 0
    if release != "12.0":
        driver.cuMemcpyBatchAsync = batch if release == "12.8" else None
    if release == "latest":
        driver.cuMemcpyBatchAsync_v2 = batch
    gpu_of(driver).copy_many([0x1000, 0x3000], [0x2000, 0x4000], [512, 256], 7)
    if release == "12.0":
        assert calls == [] and each == [[0x1000, 0x2000, 512, 7], [0x3000, 0x4000, 256, 7]]
    else:
        assert calls == [([0x1000, 0x3000], [0x2000, 0x4000], [512, 256], 2, 7)] and each == []


@pytest.mark.parametrize("whole", [True, False])
def test_copies_that_the_driver_refuses_together_are_made_one_by_one(whole):
    driver, each = Driver(), []
    driver.cuMemcpyBatchAsync_v2 = lambda *arguments: 1
    driver.cuMemcpyAsync = lambda *arguments: each.append([one.value for one in arguments]) or (0 if whole else 1)
    gpu = gpu_of(driver)
    with nullcontext() if whole else pytest.raises(UnsupportedError, match="cuMemcpyAsync failed"):
        gpu.copy_many([0x1000, 0x3000], [0x2000, 0x4000], [512, 256], 7)
    assert each == [[0x1000, 0x2000, 512, 7], [0x3000, 0x4000, 256, 7]][: 2 if whole else 1]
