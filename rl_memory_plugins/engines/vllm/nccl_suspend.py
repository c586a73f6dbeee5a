"""The communicators of a vLLM worker. `--enable-nccl-comm-suspend` and the option `nccl_suspend` mean the same."""

from __future__ import annotations

from collections.abc import Callable

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines import nccl_suspend
from rl_memory_plugins.memory import nccl


def calls(config: RLMemoryConfig) -> dict[str, Callable[[], None]]:
    """The calls of a rank, see `calls_of`: vLLM's own functions, then the process groups of torch.

    Raises:
        UnsupportedError: the option is set, and NCCL is too old. vLLM's flag has no effect then, as in vLLM itself.
    """
    from vllm.distributed import parallel_state

    if config.nccl_suspend:
        nccl_suspend.require_suspend(parallel_state)
    groups = nccl.Suspension(lambda: nccl.of_groups(nccl_suspend.device_groups(parallel_state)))

    def suspend() -> None:
        parallel_state.suspend_device_comms()
        groups.suspend()

    def resume() -> None:
        groups.resume()
        parallel_state.resume_device_comms()

    return nccl_suspend.calls_of(suspend, resume)
