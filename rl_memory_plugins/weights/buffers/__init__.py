"""The buffers that carry weights: the trainer's ends, and the receivers' ends, which `attach` opens.

- `cuda_direct` (`direct.py`): receivers open the trainer's own tensors. There is no staging.
- `cuda_ipc` (`staged.py`): slots on the receiver's GPU. The trainer packs, the receiver reads. From another GPU the
  trainer packs a bucket while the one before travels.
- `shm_pinned` (`host.py`): slots in anonymous shared memory (`memfd_create`). The receiver page-locks it; the trainer
  does too if it sends from a GPU. A file descriptor carries it over the session's socket. The memory has no name: it
  vanishes with the processes, and works between containers that share only the socket and deny CUDA IPC.
- `shm` (`host.py`): the same without page-locking, for CPU engines.
- `tcp` (`streamed.py`): slots on the trainer's host, for engines on other hosts. Their bytes follow the messages.
- `gloo` (`streamed.py`, `communicated.py`): the same, but the bytes travel over a communicator.
- `nccl` (`staged.py`, `communicated.py`): slots on the trainer's GPU, and a communicator to the receiver's, which
  has two slots of its own: one bucket arrives while the other is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rl_memory_plugins.errors import UnsupportedError, WeightUpdateError
from rl_memory_plugins.weights.buffers.direct import DirectAttached, DirectExport
from rl_memory_plugins.weights.buffers.host import ShmAttached, ShmStaging
from rl_memory_plugins.weights.buffers.protocols import SENT, TRANSPORTS, AttachedBuffer, StagingBuffer, typed
from rl_memory_plugins.weights.buffers.staged import CudaAttached, CudaStaging, NcclStaging
from rl_memory_plugins.weights.buffers.streamed import StreamedAttached, StreamedStaging
from rl_memory_plugins.weights.communicators import COMMUNICATORS
from rl_memory_plugins.weights.open_allocations import Mappings

__all__ = [
    "SENT",
    "TRANSPORTS",
    "AttachedBuffer",
    "CudaStaging",
    "DirectAttached",
    "DirectExport",
    "NcclStaging",
    "ShmStaging",
    "StagingBuffer",
    "StreamedAttached",
    "StreamedStaging",
    "attach",
    "typed",
]


def attach(
    description: dict[str, Any],
    fds: Sequence[int],
    *,
    device: str = "cpu",
    mappings: Mappings | None = None,
    communicated: Callable[[dict[str, Any]], AttachedBuffer] | None = None,
) -> AttachedBuffer:
    """Open the trainer's buffer.

    Args:
        description, fds: The result of `StagingBuffer.export`. The caller closes `fds`.
        device: The receiver's device (`Device.name`).
        mappings: Keeps allocations open after the buffer is closed, if the trainer allows it.
        communicated: Opens buffers that need a communicator, by their description.

    Raises:
        UnsupportedError: the kind of buffer is unknown, or this process cannot open it.
        HostMemoryError: there is no memory for the slot of a buffer that it does not share.
        WeightUpdateError: the buffer is on another device, or does not match its description.
    """
    kind = description.get("kind")
    try:
        if kind in ("shm", "shm_pinned"):
            return ShmAttached(description, fds, device)
        if kind in COMMUNICATORS and communicated is not None:
            return communicated(description)
        if kind == "tcp":
            return StreamedAttached(description)
        if kind == "cuda_ipc":
            return CudaAttached(description, device)
        if kind == "cuda_direct":
            return DirectAttached(description, device, Mappings() if mappings is None else mappings)
    except (KeyError, TypeError, ValueError) as error:
        raise WeightUpdateError(f"the trainer's description of its buffer is invalid: {error!r}") from None
    raise UnsupportedError(f"buffers of kind {kind!r} are not supported", allowed=list(TRANSPORTS))
