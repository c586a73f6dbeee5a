"""The communicators of a vLLM worker. `--enable-nccl-comm-suspend` and the option `nccl_suspend` mean the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines import nccl_suspend
from rl_memory_plugins.memory import nccl


@dataclass(frozen=True)
class DeviceCommunicator:
    """The communicators of one of vLLM's groups.

    Attributes:
        coordinator: vLLM's `GroupCoordinator`, with a device communicator.
    """

    coordinator: Any

    def suspend(self) -> None:
        self.coordinator.device_communicator.suspend()

    def resume(self) -> None:
        self.coordinator.device_communicator.resume()

    def suspendable_bytes(self) -> int:
        return nccl.counted_bytes(nccl_suspend.pynccl_of(self.coordinator), nccl.SUSPENDABLE) or 0


def calls(config: RLMemoryConfig) -> dict[str, Callable[[], int | None]]:
    """The calls of a rank, see `calls_of`: those of vLLM's communicators, then those of torch's.

    Raises:
        UnsupportedError: the option is set, and NCCL is too old. vLLM's flag has no effect then, as in vLLM itself.
    """
    if config.nccl_suspend:
        from vllm.distributed import parallel_state

        nccl_suspend.require_suspend(parallel_state)
    return nccl_suspend.calls_of(_communicators)


def _communicators() -> Iterator[nccl.Communicator]:
    from vllm.distributed import parallel_state

    for coordinator in nccl_suspend.coordinators(parallel_state):
        if coordinator.device_communicator is not None:
            yield DeviceCommunicator(coordinator)
    yield from nccl_suspend.of_torch(parallel_state)
