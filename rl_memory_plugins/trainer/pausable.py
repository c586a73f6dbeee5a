"""Memory of a trainer that sleeps as an engine's does: by tag, in two phases, and at the same addresses.

    memory = PausableMemory(model, optimizer)
    memory.sleep()  # the tensors' device memory is free; their content is in host memory
    memory.wake()  # every tensor has its former address and content

The allocators and the state machine are those of the engines (`memory/`). A sleep unmaps the tensors' memory and a wake
maps it again, so nothing goes through torch's cache, and CUDA graphs and flat buffers stay valid, except a graph's
gradients that were not made in `region("gradients")`. NCCL registrations do not stay valid. A sleeping tensor must not
be used: on a GPU its memory does not exist, and on a CPU it reads as zeros.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

from rl_memory_plugins.errors import DeviceMemoryError, InvalidRequestError, StateConflictError
from rl_memory_plugins.memory.ranges import subtract
from rl_memory_plugins.memory.threads import Beside
from rl_memory_plugins.memory.transitions import TRIM_THRESHOLD_BYTES
from rl_memory_plugins.records import Report, TagChange, TagStatus
from rl_memory_plugins.tags import Level
from rl_memory_plugins.timing import timed
from rl_memory_plugins.trainer.closed_memories import note_closed
from rl_memory_plugins.trainer.pausable_part import PausablePart
from rl_memory_plugins.trainer.pausable_tensors import PausableTensors, Pending
from rl_memory_plugins.trainer.sleepers import await_leaving, sleepers
from rl_memory_plugins.trainer.targets import GRADIENTS, Targets, names_of

logger = logging.getLogger(__name__)


class PausableMemory(PausableTensors):
    """The memory of a trainer's tensors on one device. It sleeps and wakes by tag.

    A tensor belongs to the tag of the `region` that it was made in, or to a tag that has adopted it. A module's
    parameters and buffers are adopted by the tag `parameters`, its gradients by `gradients`, and the state of an
    optimiser by `optimizer`. On a GPU, adoption moves a tensor once: its address changes, and tensor objects, views and
    references stay. Adopt before CUDA graphs hold addresses. A tensor belongs to one memory; no `Offloader` moves it.

    Every sleep reads the targets again and adopts new tensors. The state that the first step of an optimiser makes is
    adopted at the end of that step.

    Args:
        *targets: Modules (plain, FSDP1, FSDP2) and optimisers to adopt; see `adopt`.
        dropped: Tags whose content no sleep copies. Their tensors read as zeros after the wake. If `gradients` is among
            them, a sleep sets a module's gradients to `None`, except those that were made in the region `gradients`
            or adopted as a list, such as Megatron's flat buffers: these keep their address and read as zeros.
        frozen: Tags that training does not change, e.g. of a reference policy. A sleep copies them again only if their
            bytes have changed. The same holds for all parameters of modules that need no gradient.
        device: The device of the tensors. Default: the current GPU, or the CPU without one.
        process_groups: Process groups of `torch.distributed`, the first with all ranks of the others. The memory of
            their NCCL communicators leaves while all tags of all ranks sleep. The ranks of the first group then make
            this object, sleep and wake together: all of them do, or none does. Groups without NCCL (Gloo) hold no
            device memory.
        **options: The fields of `PauseOptions`.

    Raises:
        UnsupportedError: no allocator works on this device, or a tensor cannot be adopted; use `Offloader`. Or torch or
            NCCL is too old for `process_groups`.
        InvalidRequestError: see `adopt`; or `process_groups` without `torch.distributed`, or in another order; or an
            option has a value that it cannot have.
        DeviceMemoryError: too little device memory to move the tensors.
    """

    # -- sleep and wake ---------------------------------------------------------------------------------------

    def sleep(self, tags: Collection[str] | None = None) -> Report:
        """Copy these tags to host memory, except dropped ones, and free their device memory. Default: all tags.

        A tag that sleeps already stays as it is. Returns: the bytes by tag, and the seconds by step.

        Raises:
            HostMemoryError: too little host memory; nothing sleeps that was awake.
            InvalidRequestError: an unknown tag; the error lists the known ones.
            UnsupportedError, DeviceMemoryError, WeightUpdateError: as for `adopt`, of a new tensor; nothing sleeps that
                was awake.
            StateConflictError: a region of such a tag is open, a new tensor belongs to another `PausableMemory`, or a
                sleep or wake is prepared; nothing sleeps that was awake.
        """
        with self._lock, self._aborting():
            self._groups.prepare("sleep", lambda: self.prepare_sleep(tags), self.abort)
            return self._commit(written=False)

    def wake(self, tags: Collection[str] | None = None, *, wait: bool = True) -> Report:
        """Give these tags device memory at their former addresses, with their content. Default: all tags.

        A tag that is awake already stays as it is. Returns: the bytes by tag, and the seconds by step.

        Args:
            wait: If `False`, the content of the tags that `waits_before_use` is still on its way when this returns.

        Raises:
            DeviceMemoryError: too little device memory; all tags that slept still sleep, with their content.
            InvalidRequestError: an unknown tag; the error lists the known ones.
        """
        with self._lock, self._aborting():
            self._groups.prepare("wake", lambda: self.prepare_wake(tags), self.abort)
            return self.commit(later=() if wait else self._chosen(tags))

    def prepare_sleep(self, tags: Collection[str] | None = None) -> None:
        """The first phase of `sleep`, for several processes that agree: obtain host memory, and free nothing yet.

        Afterwards call `commit` or `abort`. Raises as `sleep` does, and needs neither then.
        """
        with self._lock:
            requested = self._begin(tags)
            chosen = [tag for tag in requested if self._manager.is_resident(tag)]
            opened = [tag for tag in chosen if self._regions.get(tag)]
            if opened:
                raise StateConflictError(f"regions of {', '.join(opened)} are open: leave them first", tags=opened)
            self._first_steps.forget_done()
            seconds: dict[str, float] = {}
            if chosen:
                with timed(seconds, "adopt"):
                    self._adopt_new()
                self._manager.prepare_sleep(Level.PRESERVE, chosen)
            drops = GRADIENTS in self._dropped.intersection(requested)
            manager = self._manager
            self._pending = Pending(
                manager.commit_sleep, manager.abort_sleep, requested, chosen, seconds, sleeps=True, drops=drops
            )

    def prepare_wake(self, tags: Collection[str] | None = None) -> None:
        """The first phase of `wake`, for several processes that agree: obtain device memory, and map nothing yet.

        Afterwards call `commit` or `abort`. Raises as `wake` does, and needs neither then.
        """
        with self._lock:
            requested = self._begin(tags)
            chosen = [tag for tag in requested if not self._manager.is_resident(tag)]
            if chosen:
                self._reserve(chosen)
            try:
                self._groups.require_memory()
            except BaseException:
                self._manager.abort_wake()
                raise
            self._pending = Pending(self._commit_wake, self._manager.abort_wake, requested, chosen, {})

    def drop_gradients(self) -> None:
        """Set the gradients to `None` that the prepared sleep drops, as `begin` and `commit` do.

        Their memory goes to torch's cache. Empty it before `begin`: later, that would wait for the copies.
        """
        with self._lock:
            if self._pending is not None and self._pending.drops:
                self._targets.drop_gradients(self.owned())
                self._pending = replace(self._pending, drops=False)

    def synchronize(self) -> None:
        """Wait for all work on the device, as `commit` without `tags` does."""
        with self._lock:
            self._manager.device.synchronize()

    def begin(self) -> None:
        """Start the copies of the prepared sleep, tag by tag as `prepare_sleep` has named them.

        They start behind the work of the current stream, and run on while this process does other work. `commit` waits
        for them and frees the device memory; `abort` waits for them and leaves all awake. Nothing may write to the tags
        meanwhile.

        Raises:
            RLMemoryError: a copy could not start; nothing is prepared any more, and all stays awake.
            StateConflictError: no sleep is prepared, or a tag has got memory since the preparation.
        """
        with self._lock:
            if self._pending is None:
                raise StateConflictError("no sleep is prepared")
            try:
                if self._pending.drops:
                    self.drop_gradients()
                    self._manager.device.trim(TRIM_THRESHOLD_BYTES)
                if self._pending.changing:
                    self._manager.recheck_copies(synchronize=False)  # it would wait for copies of other memories
                    self._manager.begin_sleep()
            except BaseException:
                self.abort()
                raise

    def commit(self, later: Collection[str] = (), *, tags: Collection[str] | None = None) -> Report:
        """The second phase of the prepared sleep or wake.

        Args:
            later: Tags of a wake; the content of those that `waits_before_use` is still on its way when this returns.
            tags: Tags of a sleep that has begun, which leave now. This waits for their copies and for nothing else on
                the device, so nothing may have used them since `begin`. The others stay prepared, their copies run on,
                and another `commit` or `abort` follows. Default: all.

        Raises:
            StateConflictError: nothing is prepared, or a tag has got memory since the preparation; nothing changes.
        """
        with self._lock:
            return self._commit(written=True, later=[tag for tag in later if self.waits_before_use(tag)], tags=tags)

    def commit_behind(self, then: Callable[[], object] = lambda: None) -> dict[str, int]:
        """`commit` of the prepared sleep, by a thread: this returns at once, and the tags leave behind it.

        The thread waits for all work on the device, frees the device memory, and calls `then`, which must not use a
        `PausableMemory`. Every other call of this memory waits for the thread first, except `part`, `status`,
        `device_memory`, `synchronize`, `abort` and `waits_before_use`; so do the optimisers of `torch.optim` whose
        states are here.
        Nothing else may use the tags from now on: a write to a tensor that is leaving is lost without an error. Capture
        no CUDA graph in this process before `wait`: it would fail. CUDA can also refuse the thread's calls meanwhile;
        then the tags stay, and the next call that waits raises that. A memory with process groups, whose ranks sleep
        together, has committed when this returns, and so has one in a process that can start no thread.

        Returns: by tag, the bytes that leave.

        Raises:
            StateConflictError: no sleep is prepared.
            RLMemoryError: from the next call that waits, once: a copy or a release failed. The tags that had not left
                before are awake with their content; `details["changed"]` names those that had. Or `then` failed, which
                the message says: all tags sleep.
        """
        with self._lock:
            if self._pending is None or not self._pending.sleeps:
                raise StateConflictError("no sleep is prepared")
            self.drop_gradients()  # here: the caller may look at them
            pending, blocks = self._pending, self._allocator.blocks
            leave = [tag for tag in pending.tags if tag in pending.changing]
            sizes = {tag: sum(block.nbytes for block in blocks(tag)) for tag in leave}
            if self._groups.own:
                self._commit(written=True)
                then()
                return sizes

            def run() -> None:
                failed = "a trainer's memory did not leave; its next call raises this too"
                try:
                    self._leave(pending, None, written=True)
                    self._has_left = True
                    failed = "a trainer's memory has left, but what follows failed; its next call raises this too"
                    then()
                except BaseException:
                    logger.warning(failed, exc_info=True)
                    raise

            # Not a daemon: the interpreter waits for it at exit, so it makes no CUDA call while torch shuts down.
            leaves = Beside(run, "rl-memory-leaving", daemon=False)
            self._has_left = False
            self._leaves, self._pending = leaves, None  # before the start, which an interrupt may end
            leaves.start()
            return sizes

    def _commit(self, *, written: bool, later: Collection[str] = (), tags: Collection[str] | None = None) -> Report:
        """Commit. `written`: tensors may have been written since the preparation."""
        pending, self._pending = self._pending, None
        if pending is None:
            raise StateConflictError("no sleep or wake is prepared")
        if not pending.sleeps:
            return self._groups.wake(lambda: self._act(pending, pending.tags, later), pending.abort)
        return self._groups.sleep(lambda: self._leave(pending, tags, written), self._all_asleep)

    def _leave(self, pending: Pending, tags: Collection[str] | None, written: bool) -> Report:
        """Commit the sleep of these tags, or of all. The others stay prepared."""
        try:
            if pending.drops:
                self._targets.drop_gradients(self.owned())
            if written:
                self._manager.recheck_copies(tags)
        except BaseException:
            pending.abort()
            raise
        report = self._act(pending, pending.tags if tags is None else tags, tags)
        rest = [tag for tag in pending.tags if tags is not None and tag not in tags]
        if rest:
            self._pending = replace(pending, tags=rest, seconds={}, drops=False)
        return report

    def _act(self, pending: Pending, tags: Collection[str], argument: Collection[str] | None) -> Report:
        """Commit with this argument, if that changes one of these tags."""
        if not set(tags).intersection(pending.changing):
            return Report([], {})
        try:
            changes = pending.commit(argument)
        finally:
            self._keep_while_asleep()
        return Report(changes, {**pending.seconds, **self._manager.seconds()})

    def _all_asleep(self) -> bool:
        return not any(self._allocator.blocks(tag) for tag in self._manager.tags if self._manager.is_resident(tag))

    def abort(self) -> None:
        """Undo `prepare_sleep` or `prepare_wake`. Does nothing if nothing is prepared: not to what leaves behind."""
        with self._lock:
            pending, self._pending = self._pending, None
            if pending is not None:
                pending.abort()
            elif self._leaves is None:
                self._undo_interrupted()

    @contextmanager
    def _aborting(self) -> Iterator[None]:
        """Let the body leave nothing prepared, also if an interrupt comes between its two phases."""
        before = self._pending
        try:
            yield
        except BaseException:
            if before is None:
                self.abort()
            raise

    def _begin(self, tags: Collection[str] | None) -> list[str]:
        self._require_nothing_prepared()
        return self._chosen(tags)

    def _commit_wake(self, later: Collection[str] | None) -> list[TagChange]:
        changes = self._manager.commit_wake(later or ())
        for tag in self._dropped.intersection(change.tag for change in changes):
            beside = subtract(self._allocator.extents(tag), self._allocator.blocks(tag))
            if beside:
                self._manager.device.fill(beside, 0)
        return changes

    def _reserve(self, tags: list[str]) -> None:
        try:
            self._manager.prepare_wake(tags)
        except DeviceMemoryError:
            await_leaving()
            self._manager.device.trim()
            try:
                self._manager.prepare_wake(tags)
            except DeviceMemoryError as error:
                message = f"{error.message}. {', '.join(tags)} still sleep; free device memory and call wake again"
                raise DeviceMemoryError(message, **{**error.details, "tags": tags}) from None

    def _chosen(self, tags: Collection[str] | None) -> list[str]:
        known = self._manager.tags
        if tags is None:
            return known
        names = names_of(tags)
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise InvalidRequestError(
                f"tags {unknown} are unknown: use some of {', '.join(known)}", field="tags", got=names, allowed=known
            )
        return list(dict.fromkeys(names))

    @property
    def drops_gradients(self) -> bool:
        """Whether it has modules, whose gradients a sleep of the tag `gradients` drops."""
        return GRADIENTS in self._dropped and self._targets.has_modules

    def part(self, *tags: str) -> PausablePart:
        """These tags as a part of a `RolloutHandoff`."""
        return PausablePart(self, self._chosen(tags))

    def device_memory(self) -> tuple[str, int]:
        """The name of the device, as engines name it too, and its free bytes now."""
        device = self._manager.device
        return device.name, device.memory_info()[0]

    def status(self) -> dict[str, TagStatus]:
        """By tag: its state, its bytes, and the bytes of its copy in host memory."""
        return self._manager.status().tags

    def left(self) -> dict[str, int]:
        """The bytes that this process leaves on its GPU while tags sleep, by cause: `context`, `nccl`, `workspace`,
        `graphs` and `other`. Empty while everything is awake, and where the device is no GPU. torch's cache does not
        count; see `aggressive_empty_cache`. The first call after a sleep takes milliseconds.

        Raises:
            RLMemoryError: as for `wait`.
        """
        with self._lock:
            self.wait()
            return dict(self._manager.account().left)

    # -- host memory ------------------------------------------------------------------------------------------

    def free_host_memory(self) -> None:
        """Free all host memory that no sleeping tag needs. Later sleeps obtain it again, and take longer."""
        with self._lock:
            self.wait()
            self._manager.free_host_memory()

    def close(self) -> None:
        """Wake all tags, and free the host memory and all device memory without a tensor.

        Tensors stay as they are, and other memories and Offloaders may take them. The device memory of those that end
        later is freed when another memory adopts tensors or sleeps, or an Offloader offloads. This memory takes no more
        calls. Capture no CUDA graph meanwhile, and leave all regions first. While tags sleep, all ranks of the process
        groups close together, because they wake together. While everything is awake, a rank closes by itself.

        Raises:
            DeviceMemoryError: as for `wake`.
            RLMemoryError: as for `wait`; the memory is not closed.
            StateConflictError: a transition is prepared; the memory is not closed.
        """
        with self._lock:
            if self._closed:
                return
            self.wait()
            if self._content.exists() or self._groups.sleeps():
                self.wake()
            self.free_host_memory()
            for tag in self._manager.tags:
                self._allocator.free_unused(tag)
            self._groups.close()  # from here on nothing fails: a memory that stays open keeps its groups
            self._hooks.remove()
            self._targets = Targets(gradients=False)  # it keeps none of them from now on
            self._closed = True
            note_closed(self._allocator, self._manager.tags)
            sleepers.discard(self)
