"""The memory that weights travel in: the trainer's ends, and the receivers' ends, which `attach` makes.

- `cuda_direct` (`direct.py`): the trainer's own tensors, opened by the receivers. Nothing is staged.
- `cuda_ipc` (`staged.py`): slots in one allocation on the receiver's GPU; the trainer packs, the receiver reads.
- `shm_pinned` (`host.py`): slots in anonymous shared memory (`memfd_create`), page-locked by the receiver, and by the
  trainer where it sends from a GPU. It is passed as a file descriptor over the session's socket and has no
  name, so nothing is left behind when a process is killed, and it works between containers that share nothing
  but the socket and deny CUDA IPC.
- `shm` (`host.py`): the same, not page-locked. What CPU engines use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_memory_plugins.errors import UnsupportedError, WeightUpdateError
from rl_memory_plugins.weights.buffers.direct import DirectAttached, DirectExport
from rl_memory_plugins.weights.buffers.host import ShmAttached, ShmStaging
from rl_memory_plugins.weights.buffers.protocols import TRANSPORTS, AttachedBuffer, StagingBuffer, typed
from rl_memory_plugins.weights.buffers.staged import CudaAttached, CudaStaging
from rl_memory_plugins.weights.cuda_ipc import Mappings

__all__ = [
    "TRANSPORTS",
    "AttachedBuffer",
    "CudaAttached",
    "CudaStaging",
    "DirectAttached",
    "DirectExport",
    "ShmAttached",
    "ShmStaging",
    "StagingBuffer",
    "attach",
    "typed",
]


def attach(
    description: dict[str, Any],
    fds: Sequence[int],
    *,
    device: str = "cpu",
    mappings: Mappings | None = None,
) -> AttachedBuffer:
    """Open the trainer's buffer. `fds` stay the caller's to close.

    Args:
        device: The receiver's (`Device.name`).
        mappings: Where allocations may stay open after the buffer is closed.

    Raises:
        UnsupportedError: a kind this version does not know, or one that cannot be opened here.
        WeightUpdateError: memory of another device, or a description that is not true.
    """
    kind = description.get("kind")
    try:
        if kind in ("shm", "shm_pinned"):
            return ShmAttached(description, fds, device)
        if kind == "cuda_ipc":
            return CudaAttached(description, device)
        if kind == "cuda_direct":
            return DirectAttached(description, device, Mappings() if mappings is None else mappings)
    except (KeyError, TypeError, ValueError) as error:
        raise WeightUpdateError(f"the trainer's buffer is described badly: {error!r}") from None
    raise UnsupportedError(f"buffers of kind {kind!r} are not supported", allowed=list(TRANSPORTS))
