"""`nccl`: a communicator of NCCL itself for two GPUs. No call waits in NCCL, so that each has a deadline."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.weights.communicators.polled import await_done
from rl_memory_plugins.weights.wire import Connection, Deadline

_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_CONFIG_MAGIC, _CONFIG_VERSION = 0xCAFEBEEF, 21400
_ALIKE = {"NCCL_CUMEM_ENABLE": "1", "NCCL_P2P_DISABLE": "0", "NCCL_SHM_DISABLE": "0", "NCCL_NET": ""}
"""The variables that decide by which way two ends exchange memory, and their defaults. SGLang sets the first."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


class _Config(ctypes.Structure):
    """NCCL's configuration as of version 2.14, which later versions take too."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


@functools.cache
def _nccl() -> Any:
    """The library that torch has loaded.

    Raises:
        UnsupportedError: there is none.
    """
    if torch.version.cuda is None:
        raise UnsupportedError("this torch is built without CUDA")
    try:
        return ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise UnsupportedError(f"NCCL cannot be loaded: {error}") from None


def settings() -> dict[str, str]:
    """NCCL's version in this process, and the variables that must be alike at both ends; empty without NCCL."""
    try:
        library = _nccl()
    except UnsupportedError:
        return {}
    version = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(version))
    own = {"version": str(version.value)}
    return own | {name: _canonical(os.environ.get(name, ""), default) for name, default in _ALIKE.items()}


def require(theirs: Mapping[str, str]) -> None:
    """Check that this process can be joined with one that has these `settings`.

    Two ends that choose different ways to exchange memory do not fail: they wait for each other, or end their process.

    Raises:
        UnsupportedError: one of them has no NCCL, or they are not alike.
    """
    _nccl()
    if not theirs:
        raise UnsupportedError("the rank's process has no NCCL")
    for name, own in settings().items():
        other = theirs.get(name, "")
        if other != own:
            what = "NCCL's version" if name == "version" else name
            raise UnsupportedError(
                f"{what} is {other or 'not set'} in the engine, and {own or 'not set'} in the trainer"
            )


def _canonical(value: str, default: str) -> str:
    return default if value in ("", "-2") else value  # -2: NCCL decides


def new_unique_id() -> bytes:
    """What the two ends of a new communicator have in common.

    Raises:
        UnsupportedError: there is no NCCL, or it finds no network.
    """
    unique = _UniqueId()
    if _nccl().ncclGetUniqueId(ctypes.byref(unique)) != _SUCCESS:
        raise UnsupportedError(f"NCCL cannot begin a communicator: {_last_error()}")
    return bytes(unique)


class NcclCommunicator:
    """See `Communicator`. Slots are on the GPU, and not from torch's allocator.

    Args:
        unique_id: The result of the trainer's `new_unique_id`.
        device: The GPU of this end. The two ends cannot share one.
    """

    transport = "nccl"

    def __init__(
        self, name: str, unique_id: bytes, connection: Connection, end: int, timeout_s: float, device: torch.device
    ) -> None:
        if device.type != "cuda":
            raise UnsupportedError("NCCL joins GPUs, and this end has none")
        if len(unique_id) != ctypes.sizeof(_UniqueId):
            raise ValueError("the trainer's identifier of a communicator is invalid")
        self.name = name
        self._peer = 1 - end
        self._library = _nccl()
        self.device = device
        self._communicator = ctypes.c_void_p()
        self._stream = torch.cuda.Stream(device)
        self._is_connected = False
        config = _Config(ctypes.sizeof(_Config), _CONFIG_MAGIC, _CONFIG_VERSION, 0)
        try:
            with torch.cuda.device(device):
                self._call(
                    "ncclCommInitRankConfig",
                    ctypes.byref(self._communicator),
                    ctypes.c_int(2),
                    _UniqueId.from_buffer_copy(unique_id),
                    ctypes.c_int(end),
                    ctypes.byref(config),
                )
                await_done(self._is_ready, Deadline(timeout_s), connection)
        except OSError as error:
            self.close()
            if connection.is_ended():
                connection.raise_cause("left while the two ends were joined")
            text = str(error) or f"not within {timeout_s:g} s"
            raise UnsupportedError(f"NCCL cannot join the two ends: {text}") from None

    def send(self, data: torch.Tensor, connection: Connection, timeout_s: float) -> None:
        with torch.cuda.device(self.device):
            self._begin("ncclSend", data, connection, Deadline(timeout_s))

    def begin_receive(self, slot: torch.Tensor, nbytes: int, connection: Connection, timeout_s: float) -> None:
        with torch.cuda.device(self.device):
            self._begin("ncclRecv", slot[:nbytes], connection, Deadline(timeout_s))

    def await_received(
        self, connection: Connection, timeout_s: float, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        deadline = Deadline(timeout_s)
        with torch.cuda.device(self.device):
            await_done(self._is_ready, deadline, connection)  # a thread of NCCL's gives the stream its work
            arrived = torch.cuda.Event()
            arrived.record(self._stream)  # before `meanwhile` gives it more
            await_done(lambda: self._is_ready() and arrived.query(), deadline, connection, meanwhile)

    def settle(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        communicator, self._communicator = self._communicator, ctypes.c_void_p()
        if communicator:
            with torch.cuda.device(self.device):
                self._library.ncclCommAbort(communicator)  # ends a transfer that still waits for the peer

    def _begin(self, name: str, data: torch.Tensor, connection: Connection, deadline: Deadline) -> None:
        """Begin a transfer on the stream of this communicator, after the work of the current stream."""
        await_done(self._is_ready, deadline, connection)  # with the former call
        current = torch.cuda.current_stream(self.device)
        while self._stream == current:  # torch hands out a few streams in turn, and the engine may compute on one
            self._stream = torch.cuda.Stream(self.device)
        self._stream.wait_stream(current)
        self._call(
            name,
            ctypes.c_void_p(data.data_ptr()),
            ctypes.c_size_t(len(data)),
            ctypes.c_int(_UINT8),
            ctypes.c_int(self._peer),
            self._communicator,
            ctypes.c_void_p(self._stream.cuda_stream),
        )
        if not self._is_connected:  # the first call connects the two GPUs; nothing need wait for the others
            await_done(self._is_ready, deadline, connection)
            self._is_connected = True

    def _is_ready(self) -> bool:
        """Whether no call is in progress. Raises `ConnectionError` if the communicator has failed."""
        if not self._communicator:
            raise ConnectionError("the communicator is closed")
        state = ctypes.c_int()
        self._call("ncclCommGetAsyncError", self._communicator, ctypes.byref(state))
        self._check("NCCL", state.value)
        return state.value == _SUCCESS

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, result: int) -> None:
        if result not in (_SUCCESS, _IN_PROGRESS):
            raise ConnectionError(f"{name} failed with error {result}: {_last_error()}")


def _last_error() -> str:
    describe = _nccl().ncclGetLastError
    describe.restype = ctypes.c_char_p
    return (describe(None) or b"").decode(errors="replace").strip() or "NCCL_DEBUG=INFO tells more"
