"""The option `nccl_suspend`: a sleep also releases the memory of the engine's NCCL communicators.

The calls are collective, so they are phases of their own: a rank may suspend or resume only after every rank has
succeeded in the phase before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rl_memory_plugins.coordination import RankGroup
from rl_memory_plugins.errors import EngineFaultError, UnsupportedError
from rl_memory_plugins.memory import nccl
from rl_memory_plugins.memory.residual import moved
from rl_memory_plugins.records import Reply


class SuspendingRanks:
    """The ranks of an engine that suspends its communicators.

    They suspend after all ranks have released the memory of a sleep. They resume after all ranks have reserved the
    memory of a wake, and before any rank maps it. A wake that fails to resume leaves the tags asleep, and the next wake
    tries again.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    def call(self, method: str, **arguments: Any) -> list[Reply[Any]]:
        replies = self._ranks.call(method, **arguments)
        if any(reply.error is not None for reply in replies):
            return replies
        after: list[Reply[Any]] = []
        if method == "commit_sleep" and any(reply.result["changes"] for reply in replies):
            after = self._ranks.call("suspend_communicators")
        elif method == "prepare_wake":
            after = self._ranks.call("resume_communicators")
        return after if any(reply.error is not None for reply in after) else replies


def calls_of(suspend: Callable[[], None], resume: Callable[[], None]) -> dict[str, Callable[[], None]]:
    """The calls of a rank by name, for `RankAgent`.

    Args:
        suspend: Suspends all communicators of this rank.
        resume: Resumes them.
    """

    def suspend_communicators() -> None:
        try:
            with moved("nccl"):
                suspend()
        except Exception as error:
            raise EngineFaultError(
                f"the memory is released, but the communicators are not suspended: {error}"
            ) from error

    def resume_communicators() -> None:
        try:
            with moved("nccl"):
                resume()
        except Exception as error:
            raise EngineFaultError(f"the communicators cannot be resumed, and nothing was mapped: {error}") from error

    return {"suspend_communicators": suspend_communicators, "resume_communicators": resume_communicators}


def coordinators(parallel_state: Any) -> Iterator[Any]:
    """The engine's groups, from the module `parallel_state`, which both engines have. All ranks have the same order."""
    for reference in list(parallel_state._groups.values()):
        group = reference()
        if group is not None:
            yield group


def pynccl_of(coordinator: Any) -> Any:
    """The engine's own communicator of a group, `PyNcclCommunicator`; `None` if it has none."""
    holder = getattr(coordinator, "device_communicator", None) or coordinator
    communicator = getattr(holder, "pynccl_comm", None)
    return communicator if getattr(communicator, "available", False) else None


def device_groups(parallel_state: Any) -> list[Any]:
    """The process groups of torch by which the engine's ranks exchange tensors on their devices."""
    return [one.device_group for one in coordinators(parallel_state)]


def require_suspend(parallel_state: Any) -> None:
    """Check that the communicators of this rank can be suspended.

    Raises:
        UnsupportedError: the engine's NCCL is too old.
    """
    own = [one for one in map(pynccl_of, coordinators(parallel_state)) if one is not None]
    for one in own:
        if not hasattr(one.nccl.lib, "ncclCommSuspend"):
            raise _too_old(f"the engine has loaded NCCL {one.nccl.ncclGetVersion()}")
    if not own and any(map(nccl.has_nccl, device_groups(parallel_state))) and nccl.why_not():
        raise _too_old(nccl.why_not())


def _too_old(why: str) -> UnsupportedError:
    return UnsupportedError(
        f"nccl_suspend needs NCCL 2.29.7 or later, and {why}: install a later nvidia-nccl, or leave the option off",
        mode="nccl_suspend",
    )
