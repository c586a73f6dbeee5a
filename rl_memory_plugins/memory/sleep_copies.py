"""The copies of a prepared sleep: when they begin, what makes them out of date, and what an abort leaves of them."""

from __future__ import annotations

import logging
from collections.abc import Collection

from rl_memory_plugins.errors import StateConflictError
from rl_memory_plugins.memory.allocator import Reservation
from rl_memory_plugins.memory.backup import Backup
from rl_memory_plugins.memory.interrupts import to_its_end
from rl_memory_plugins.memory.ranges import subtract
from rl_memory_plugins.memory.transitions import Transitions
from rl_memory_plugins.memory.weights_content import PreparedSleep
from rl_memory_plugins.tags import Tag, TagState

logger = logging.getLogger(__name__)


class SleepCopies(Transitions):
    """The part of `MemoryManager` that copies what sleeps. `MemoryManager` documents the arguments."""

    @property
    def prepared_tags(self) -> list[str]:
        """The tags that the prepared sleep will release."""
        return [] if self._prepared_sleep is None else list(self._prepared_sleep.states)

    def begin_sleep(self) -> None:
        """Start the copies of the prepared sleep, in the order of its tags. They run one behind the other.

        They start behind the work of the current stream, and wait for no other: `prepare_sleep` has waited for the
        device, and to wait again would be to wait for copies that others have begun. Nothing may write to a tag until
        its `commit_sleep` or `abort_sleep`.

        Raises:
            RLMemoryError: a copy could not start; call `abort_sleep`.
            StateConflictError: no sleep is prepared, or a tag has got memory since.
        """
        with self._naming_changes():
            prepared = self._require_sleep()
            prepared.has_begun = True
            self._begin_copies(prepared, prepared.states, synchronize=False)

    def recheck_copies(self, tags: Collection[str] | None = None, *, synchronize: bool = True) -> None:
        """Copy the blocks of prepared tags again whose clean copy no longer matches them. Default: of all.

        Args:
            synchronize: Wait for the device before, unless the copies have begun: nothing may have written since.
        """
        prepared = self._prepared_sleep
        if prepared is None:
            return
        kept = {tag: one for tag, one in prepared.backups.items() if one is self._backups.get(tag)}
        if tags is not None:
            kept = {tag: one for tag, one in kept.items() if tag in tags}
        if kept and synchronize and not prepared.has_begun:
            self.device.synchronize()  # another stream may still write
        for tag, backup in kept.items():
            with self.allocator.held(tag) as live:  # what has been freed since cannot be read
                freed = subtract(backup.identified, live)
                is_clean = not freed and backup.is_clean(self.device, backup.blocks, self.epoch)
            if not is_clean:
                del self._backups[tag]  # a backup that is not among these counts as new, and is copied as a whole
                prepared.copied.pop(tag, None)

    def _reserve(self, tag: str) -> Reservation:
        try:
            return self.allocator.reserve(tag)
        finally:  # also a failed one has freed what tensors have left
            if tag in self._backups:
                self._backups[tag].forget(self.allocator.blocks(tag))

    def _require_sleep(self) -> PreparedSleep:
        if self._prepared_sleep is None:
            raise StateConflictError("no sleep is prepared on this rank", rank=self.rank)
        return self._prepared_sleep

    def _begin_copies(self, prepared: PreparedSleep, tags: Collection[str], *, synchronize: bool) -> None:
        """Start the copies of these tags that have not begun. `synchronize`: wait for the device before."""
        if synchronize:
            with self._timed("synchronize"):
                self.device.synchronize()
        self._require_covered(prepared, tags)
        with self._timed("backup"):
            for tag in tags:
                if tag in prepared.backups and tag not in prepared.copied:
                    prepared.copied[tag] = self._begin_copy(prepared, tag)

    def _begin_copy(self, prepared: PreparedSleep, tag: str) -> int:
        backup = prepared.backups[tag]
        gone = subtract(backup.blocks, self.allocator.blocks(tag))
        # torch counts a graph's temporaries as unused, but replays need them.
        unused = self.allocator.unused(tag) if tag != Tag.CUDA_GRAPH else []
        clean = backup is self._backups.get(tag)
        if clean and prepared.epoch != self.epoch:  # the weights were written after `prepare_sleep`
            del self._backups[tag]
            clean = False
        if backup.is_shared and not clean:
            backup.free()
            backup = prepared.backups[tag] = Backup(self.arena, backup.blocks, backup.identified)
        return backup.begin_save(self.device, self.epoch, gone, unused, clean=clean)

    def _require_covered(self, prepared: PreparedSleep, tags: Collection[str]) -> None:
        """Check that none of these tags has got memory since `prepare_sleep`, whose content would be lost.

        Raises:
            StateConflictError: a tag to preserve has got memory.
        """
        for tag in tags:
            if prepared.states[tag] is TagState.PRESERVED:
                backup = prepared.backups.get(tag)
                missing = subtract(self.allocator.blocks(tag), backup.blocks if backup is not None else [])
                if missing:
                    raise StateConflictError(
                        f"the tag {tag} has got memory since its sleep was prepared: prepare the sleep again", tag=tag
                    )

    def _free_new_backups(self, prepared: PreparedSleep) -> None:
        """Wait for the copies that nobody needs any more. If one fails, nothing is lost: its tag is resident."""

        def free() -> None:
            for tag, backup in prepared.backups.items():
                try:
                    if backup is self._backups.get(tag):
                        backup.finish()
                    else:
                        backup.free()
                except Exception:  # it must hide no error before it, and keep no other copy
                    logger.warning("the copy of %s, which is no longer needed, has failed", tag, exc_info=True)

        to_its_end(free)
