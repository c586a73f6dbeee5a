"""The communicators of a trainer's process groups, whose memory leaves while all of the trainer's tensors sleep.

To suspend and to resume a communicator are collective calls, which wait for all of its ranks. A rank that fails alone
would leave the others waiting, so all ranks agree first: all sleep or wake, or none does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from rl_memory_plugins.errors import EngineFaultError, InvalidRequestError, UnsupportedError
from rl_memory_plugins.memory import nccl
from rl_memory_plugins.records import Report
from rl_memory_plugins.timing import timed
from rl_memory_plugins.trainer.peers import Peers

_suspension = nccl.Suspension()  # of this process: a group may belong to several memories
_users: weakref.WeakKeyDictionary[Any, weakref.WeakSet[SleepingGroups]] = weakref.WeakKeyDictionary()
"""By process group: the memories that sleep with it. It is suspended while all of them sleep."""


class SleepingGroups:
    """The process groups of a `PausableMemory`. All ranks of the first group create it together.

    Args:
        groups: The first has the ranks of all others. Groups without NCCL have no device memory to release.
        device: The device of this rank.

    Attributes:
        own: The groups that have this rank.

    Raises:
        InvalidRequestError: `torch.distributed` has not started, or a group has a rank that the first does not have.
        UnsupportedError: a group uses NCCL, and torch or NCCL is too old.
    """

    def __init__(self, groups: Sequence[Any], device: torch.device) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidRequestError("process_groups: call init_process_group first", field="process_groups")
        self._groups = [None if group is dist.GroupMember.NON_GROUP_MEMBER else group for group in groups]
        self.own: Sequence[Any] = [group for group in self._groups if group is not None]
        if not self.own:
            raise InvalidRequestError("process_groups: this rank is in none of the groups", field="process_groups")
        ranks = [set(dist.get_process_group_ranks(group)) for group in self.own]
        beyond = sorted(set().union(*ranks) - ranks[0])
        if beyond:
            raise InvalidRequestError(
                f"process_groups: the first group must have all ranks of the others, and lacks {beyond}: "
                "put torch.distributed.group.WORLD first",
                field="process_groups",
                missing=beyond,
            )
        if any(map(nccl.has_nccl, self.own)) and nccl.why_not():
            raise UnsupportedError(
                f"process_groups: {nccl.why_not()}: install torch 2.13 and nvidia-nccl 2.29.7 or later, or leave "
                "process_groups out"
            )
        self._device = device
        self._peers = Peers(self.own[0])
        self._asleep = False
        self._broken: str = ""
        for group in self.own:
            _users.setdefault(group, weakref.WeakSet()).add(self)

    def prepare(self, step: str, prepare: Callable[[], None], abort: Callable[[], None]) -> None:
        """Prepare on all ranks. If a rank fails, undo it on all ranks, and raise the rank's error."""
        prepared = False

        def run() -> None:
            nonlocal prepared
            prepare()
            prepared = True

        try:
            self._agree(step, run)
        except BaseException:
            if prepared:
                abort()
            raise

    def require_memory(self) -> None:
        """Check before a wake that `resume` will find device memory, beside what the wake has reserved.

        Raises:
            DeviceMemoryError: there is too little.
            EngineFaultError: an earlier call of NCCL has failed on some ranks only.
        """
        if self._broken:
            raise EngineFaultError(self._broken)
        _suspension.require_memory(self._device, self._communicators())

    def sleep(self, commit: Callable[[], Report], is_asleep: Callable[[], bool]) -> Report:
        """Commit a prepared sleep on all ranks. Suspend each communicator whose users sleep on all ranks.

        Args:
            commit: Commits on this rank.
            is_asleep: Whether all memory of this rank sleeps now.

        Raises:
            RLMemoryError: a rank has failed; other ranks may sleep.
            EngineFaultError: NCCL has failed; the memory sleeps.
        """
        reports: list[Report] = []

        def run() -> list[bool]:
            reports.append(commit())
            self._asleep = is_asleep()
            return [group is None or all(user._asleep for user in _users[group]) for group in self._groups]

        idle = [all(answers) for answers in zip(*self._agree("commit_sleep", run), strict=True)]
        chosen = [group for group, leaves in zip(self._groups, idle, strict=True) if leaves and group is not None]
        if not any(idle) or self._broken:
            return reports[0]
        seconds = self._collective("suspend", lambda: _suspension.suspend(nccl.of_groups(chosen)))
        return msgspec.structs.replace(reports[0], seconds={**reports[0].seconds, **seconds})

    def wake(self, commit: Callable[[], Report], abort: Callable[[], None]) -> Report:
        """Resume the communicators, and commit a prepared wake on all ranks.

        Raises:
            EngineFaultError: NCCL has failed; all that slept still sleeps.
            RLMemoryError: the commit of a rank has failed; other ranks may be awake.
        """
        try:
            seconds = self._collective("resume", lambda: _suspension.resume(self._communicators()))
        except BaseException:
            abort()
            raise
        self._asleep = False
        reports: list[Report] = []
        self._agree("commit_wake", lambda: reports.append(commit()))
        return msgspec.structs.replace(reports[0], seconds={**seconds, **reports[0].seconds})

    def sleeps(self) -> bool:
        """Whether a communicator of these groups is suspended."""
        return any(map(_suspension.is_suspended, self._communicators()))

    def close(self) -> None:
        """Let other memories with these groups decide alone."""
        for group in self.own:
            _users[group].discard(self)

    def _communicators(self) -> list[nccl.GroupCommunicator]:
        return [nccl.GroupCommunicator(group) for group in self.own]

    def _agree(self, step: str, run: Callable[[], Any]) -> list[Any]:
        self._peers.step = step
        return self._peers.agree(run)

    def _collective(self, step: str, call: Callable[[], None]) -> dict[str, float]:
        """Make a collective call of NCCL, and check that all ranks end alike. Returns its seconds by step.

        Raises:
            EngineFaultError: the call has failed on a rank.
        """
        seconds: dict[str, float] = {}
        why = ""
        try:
            with timed(seconds, step), self._on_device():
                call()
        except Exception as error:
            why = f"{step} of the process groups: {error}"
        answers = self._agree(step, lambda: (why, self._states()))
        whys = [found for found, _ in answers if found]
        if not whys:
            return seconds
        by_group = zip(*(states for _, states in answers), strict=True)
        if any(len({state for state in states if state is not None}) > 1 for states in by_group):
            # Another collective call would wait without end for the ranks that failed.
            self._broken = f"{whys[0]}. Only some ranks have failed: start the trainer's processes again"
        raise EngineFaultError(self._broken or whys[0], step=step)

    def _states(self) -> list[bool | None]:
        """Which groups are suspended; `None` for groups without this rank."""
        return [
            None if group is None else _suspension.is_suspended(nccl.GroupCommunicator(group)) for group in self._groups
        ]

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # a communicator must be idle
            with torch.cuda.device(self._device):
                yield
        else:
            yield


class NoGroups:
    """As `SleepingGroups`, of a rank that sleeps and wakes by itself."""

    own: Sequence[Any] = ()

    def prepare(self, step: str, prepare: Callable[[], None], abort: Callable[[], None]) -> None:
        prepare()

    def require_memory(self) -> None:
        pass

    def sleep(self, commit: Callable[[], Report], is_asleep: Callable[[], bool]) -> Report:
        return commit()

    def wake(self, commit: Callable[[], Report], abort: Callable[[], None]) -> Report:
        return commit()

    def sleeps(self) -> bool:
        return False

    def close(self) -> None:
        pass


def groups_of(groups: Sequence[Any], device: torch.device) -> SleepingGroups | NoGroups:
    """What a `PausableMemory` with these process groups uses."""
    return SleepingGroups(groups, device) if groups else NoGroups()
