"""The content of a memory's sleeping tensors, which can be read in host memory."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch

from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.memory.adoption import bytes_of
from rl_memory_plugins.memory.allocator import Allocator, Block
from rl_memory_plugins.memory.fingerprint import memory_view
from rl_memory_plugins.memory.ranges import merge
from rl_memory_plugins.trainer.closed_memories import note_closed

if TYPE_CHECKING:
    from rl_memory_plugins.memory.manager import MemoryManager


logger = logging.getLogger(__name__)


class SleepingContent:
    """The sleeping tensors of a `PausableMemory` on one device. It refers to no target of the memory.

    After the end of the memory they can still be read, and no more be woken.
    """

    def __init__(self, manager: MemoryManager, allocator: Allocator, device: torch.device) -> None:
        self._manager = manager
        self._allocator = allocator
        self._device = device
        self._lock = threading.Lock()  # of `settle`, once the memory has ended

    @property
    def _tags(self) -> list[str]:
        return [tag for tag in self._manager.tags if not self._manager.is_resident(tag)]

    @property
    def may_sleep(self) -> bool:
        """See `sleepers.Sleeper`."""
        return bool(self._tags or self._manager.unfinished)

    def exists(self) -> bool:
        """Whether memory sleeps, or its content is on its way."""
        return any(self._allocator.blocks(tag) for tag in {*self._tags, *self._manager.unfinished})

    def is_used(self) -> bool:
        """Whether a tensor sleeps. On a GPU, sleeping memory without one stays a block, and this takes milliseconds."""
        return any(self._allocator.is_used(tag) for tag in {*self._tags, *self._manager.unfinished})

    def owned(self) -> Callable[[int], bool]:
        """A function that tells whether an address belongs to a sleeping tag."""
        return within(self._allocator, self._tags)

    def host_bytes(self, storage: Any) -> torch.Tensor | None:
        """The content of a sleeping storage in host memory, uint8, [bytes]; `None` if the storage is not asleep."""
        if storage.device != self._device:
            return None
        if self._manager.unfinished:
            self.settle()
        copies = self._manager.host_copies(Block(storage.data_ptr(), storage.nbytes()))
        # On a CPU a tensor that ended while it slept left its address to others; those of a GPU stay reserved.
        if copies and self._device.type == "cpu" and not self.owned()(storage.data_ptr()):
            return None
        return sleeping_content(storage, copies)

    def await_leaving(self) -> None:
        """Nothing leaves: a thread that lets tags leave keeps their memory."""

    def settle(self) -> None:
        """Wait for what is on its way, and undo what the memory had prepared."""
        with self._lock:
            for step in (self._manager.finish_wake, self._manager.abort_sleep, self._manager.abort_wake):
                with suppress(RLMemoryError):
                    step()

    def end(self) -> None:
        """Free the host memory in a thread.

        The garbage collector may call this in any thread, also in those that the arena waits for or that hold a lock.
        """
        note_closed(self._allocator, self._manager.tags)
        try:
            threading.Thread(target=self._close, name="rl-memory-close").start()
        except RuntimeError:  # no more threads can be started: `forget_ended` tries again
            remnants.add(self)

    def _close(self) -> None:
        # A new thread's GPU is 0, where a wait for a copy of another one would make a context.
        with nullcontext() if self._device.type == "cpu" else torch.cuda.device(self._device):
            self.settle()
            self._manager.arena.close()


remnants: set[SleepingContent] = set()
"""What sleeps of memories that have ended."""


def memory_ended(content: SleepingContent) -> None:
    """The end of the memory. The garbage collector may call this in any thread."""
    remnants.add(content)  # first: an interrupt in a finaliser is lost, and `forget_ended` goes on then
    if not content.may_sleep:
        remnants.discard(content)
        content.end()


def forget_ended() -> None:
    """Free the host memory of remnants whose tensors have ended too."""
    for content in list(remnants):  # without a lock: a collection in here may end a memory, which adds to them
        try:
            content.settle()
            if content.is_used():
                continue
        except Exception:  # is no error of the call that comes by here
            logger.warning("what sleeps of a memory that has ended cannot be looked at", exc_info=True)
            continue
        remnants.discard(content)
        content.end()


def within(allocator: Allocator, tags: Iterable[str]) -> Callable[[int], bool]:
    """A function that tells whether an address belongs to a tensor of one of these tags."""
    extents = merge(block for tag in tags for block in allocator.extents(tag))
    starts, ends = [block.address for block in extents], [block.end for block in extents]

    def is_within(address: int) -> bool:
        at = bisect_right(starts, address)
        return at > 0 and address < ends[at - 1]

    return is_within


def sleeping_content(storage: Any, copies: Sequence[tuple[Block, int]]) -> torch.Tensor | None:
    """The content of a storage as uint8, [bytes]; `None` without copies.

    Args:
        copies: The parts of the storage's memory that are in host memory only, with the addresses of their copies.
    """
    if not copies:
        return None
    whole = Block(storage.data_ptr(), storage.nbytes())
    if copies[0][0] == whole:
        found: torch.Tensor = memory_view(copies[0][1], whole.nbytes)
        return found
    content = bytes_of(storage).clone()  # of a CPU: the first and last bytes of a storage are never released
    for part, address in copies:
        start = part.address - whole.address
        content[start : start + part.nbytes] = memory_view(address, part.nbytes)
    return content
