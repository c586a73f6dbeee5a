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

import threading
import types
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rl_memory_plugins.errors import DeviceMemoryError, InvalidRequestError, StateConflictError
from rl_memory_plugins.memory.adoption import bytes_of
from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.backup import PagedArena
from rl_memory_plugins.memory.fingerprint import memory_view
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.memory.preparation import PrepareMode
from rl_memory_plugins.memory.ranges import merge, subtract
from rl_memory_plugins.memory.select import choose_allocator
from rl_memory_plugins.records import Report, TagChange, TagStatus
from rl_memory_plugins.tags import Level
from rl_memory_plugins.timing import timed
from rl_memory_plugins.trainer.first_step import FirstSteps
from rl_memory_plugins.trainer.gpu import with_index
from rl_memory_plugins.trainer.offloading import HOST_MARGIN_BYTES, Target, owned_elsewhere, sleepers
from rl_memory_plugins.trainer.pausable_part import PausablePart
from rl_memory_plugins.trainer.state_size import expected_state_bytes
from rl_memory_plugins.trainer.targets import GRADIENTS, OPTIMIZER, PARAMETERS, Targets, default_tag
from rl_memory_plugins.weights.cuda_ipc import release_mapped


@dataclass(frozen=True)
class PauseOptions:
    """The options of a `PausableMemory`. `RLMemoryConfig` documents them."""

    allocator: Literal["auto", "vmm", "tms", "host"] = "auto"
    tms_hook_mode: Literal["auto", "torch", "preload"] = "auto"
    prepare_host_memory: PrepareMode = "auto"
    host_arena_max_bytes: int = 0
    host_memory_margin_bytes: int = HOST_MARGIN_BYTES
    device_memory_margin_bytes: int = 64 << 20
    fault_dir: str | None = None


@dataclass(frozen=True)
class _Pending:
    """A prepared sleep or wake of tags."""

    commit: Callable[[], list[TagChange]]
    abort: Callable[[], None]
    tags: list[str]
    seconds: dict[str, float]  # by step, of the preparation
    drops: bool = False  # whether gradients of modules become `None`


class PausableMemory:
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
        **options: The fields of `PauseOptions`.

    Raises:
        UnsupportedError: no allocator works on this device, or a tensor cannot be adopted; use `Offloader`.
        InvalidRequestError: see `adopt`.
        DeviceMemoryError: too little device memory to move the tensors.
    """

    def __init__(
        self,
        *targets: Target,
        dropped: Collection[str] = (GRADIENTS,),
        frozen: Collection[str] = (),
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        self.device = with_index(device)
        self._dropped, self._frozen = frozenset(dropped), frozenset(frozen)
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if distributed else 0
        self._allocator, arena = choose_allocator(PauseOptions(**options), self.device, rank)
        self._manager = MemoryManager(
            rank,
            self._allocator,
            arena,
            self._unchanging,
            tags=(GRADIENTS, PARAMETERS, OPTIMIZER),
            preserves=lambda level, tag: tag not in self._dropped,
            zero_on_wake=self._dropped,
        )
        for tag in (*dropped, *frozen):
            self._manager.add_tag(tag)
        self._targets = Targets(gradients=GRADIENTS not in self._dropped)
        self._first_steps = FirstSteps(weakref.WeakMethod(self._adopt_state))
        self._prepared: set[str] = set()  # tags for whose copies host memory has been asked for
        self._regions: Counter[str] = Counter()  # the open regions by tag
        self._pending: _Pending | None = None
        self._lock = threading.RLock()
        self._closed = False
        weakref.finalize(self, _close_arena, arena).atexit = False
        sleepers.add(self)
        if targets:
            self.adopt(*targets)

    # -- which tensors ----------------------------------------------------------------------------------------

    @contextmanager
    def region(self, tag: str) -> Iterator[None]:
        """A context whose allocations, by operators of this thread on this device, belong to `tag`.

        autograd computes gradients of GPU tensors in threads of its own, which no region covers.

        Raises:
            StateConflictError: the tag is asleep, or a sleep or wake is prepared.
        """
        with self._lock:
            self._open(tag)
            self._regions[tag] += 1
        try:
            with self._allocator.region(tag):
                yield
        finally:
            with self._lock:
                self._regions[tag] -= 1

    def adopt(self, *targets: Target, tag: str | None = None) -> None:
        """Adopt the tensors of these targets, now and at each later sleep. Tensors that have a tag keep it.

        Args:
            *targets: As for `Offloader`. Pass as lists: tensors that only `param_groups` of an optimiser refer to (FP32
                master weights), and Megatron's gradient buffers.
            tag: The tag of the tensors; gradients of modules still belong to `gradients`. Needed for lists.

        Raises:
            InvalidRequestError: a target of another type, a list without a tag, or a tensor on another device.
            UnsupportedError: a tensor cannot be moved; use `Offloader` for it.
            DeviceMemoryError: too little device memory to move the tensors.
            WeightUpdateError: an engine keeps the tensors' memory open and does not answer.
            StateConflictError: the tag is asleep, a tensor belongs to another `PausableMemory`, or a sleep or wake is
                prepared.
        """
        Targets.check(targets, tag)
        with self._lock:
            for name in {tag} if tag is not None else {default_tag(target) for target in targets}:
                self._open(name)
            self._targets.add(targets, tag)
            try:
                self._adopt_new()
            except BaseException:
                self._targets.remove_last(len(targets))
                raise
            optimizers = [target for target in targets if isinstance(target, torch.optim.Optimizer)]
            self._prepare({tag or OPTIMIZER: sum(map(expected_state_bytes, optimizers))})
            self._first_steps.watch(optimizers)

    def _open(self, tag: str) -> None:
        if not tag or not isinstance(tag, str):
            raise InvalidRequestError("a tag is a string that is not empty", field="tag", got=str(tag))
        self._require_nothing_prepared()
        self._manager.add_tag(tag)
        if not self._manager.is_resident(tag):
            raise StateConflictError(f"the tag {tag} is asleep: wake([{tag!r}]) first", tag=tag)

    def _adopt_state(self) -> bool:
        """Adopt the state that a first step has made. Returns `False` if a later step must try again."""
        with self._lock:
            if self._closed:
                return True
            if self._pending is not None:
                return False
            self._adopt_new()
            return True

    def _adopt_new(self) -> None:
        """Adopt the tensors of the targets that have no tag, and obtain host memory for their copies in advance."""
        new = self._targets.without_tag(self.device, self.owned(), self._manager.is_resident, owned_elsewhere(self))
        if new:
            release_mapped()  # engines may hold the old memory open by CUDA IPC
        for tag, tensors in new.items():
            self._manager.add_tag(tag)
            self._allocator.adopt(tag, tensors)
        self._prepare()

    def owned(self) -> Callable[[Any], bool]:
        """See `offloading.Sleeper`."""
        extents = merge(block for tag in self._manager.tags for block in self._allocator.extents(tag))
        starts = [block.address for block in extents]

        def is_owned(storage: Any) -> bool:
            at = bisect_right(starts, storage.data_ptr()) - 1
            return at >= 0 and bool(storage.data_ptr() < extents[at].end)

        return is_owned

    def _unchanging(self, tag: str) -> Iterable[Block]:
        """The parts of a tag that need no copy, or no second copy."""
        if tag in self._dropped or tag in self._frozen:
            return self._allocator.blocks(tag)
        return self._targets.without_gradient()

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
        with self._lock:
            self.prepare_sleep(tags)
            return self._commit(written=False)

    def wake(self, tags: Collection[str] | None = None) -> Report:
        """Give these tags device memory at their former addresses, with their content. Default: all tags.

        A tag that is awake already stays as it is. Returns: the bytes by tag, and the seconds by step.

        Raises:
            DeviceMemoryError: too little device memory; all tags that slept still sleep, with their content.
            InvalidRequestError: an unknown tag; the error lists the known ones.
        """
        with self._lock:
            self.prepare_wake(tags)
            return self.commit()

    def prepare_sleep(self, tags: Collection[str] | None = None) -> None:
        """The first phase of `sleep`, for several processes that agree: obtain host memory, and free nothing yet.

        Afterwards call `commit` or `abort`. Raises as `sleep` does, and needs neither then.
        """
        with self._lock:
            requested = self._begin(tags)
            chosen = [tag for tag in requested if self._manager.is_resident(tag)]
            opened = [tag for tag in chosen if self._regions[tag]]
            if opened:
                raise StateConflictError(f"regions of {', '.join(opened)} are open: leave them first", tags=opened)
            self._first_steps.forget_done()
            seconds: dict[str, float] = {}
            if chosen:
                with timed(seconds, "adopt"):
                    self._adopt_new()
                self._manager.prepare_sleep(Level.PRESERVE, chosen)
            drops = GRADIENTS in self._dropped.intersection(requested)
            self._pending = _Pending(self._manager.commit_sleep, self._manager.abort_sleep, chosen, seconds, drops)

    def prepare_wake(self, tags: Collection[str] | None = None) -> None:
        """The first phase of `wake`, for several processes that agree: obtain device memory, and map nothing yet.

        Afterwards call `commit` or `abort`. Raises as `wake` does, and needs neither then.
        """
        with self._lock:
            chosen = [tag for tag in self._begin(tags) if not self._manager.is_resident(tag)]
            if chosen:
                self._reserve(chosen)
            self._pending = _Pending(self._commit_wake, self._manager.abort_wake, chosen, {})

    def commit(self) -> Report:
        """The second phase of the prepared sleep or wake.

        Raises:
            StateConflictError: nothing is prepared, or a tag has got memory since the preparation; nothing changes.
        """
        with self._lock:
            return self._commit(written=True)

    def _commit(self, *, written: bool) -> Report:
        """Commit. `written`: tensors may have been written since the preparation."""
        pending, self._pending = self._pending, None
        if pending is None:
            raise StateConflictError("no sleep or wake is prepared")
        try:
            if pending.drops:
                self._targets.drop_gradients(self.owned())
            if written:
                self._manager.recheck_copies()
        except BaseException:
            pending.abort()
            raise
        if not pending.tags:
            return Report([], {})
        try:
            changes = pending.commit()
        finally:
            self._keep_while_asleep()
        return Report(changes, {**pending.seconds, **self._manager.seconds()})

    def _keep_while_asleep(self) -> None:
        """Keep this memory alive while tensors sleep in it, and forget memories whose sleeping tensors are gone."""
        asleep.add(self)
        for memory in [memory for memory in list(asleep) if not memory._sleeping()]:
            asleep.discard(memory)

    def _sleeping(self) -> bool:
        return any(self._allocator.blocks(tag) for tag in self._manager.tags if not self._manager.is_resident(tag))

    def abort(self) -> None:
        """Undo `prepare_sleep` or `prepare_wake`. Does nothing if nothing is prepared."""
        with self._lock:
            pending, self._pending = self._pending, None
            if pending is not None:
                pending.abort()

    def _begin(self, tags: Collection[str] | None) -> list[str]:
        self._require_nothing_prepared()
        return self._chosen(tags)

    def _require_nothing_prepared(self) -> None:
        if self._closed:
            raise StateConflictError("this PausableMemory is closed")
        if self._pending is not None:
            raise StateConflictError("a sleep or wake is prepared: call commit or abort first")

    def _commit_wake(self) -> list[TagChange]:
        changes = self._manager.commit_wake()
        for tag in self._dropped.intersection(change.tag for change in changes):
            beside = subtract(self._allocator.extents(tag), self._allocator.blocks(tag))
            if beside:
                self._manager.device.fill(beside, 0)
        return changes

    def _reserve(self, tags: list[str]) -> None:
        try:
            self._manager.prepare_wake(tags)
        except DeviceMemoryError:
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
        names = [tags] if isinstance(tags, str) else list(tags)
        unknown = sorted(set(names) - set(known))
        if unknown or not names:
            raise InvalidRequestError(
                f"tags {unknown} are unknown: use some of {', '.join(known)}", field="tags", got=names, allowed=known
            )
        return [tag for tag in known if tag in names]

    def part(self, *tags: str) -> PausablePart:
        """These tags as a part of a `RolloutHandoff`."""
        return PausablePart(self, self._chosen(tags))

    def status(self) -> dict[str, TagStatus]:
        """By tag: its state, its bytes, and the bytes of its copy in host memory."""
        return self._manager.status().tags

    # -- host memory ------------------------------------------------------------------------------------------

    def _prepare(self, expected: Mapping[str, int] = types.MappingProxyType({})) -> None:
        """Obtain host memory for tags that had none. `expected`: bytes that a tag will have beside its present ones."""
        sizes = {tag: sum(b.nbytes for b in self._allocator.blocks(tag)) for tag in self._manager.tags}
        sizes |= {tag: sizes[tag] + nbytes for tag, nbytes in expected.items() if nbytes}
        new = {tag for tag, nbytes in sizes.items() if nbytes} - self._prepared - self._dropped
        if new:
            self._prepared |= new
            self._manager.arena.prepare([sizes[tag] for tag in new])

    def free_host_memory(self) -> None:
        """Free all host memory that no sleeping tag needs. Later sleeps obtain it again, and take longer."""
        with self._lock:
            self._manager.free_host_memory()

    def close(self) -> None:
        """Wake all tags, and free the host memory and all device memory without a tensor.

        Tensors stay as they are, and other memories and Offloaders may take them. This memory takes no more calls.
        Capture no CUDA graph meanwhile, and leave all regions first.

        Raises:
            DeviceMemoryError: as for `wake`.
        """
        with self._lock:
            if self._closed:
                return
            self.wake()
            self.free_host_memory()
            for tag in self._manager.tags:
                self._allocator.free_unused(tag)
            self._closed = True
            sleepers.discard(self)

    def host_bytes(self, storage: Any) -> torch.Tensor | None:
        """See `offloading.Sleeper`."""
        if storage.device != self.device:
            return None
        whole = Block(storage.data_ptr(), storage.nbytes())
        copies = self._manager.host_copies(whole)
        if not copies:
            return None
        if copies[0][0] == whole:
            found: torch.Tensor = memory_view(copies[0][1], whole.nbytes)
            return found
        content = bytes_of(storage).clone()  # of a CPU: the first and last bytes of a storage are never released
        for part, address in copies:
            start = part.address - whole.address
            content[start : start + part.nbytes] = memory_view(address, part.nbytes)
        return content


asleep: set[PausableMemory] = set()
"""The memories with sleeping tensors. Without this reference, the end of a memory would lose their content."""


def _close_arena(arena: PagedArena) -> None:
    # The garbage collector may run in any thread, also in those that the arena waits for or that hold its lock.
    with suppress(RuntimeError):  # no thread starts while the interpreter ends
        threading.Thread(target=arena.close, name="rl-memory-close").start()
