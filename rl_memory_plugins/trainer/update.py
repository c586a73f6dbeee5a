"""One weight update from all processes of a trainer to all their engines."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import secrets
import socket
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rl_memory_plugins.errors import InvalidRequestError, RLMemoryError, WeightUpdateError
from rl_memory_plugins.memory.threads import on_this_gpu
from rl_memory_plugins.trainer.engine_handle import EngineHandle, as_engines
from rl_memory_plugins.trainer.gpu import own_gpu
from rl_memory_plugins.trainer.peers import Peers
from rl_memory_plugins.trainer.sources.model import ModelSource
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.manifest import Mismatch, TensorSpec, manifest_error
from rl_memory_plugins.weights.push import specificity
from rl_memory_plugins.weights.sender import DEFAULT_TIMEOUT_S, WeightSender, close_iterator
from rl_memory_plugins.weights.source import ResidentSource, TensorSource


class _Site(NamedTuple):
    """One trainer process: its GPU, and the devices of each engine that it controls."""

    device: str | None
    engines: list[list[str]]


def push_from_all(
    engines: Any,
    tensors: TensorSource | torch.nn.Module | Mapping[str, torch.Tensor],
    peers: Peers | None = None,
    *,
    partial: bool = False,
    weight_version: str | None = None,
    mode: str = "keep",
    timeout_s: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Update all engines; every trainer process calls it, and it succeeds on all or fails on all.

    Every process goes through the source once and in step, since a source may gather. A process sends to the
    engine ranks on its own GPU; engine ranks that share none with the trainer are served by the process that
    controls their engine; the others only take part in the gathers. Nothing is gathered before every receiver
    has accepted the manifest. A process whose receiver fails goes on gathering, so that no other one hangs.
    A source that itself fails on one process in the middle of its collectives cannot go on: the others wait for
    it in theirs until the timeout of the source's process group, and only then fail.

    Args:
        engines: Those that this process controls, as for `RolloutHandoff`: each engine is given to one process.
        tensors: What to send, the same on every process.
        peers: The trainer's processes; this one alone where not given.
        partial, weight_version, mode, timeout_s: As for `weights.push.push_weights`, the same everywhere.
        **options: Of `weights.sender.WeightSender`, e.g. `bucket_bytes`.

    Returns: this process's part of the sender's report (`receivers` is empty where it did not send), and under
        `engines` the answers of those it controls.

    Raises:
        RLMemoryError: on every process the most specific one; see `Peers.share`.
    """
    engines = as_engines(engines)
    peers = peers or Peers()
    wait_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    source = ModelSource(tensors) if isinstance(tensors, (torch.nn.Module, Mapping)) else tensors
    shared: list[tuple[str, _Site]] = peers.agree(
        lambda: (secrets.token_urlsafe(32), _Site(own_gpu(), [engine.devices() for engine in engines])),
        as_type=tuple[str, _Site],
    )
    token, sites = shared[0][0], [site for _, site in shared]
    served = [
        device
        for controller, site in enumerate(sites)
        for devices in site.engines
        for device in devices
        if server_of(device, controller, sites) == peers.rank
    ]
    begin = _Begin(peers)
    sender: WeightSender | None = None
    calls: list[_EngineCall] = []

    def listen() -> dict[str, str]:
        nonlocal sender
        if not served:
            return {}
        sender = WeightSender(served, timeout_s=wait_s, token=token, settle_unused=begin.settle, **options)
        return sender.endpoints

    try:
        sockets = peers.agree(listen)
        for engine, devices in zip(engines, sites[peers.rank].engines, strict=True):
            servers = {device: server_of(device, peers.rank, sites) for device in devices}
            body = {
                "endpoints": {device: sockets[server][device] for device, server in servers.items()},
                "token": token,
                "weight_version": weight_version,
                "mode": mode,
                "timeout_s": timeout_s,
            }
            calls.append(_EngineCall(engine, devices, body))
        report, failure = _send(sender, source, begin, partial)
    finally:
        if sender is not None:
            sender.close()
    failures = [failure, *(call.finish(wait_s) for call in calls)]
    worst = max((one for one in failures if one is not None), key=specificity, default=None)
    try:
        peers.share(None, worst, severity=specificity)
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        failures.clear()  # or they and this frame keep each other
        del worst, failure
    return {**report, "engines": [call.answer for call in calls]}


def require_options(options: Mapping[str, Any]) -> None:
    """Check what `push_from_all` is to be called with, before anything sleeps for it.

    Raises:
        InvalidRequestError: an option that an update has not, or with a value that it cannot have.
    """
    allowed = {"partial", *inspect.signature(WeightSender).parameters} - {"receivers", "token", "settle_unused"}
    unknown = sorted(options.keys() - allowed)
    if unknown:
        raise InvalidRequestError(
            f"no options of an update: {', '.join(unknown)}", got=unknown, allowed=sorted(allowed)
        )
    sender = {name: value for name, value in options.items() if name != "partial" and value is not None}
    WeightSender(**sender).close()


def server_of(device: str, controller: int, sites: Sequence[_Site]) -> int:
    """The trainer process that sends to an engine's device: the first on it, else its engine's controller."""
    return next((rank for rank, site in enumerate(sites) if site.device == device), controller)


def _send(
    sender: WeightSender | None, source: TensorSource, begin: _Begin, partial: bool
) -> tuple[dict[str, Any], Exception | None]:
    """This process's part: go through the source once, sending or not."""
    once = _Once(source)
    try:
        if sender is not None:
            return sender.send(once, partial=partial), None
        begin.settle(None)
        once.drain()
    except Exception as error:
        known = wire.as_update_error(error)
        traceback.clear_frames(error.__traceback__)
        if not begin.shared:
            with contextlib.suppress(Exception):  # it raises what all know now
                begin.settle(None, known)
        elif begin.agreed and begin.peers.size > 1:
            with contextlib.suppress(Exception):
                once.drain()
        try:
            return {}, known
        finally:
            del known  # or it and this frame keep each other
    finally:
        once.close()
    return {"bytes": 0, "tensors": 0, "buckets": 0, "seconds": {}, "receivers": []}, None


class _Begin:
    """All processes agree to begin, exactly once each, before any of them touches the source's tensors."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.shared = False
        self.agreed = False

    def settle(self, unused: list[str] | None, error: Exception | None = None) -> list[str]:
        """`unused` is what `WeightSender` asks about; `None` where this process sends nothing.

        Raises:
            RLMemoryError: another process cannot begin.
        """
        self.shared = True
        votes = [vote for vote in self.peers.share(unused, error, specificity) if vote is not None]
        unknown = [name for name in votes[0] if all(name in vote for vote in votes)] if votes else []
        self.agreed = not unknown
        if unknown and unused is None:
            raise manifest_error([Mismatch("unknown", name, "no rank of the engine uses it") for name in unknown])
        return unknown


class _Once:
    """A source whose one iteration can be taken over and finished by another consumer."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._tensors: Iterator[tuple[str, torch.Tensor]] | None = None

    def specs(self) -> list[TensorSpec]:
        return self._source.specs()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._tensors = self._source.tensors()
        return itertools.chain(self._tensors)  # which the sender cannot close

    def resident(self) -> list[torch.Tensor] | None:
        return self._source.resident() if isinstance(self._source, ResidentSource) else None

    def drain(self) -> None:
        """Take part in the gathers that are left."""
        for _ in self.tensors() if self._tensors is None else self._tensors:
            pass

    def close(self) -> None:
        """Take part in no more. No source goes on after it."""
        close_iterator(self._tensors)


class _EngineCall:
    """An engine's call, in a thread: it returns once the engine has the weights.

    If the engine refuses, its ranks will never connect; the senders that wait for them are told so.
    """

    def __init__(self, engine: EngineHandle, devices: list[str], body: dict[str, Any]) -> None:
        self._engine = engine
        self._devices = devices
        self._body = body
        self._error: Exception | None = None
        self.answer: Any = None
        self._thread = threading.Thread(target=on_this_gpu(self._run), name="rl-memory-update-weights", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads
            self._fail(error)

    def finish(self, timeout_s: float) -> Exception | None:
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return WeightUpdateError(f"the engine did not answer within {timeout_s:g} s", reason="stalled")
        error, self._error = self._error, None  # its traceback leads back here
        return error

    def _run(self) -> None:
        try:
            self.answer = self._engine.post_update(self._body)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._error = wire.as_update_error(error)
        for device in self._devices:
            self._stand_in(device, self._error)

    def _stand_in(self, device: str, error: RLMemoryError) -> None:
        """Take the place of a rank that does not come; a sender whose rank is there already refuses it."""
        with contextlib.suppress(OSError, RLMemoryError), socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(1.0)
            sock.connect(self._body["endpoints"][device])
            connection = wire.Connection(sock, "the trainer")
            connection.send(wire.Hello(wire.PROTOCOL, device, self._body["token"], rank=-1), 1.0)
            connection.fail(error)
