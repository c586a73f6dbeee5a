"""The frame of every transition of a rank: its steps' seconds, its errors, and the deferred work of a release."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rl_memory_plugins.errors import RLMemoryError, as_rl_memory_error
from rl_memory_plugins.memory.allocator import Allocator, Block
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.reclaim import Reclaim
from rl_memory_plugins.memory.weights_content import WeightsContent
from rl_memory_plugins.timing import Steps, timed

logger = logging.getLogger(__name__)

#: A sleep empties torch's cache only if it holds this many bytes: emptying takes 25 ms, whatever its size.
TRIM_THRESHOLD_BYTES = 512 << 20


class Transitions(WeightsContent):
    """The part of `MemoryManager` that all transitions share. `MemoryManager` documents the arguments."""

    def __init__(
        self,
        rank: int,
        allocator: Allocator,
        arena: PagedArena,
        discardable: Callable[[str], Iterable[Block]],
        *,
        tags: Iterable[str],
        eager_backup: bool,
    ) -> None:
        super().__init__(rank, allocator, arena, discardable, tags=tags, eager_backup=eager_backup)
        self._reclaim: Reclaim | None = None
        self._reclaimed = True  # the deferred work of the latest release is done
        self._allocations = 0  # `Device.allocations()` at the end of the latest transition
        self._seconds = Steps()

    def seconds(self) -> Steps:
        """The seconds by step of the latest transition. Steps that did not run are absent."""
        return self._seconds.copy()

    def _reclaim_later(self) -> None:
        """Schedule the deferred work of a release. Ends every transition, because a transition's begin cancels it."""
        if self._reclaimed or self._reclaim is not None or not self._any_asleep():
            return
        self._allocations = self.device.allocations()
        try:
            self._reclaim = Reclaim(self._reclaim_memory)
        except RuntimeError:  # the thread cannot start
            logger.exception("released memory is not reclaimed early; the next wake reclaims it and takes longer")

    def _reclaim_memory(self) -> None:
        # While the engine sleeps, only a trainer in this process allocates. Then the cache is the trainer's, and
        # emptying it would abort a graph capture of the trainer.
        if self.device.allocations() == self._allocations:
            self.device.trim()
        self.allocator.reclaim()
        self.arena.settle()
        self._reclaimed = True

    def _begin_transition(self) -> None:
        self._require_no_transition()
        self._seconds = Steps()
        if self._reclaim is not None:
            self._reclaim.end()
            self._reclaim = None

    @contextmanager
    def _acting(self) -> Iterator[None]:
        """While the body runs, no other transition begins: a signal handler may ask for one."""
        self._acts_in, self.arena.is_busy = os.getpid(), True
        try:
            yield
        finally:
            self._acts_in, self.arena.is_busy = 0, False

    @contextmanager
    def _naming_changes(self) -> Iterator[None]:
        """Convert every error to an `RLMemoryError` whose details name the tags that changed before it."""
        before = dict(self._states)
        try:
            yield
        except Exception as error:
            typed = as_rl_memory_error(error)
            changed = {str(tag): state.value for tag, state in self._states.items() if state != before[tag]}
            typed.details.update(rank=self.rank, changed=changed, content=self.content.value)
            if typed is error:
                raise
            raise typed from error

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        try:
            with timed(self._seconds, step):
                yield
        except RLMemoryError as error:
            error.details.setdefault("rank", self.rank)
            raise
