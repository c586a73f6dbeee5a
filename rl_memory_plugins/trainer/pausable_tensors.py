"""The tensors of a `PausableMemory`: which tag each belongs to, and whether its content is there."""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rl_memory_plugins.errors import InvalidRequestError, RLMemoryError, StateConflictError, as_rl_memory_error
from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.memory.select import choose_allocator
from rl_memory_plugins.memory.threads import Beside
from rl_memory_plugins.records import TagChange
from rl_memory_plugins.trainer.closed_memories import free_closed
from rl_memory_plugins.trainer.first_step import FirstSteps
from rl_memory_plugins.trainer.gpu import is_capturing, with_index
from rl_memory_plugins.trainer.held_tensors import Target, optimizers_in
from rl_memory_plugins.trainer.pause_options import pause_options
from rl_memory_plugins.trainer.process_groups import groups_of
from rl_memory_plugins.trainer.sleepers import owned_elsewhere, sleepers
from rl_memory_plugins.trainer.sleeping_content import SleepingContent, forget_ended, memory_ended, within
from rl_memory_plugins.trainer.state_hooks import StateHooks
from rl_memory_plugins.trainer.state_size import expected_state_bytes
from rl_memory_plugins.trainer.targets import GRADIENTS, OPTIMIZER, PARAMETERS, Targets, default_tag, names_of
from rl_memory_plugins.weights.open_allocations import release_mapped


@dataclass(frozen=True)
class Pending:
    """A prepared sleep or wake of tags."""

    commit: Callable[[Collection[str] | None], list[TagChange]]  # takes the tags to release, or whose content may wait
    abort: Callable[[], None]
    tags: list[str]  # that no commit has named yet
    changing: list[str]  # the tags that are to sleep or to wake, and do not yet
    seconds: dict[str, float]  # by step, of the preparation
    sleeps: bool = False
    drops: bool = False  # whether gradients of modules become `None`


class PausableTensors:
    """The part of `PausableMemory` that knows its tensors. `PausableMemory` documents the arguments."""

    def __init__(
        self,
        *targets: Target,
        dropped: Collection[str] = (GRADIENTS,),
        frozen: Collection[str] = (),
        device: torch.device | str | None = None,
        process_groups: Sequence[Any] = (),
        **options: Any,
    ) -> None:
        self.device = with_index(device)
        self._groups = groups_of(process_groups, self.device)
        dropped, frozen = names_of(dropped, "dropped"), names_of(frozen, "frozen")
        drops = self._dropped = frozenset(dropped)
        self._frozen = frozenset(frozen)
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if distributed else 0
        self._allocator, arena = choose_allocator(pause_options(options), self.device, rank)
        self._manager = MemoryManager(  # may outlive this memory, and must not keep it
            rank,
            self._allocator,
            arena,
            partial(_unchanging_of, weakref.WeakMethod(self._unchanging)),
            tags=(GRADIENTS, PARAMETERS, OPTIMIZER),
            preserves=lambda level, tag: tag not in drops,
            zero_on_wake=drops,
        )
        for tag in (*dropped, *frozen):
            self._manager.add_tag(tag)
        self._targets = Targets(gradients=GRADIENTS not in self._dropped)
        self._first_steps = FirstSteps(weakref.WeakMethod(self._adopt_state))
        self._hooks = StateHooks(weakref.WeakMethod(self._before_use))
        self._prepared: set[str] = set()  # tags for whose copies host memory has been asked for
        self._regions: dict[str, set[object]] = {}  # the open regions of each tag that has had one
        self._pending: Pending | None = None
        self._leaves: Beside[None] | None = None  # commits a sleep; whoever touches tensors or the manager waits for it
        self._has_left = False  # what `_leaves` has committed; it may still run what follows
        self._lock = threading.RLock()  # the thread of `_leaves` never takes it: callers hold it while they wait
        self._closed = False
        self._content = SleepingContent(self._manager, self._allocator, self.device)
        weakref.finalize(self, memory_ended, self._content).atexit = False
        forget_ended()
        sleepers.add(self)
        if targets:
            self.adopt(*targets)

    @contextmanager
    def region(self, tag: str) -> Iterator[None]:
        """A context whose allocations, by operators of this thread on this device, belong to `tag`.

        autograd computes gradients of GPU tensors in threads of its own, which no region covers.

        Raises:
            StateConflictError: the tag is asleep, or a sleep or wake is prepared.
        """
        region, regions = object(), set[object]()
        try:
            with self._lock:
                self._open(tag)
                regions = self._regions.setdefault(tag, regions)
                regions.add(region)
            with self._allocator.region(tag):
                yield
        finally:
            regions.discard(region)  # without the lock: an interrupt of a wait would leave the region open for ever

    def adopt(self, *targets: Target, tag: str | None = None) -> None:
        """Adopt the tensors of these targets, now and at each later sleep. Tensors that have a tag keep it.

        Args:
            *targets: As for `Offloader`. Pass as lists: tensors that only `param_groups` of an optimiser refer to (FP32
                master weights), and Megatron's gradient buffers.
            tag: The tag of the tensors; gradients of modules still belong to `gradients`. Needed for lists.

        Raises:
            InvalidRequestError: a target of another type, a list without a tag, or a tensor on another device.
            UnsupportedError: a tensor cannot be moved; use `Offloader` for it.
            DeviceMemoryError: too little device memory to move the tensors. They are as before; with
                `in_host_memory_bytes` in its details, some have their content in host memory, until an `adopt` or
                `Offloader(tensors).load()` succeeds.
            WeightUpdateError: an engine keeps the tensors' memory open and does not answer.
            StateConflictError: the tag is asleep, a tensor belongs to another `PausableMemory`, or a sleep or wake is
                prepared.
        """
        Targets.check(targets, tag)
        with self._lock:
            for name in [tag] if tag is not None else {default_tag(target) for target in targets}:
                self._open(name)
            self._targets.add(targets, tag)
            try:
                self._adopt_new()
            except BaseException:
                self._targets.remove_last(len(targets))
                raise
            optimizers = optimizers_in(*targets)
            expected = sum(expected_state_bytes(optimizer, self.device) for optimizer in optimizers)
            self._prepare({tag or OPTIMIZER: expected})
            self._first_steps.watch(optimizers)
            self._hooks.watch(optimizers)

    def _open(self, tag: str) -> None:
        if not tag or not isinstance(tag, str):
            raise InvalidRequestError("a tag is a string that is not empty", field="tag", got=str(tag))
        self._require_nothing_prepared()
        self._manager.add_tag(tag)
        if not self._manager.is_resident(tag):
            raise StateConflictError(f"the tag {tag} is asleep: wake([{tag!r}]) first", tag=tag)

    def _adopt_state(self, optimizer: torch.optim.Optimizer) -> bool:
        """Adopt the state that an optimiser's first step has made. Returns `False` if a later step must try again."""
        with self._lock:
            if self._closed:
                return True
            if self._pending is not None or self._leaves is not None:
                return False
            self._adopt_new(optimizer)
            return True

    def _adopt_new(self, only: torch.optim.Optimizer | None = None) -> None:
        """Adopt the tensors of the targets, or of one optimiser, that have no tag, and obtain host memory for their
        copies in advance."""
        new = self._targets.without_tag(
            self.device, self.owned(), self._manager.is_resident, owned_elsewhere(self), only
        )
        if new:
            release_mapped()  # engines may hold the old memory open by CUDA IPC
        for tag, tensors in new.items():
            self._manager.add_tag(tag)
            self._allocator.adopt(tag, tensors)
        free_closed()
        self._prepare()

    def owned(self) -> Callable[[int], bool]:
        """See `sleepers.Sleeper`."""
        return within(self._allocator, self._manager.tags)

    @property
    def may_sleep(self) -> bool:
        """See `sleepers.Sleeper`."""
        return self._leaves is not None or self._content.may_sleep

    def host_bytes(self, storage: Any) -> torch.Tensor | None:
        """See `sleepers.Sleeper`."""
        if storage.device != self.device:
            return None
        if self._leaves is not None or self._manager.unfinished:
            if not self.owned()(storage.data_ptr()):
                return None  # a tensor of others does not wait for this memory, and does not get its errors
            self.wait()
        return self._content.host_bytes(storage)

    def _unchanging(self, tag: str) -> Iterable[Block]:
        """The parts of a tag that need no copy, or no second copy."""
        if tag in self._dropped or tag in self._frozen:
            return self._allocator.blocks(tag)
        return self._targets.without_gradient()

    def _require_nothing_prepared(self) -> None:
        if self._closed:
            raise StateConflictError("this PausableMemory is closed")
        if self._pending is not None:
            raise StateConflictError("a sleep or wake is prepared: call commit or abort first")
        self.wait()
        self._undo_interrupted()

    def _undo_interrupted(self) -> None:
        """Undo a preparation that an interrupt has cut off from `_pending`. Nothing is prepared otherwise."""
        self._manager.abort_sleep()
        self._manager.abort_wake()

    def wait(self) -> None:
        """Wait for the content that a wake has left on its way, and for the tags that `commit_behind` lets leave.

        Does nothing if there is neither. Everything else that this memory does to tensors waits by itself.

        Raises:
            RLMemoryError: a copy failed. Of a wake, its tag, and those behind it, sleep again with their content in
                host memory. Of a sleep, they are awake with their content; a later call raises no error for it again,
                and other processes get none.
            StateConflictError: a CUDA graph is being captured; wait before the capture. Or this is the function that
                `commit_behind` calls.
        """
        if self._leaves is None and not self._manager.unfinished:
            return
        self._require_not_leaving()
        with self._lock:
            if is_capturing():
                raise StateConflictError(
                    "a CUDA graph is captured while a sleep or wake is unfinished: call wait() before"
                )
            self._end_leaving()
            if not self._manager.unfinished:
                return
            try:
                self._manager.finish_wake()
            except RLMemoryError as error:
                tags = ", ".join(error.details["changed"])
                message = f"{error.message}. {tags} sleep again with their content: call wake before the next step"
                raise type(error)(message, **error.details) from error
            finally:
                self._keep_while_asleep()

    def _require_not_leaving(self) -> None:
        """Refuse the thread of `commit_behind`: others hold the lock while they wait for it."""
        leaves = self._leaves
        if leaves is not None and leaves.is_here:
            raise StateConflictError("the function behind a sleep must not use the memory that sleeps")

    def await_leaving(self) -> None:
        """See `sleepers.Sleeper`."""
        leaves = self._leaves
        if leaves is not None:
            leaves.join()

    def _end_leaving(self) -> None:
        """Wait for the thread of `commit_behind`, if any, and raise its error."""
        if self._leaves is None:
            return
        failure = self._leaves.end()  # an interrupted wait leaves it as it is
        self._leaves = None
        if failure is not None:
            error = as_rl_memory_error(failure)
            told = "the sleep before: what it has not put to sleep is awake"
            if self._has_left:
                told = "what follows the sleep before: all that the sleep names is asleep"
            raise type(error)(f"{error.message}. It was an error of {told}", **error.details) from failure

    def waits_before_use(self, tag: str) -> bool:
        """Whether the users of a tag wait for its content by themselves.

        They do if the tag holds the states of optimisers of `torch.optim` and nothing else: `step`, `state_dict` and
        `load_state_dict` wait. They do not if a step was captured in a CUDA graph, if hooks of all optimisers are
        registered, or if a region of the tag was opened.
        """
        targets = self._targets.of(tag)
        mixed = tag == GRADIENTS or tag in self._regions or tag in self._dropped
        return bool(targets) and not mixed and self._hooks.cover(targets)

    def _before_use(self, optimizer: torch.optim.Optimizer, reads: bool) -> None:
        """Called before an optimiser uses its state.

        Raises:
            StateConflictError: it reads its state, which is asleep. Also as for `wait`.
        """
        self.wait()
        if not reads or not optimizer.state:
            return
        for tag in self._targets.tags_of(optimizer):
            if not self._manager.is_resident(tag) and self._allocator.blocks(tag):
                raise StateConflictError(f"the state of the optimiser is asleep: wake([{tag!r}]) first", tag=tag)

    @property
    def process_groups(self) -> Sequence[Any]:
        """The process groups of this rank that sleep with this memory."""
        return self._groups.own

    def _keep_while_asleep(self) -> None:
        """Let the optimisers keep this memory while it sleeps, so that their steps are refused or wait.

        Without an optimiser nobody keeps it: its tensors are read by `SleepingContent`.
        """
        self._hooks.keep(self if self._content.exists() else None)
        forget_ended()

    def _prepare(self, expected: Mapping[str, int] = types.MappingProxyType({})) -> None:
        """Obtain host memory for tags that had none. `expected`: bytes that a tag will have beside its present ones."""
        known = self._prepared | self._dropped
        unknown = [tag for tag in self._manager.tags if tag not in known]
        sizes = {tag: sum(b.nbytes for b in self._allocator.blocks(tag)) + expected.get(tag, 0) for tag in unknown}
        new = [tag for tag in unknown if sizes[tag]]
        if new:
            self._prepared.update(new)
            self._manager.arena.prepare([sizes[tag] for tag in new])


def _unchanging_of(method: weakref.WeakMethod[Callable[[str], Iterable[Block]]], tag: str) -> Iterable[Block]:
    found = method()
    return () if found is None else found(tag)
