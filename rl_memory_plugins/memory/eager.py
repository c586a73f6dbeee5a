"""Copies the weights to host memory while the engine runs, so that the next preserving sleep only unmaps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial

from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.memory.allocator import Allocator, Block
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.backup import Backup
from rl_memory_plugins.memory.preparation import AllocationCancelled, Caller
from rl_memory_plugins.memory.ranges import intersect
from rl_memory_plugins.memory.shared_backup import share, sources
from rl_memory_plugins.memory.threads import await_end, on_this_gpu
from rl_memory_plugins.tags import Tag

logger = logging.getLogger(__name__)


class EagerBackup(threading.Thread):
    """A thread that copies the weights. The constructor starts the thread.

    At the sleep, the epoch and the fingerprint of the backup show whether the backup is clean. A copy that overlapped a
    write is freed. Call `finish` before the weights are released.

    Args:
        identified: The parts of the weights that must not change during the copy. The sleep copies the rest again.
        epoch: The content epoch of the weights now.
        former: An earlier copy. The constructor cancels that copy, and the new thread waits for its end.

    Raises:
        RuntimeError: the thread cannot start.
    """

    def __init__(
        self,
        allocator: Allocator,
        arena: PagedArena,
        identified: Sequence[Block],
        epoch: int,
        former: EagerBackup | None = None,
    ) -> None:
        # Not a daemon: the interpreter waits for the thread at exit, so it makes no CUDA call while torch shuts down.
        super().__init__(target=on_this_gpu(partial(self._copy_after, former)), name="rl-memory-eager-backup")
        self._allocator = allocator
        self._arena = arena
        self._identified = identified
        self._epoch = epoch
        self._cancelled = threading.Event()
        self._awaited = threading.Event()
        self._backup: Backup | None = None
        if former is not None:
            former.cancel()
        self.start()

    def cancel(self) -> None:
        """Cancel the copy. Does not wait."""
        self._cancelled.set()

    def finish(self) -> Backup | None:
        """Wait for the thread, and return the backup; None if the copy was cancelled or failed."""
        self._awaited.set()
        await_end(self)
        backup, self._backup = self._backup, None
        return backup

    def _go_on(self) -> bool:
        return not self._cancelled.is_set() and threading.main_thread().is_alive()

    def _copy_after(self, former: EagerBackup | None) -> None:
        outdated = former.finish() if former is not None else None
        if outdated is not None:
            outdated.free()
        try:
            self._copy()
        except AllocationCancelled:
            pass
        except RLMemoryError as error:  # the next sleep tries again, and raises the error if it persists
            logger.warning("the weights were not copied in advance: %s", error)
        except Exception:
            logger.exception("the weights were not copied in advance")

    def _copy(self) -> None:
        with self._allocator.held(Tag.WEIGHTS) as blocks:
            if not self._go_on():
                return
            device, caller = self._allocator.device, Caller(self._go_on, self._awaited.is_set)
            if self._arena.shared is not None:
                parameters = sources(self._allocator, Tag.WEIGHTS, self._identified)
                self._backup = share(self._arena, device, blocks, parameters, self._epoch, caller)
                if self._backup is not None:
                    return
            backup = Backup(self._arena, blocks, intersect(blocks, self._identified), caller)
            try:
                if backup.save_in_steps(device, self._epoch, self._go_on):
                    self._backup = backup
            finally:
                if self._backup is None:
                    backup.free()
