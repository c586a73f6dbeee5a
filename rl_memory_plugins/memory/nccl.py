"""The memory of NCCL communicators, which NCCL 2.29.7 and later release on request (`ncclCommSuspend`).

To suspend and to resume are collective calls: all ranks of a communicator make them, and ranks with several
communicators make them in the same order. A suspended communicator keeps its connections and its addresses, and must
not be used. CUDA graphs that use the communicator work again after it is resumed.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rl_memory_plugins.memory.allocator import too_little_for_wake

logger = logging.getLogger(__name__)

#: The first version of NCCL that can suspend a communicator.
FIRST_VERSION = (2, 29, 7)
SUSPENDABLE, TOTAL = 0, 3  # ncclStatGpuMemSuspend, ncclStatGpuMemTotal
#: Device memory that stays free beside that of resumed communicators.
MARGIN_BYTES = 16 << 20

_own: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""The engine's own communicators, and the bytes of each when it was made, as NCCL counts them."""


class Communicator(Protocol):
    """A communicator. Objects for the same communicator are equal."""

    def suspend(self) -> None:
        """Release the memory, which no stream uses. Collective."""

    def resume(self) -> None:
        """Obtain the memory again. Collective."""

    def suspendable_bytes(self) -> int:
        """Bytes of device memory that `suspend` releases, as NCCL counts them; 0 if NCCL cannot tell."""


class Suspension:
    """Suspends communicators, and knows which are suspended."""

    def __init__(self) -> None:
        self._suspended: list[tuple[Communicator, int]] = []  # with their bytes
        self._warned = False

    def suspend(self, communicators: Iterable[Communicator]) -> None:
        """Suspend these communicators, except suspended ones. Raises what NCCL raises; a later call continues.

        Args:
            communicators: In an order that all ranks have in common.
        """
        for one in communicators:
            if not self.is_suspended(one):
                nbytes = one.suspendable_bytes()
                if not nbytes and not self._warned:
                    logger.warning("NCCL holds no memory that it can release: is NCCL_CUMEM_ENABLE 0?")
                    self._warned = True
                self._suspended.append((one, nbytes))  # before: an interrupt comes when NCCL has suspended it
                try:
                    one.suspend()
                except Exception:
                    self._suspended.pop()
                    raise

    def resume(self, among: Collection[Communicator] | None = None) -> None:
        """Resume the suspended ones among these communicators. Default: all. Raises as `suspend` does."""
        for chosen in self._chosen(among):
            place = self._suspended.index(chosen)
            del self._suspended[place]  # before, as in `suspend`
            try:
                chosen[0].resume()
            except Exception:
                self._suspended.insert(place, chosen)
                raise

    def require_memory(self, device: torch.device, among: Collection[Communicator] | None = None) -> None:
        """Check that the device has memory for `resume`. A rank that fails in it alone leaves the others waiting.

        Raises:
            DeviceMemoryError: there is too little, also without torch's cache.
        """
        needed = sum(nbytes for _, nbytes in self._chosen(among))
        if not needed or device.type != "cuda":
            return
        free = torch.cuda.mem_get_info(device)[0]
        if free < needed + MARGIN_BYTES:
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info(device)[0]
        if free < needed + MARGIN_BYTES:
            raise too_little_for_wake(needed, free, MARGIN_BYTES, "GPU memory for NCCL communicators")

    def is_suspended(self, communicator: Communicator) -> bool:
        return any(one == communicator for one, _ in self._suspended)

    def count(self) -> int:
        """The number of suspended communicators."""
        return len(self._suspended)

    def _chosen(self, among: Collection[Communicator] | None) -> list[tuple[Communicator, int]]:
        return [(one, nbytes) for one, nbytes in self._suspended if among is None or one in among]


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

    def suspendable_bytes(self) -> int:
        return int(self.backend.memory_stats().get("suspend", 0))


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
    counted = counted_bytes(communicator, TOTAL)
    if counted is not None:
        _own[communicator] = counted


def growth_of_own(index: int) -> int:
    """By how many bytes the engine's own communicators have grown since they were made, as NCCL counts them.

    NCCL obtains the memory of an algorithm when a collective call first uses it.

    Args:
        index: torch's ordinal of the GPU.
    """
    here = [(one, made) for one, made in _own.items() if one.device.index == index]
    return sum(max((counted_bytes(one, TOTAL) or 0) - made, 0) for one, made in here)


def counted_bytes(communicator: Any, stat: int) -> int | None:
    """Bytes of GPU memory of a `PyNcclCommunicator`; `None` if it has no communicator or NCCL cannot tell.

    Args:
        stat: `SUSPENDABLE` or `TOTAL`; both count the memory of a suspended communicator too.
    """
    count = getattr(getattr(getattr(communicator, "nccl", None), "lib", None), "ncclCommMemStats", None)
    value = ctypes.c_uint64()
    if count is None or count(communicator.comm, ctypes.c_int(stat), ctypes.byref(value)) != 0:
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
