"""The communicators of a trainer's process groups, whose memory leaves while all of the trainer's tensors sleep.

To suspend and to resume a communicator are collective calls, which wait for all of its ranks. A rank that fails alone
would leave the others waiting, so all ranks agree first: all sleep or wake, or none does.
"""

from __future__ import annotations

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


class SleepingGroups:
    """The process groups of a `PausableMemory`. All ranks of the first group create it together.

    Args:
        groups: The first has the ranks of all others. Groups without NCCL have no device memory to release.
        device: The device of this rank.

    Raises:
        InvalidRequestError: `torch.distributed` has not started, or a group has a rank that the first does not have.
        UnsupportedError: a group uses NCCL, and torch or NCCL is too old.
    """

    def __init__(self, groups: Sequence[Any], device: torch.device) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidRequestError("process_groups: call init_process_group first", field="process_groups")
        own = [group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER]
        if not own:
            raise InvalidRequestError("process_groups: this rank is in none of the groups", field="process_groups")
        ranks = [set(dist.get_process_group_ranks(group)) for group in own]
        beyond = sorted(set().union(*ranks) - ranks[0])
        if beyond:
            raise InvalidRequestError(
                f"process_groups: the first group must have all ranks of the others, and lacks {beyond}: "
                "put torch.distributed.group.WORLD first",
                field="process_groups",
                missing=beyond,
            )
        if any(map(nccl.has_nccl, own)) and nccl.why_not():
            raise UnsupportedError(
                f"process_groups: {nccl.why_not()}: install torch 2.13 and nvidia-nccl 2.29.7 or later, or leave "
                "process_groups out"
            )
        self._device = device
        self._peers = Peers(own[0])
        self._suspension = nccl.Suspension(lambda: nccl.of_groups(own))

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

    def sleep(self, commit: Callable[[], Report], is_asleep: Callable[[], bool]) -> Report:
        """Commit a prepared sleep on all ranks, and suspend the communicators if all memory of all ranks sleeps.

        Args:
            commit: Commits on this rank.
            is_asleep: Whether all memory of this rank sleeps now.

        Raises:
            RLMemoryError: a rank has failed; other ranks may sleep.
            EngineFaultError: NCCL has failed; the memory sleeps.
        """
        reports: list[Report] = []

        def run() -> bool:
            reports.append(commit())
            return is_asleep()

        all_asleep = all(self._agree("commit_sleep", run))
        return self._timed(reports[0], "suspend", self._suspension.suspend if all_asleep else None)

    def wake(self, commit: Callable[[], Report], abort: Callable[[], None]) -> Report:
        """Resume the communicators, and commit a prepared wake.

        Raises:
            EngineFaultError: NCCL has failed; all that slept still sleeps. A later wake tries again.
        """
        try:
            resumed = self._timed(Report([], {}), "resume", self._suspension.resume)
        except BaseException:
            abort()
            raise
        report = commit()
        return msgspec.structs.replace(report, seconds={**resumed.seconds, **report.seconds})

    def _agree(self, step: str, run: Callable[[], Any]) -> list[Any]:
        self._peers.step = step
        return self._peers.agree(run)

    def _timed(self, report: Report, step: str, call: Callable[[], None] | None) -> Report:
        """The report of a commit with the seconds of this step."""
        if call is None:
            return report
        seconds = dict(report.seconds)
        try:
            with timed(seconds, step), self._on_device():
                call()
        except Exception as error:
            raise EngineFaultError(f"{step} of the process groups: {error}", step=step) from error
        return msgspec.structs.replace(report, seconds=seconds)

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

    def prepare(self, step: str, prepare: Callable[[], None], abort: Callable[[], None]) -> None:
        prepare()

    def sleep(self, commit: Callable[[], Report], is_asleep: Callable[[], bool]) -> Report:
        return commit()

    def wake(self, commit: Callable[[], Report], abort: Callable[[], None]) -> Report:
        return commit()


def groups_of(groups: Sequence[Any], device: torch.device) -> SleepingGroups | NoGroups:
    """What a `PausableMemory` with these process groups uses."""
    return SleepingGroups(groups, device) if groups else NoGroups()
