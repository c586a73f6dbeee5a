"""The memory of NCCL communicators. Both engines make their communicators by a class `PyNcclCommunicator`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def count_as_nccl(original: Callable[..., None]) -> Callable[..., None]:
    """Attribute the device memory of a communicator to `nccl` in `memory_status`."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from rl_memory_plugins.memory.residual import attributed

        with attributed("nccl"):
            original(self, *args, **kwargs)

    return __init__
