"""One GPU as a `Device`: copies, fills and fingerprints of raw addresses by torch alone (CUDA or ROCm)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from rl_memory_plugins.errors import DeviceMemoryError
from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.fingerprint import combine, fingerprint, memory_view

logger = logging.getLogger(__name__)


class CudaDevice:
    """A GPU of this process.

    Copies and fills run on a stream of their own, fingerprints on another; each begins after the work that the calling
    thread's current stream holds. It has the lowest priority there is (torch's 0, which streams have unless
    they ask for a higher one), so a background backup does not hold up an engine's kernels; the copies
    themselves occupy a copy engine and no multiprocessor.

    Args:
        index: torch's ordinal; `CUDA_VISIBLE_DEVICES` has been applied to it.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = gpu_name(index)
        self._stream = torch.cuda.Stream(device=index, priority=0)
        self._hashing = torch.cuda.Stream(device=index, priority=0)  # beside a copy that is under way

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def memory_info(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self.index)
        return int(free), int(total)

    def trim(self, min_bytes: int = 0) -> None:
        cached = torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index)
        if cached >= min_bytes:
            with torch.cuda.device(self.index):
                torch.cuda.empty_cache()

    def allocations(self) -> int:
        return int(torch.cuda.memory_stats(self.index).get("allocation.all.allocated", 0))

    def begin_copy_to_host(self, pairs: Sequence[tuple[Block, int]]) -> Callable[[], None]:
        with self._ordered_stream(self._stream):
            try:
                for block, address in pairs:
                    memory_view(address, block.nbytes).copy_(self.view(block), non_blocking=True)
            except BaseException:
                self._stream.synchronize()
                raise
            return self._stream.record_event().synchronize  # type: ignore[no-any-return]

    def copy_from_host(self, pairs: Sequence[tuple[Block, int]]) -> None:
        with self._ordered_stream(self._stream):
            for block, address in pairs:
                self.view(block).copy_(memory_view(address, block.nbytes), non_blocking=True)
        self._stream.synchronize()

    def fill(self, blocks: Sequence[Block], byte: int) -> None:
        with self._ordered_stream(self._stream):
            for block in blocks:
                self.view(block).fill_(byte)
        self._stream.synchronize()

    def fingerprint(self, blocks: Sequence[Block]) -> int:
        device, kernel = torch.device("cuda", self.index), _hash_kernel()
        try:
            with self._ordered_stream(self._hashing):
                if kernel is not None and kernel.usable(device):
                    return combine([block.nbytes for block in blocks], kernel.hash_pieces(blocks, device))
                return fingerprint([self.view(block) for block in blocks])
        except RuntimeError as error:  # torch's type, or Triton's, where it loads the kernel
            if "out of memory" not in str(error):
                raise
            raise DeviceMemoryError(f"no device memory to read the weights with: {error}") from None

    def view(self, block: Block) -> Any:
        """The block's bytes as a tensor of uint8 that owns nothing."""
        return memory_view(block.address, block.nbytes, f"cuda:{self.index}")

    def _ordered_stream(self, stream: torch.cuda.Stream) -> Any:
        stream.wait_stream(torch.cuda.current_stream(self.index))
        return torch.cuda.stream(stream)


@functools.cache
def _hash_kernel() -> ModuleType | None:
    """Imported when it is first needed: most processes that import this module hash nothing."""
    try:
        from rl_memory_plugins.memory import hash_kernel
    except Exception as error:  # no Triton, or one that does not fit
        logger.warning("weights are identified by torch's operators, which is slower: %s", error)
        return None
    return hash_kernel


def gpu_name(index: int) -> str:
    """The UUID by which every process knows this GPU, whatever its own ordinal for it is."""
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
