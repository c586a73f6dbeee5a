"""The GPU memory that this process has opened of another one, and that others have opened of this one."""

from __future__ import annotations

import select
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.errors import WeightUpdateError
from rl_memory_plugins.weights import cuda_ipc
from rl_memory_plugins.weights.cuda_ipc import Allocation, CudaGpu
from rl_memory_plugins.weights.wire import Connection

if TYPE_CHECKING:
    import torch

_SWITCH_INTERVAL_S = 50e-6


class Mappings:
    """Allocations of another process that are open in this process, each handle once.

    `keep` leaves them open between updates until the trainer closes a connection: an open allocation stays in use even
    if its owner frees it or exits. Two sessions must not use one object at the same time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[Any, ...], tuple[CudaGpu, torch.Tensor]] = {}
        self._lease: Connection | None = None

    def open(self, gpu: CudaGpu, process: str, allocations: Sequence[Allocation]) -> list[torch.Tensor]:
        """Open these allocations and close all others.

        Returns: the bytes of each (uint8, one dimension). An allocation that was open already gives the same tensor.

        Raises:
            UnsupportedError: the driver refuses. Nothing is open then.
            WeightUpdateError: an allocation has fewer bytes than the trainer says. Nothing is open then.
        """
        if process == cuda_ipc.process_id():  # CUDA does not open a handle in the process that exported it
            self.close()
            for one in allocations:
                _require_bytes(gpu, one.address, one)
            return [gpu.view(one.address, one.nbytes) for one in allocations]
        keys = [(process, *one) for one in allocations]
        with self._lock:
            self._lease = None  # the end of an earlier lease must not close this session's allocations
            try:
                self._close(self._open.keys() - set(keys))
                for key, one in zip(keys, allocations, strict=True):
                    if key not in self._open:
                        self._open[key] = (gpu, _opened(gpu, one))
            except BaseException:
                self._close(set(self._open))
                raise
            return [self._open[key][1] for key in keys]

    def keep(self, connection: Connection) -> None:
        """Leave the allocations open until the trainer closes `connection`, which this object owns from now on."""
        with self._lock:
            self._lease = connection
        watch = threading.Thread(target=self._close_after, args=(connection,), name="rl-memory-mappings", daemon=True)
        try:
            watch.start()
        except RuntimeError:  # this process cannot start more threads: the next update opens them again
            try:
                self.close()
            finally:
                connection.close()

    def close(self) -> None:
        with self._lock:
            self._lease = None
            self._close(set(self._open))

    def _close_after(self, connection: Connection) -> None:
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        poll.poll()
        with self._lock, _short_switch_interval():
            if self._lease is connection:
                self._lease = None
                self._close(set(self._open))
        connection.close()  # tells the trainer that its memory is no longer open here

    def _close(self, keys: set[tuple[Any, ...]]) -> None:
        for gpu in {self._open[key][0] for key in keys}:
            gpu.synchronize()
        for key in keys:
            gpu, memory = self._open.pop(key)
            gpu.close(memory.data_ptr())


def _opened(gpu: CudaGpu, allocation: Allocation) -> torch.Tensor:
    address = gpu.open(allocation.handle)
    try:
        _require_bytes(gpu, address, allocation)
        return gpu.view(address, allocation.nbytes)
    except BaseException:
        gpu.close(address)
        raise


def _require_bytes(gpu: CudaGpu, address: int, allocation: Allocation) -> None:
    """Check the size that the trainer states: a read past the end of the allocation would kill this process."""
    found = gpu.bytes_from(address)
    if allocation.nbytes > found:
        raise WeightUpdateError(
            f"the trainer offered {allocation.nbytes} bytes of an allocation that has only {found}",
            reason="wrong size",
            nbytes=allocation.nbytes,
            got=found,
        )


_switch_interval_lock = threading.Lock()


@contextmanager
def _short_switch_interval() -> Iterator[None]:
    """Shorten Python's switch interval while a background thread makes many driver calls.

    Each call releases the GIL. A thread that spins, such as SGLang's idle scheduler, then holds the GIL for one switch
    interval, 5 ms by default: 800 allocations took 12 s to close.
    """
    with _switch_interval_lock:
        former = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        try:
            yield
        finally:
            sys.setswitchinterval(former)


_leases: dict[str, Connection] = {}
"""The connection to each process of an engine that keeps this process's memory open."""
_leases_lock = threading.Lock()


def hold_lease(receiver: str, connection: Connection) -> None:
    """Own the connection to a receiver that keeps this process's memory open, and close its earlier connection."""
    with _leases_lock:
        previous = _leases.get(receiver)
        _leases[receiver] = connection
    if previous is not None:
        previous.close()


def release_mapped(timeout_s: float = 10.0) -> None:
    """Make all engines close the memory of this process that `keep_mapped` has left open.

    Call this before the tensors are freed, moved or paused: otherwise their memory stays in use.

    Args:
        timeout_s: The longest wait for each engine, in seconds.

    Raises:
        WeightUpdateError: an engine did not close the memory in time. The next call waits for that engine again.
    """
    with _leases_lock:
        connections = dict(_leases)
    for connection in connections.values():
        connection.finish()
    for receiver, connection in connections.items():
        connection.await_end(timeout_s)
        with _leases_lock:  # only now: if this call times out, the next call must wait for this receiver again
            if _leases.get(receiver) is connection:
                del _leases[receiver]
        connection.close()
