"""The content of one rank's weights: its state, its epoch, and copies of the weights made in advance."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from rl_memory_plugins.errors import DeviceMemoryError, EngineFaultError, StateConflictError
from rl_memory_plugins.memory.allocator import Allocator, Block, Reservation
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.backup import Backup
from rl_memory_plugins.memory.draft_state import DraftState
from rl_memory_plugins.memory.eager import EagerBackup
from rl_memory_plugins.memory.ranges import intersect, merge, subtract
from rl_memory_plugins.memory.shared_backup import prepare_share, share, sources
from rl_memory_plugins.tags import Content, DraftShare, Level, Tag, TagState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptWeights:
    """Parameters that a discarding sleep has kept.

    Attributes:
        names: Their names, as the engine names them.
        blocks: Their memory.
        fingerprint: Of the blocks; `None` if it is not known.
    """

    names: frozenset[str]
    blocks: list[Block] = field(default_factory=list)
    fingerprint: int | None = None


@dataclass
class PreparedSleep:
    level: Level
    epoch: int  # of the weights, when the sleep was prepared
    keep: Mapping[str, Block] = field(default_factory=dict)  # of parameters that a discarding sleep keeps
    backups: dict[str, Backup] = field(default_factory=dict)  # of a tag with a clean backup, that backup
    states: dict[str, TagState] = field(default_factory=dict)  # after the sleep, of the tags that are still to leave
    copied: dict[str, int] = field(default_factory=dict)  # the bytes of the copies that have begun, by tag
    has_begun: bool = False  # `begin_sleep` was called
    is_split: bool = False  # some tags have left already


class WeightsContent:
    """The part of `MemoryManager` that tracks writes to the weights. `MemoryManager` documents the arguments.

    Attributes:
        content: The content state of the weights.
        epoch: A counter that grows with every known change of the weights.
        draft: The state of the draft model.
        find_unfilled: Gives the names of the parameters that no load of the engine's own checkpoint fills. `None` until
            the model can tell.
        memory_of: Gives the present memory of parameters by name. Engines may give a parameter new memory.
    """

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
        self.rank = rank
        self.allocator = allocator
        self.device = allocator.device
        self.arena = arena
        self.content = Content.VALID
        self.epoch = 0
        self.draft = DraftState()
        self._discardable = discardable
        self._eager_backup = eager_backup
        self._eager: EagerBackup | None = None
        self._states: dict[str, TagState] = dict.fromkeys(tags, TagState.RESIDENT)
        self._backups: dict[str, Backup] = {}
        self._kept: KeptWeights | None = None
        self.find_unfilled: Callable[[], Iterable[str]] | None = None
        self.memory_of: Callable[[Iterable[str]], Mapping[str, Block]] = lambda names: {}
        self._unfilled: frozenset[str] | None = None
        self._whole: KeptWeights | None = None  # the unfilled parameters, while they hold their values
        self._whole_is_old = False  # an engine's own load into valid weights may have written them since
        self._unfilled_changed = False  # since the weights were valid, as their bytes show
        self._lost = False  # the latest wake has restored bytes of others
        self._withheld: int | None = None  # the epoch of weights that hold their values and must not answer
        self._prepared_sleep: PreparedSleep | None = None
        self._prepared_wake: dict[str, Reservation] | None = None
        self._acts_in = 0  # the process in which a transition obtains memory or acts; not in its children by fork

    @property
    def tags(self) -> list[str]:
        """The tags that sleeps and wakes take."""
        return list(self._states)

    def state(self, tag: str) -> TagState:
        return self._states[tag]

    def is_resident(self, tag: str) -> bool:
        """Whether the tag's memory is mapped. Memory of a tag that no sleep releases always is."""
        return self._states.get(tag, TagState.RESIDENT) is TagState.RESIDENT

    def _any_asleep(self) -> bool:
        return any(state is not TagState.RESIDENT for state in list(self._states.values()))

    def add_tag(self, tag: str) -> None:
        """Take a tag of the allocator into sleeps and wakes. Does nothing for a known tag."""
        self._states.setdefault(tag, TagState.RESIDENT)

    def host_copies(self, block: Block) -> list[tuple[Block, int]]:
        """The parts of `block` whose content is in host memory only, each with the address of its copy."""
        asleep = [backup for tag, backup in list(self._backups.items()) if not self.is_resident(tag)]
        return [pair for backup in asleep for pair in backup.copies(block)]

    @property
    def kept(self) -> frozenset[str]:
        """The parameters that a complete update may leave out because they hold their values, by the engine's name.

        Until a complete update these are the parameters that the last discarding sleep has kept; and always the
        unfilled ones. After an update that broke off both count only if their bytes are those of before. The weights
        must be resident.
        """
        whole = self._whole
        if self.content in (Content.UPDATING, Content.FAILED):
            if self._kept is not None and self._has_changed(self._kept) is not False:
                self._kept = None
            if whole is not None:
                changed = self._has_changed(whole, self._unfilled_blocks())
                if changed:
                    self._whole, self._unfilled_changed = None, not self._whole_is_old
                if changed is not False:
                    whole = None
        names: frozenset[str] = frozenset()
        return names.union(*(one.names for one in (self._kept, whole) if one is not None))

    @property
    def unmarked(self) -> frozenset[str]:
        """The parameters that no mark may overwrite, by the engine's name: the kept ones, and the unfilled ones.

        Unfilled parameters are left out if their bytes show that an update which broke off has written them. The
        weights must be resident.
        """
        kept = self.kept
        return kept if self._unfilled_changed else kept.union(self._unfilled or ())

    @property
    def may_learn(self) -> bool:
        """Whether `learn_unfilled` has something to do."""
        return self._unfilled is None and self.find_unfilled is not None

    def learn_unfilled(self) -> bool:
        """Find the parameters that no load fills. The first call may take seconds, later calls take no time.

        The weights must be resident. If their content is undefined at the first call, an update that broke off may have
        written unfilled parameters: updates of this package need them until one is complete. Call this before a write
        into valid weights.

        Returns: whether this call has found some.
        """
        if self._unfilled is not None or self.find_unfilled is None:
            return False
        self._unfilled = frozenset()
        try:
            self._unfilled = frozenset(self.memory_of(self.find_unfilled()))
        except Exception as error:  # without the knowledge the rule is strict: every parameter must be sent
            logger.warning("cannot tell which parameters the engine's checkpoint does not fill: %s", error)
        self._note_whole()
        return bool(self._unfilled)

    def _note_whole(self) -> None:
        """Note that the unfilled parameters hold their values, if the content is valid or withheld.

        Call this before a write or after a whole one, never after a write that broke off.
        """
        withheld = self.content is Content.STALE and self.epoch == self._withheld
        if not self._unfilled or not (self.content is Content.VALID or withheld):
            return
        blocks = self._unfilled_blocks()
        fingerprint = None
        try:
            if blocks:
                self.device.synchronize()
                fingerprint = self.device.fingerprint(blocks)
        except DeviceMemoryError:
            logger.warning("no memory for the fingerprint of %d unfilled parameters", len(self._unfilled))
        self._whole = KeptWeights(self._unfilled, blocks, fingerprint)
        self._whole_is_old = self._unfilled_changed = False

    def _unfilled_memory(self) -> Mapping[str, Block]:
        """The memory of the unfilled parameters, before a sleep discards the weights."""
        if not self.learn_unfilled() and self._whole_is_old:
            self._note_whole()
        return self.memory_of(self._unfilled or ())

    def _unfilled_blocks(self) -> list[Block]:
        return intersect(self.allocator.blocks(Tag.WEIGHTS), self.memory_of(self._unfilled or ()).values())

    def _has_changed(self, kept: KeptWeights, now: list[Block] | None = None) -> bool | None:
        """Whether the bytes have changed; `None` if that cannot be told. The parameters may have other memory `now`."""
        blocks = kept.blocks if now is None else now
        if not kept.blocks and not blocks:
            return False
        if subtract(blocks, self.allocator.blocks(Tag.WEIGHTS)):  # freed since
            return True
        if kept.fingerprint is None or not blocks:
            return None
        self.device.synchronize()
        try:
            return self.device.fingerprint(blocks) != kept.fingerprint
        except DeviceMemoryError:
            return None

    def _keep(self, prepared: PreparedSleep) -> list[Block]:
        """The memory of the parameters that a discarding sleep of the weights keeps."""
        if prepared.keep and self.content is not Content.VALID:
            still = self.kept
            prepared.keep = {name: block for name, block in prepared.keep.items() if name in still}
        return merge(prepared.keep.values())

    def _share_weights(self, blocks: list[Block], parameters: Iterable[Block]) -> Backup | None:
        """A shared copy of the resident weights, complete and clean; `None` if they need a copy of their own."""
        if self.arena.shared is None:
            return None
        backup = share(self.arena, self.device, blocks, sources(self.allocator, Tag.WEIGHTS, parameters), self.epoch)
        if backup is not None:
            self._backups[Tag.WEIGHTS] = backup
        return backup

    def _end_outdated_share(self) -> None:
        """Let other processes write to the shared copy if the resident weights no longer have its bytes."""
        backup = self._backups.get(Tag.WEIGHTS)
        if backup is not None and backup.is_shared and self.is_resident(Tag.WEIGHTS) and not self._in_transition():
            self._backups.pop(Tag.WEIGHTS).free()

    def _lose_weights(self) -> None:
        """Called when a wake has found that another program wrote to the shared copy."""
        self._backups.pop(Tag.WEIGHTS).free()
        self.content, self._lost = Content.FAILED, True
        self.epoch += 1

    def _require_own_bytes(self) -> None:
        """Called at the end of a wake.

        Raises:
            EngineFaultError: see `_lose_weights`.
        """
        lost, self._lost = self._lost, False
        if lost and self.content is Content.FAILED:
            raise EngineFaultError(
                "the host copy of the weights, which processes share, has been overwritten: send all weights again",
                tag="weights",
            )

    def _prepare_host_memory(self) -> None:
        """Obtain host memory for copies in the background, if that takes long."""
        weights = self.allocator.blocks(Tag.WEIGHTS)
        if self.arena.shared is not None:
            parameters = sources(self.allocator, Tag.WEIGHTS, self._discardable(Tag.WEIGHTS))
            prepare_share(self.arena, self.device, parameters)
            weights = subtract(weights, parameters)
        graphs = self.allocator.blocks(Tag.CUDA_GRAPH)
        self.arena.prepare([sum(block.nbytes for block in blocks) for blocks in (weights, graphs)])

    def require_writable(self) -> None:
        """Check that an update may write: the weights are resident, and no prepared transition relies on their content.

        Raises:
            StateConflictError: the weights are asleep, or a transition is prepared.
        """
        self._require_no_transition()
        if self._states[Tag.WEIGHTS] is not TagState.RESIDENT:
            raise StateConflictError(
                "the weights are asleep: wake_up(tags=['weights']) first", rank=self.rank, tag="weights"
            )

    def _in_transition(self) -> bool:
        return self._prepared_sleep is not None or self._prepared_wake is not None

    def _require_no_transition(self) -> None:
        if self._acts_in == os.getpid():
            raise StateConflictError("another transition runs on this rank, and has not ended", rank=self.rank)
        if self._in_transition():
            raise StateConflictError("another transition is already prepared on this rank", rank=self.rank)

    def withhold(self) -> None:
        """Make the first weights `stale` before they answer anything. They keep their bytes."""
        self.content, self._withheld = Content.STALE, self.epoch

    def begin_writing(self, draft: DraftShare = DraftShare.NONE) -> None:
        """Called before an update writes its first byte. The content is `updating` until `finish_writing`.

        Args:
            draft: How much of the draft model the update writes.

        Raises:
            StateConflictError: see `require_writable`.
        """
        self.require_writable()
        if self._whole_is_old:
            self._note_whole()
        self._begin_writing(draft)

    def _begin_writing(self, draft: DraftShare) -> None:
        self._cancel_eager_backup()
        self._end_outdated_share()
        self.content = Content.UPDATING
        self.draft.begin(draft)

    def finish_writing(self, complete: bool) -> None:
        """Called when the update is over on every rank. Does nothing if no byte was written.

        Args:
            complete: Every parameter was written. The content becomes `valid`, else `failed`.
        """
        if self.content is Content.UPDATING:
            self.content = Content.VALID if complete else Content.FAILED
            self.epoch += 1
            self.draft.finish(complete)
            if complete:
                self._kept = None
            self._note_whole()
            self._start_eager_backup()

    def mark_failed(self) -> None:
        """Mark the content `failed`, i.e. undefined until every byte has been written. Something may have written.

        Raises:
            StateConflictError: see `begin_writing`.
        """
        self.require_writable()
        self._begin_writing(DraftShare.NONE)
        self.finish_writing(complete=False)

    def give_up_content(self) -> None:
        """Called before something overwrites the weights with values of no use. The content becomes `failed`.

        Raises:
            StateConflictError: see `begin_writing`.
        """
        self.require_writable()
        self.learn_unfilled()
        self.begin_writing()
        self.finish_writing(complete=False)

    def note_foreign_load(self, complete: bool) -> None:
        """Called after code outside this package has written to the weights.

        Args:
            complete: Every parameter has been written.
        """
        self.epoch += 1
        self.draft.note_target()
        self._cancel_eager_backup()
        self._end_outdated_share()
        if complete:
            self.content = Content.VALID
            self._kept = None
            self._note_whole()
            self._start_eager_backup()
        elif self.content is Content.VALID:  # loads of one tensor each are too many to look at the bytes after each
            self._whole_is_old = self._whole is not None

    # -- copying in advance -----------------------------------------------------------------------------------

    def _start_eager_backup(self) -> None:
        """Start to copy the weights, if they are valid and resident, have no copy, and no transition is prepared."""
        if not self._eager_backup or self.content is not Content.VALID:
            return
        if self._in_transition() or self._states[Tag.WEIGHTS] is not TagState.RESIDENT:
            return
        self._collect_eager_backup()
        existing = self._backups.get(Tag.WEIGHTS)
        if existing is not None:
            if existing.identified and existing.epoch == self.epoch:
                return
            self._backups.pop(Tag.WEIGHTS).free()  # out of date: the new copy reuses its memory
        discardable = list(self._discardable(Tag.WEIGHTS))
        try:
            self._eager = EagerBackup(self.allocator, self.arena, discardable, self.epoch, self._eager)
        except RuntimeError:  # the thread cannot start
            logger.exception("the weights are not copied in advance; the next sleep copies them")

    def _cancel_eager_backup(self) -> None:
        if self._eager is not None:
            self._eager.cancel()

    def _collect_eager_backup(self) -> None:
        """Add a finished copy to the backups. Does not wait."""
        if self._eager is not None and not self._eager.is_alive():
            self._end_eager_backup(wanted=True)

    def _end_eager_backup(self, wanted: bool) -> None:
        """Wait until no thread reads the weights. Without `wanted`, cancel the copy first."""
        if self._eager is None:
            return
        if not wanted:
            self._eager.cancel()
        backup, self._eager = self._eager.finish(), None
        if backup is not None:
            self._backups[Tag.WEIGHTS] = backup
