"""The option `nccl_suspend`: a sleep also releases the memory of the engine's NCCL communicators.

The calls are collective, so they are phases of their own: a rank may suspend or resume only after every rank has
succeeded in the phase before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from rl_memory_plugins.commands import error_reply
from rl_memory_plugins.coordination import RankGroup
from rl_memory_plugins.errors import EngineFaultError, UnsupportedError
from rl_memory_plugins.memory import nccl
from rl_memory_plugins.memory.residual import moved
from rl_memory_plugins.records import Reply


class SuspendingRanks:
    """The ranks of an engine that suspends its communicators.

    They suspend after all ranks have released the memory of a sleep. They resume after all ranks have reserved the
    memory of a wake and have found memory for their communicators, and before any rank maps the memory. A wake that
    fails to resume on all ranks leaves the tags asleep, and the next wake tries again. If only some ranks fail, their
    communicators do not fit any more: another collective call would wait without end, so every wake is refused.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._broken: EngineFaultError | None = None

    def call(self, method: str, **arguments: Any) -> list[Reply[Any]]:
        replies = self._ranks.call(method, **arguments)
        if _failed(replies):
            return replies
        after: list[Reply[Any]] = []
        if method == "commit_sleep" and any(reply.result["changes"] for reply in replies):
            after = self._collective("suspend_communicators")
        elif method == "prepare_wake":
            after = self._resumed(replies)
        return after if _failed(after) else replies

    def _resumed(self, reserved: list[Reply[Any]]) -> list[Reply[Any]]:
        if self._broken is not None:
            return [error_reply(reply.rank, self._broken) for reply in reserved]
        checked = self._ranks.call("check_communicators")
        return checked if _failed(checked) else self._collective("resume_communicators")

    def _collective(self, method: str) -> list[Reply[Any]]:
        replies = self._ranks.call(method)
        states = {reply.result if reply.error is None else reply.error["details"].get("suspended") for reply in replies}
        if _failed(replies) and len(states) > 1:
            whys = [str(reply.error["message"]) for reply in replies if reply.error is not None]
            self._broken = EngineFaultError(f"{whys[0]}. Only some ranks have failed: start the engine again")
            return [error_reply(reply.rank, self._broken) for reply in replies]
        return replies


def _failed(replies: Sequence[Reply[Any]]) -> bool:
    return any(reply.error is not None for reply in replies)


def calls_of(find: Callable[[], Iterable[nccl.Communicator]]) -> dict[str, Callable[[], int | None]]:
    """The calls of a rank by name, for `RankAgent`. Those that suspend and resume return how many are suspended.

    Args:
        find: Gives the communicators of this rank, in an order that all ranks have in common.
    """
    communicators = nccl.Suspension()

    def suspend_communicators() -> int:
        try:
            with moved("nccl"):
                communicators.suspend(find())
        except Exception as error:
            message = f"the memory is released, but the communicators are not suspended: {error}"
            raise EngineFaultError(message, suspended=communicators.count()) from error
        return communicators.count()

    def check_communicators() -> None:
        if torch.cuda.is_initialized():
            communicators.require_memory(torch.device("cuda", torch.cuda.current_device()))

    def resume_communicators() -> int:
        try:
            with moved("nccl"):
                communicators.resume()
        except Exception as error:
            message = f"the communicators cannot be resumed, and nothing was mapped: {error}"
            raise EngineFaultError(message, suspended=communicators.count()) from error
        return communicators.count()

    return {call.__name__: call for call in (suspend_communicators, check_communicators, resume_communicators)}


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


def of_torch(parallel_state: Any) -> list[nccl.GroupCommunicator]:
    """torch's communicators of the engine's groups."""
    return nccl.of_groups(one.device_group for one in coordinators(parallel_state))


def require_suspend(parallel_state: Any) -> None:
    """Check that the communicators of this rank can be suspended.

    Raises:
        UnsupportedError: the engine's NCCL is too old.
    """
    own = [one for one in map(pynccl_of, coordinators(parallel_state)) if one is not None]
    for one in own:
        if not hasattr(one.nccl.lib, "ncclCommSuspend"):
            raise _too_old(f"the engine has loaded NCCL {one.nccl.ncclGetVersion()}")
    uses_nccl = any(nccl.has_nccl(one.device_group) for one in coordinators(parallel_state))
    if not own and uses_nccl and nccl.why_not():
        raise _too_old(nccl.why_not())


def _too_old(why: str) -> UnsupportedError:
    return UnsupportedError(
        f"nccl_suspend needs NCCL 2.29.7 or later, and {why}: install a later nvidia-nccl, or leave the option off",
        mode="nccl_suspend",
    )
