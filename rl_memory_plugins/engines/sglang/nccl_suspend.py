"""The communicators of a SGLang scheduler: its own, by their library, and those of torch's process groups."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines import nccl_suspend
from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.memory import nccl

MEMORY = 1  # NCCL_SUSPEND_MEM
CUMEM = "NCCL_CUMEM_ENABLE"


def use_suspendable_memory(config: RLMemoryConfig) -> None:
    """Have NCCL use the memory that it can release, if the option is set. SGLang turns this off by default.

    Call it before SGLang sets its own variables, and in a scheduler before it makes communicators.

    Raises:
        UnsupportedError: the environment turns the memory off.
    """
    if config.nccl_suspend and os.environ.setdefault(CUMEM, "1") == "0":
        raise UnsupportedError(
            f"nccl_suspend needs {CUMEM}=1, because NCCL releases no other memory, and the environment has {CUMEM}=0. "
            "SGLang sets 0 if an engine was started before in this process: set 1 before the first start",
            mode="nccl_suspend",
        )


@dataclass(frozen=True)
class OwnCommunicator:
    """A communicator of SGLang.

    Attributes:
        communicator: SGLang's `PyNcclCommunicator`, which has no such calls.
    """

    communicator: Any

    def suspend(self) -> None:
        self._call("ncclCommSuspend", ctypes.c_int(MEMORY))

    def resume(self) -> None:
        self._call("ncclCommResume")

    def suspendable_bytes(self) -> int:
        return nccl.counted_bytes(self.communicator, nccl.SUSPENDABLE) or 0

    def _call(self, name: str, *arguments: Any) -> None:
        library = self.communicator.nccl
        library.NCCL_CHECK(getattr(library.lib, name)(self.communicator.comm, *arguments))


def calls(config: RLMemoryConfig) -> dict[str, Callable[[], int | None]]:
    """The calls of a rank, see `calls_of`.

    Raises:
        UnsupportedError: the option is set, and NCCL is too old.
    """
    if config.nccl_suspend:
        from sglang.srt.distributed import parallel_state

        nccl_suspend.require_suspend(parallel_state)
    return nccl_suspend.calls_of(_communicators)


def _communicators() -> Iterator[nccl.Communicator]:
    from sglang.srt.distributed import parallel_state

    for coordinator in nccl_suspend.coordinators(parallel_state):
        own = nccl_suspend.pynccl_of(coordinator)
        if own is not None:
            yield OwnCommunicator(own)
    yield from nccl_suspend.of_torch(parallel_state)
