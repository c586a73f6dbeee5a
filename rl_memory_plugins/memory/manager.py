"""The state machine of one rank: the states of its tags, the content of its weights, and all transitions.

Each transition has two phases, so that all ranks can agree before any of them acts (`coordination.py`): `prepare_*`
obtains all resources and changes no state; then `commit_*` acts, or `abort_*` undoes the preparation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from types import MappingProxyType

from rl_memory_plugins.errors import DeviceMemoryError, StateConflictError
from rl_memory_plugins.memory.allocator import Allocator, Block, Reservation
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.backup import Backup
from rl_memory_plugins.memory.interrupts import to_its_end
from rl_memory_plugins.memory.ranges import intersect, merge, subtract
from rl_memory_plugins.memory.sleep_copies import SleepCopies
from rl_memory_plugins.memory.transitions import TRIM_THRESHOLD_BYTES
from rl_memory_plugins.memory.weights_content import KeptWeights, PreparedSleep
from rl_memory_plugins.records import RankStatus, TagChange, TagStatus
from rl_memory_plugins.tags import PUBLIC_TAGS, Content, Level, Tag, TagState, preserves
from rl_memory_plugins.timing import Steps

POISON_BYTE = 0xFF  # an all-ones float of any width is a NaN


class MemoryManager(SleepCopies):
    """Manages the tags of one rank.

    Args:
        rank: This rank's number within the engine.
        allocator: The allocator of the tags' blocks.
        arena: Host memory for backups.
        discardable: Returns the parts of a tag's blocks that a discarding sleep may lose: for `weights` the parameters
            that a complete update writes again, for `kv_cache` the cache itself. All other content of the blocks
            (buffers, scales, parameters of a draft model, cache metadata) is always preserved. Called at each sleep.
        tags: The tags that sleeps and wakes take; `add_tag` adds others.
        preserves: Whether a sleep of this level keeps the content of a tag.
        poison: Fill newly mapped pages with a NaN pattern, so that a missing restore shows.
        zero_on_wake: Tags whose memory the engine expects to be zero after a wake.
        eager_backup: Copy the weights in the background at the start and after each complete update.
        notes: Limitations of this rank, for `memory_status`.
    """

    def __init__(
        self,
        rank: int,
        allocator: Allocator,
        arena: PagedArena,
        discardable: Callable[[str], Iterable[Block]],
        *,
        tags: Iterable[str] = PUBLIC_TAGS,
        preserves: Callable[[Level, str], bool] = preserves,
        poison: bool = False,
        zero_on_wake: Iterable[str] = (),
        eager_backup: bool = False,
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__(rank, allocator, arena, discardable, tags=tags, eager_backup=eager_backup)
        self._preserves = preserves
        self.notes = list(notes)
        self._poison = poison
        self._zero_on_wake = frozenset(zero_on_wake)
        self._unrestored: dict[str, list[Block]] = {}  # mapped by a wake that failed; the content is undefined
        self._residual: dict[str, int] | None = None  # bytes by cause during the latest sleep; None before `account`
        self._unfinished: dict[str, TagState] = {}  # tags whose content is on its way, with their states before

    def warm_up(self) -> None:
        """Speed up the first preserving sleep: load the hash kernel, and allocate host memory in the background.

        Called once the regions are filled.
        """
        with suppress(DeviceMemoryError):
            self.device.fingerprint(self.allocator.blocks(Tag.WEIGHTS)[:1])
        self._prepare_host_memory()
        self._start_eager_backup()

    # -- status -------------------------------------------------------------------------------------------

    def status(self) -> RankStatus:
        """The state of the rank. Takes little time, and works in every state, also while another thread commits."""
        self._collect_eager_backup()
        free, total = self.device.memory_info()
        shared = self.arena.shared.held if self.arena.shared is not None else {}
        tags = {
            str(tag): TagStatus(
                state=self._states[tag],
                bytes=sum(block.nbytes for block in self.allocator.blocks(tag)),
                host_bytes=backup.nbytes if (backup := self._backups.get(tag)) is not None else 0,
            )
            for tag in self.tags  # another thread may add one
        }
        return RankStatus(
            rank=self.rank,
            device=self.device.name,
            allocator=self.allocator.name,
            tags=tags,
            content=self.content,
            content_epoch=self.epoch,
            device_free_bytes=free,
            device_total_bytes=total,
            host_arena_bytes=self.arena.held_bytes - sum(shared.values()),
            host_shared=shared,
            notes=(*self.notes, *self.arena.notes),
            left=(self._residual or {}) if self._any_asleep() else {},
            draft=self.draft.state,
        )

    def account(self) -> RankStatus:
        """The status, with the residual memory if a tag sleeps. The first call after a sleep takes milliseconds."""
        if self._residual is None and self._any_asleep():
            self._residual = self.allocator.residual_memory()
        return self.status()

    def free_host_memory(self) -> None:
        """Free all host memory that no sleeping tag needs. Later sleeps obtain it again.

        Raises:
            StateConflictError: a transition is prepared.
        """
        self._begin_transition()
        for tag in [tag for tag in self._backups if self.is_resident(tag)]:
            self._backups.pop(tag).free()
        self.arena.free_idle()
        self._reclaim_later()

    # -- sleep --------------------------------------------------------------------------------------------

    def prepare_sleep(
        self, level: Level, tags: Sequence[str], keep: Mapping[str, Block] = MappingProxyType({})
    ) -> None:
        """Obtain host memory for the content of resident `tags` that `level` preserves. Releases nothing.

        Args:
            keep: The memory of parameters that a discarding sleep preserves too, by name. Of undefined weights it can
                keep only those that the last sleep has kept. It preserves unfilled parameters without `keep`.

        Raises:
            HostMemoryError: too little host memory for the copies; nothing was changed.
        """
        self._begin_transition()
        if level is Level.DISCARD and Tag.WEIGHTS in tags and self.is_resident(Tag.WEIGHTS):
            keep = {**self._unfilled_memory(), **keep}
        prepared = PreparedSleep(level, self.epoch, keep)
        if level is Level.PAUSE:
            tags = ()
        try:
            if Tag.WEIGHTS in tags:
                if self._states[Tag.WEIGHTS] is TagState.RESIDENT:
                    # With `eager_backup` the arena holds a copy of the weights at every level.
                    self.arena.note_sleep(preserves(level, Tag.WEIGHTS) or self._eager_backup)
                with self._timed("backup"):
                    self._end_eager_backup(wanted=preserves(level, Tag.WEIGHTS))
            with self._timed("synchronize"):
                self.device.synchronize()
            with self._acting(), self._timed("backup"):
                for tag in tags:
                    if self._states[tag] is TagState.RESIDENT:
                        self._prepare_tag(prepared, tag)
                self._prepared_sleep = prepared
        except BaseException:
            self._prepared_sleep = None
            self._free_new_backups(prepared)
            self._reclaim_later()
            raise

    def _prepare_tag(self, prepared: PreparedSleep, tag: str) -> None:
        blocks, discardable = self.allocator.blocks(tag), list(self._discardable(tag))
        epoch = self.epoch
        existing = self._backups.get(tag)
        if preserves := self._preserves(prepared.level, tag):
            prepared.states[tag] = TagState.PRESERVED
            kept, identified = blocks, intersect(blocks, discardable)
        else:
            identified = intersect(blocks, self._keep(prepared)) if tag is Tag.WEIGHTS else []
            lost = subtract(intersect(blocks, discardable), identified)
            prepared.states[tag] = TagState.DISCARDED if lost or not identified else TagState.PRESERVED
            kept = subtract(blocks, lost)
            if existing is not None:  # an update of the other weights leaves these: the fingerprint alone decides
                epoch = existing.epoch
        if not kept:
            return
        if existing is not None and existing.is_clean(self.device, kept, epoch):
            prepared.backups[tag] = existing
            return
        if existing is not None:  # out of date: the new copy reuses its memory
            self._backups.pop(tag).free()
        shared = self._share_weights(kept, discardable) if preserves and tag is Tag.WEIGHTS else None
        prepared.backups[tag] = shared or Backup(self.arena, kept, identified)

    def commit_sleep(self, tags: Collection[str] | None = None) -> list[TagChange]:
        """Copy and release the tags that `prepare_sleep` prepared. Each tag's state changes with its memory.

        A tag is released while the next tag is copied: unmapping a KV cache takes a tenth of the time of such a copy.

        Args:
            tags: The tags to release now; the others stay prepared for another commit. After `begin_sleep` this waits
                for the copies of these tags and for nothing else on the device, so no work may have used the tags
                since. Default: all, and it waits for all work.

        Raises:
            RLMemoryError: a copy or a release failed. `details["changed"]` holds the tags that had changed before, with
                their new states. No tag is prepared any more.
            StateConflictError: no sleep is prepared.
        """
        if self._require_sleep().is_split:
            self._seconds = Steps()  # those of the commit before
        self._residual = None
        with self._acting(), self._naming_changes():
            prepared = self._require_sleep()  # a signal handler may have undone it
            try:
                self._prepared_sleep = None
                changes = self._release_tags(prepared, tags)
                if prepared.states:
                    prepared.is_split, self._prepared_sleep = True, prepared
                return changes
            finally:
                if self._prepared_sleep is None:
                    self._free_new_backups(prepared)  # of tags that an error has left resident
                    self._reclaim_later()

    def _release_tags(self, prepared: PreparedSleep, tags: Collection[str] | None) -> list[TagChange]:
        chosen = [tag for tag in prepared.states if tags is None or tag in tags]
        self._begin_copies(prepared, chosen, synchronize=tags is None or not prepared.has_begun)
        changes = []
        for tag in chosen:
            with self._timed("backup"):
                if tag in prepared.backups:
                    prepared.backups[tag].finish()
            with self._timed("release"):
                changes.append(self._release_tag(prepared, tag))
        if changes and tags is None:  # to empty the cache is to wait for all copies
            with self._timed("release"):
                self.device.trim(TRIM_THRESHOLD_BYTES)
        return changes

    def _release_tag(self, prepared: PreparedSleep, tag: str) -> TagChange:
        state, copied = prepared.states.pop(tag), prepared.copied.pop(tag, 0)
        backup = prepared.backups.pop(tag, None)
        former = self._backups.pop(tag, None)
        if former is not None and former is not backup:
            former.free()
        if backup is not None:
            self._backups[tag] = backup
        if tag is Tag.WEIGHTS:
            if not self._preserves(prepared.level, tag):
                identified, fingerprint = (backup.identified, backup.fingerprint) if backup is not None else ([], None)
                self._kept = KeptWeights(frozenset(prepared.keep), identified, fingerprint) if prepared.keep else None
                if not prepared.keep.keys() >= (self._unfilled or frozenset()):
                    self._whole, self._unfilled_changed = None, True
            if state is TagState.DISCARDED:
                self.content = Content.STALE
                self.epoch += 1
            if backup is not None:
                backup.epoch = self.epoch  # the backup holds only parts that were not discarded
        self._reclaimed = False
        try:
            released = self.allocator.release(tag)
            self._states[tag] = state
        except BaseException:
            # Counts as released as a whole, also if an interrupt ends the undo: a wake maps the released part.
            self._states[tag] = state
            with suppress(Exception):
                self._map_tag(tag, self.allocator.reserve(tag))
                self._await_content(tag)
                self._states[tag] = TagState.RESIDENT
            raise
        return TagChange(self.rank, str(tag), state, bytes_released=released, bytes_copied=copied)

    def abort_sleep(self) -> None:
        """Undo `prepare_sleep`. Does nothing if no sleep is prepared."""
        prepared, self._prepared_sleep = self._prepared_sleep, None
        if prepared is not None:
            self._free_new_backups(prepared)
            self._reclaim_later()

    # -- wake ---------------------------------------------------------------------------------------------

    def prepare_wake(self, tags: Sequence[str]) -> None:
        """Obtain physical memory for the released tags among `tags`. Maps nothing.

        Raises:
            DeviceMemoryError: the device has too little free memory; nothing was changed.
        """
        self._begin_transition()
        reservations: dict[str, Reservation] = {}
        try:
            with self._acting(), self._timed("reserve"):
                for tag in reversed(tags):
                    if self._states[tag] is not TagState.RESIDENT:
                        reservations[tag] = self._reserve(tag)
                self._prepared_wake = reservations
        except BaseException:
            self._prepared_wake = None
            for reservation in reservations.values():
                reservation.drop()
            self._reclaim_later()
            raise

    def commit_wake(self, later: Collection[str] = ()) -> list[TagChange]:
        """Map and restore the tags that `prepare_wake` reserved. Backups stay, so that a later sleep can reuse them.

        If a tag fails, the tags before it are released again; their backups still hold their content.

        Args:
            later: Tags whose content is still on its way when this returns. Nothing may read or write them before
                `finish_wake`, which every transition calls first.

        Raises:
            RLMemoryError: a tag could not be mapped or restored.
            EngineFaultError: a shared copy had other bytes. All tags are resident, and the content is `failed`.
            StateConflictError: no wake is prepared.
        """
        self._require_wake()
        former: dict[str, TagState] = {}
        changes = []
        with self._acting(), self._naming_changes():
            reservations = self._require_wake()  # a signal handler may have undone it
            try:
                self._prepared_wake = None
                for tag in sorted(reservations, key=lambda tag: tag in later):  # the copies of `later` begin last
                    reservation = reservations.pop(tag)
                    former[tag] = self._states[tag]
                    copied = self._map_tag(tag, reservation)
                    self._states[tag] = TagState.RESIDENT
                    restored = {"bytes_restored": reservation.nbytes, "bytes_copied": copied}
                    changes.append(TagChange(self.rank, str(tag), TagState.RESIDENT, **restored))
                awaited = [tag for tag in former if tag not in later]
                if awaited:
                    with self._timed("restore"):
                        for tag in awaited:
                            self._await_content(tag)
                        if awaited == list(former):
                            self.device.synchronize()
                self._unfinished = {tag: state for tag, state in former.items() if tag in self._unrestored}
            except BaseException:
                self._prepared_wake = None
                to_its_end(lambda: self._undo_wake(reservations, former))
                raise
            finally:
                self._reclaim_later()
            self._require_own_bytes()
        return changes

    def _undo_wake(self, reservations: dict[str, Reservation], former: Mapping[str, TagState]) -> None:
        """Drop what is reserved, and unmap the tags that were mapped. May be run again."""
        while reservations:
            reservations.popitem()[1].drop()
        for tag, state in former.items():
            self._unmap_tag(tag, state)

    def _require_wake(self) -> dict[str, Reservation]:
        if self._prepared_wake is None:
            raise StateConflictError("no wake is prepared on this rank", rank=self.rank)
        return self._prepared_wake

    @property
    def unfinished(self) -> list[str]:
        """The tags whose content is still on its way."""
        return list(self._unfinished)

    def finish_wake(self) -> None:
        """Wait for the content of the tags that `commit_wake` has left for later. Does nothing if there are none.

        Raises:
            RLMemoryError: a copy failed. Its tag, and those behind it, sleep again; their backups hold their content.
        """
        with self._naming_changes():
            try:
                for tag in list(self._unfinished):
                    self._await_content(tag)
                    self._unfinished.pop(tag, None)  # a signal handler may have waited meanwhile
            except BaseException:
                to_its_end(lambda: self._undo_wake({}, self._unfinished))
                self._unfinished = {}
                self._reclaim_later()
                raise

    def _map_tag(self, tag: str, reservation: Reservation) -> int:
        """Commit the reservation, and start to restore its blocks from the backup. Returns the bytes copied.

        The tag counts as unrestored until `_await_content`. The next tag is mapped while this one is copied.
        """
        # Before the commit: what an interrupt leaves mapped has no content yet.
        undefined = self._unrestored[tag] = merge([*self._unrestored.get(tag, []), *reservation.blocks])
        with self._timed("map"):
            reservation.commit()
        with self._timed("restore"):
            # A tensor may have been freed since the release, and its addresses may belong to another tensor now.
            blocks = intersect(self.allocator.blocks(tag), undefined)
            if self._poison:
                self.device.fill(blocks, POISON_BYTE)
            if tag in self._zero_on_wake and (self._poison or not self.allocator.maps_zeroed):
                self.device.fill(blocks, 0)
            backup = self._backups.get(tag)
            copied = backup.begin_restore(self.device, blocks) if backup is not None else 0
            if backup is not None and backup.is_shared:
                backup.finish()
                if not backup.arrived(self.device, blocks):
                    self._lose_weights()
                del self._unrestored[tag]
        return copied

    def _await_content(self, tag: str) -> None:
        """Wait for the content of a tag that was mapped."""
        if tag in self._backups:
            self._backups[tag].finish()
        self._unrestored.pop(tag, None)

    def _unmap_tag(self, tag: str, state: TagState) -> None:
        """Undo `_map_tag`. If that fails too, the tag counts as released, and a later wake maps its missing part."""
        self._states[tag] = TagState.DISCARDED if self._lost and tag is Tag.WEIGHTS else state
        if tag in self._backups:
            with suppress(Exception):  # the copy may have failed
                self._backups[tag].finish()
        try:
            self.device.synchronize()
            self._reclaimed = False
            self.allocator.release(tag)
        except Exception:
            return
        self._unrestored.pop(tag, None)

    def abort_wake(self) -> None:
        """Undo `prepare_wake`. Does nothing if no wake is prepared."""
        reservations, self._prepared_wake = self._prepared_wake, None
        if reservations is not None:
            for reservation in reservations.values():
                reservation.drop()
            self._reclaim_later()

    # -- internals ------------------------------------------------------------------------------------------

    def _begin_transition(self) -> None:
        self.finish_wake()
        super()._begin_transition()

    def check_integrity(self) -> None:
        """Assert the invariants that hold between two calls. Tests call it after every step."""
        for tag in self._states:
            if self._states[tag] is TagState.PRESERVED and self.allocator.blocks(tag):
                assert tag in self._backups, f"{tag} is preserved without a backup"
            blocks = self.allocator.blocks(tag)
            assert all(left.end <= right.address for left, right in pairwise(blocks)), f"{tag} overlaps"
        assert self._prepared_sleep is None or self._prepared_wake is None
