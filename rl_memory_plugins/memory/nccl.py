"""The memory of NCCL communicators, which NCCL 2.29.7 and later release on request (`ncclCommSuspend`).

To suspend and to resume are collective calls: all ranks of a communicator make them, and ranks with several
communicators make them in the same order. A suspended communicator keeps its connections and its addresses, and must
not be used. CUDA graphs that use the communicator work again after it is resumed.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

#: The first version of NCCL that can suspend a communicator.
FIRST_VERSION = (2, 29, 7)
TOTAL = 3  # ncclStatGpuMemTotal

_own: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""The engine's own communicators, and the bytes of each when it was made, as NCCL counts them."""


class Communicator(Protocol):
    """A communicator. Objects for the same communicator are equal."""

    def suspend(self) -> None:
        """Release the memory, which no stream uses. Collective."""

    def resume(self) -> None:
        """Obtain the memory again. Collective."""


class Suspension:
    """Suspends communicators, and resumes those that it has suspended.

    Args:
        find: Gives the communicators that exist, in an order that all ranks have in common.
    """

    def __init__(self, find: Callable[[], Iterable[Communicator]]) -> None:
        self._find = find
        self._suspended: list[Communicator] = []

    def suspend(self) -> None:
        """Suspend the communicators that are not suspended. Raises what NCCL raises; a later call continues."""
        for one in self._find():
            if one not in self._suspended:
                one.suspend()
                self._suspended.append(one)

    def resume(self) -> None:
        """Resume all communicators. Raises what NCCL raises; a later call continues."""
        while self._suspended:
            self._suspended[0].resume()
            self._suspended.pop(0)


@dataclass(frozen=True)
class GroupCommunicator:
    """The communicator of all ranks of a process group. Those that torch makes for two ranks (`send`, `recv`) stay.

    Attributes:
        group: A process group of `torch.distributed` with the backend `nccl`.
    """

    group: Any

    @property
    def backend(self) -> Any:
        """torch's `ProcessGroupNCCL`."""
        return self.group._get_backend(torch.device("cuda"))

    def exists(self) -> bool:
        """Whether torch has made the communicator: it does so at the group's first collective call."""
        made = getattr(self.backend, "_comm_ptr", None)
        return made is None or bool(made())

    def suspend(self) -> None:
        self.backend.suspend()

    def resume(self) -> None:
        self.backend.resume()


def why_not() -> str:
    """Why torch cannot suspend the communicator of a process group; empty if it can."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_nccl_available():
        return "this torch is built without NCCL"
    if not hasattr(distributed.distributed_c10d.Backend, "suspend") and not hasattr(
        distributed.distributed_c10d.ProcessGroupNCCL, "suspend"
    ):
        return f"torch {torch.__version__} cannot suspend a process group; torch 2.13 and later can"
    version = torch.cuda.nccl.version()
    if version < FIRST_VERSION:  # a call would end the process, because the library has no such function
        return f"NCCL {'.'.join(map(str, version))} is older than {'.'.join(map(str, FIRST_VERSION))}"
    return ""


def has_nccl(group: Any) -> bool:
    """Whether the process group has a communicator of NCCL, or will have one after its first collective call."""
    return "nccl" in torch.distributed.get_backend_config(group)


def of_groups(groups: Iterable[Any]) -> list[GroupCommunicator]:
    """The communicators that exist among those of process groups; none if torch cannot suspend them."""
    if why_not():
        return []
    return [one for one in map(GroupCommunicator, filter(has_nccl, groups)) if one.exists()]


def note_own(communicator: Any) -> None:
    """Note a new `PyNcclCommunicator` of an engine, for `growth_of_own`."""
    counted = _counted(communicator)
    if counted is not None:
        _own[communicator] = counted


def growth_of_own(index: int) -> int:
    """By how many bytes the engine's own communicators have grown since they were made, as NCCL counts them.

    NCCL obtains the memory of an algorithm when a collective call first uses it.

    Args:
        index: torch's ordinal of the GPU.
    """
    here = [(one, made) for one, made in _own.items() if one.device.index == index]
    return sum(max((_counted(one) or 0) - made, 0) for one, made in here)


def _counted(communicator: Any) -> int | None:
    """All GPU memory of a communicator in bytes, suspended or not; `None` if it has none or NCCL cannot tell."""
    count = getattr(getattr(getattr(communicator, "nccl", None), "lib", None), "ncclCommMemStats", None)
    value = ctypes.c_uint64()
    if count is None or count(communicator.comm, ctypes.c_int(TOTAL), ctypes.byref(value)) != 0:
        return None
    return value.value


def bytes_of_groups(index: int) -> int:
    """The GPU memory of the communicators that torch has made, in bytes, as NCCL counts it; 0 if torch cannot tell.

    NCCL counts the memory of suspended communicators too.

    Args:
        index: torch's ordinal of the GPU.
    """
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or torch.cuda.current_device() != index:
        return 0
    groups = [group for group in distributed.distributed_c10d._world.pg_map if group is not None]
    return sum(one.backend.memory_stats().get("total", 0) for one in of_groups(groups))
