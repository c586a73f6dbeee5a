"""A GPU as a `Device`: copies, fills and fingerprints of raw addresses through torch (CUDA or ROCm)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch

from rl_memory_plugins.errors import DeviceMemoryError
from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.copies import by_pieces
from rl_memory_plugins.memory.fingerprint import combine, fingerprint, memory_view
from rl_memory_plugins.memory.segments import DEFAULT_POOL, Segments, cached_bytes

logger = logging.getLogger(__name__)


class CudaDevice:
    """A GPU of this process.

    Copies and fills run on one stream, fingerprints on another. Each operation starts after the work on the calling
    thread's current stream. Both streams have the lowest priority (torch's default, 0), so a background backup does not
    delay an engine's kernels. Copies occupy a copy engine and no multiprocessor.

    Args:
        index: torch's ordinal of the GPU, which counts the devices of `CUDA_VISIBLE_DEVICES`.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = gpu_name(index)
        self._stream = torch.cuda.Stream(device=index, priority=0)
        self._hashing = torch.cuda.Stream(device=index, priority=0)  # hashes while a copy runs
        self._segments = Segments(index)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def memory_info(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self.index)
        return int(free), int(total)

    def trim(self, min_bytes: int = 0) -> None:
        # torch counts unused parts of pools as cached too, e.g. the temporaries of CUDA graphs, and frees none of them.
        cached = torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index)
        if cached >= min_bytes and (not min_bytes or self._freeable_bytes() >= min_bytes):
            with torch.cuda.device(self.index):
                torch.cuda.empty_cache()

    def _freeable_bytes(self) -> int:
        """The bytes of torch's cache that an emptying frees. Takes milliseconds."""
        return cached_bytes(self._segments.by_pool().get(DEFAULT_POOL, ()))

    def allocations(self) -> int:
        return int(torch.cuda.memory_stats(self.index).get("allocation.all.allocated", 0))

    def begin_copy_to_host(self, pairs: Sequence[tuple[Block, int]]) -> Callable[[], None]:
        with self._ordered_stream(self._stream):
            cut = by_pieces(pairs)
            return self._begin((memory_view(address, block.nbytes), self.view(block)) for block, address in cut)

    def begin_copy_from_host(self, pairs: Sequence[tuple[Block, int]]) -> Callable[[], None]:
        with self._ordered_stream(self._stream):
            cut = by_pieces(pairs)
            return self._begin((self.view(block), memory_view(address, block.nbytes)) for block, address in cut)

    def _begin(self, copies: Iterable[tuple[Any, Any]]) -> Callable[[], None]:
        """Start to copy to the first tensor of each pair from the second. Returns a function that waits."""
        try:
            for destination, source in copies:
                destination.copy_(source, non_blocking=True)
        except BaseException:
            self._stream.synchronize()
            raise
        return self._stream.record_event().synchronize  # type: ignore[no-any-return]

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
        except RuntimeError as error:  # from torch, or from Triton, which loads the kernel
            if "out of memory" not in str(error):
                raise
            raise DeviceMemoryError(f"too little device memory to compute a fingerprint: {error}") from None

    def view(self, block: Block) -> Any:
        """The block as a uint8 tensor of shape [nbytes] that does not own the memory."""
        return memory_view(block.address, block.nbytes, f"cuda:{self.index}")

    def _ordered_stream(self, stream: torch.cuda.Stream) -> Any:
        stream.wait_stream(torch.cuda.current_stream(self.index))
        return torch.cuda.stream(stream)


@functools.cache
def _hash_kernel() -> ModuleType | None:
    """Import the kernel at its first use, since most processes hash nothing. None if Triton does not work here."""
    try:
        from rl_memory_plugins.memory import hash_kernel
    except Exception as error:  # Triton is absent or incompatible
        logger.warning("fingerprints are computed by torch's operators, which takes longer: %s", error)
        return None
    return hash_kernel


def gpu_name(index: int) -> str:
    """The UUID of a GPU, which is the same in every process, unlike the ordinal `index`."""
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
