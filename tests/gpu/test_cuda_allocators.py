"""The suite of all allocators, on those that hold GPU memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest
import test_allocators as suite
import torch
from test_allocators import *  # noqa: F403 - the suite's tests, collected here with the harnesses below
from torch_memory_saver.utils import get_binary_path_from_package

from rl_memory_plugins.memory.cuda_vmm import CudaVmmAllocator
from rl_memory_plugins.memory.torch_saver import TorchSaverAllocator

MiB = suite.MiB


class CudaHarness:
    """Tensors on GPU 0. One allocator serves all tests, as one serves an engine's process."""

    nbytes = 256 * MiB

    def __init__(self, allocator) -> None:
        self.allocator = allocator
        self._tensors: dict[int, torch.Tensor] = {}
        self._hog: torch.Tensor | None = None

    def make(self, nbytes: int, byte: int) -> int:
        handle = len(self._tensors)
        self._tensors[handle] = torch.full((nbytes,), byte, dtype=torch.uint8, device="cuda:0")
        return handle

    def address(self, handle: int) -> int:
        return self._tensors[handle].data_ptr()

    def read(self, handle: int) -> bytes:
        return self._tensors[handle].cpu().numpy().tobytes()

    def free(self, handle: int) -> None:
        del self._tensors[handle]
        gc.collect()

    def physical_bytes(self) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(0)
        return total - free - (0 if self._hog is None else self._hog.numel())

    def starve(self) -> None:
        torch.cuda.empty_cache()
        self._hog = torch.empty(torch.cuda.mem_get_info(0)[0] - 128 * MiB, dtype=torch.uint8, device="cuda:0")

    def feed(self) -> None:
        self._hog = None
        torch.cuda.empty_cache()


class VmmHarness(CudaHarness):
    def __init__(self) -> None:
        super().__init__(CudaVmmAllocator(0))

    def close(self) -> None:
        self._tensors.clear()
        self.allocator.close()


class SaverHarness(CudaHarness):
    def __init__(self) -> None:
        super().__init__(TorchSaverAllocator(0))

    def close(self) -> None:
        """It can neither unmap nor be made twice: leave its memory released, under tags no other test uses."""
        torch.cuda.synchronize()
        for tag in suite.Tag:
            self.allocator.release(tag)


HARNESSES = {"vmm": VmmHarness, "tms": SaverHarness}
#: What torch_memory_saver has no call for.
BEYOND_SAVER = {
    "test_reserve_takes_physical_memory_and_drop_gives_it_back",
    "test_a_block_freed_while_released_disappears",
    "test_a_block_freed_while_reserved_is_safe",
}


@pytest.fixture(params=list(HARNESSES))
def memory(request):
    if request.param == "tms" and request.node.originalname in BEYOND_SAVER:
        pytest.skip("torch_memory_saver obtains memory only by mapping it, and maps all of a tag")
    harness = HARNESSES[request.param]()
    # kernels are loaded on their first use, and take memory
    warm = torch.full((4 * MiB,), 1, dtype=torch.uint8, device="cuda:0")
    harness.allocator.device.fingerprint([suite.Block(warm.data_ptr(), warm.numel())])
    yield harness
    harness.feed()
    harness.close()


def test_what_tensors_leave_of_a_segment_is_unused(memory):
    kept, gone = (suite.make(memory, suite.Tag.WEIGHTS, byte, MiB // 2) for byte in (1, 2))
    here, there = memory.address(kept), memory.address(gone)
    memory.free(gone)
    unused = memory.allocator.unused(suite.Tag.WEIGHTS)
    assert any(block.address <= there and there + MiB // 2 <= block.end for block in unused)
    assert not any(block.address < here + MiB // 2 and here < block.end for block in unused)


def test_the_saver_is_used_in_the_mode_that_the_process_was_started_for():
    preloaded = "torch_memory_saver" in os.environ.get("LD_PRELOAD", "")
    assert TorchSaverAllocator(0).hook_mode == ("preload" if preloaded else "torch")


@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="this is the inner run")
def test_the_suite_passes_with_the_saver_preloaded():
    library = str(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))
    command = [
        sys.executable,
        "-m",
        "pytest",
        __file__,
        "-k",
        "tms or saver_is_used",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    environment = {**os.environ, "LD_PRELOAD": library}
    inner = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert inner.returncode == 0, inner.stdout + inner.stderr
    assert " passed" in inner.stdout
