"""The trainer's end of a weight update. Needs torch, and no engine."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from rl_memory_plugins.errors import (
    AuthenticationError,
    InvalidRequestError,
    ManifestError,
    OutOfMemoryError,
    RLMemoryError,
    UnsupportedError,
    WeightUpdateError,
)
from rl_memory_plugins.weights import cuda_ipc, wire
from rl_memory_plugins.weights.buffers import TRANSPORTS, CudaStaging, DirectExport, ShmStaging, StagingBuffer
from rl_memory_plugins.weights.manifest import BucketEntry, Manifest, Mismatch, TensorSpec, manifest_error
from rl_memory_plugins.weights.source import ResidentSource, TensorSource, as_source

if TYPE_CHECKING:
    import torch

DEFAULT_BUCKET_BYTES = 512 << 20

DEFAULT_TIMEOUT_S = 60.0

HOST_BUCKET_BYTES = 128 << 20
"""At most so much to a bucket in host memory: making and page-locking pages takes longer than copying."""

DIRECT_BUCKET_BYTES = 1 << 30
"""Where nothing is staged, a bucket is only what is announced and acknowledged at a time."""

MIN_MEAN_ALLOCATION = 16 << 20
"""With fewer bytes to an allocation, staging takes less time than to open and close all of them for one update."""


class _Receiver:
    """A connected rank, and the slots it has not acknowledged."""

    def __init__(self, connection: wire.Connection, hello: wire.Hello) -> None:
        self.connection = connection
        self.rank = hello.rank
        self.device = hello.device
        self.unacknowledged: list[int] = []
        self.ways: list[str] = []  # transports that may still serve it, the best first
        self.refused: list[dict[str, str]] = []
        self.lane: _Lane | None = None
        connection.peer = f"rank {hello.rank} on {hello.device}"
        connection.details = {"rank": hello.rank, "device": hello.device}


class _Lane:
    """One buffer, and the receivers that it serves."""

    def __init__(self, transport: str, buffer: StagingBuffer) -> None:
        self.transport = transport
        self.buffer = buffer
        self.receivers: list[_Receiver] = []


class WeightSender:
    """Serves one update to the ranks of an engine on this host.

    Make it, tell the engine `endpoints` and `token` (`POST /update_weights_from_ipc`) from another thread, and
    call `send`. `push_weights` does all three.

    Args:
        receivers: The devices that will connect (`RankStatus.device`), or their number.
        bucket_bytes: Bytes of one bucket at most, unless one row of a tensor is larger; `slots` of them exist at a
            time. A GPU is fastest with large ones, since the two processes take turns on it.
        timeout_s: How long to wait for a receiver at any one point.
        directory: Where the private directory for the socket is made; the engine must see it under the same
            path, which must be short (a socket's path has at most 107 bytes).
        token: What receivers must show; several senders of one update share it.
        settle_unused: Several senders of one update agree here, once each has heard all its receivers: it is given
            the names that none of them uses, and gives those that no receiver of any sender uses.
        transport: One of `buffers.TRANSPORTS`, or `auto`: for each receiver the first of them that works. What
            needs CUDA is tried only if this process uses CUDA already.
        keep_mapped: The tensors stay where they are until the next update or `cuda_ipc.release_mapped`, so that
            receivers may leave them open: opening takes longer than copying. Call `release_mapped` before they
            are freed, moved or paused, or else their memory stays in use.

    A receiver on a GPU that this process sees is served from a staging buffer on that GPU, one for each GPU;
    other receivers share one in host memory.

    Raises:
        InvalidRequestError: no receivers, no such transport, or no socket in `directory`.
    """

    def __init__(
        self,
        receivers: int | Sequence[str] = 1,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        slots: int = 2,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        directory: str | os.PathLike[str] | None = None,
        token: str | None = None,
        settle_unused: Callable[[list[str]], list[str]] = list,
        transport: str = "auto",
        keep_mapped: bool = False,
    ) -> None:
        if transport not in ("auto", *TRANSPORTS):
            raise InvalidRequestError(
                f"there is no transport {transport!r}",
                field="transport",
                got=transport,
                allowed=["auto", *TRANSPORTS],
            )
        self._transport = transport
        self._keep_mapped = keep_mapped
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._home: str | None = None  # the GPU on which all tensors lie
        self._awaited = None if isinstance(receivers, int) else list(receivers)
        self._count = receivers if isinstance(receivers, int) else len(receivers)
        if self._count < 1 or slots < 1 or bucket_bytes < 1:
            raise InvalidRequestError("an update needs at least one receiver, one slot and one byte a bucket")
        self._bucket_bytes = bucket_bytes
        self._slots = slots
        self._timeout_s = timeout_s
        self.token = token or secrets.token_urlsafe(32)
        self._settle_unused = settle_unused
        self._receivers: list[_Receiver] = []
        self._cancelled: RLMemoryError | None = None
        self._wake, self._wakeable = socket.socketpair()
        self._directory = tempfile.mkdtemp(prefix="rl-memory-", dir=directory)  # mode 0700
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path = str(Path(self._directory) / "weights.sock")
            self._listener.bind(path)
            self._listener.listen(self._count + 8)
            self._listener.setblocking(False)
        except OSError as error:
            self.close()
            raise InvalidRequestError(
                f"no socket can be made in {self._directory}: {error}", field="directory", got=self._directory
            ) from None
        names = ["*"] if self._awaited is None else self._awaited
        self.endpoints: dict[str, str] = dict.fromkeys(names, path)

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release everything. May be called more than once."""
        for receiver in self._receivers:
            receiver.connection.close()
        self._receivers = []
        self._listener.close()
        self._wake.close()
        self._wakeable.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def cancel(self, error: RLMemoryError) -> None:
        """Make a `send` that waits in another thread raise `error` and abort at all receivers."""
        self._cancelled = error
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def send(
        self, tensors: TensorSource | torch.nn.Module | Mapping[str, torch.Tensor], *, partial: bool = False
    ) -> dict[str, Any]:
        """Send one update to all receivers; returns when all of them have it, and closes the sender.

        Args:
            tensors: What to send.
            partial: The update changes some weights only, and the others are valid.

        Returns: bytes, tensors, buckets, seconds by step, `transport` (the slowest of those in use),
        `fallbacks` (device, transport, and why it was not used), and the receivers' reports.

        Raises:
            ManifestError: the tensors do not fit; mismatches of all ranks are merged. Nothing was changed.
            WeightUpdateError: a receiver stalled, is gone, or failed; or `tensors` broke off.
            UnsupportedError: a receiver cannot be served by the transport that was asked for.
            RLMemoryError: whatever else a receiver reported.
        """
        seconds: dict[str, float] = {}
        try:
            source = as_source(tensors)
            manifest = Manifest(source.specs(), self._bucket_bytes, self._slots, partial)
            mismatches = manifest.mismatches()
            if mismatches:
                raise manifest_error(mismatches)
            with _timed(seconds, "connect"):
                self._connect()
            self._offer(manifest, source, seconds)
            buckets = self._buckets(manifest)
            self._stream(manifest, buckets, source, seconds)
            with _timed(seconds, "commit"):
                self._broadcast(wire.Commit())
                done = self._gather(self._receivers, wire.Done)
            self._hold_leases()
            return {
                "bytes": sum(spec.nbytes for spec in manifest.tensors),
                "tensors": len(manifest.tensors),
                "buckets": len(buckets),
                "transport": max((lane.transport for lane in self._in_use()), key=TRANSPORTS.index),
                "fallbacks": [refusal for receiver, _ in done for refusal in receiver.refused],
                "seconds": seconds,
                "receivers": [message.report for _, message in done],
            }
        except BaseException as error:
            known = wire.as_update_error(error)
            for receiver in self._receivers:
                receiver.connection.fail(known)
            if known is error or not isinstance(error, Exception):
                raise
            raise known from error
        finally:
            for lane in self._lanes.values():
                lane.buffer.close()
            self.close()

    # -- the steps of a session -------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Wait until all receivers have introduced themselves; turn others away."""
        deadline = wire.Deadline(self._timeout_s)
        strangers: list[wire.Connection] = []
        try:
            while len(self._receivers) < self._count:
                ready = self._select([self._listener, *strangers], deadline.remaining())
                if not ready:
                    here = [receiver.device for receiver in self._receivers]
                    raise WeightUpdateError(
                        f"{self._count - len(here)} of {self._count} receivers did not connect within "
                        f"{self._timeout_s:g} s",
                        reason="stalled",
                        timeout_s=self._timeout_s,
                        connected=here,
                        missing=self._still_awaited(),
                    )
                for one in ready:
                    if isinstance(one, wire.Connection):
                        strangers.remove(one)
                        self._greet(one)
                    else:
                        with contextlib.suppress(BlockingIOError):
                            sock, _ = self._listener.accept()
                            strangers.append(wire.Connection(sock, "a connecting process"))
        finally:
            for stranger in strangers:
                stranger.close()

    def _greet(self, connection: wire.Connection) -> None:
        try:
            hello = connection.receive(wire.Hello, timeout_s=1.0, limit=wire.MAX_HELLO_BYTES)
            if hello.protocol != wire.PROTOCOL:
                raise WeightUpdateError(
                    f"the trainer speaks protocol {wire.PROTOCOL}, the engine {hello.protocol}: install the "
                    "same version of rl_memory_plugins on both sides",
                    reason="protocol",
                )
            if not hmac.compare_digest(hello.token.encode(), self.token.encode()):
                raise AuthenticationError("the token is not this update's")
            awaited = self._still_awaited()
            if awaited is not None and hello.device not in awaited:
                raise WeightUpdateError(
                    f"device {hello.device} is not awaited, or is here already",
                    device=hello.device,
                    awaited=awaited,
                )
            if len(self._receivers) == self._count:
                raise WeightUpdateError(f"all {self._count} receivers are here already", device=hello.device)
        except RLMemoryError as error:
            connection.fail(error)
            connection.close()
            return
        self._receivers.append(_Receiver(connection, hello))

    def _still_awaited(self) -> list[str] | None:
        if self._awaited is None:
            return None
        left = list(self._awaited)
        for receiver in self._receivers:
            left.remove(receiver.device)
        return left

    def _offer(self, manifest: Manifest, source: TensorSource, seconds: dict[str, float]) -> None:
        """Find a buffer for each receiver, and have all check the manifest."""
        gpus = cuda_ipc.local_gpus(initialise=self._transport == "cuda_ipc")
        resident = source.resident() if isinstance(source, ResidentSource) else None
        self._home = _home(resident, gpus)
        for receiver in self._receivers:
            receiver.ways = ways(self._transport, receiver.device, gpus, self._home)
        answers: list[tuple[_Receiver, wire.Answer]] = []
        waiting = self._receivers
        while waiting:
            for receiver in waiting:
                with _timed(seconds, "open"):
                    lane = self._lane(receiver, manifest, resident)
                    description, fds = lane.buffer.export()
                receiver.connection.send(wire.Offer(manifest, description), self._timeout_s, fds)
            with _timed(seconds, "validate"):
                got = self._gather(waiting, wire.Answer, wire.Unopened)
            waiting = []
            for receiver, answer in got:
                if isinstance(answer, wire.Answer):
                    answers.append((receiver, answer))
                elif isinstance(answer, wire.Unopened):
                    self._refuse(receiver, answer.reason)
                    waiting.append(receiver)
        for receiver in self._receivers:
            assert receiver.lane is not None
            receiver.lane.receivers.append(receiver)
        self._judge(answers)

    def _lane(self, receiver: _Receiver, manifest: Manifest, resident: Sequence[torch.Tensor] | None) -> _Lane:
        """The best buffer that may still serve the receiver: one that is there, or a new one.

        Raises:
            UnsupportedError: there is none.
            OutOfMemoryError: there is no memory for the last one.
        """
        error: RLMemoryError | None = None
        while receiver.ways:
            way = receiver.ways[0]
            key = (way, receiver.device if way.startswith("cuda") else "")
            try:
                if key not in self._lanes:
                    self._lanes[key] = _Lane(way, self._buffer(way, receiver.device, manifest, resident))
                receiver.lane = self._lanes[key]
                return self._lanes[key]
            except (UnsupportedError, OutOfMemoryError) as failure:
                error = failure
                self._refuse(receiver, str(failure))
        if isinstance(error, OutOfMemoryError):
            raise error
        raise UnsupportedError(
            f"no transport to {receiver.connection.peer}: "
            + "; ".join(f"{refusal['transport']}: {refusal['reason']}" for refusal in receiver.refused),
            device=receiver.device,
            tried=receiver.refused,
        )

    def _refuse(self, receiver: _Receiver, reason: str) -> None:
        transport = receiver.ways.pop(0)
        receiver.refused.append({"device": receiver.device, "transport": transport, "reason": reason})

    def _buffer(
        self, way: str, device: str, manifest: Manifest, resident: Sequence[torch.Tensor] | None
    ) -> StagingBuffer:
        if way == "cuda_direct":
            if resident is None:
                raise UnsupportedError("the source makes its tensors one by one")
            if self._home != device:
                raise UnsupportedError(f"not all tensors lie on {device}")
            mean = 0 if self._keep_mapped or self._transport == way else MIN_MEAN_ALLOCATION
            return DirectExport(resident, device, keep=self._keep_mapped, mean_bytes=mean)
        stable = resident is not None
        if way == "cuda_ipc":
            return CudaStaging(device, manifest.slot_bytes(), self._slots, stable=stable)
        return ShmStaging(_smaller(manifest).slot_bytes(), self._slots, pinned=way == "shm_pinned", stable=stable)

    def _in_use(self) -> list[_Lane]:
        return [lane for lane in self._lanes.values() if lane.receivers]

    def _buckets(self, manifest: Manifest) -> list[list[BucketEntry]]:
        """The cut that the buffers of all lanes have room for."""
        transports = {lane.transport for lane in self._in_use()}
        if transports == {"cuda_direct"}:
            nbytes = max(self._bucket_bytes, DIRECT_BUCKET_BYTES)
            return msgspec.structs.replace(manifest, bucket_bytes=nbytes).buckets(split=False)
        return (manifest if transports <= {"cuda_direct", "cuda_ipc"} else _smaller(manifest)).buckets()

    def _judge(self, answers: Sequence[tuple[_Receiver, wire.Answer]]) -> None:
        """Raise what all ranks together have against the manifest."""
        merged: dict[Mismatch, list[int]] = {}
        ignored_by: dict[str, int] = {}
        for receiver, answer in answers:
            for name in answer.unused:
                ignored_by[name] = ignored_by.get(name, 0) + 1
            for mismatch in answer.mismatches if isinstance(answer, wire.Reject) else ():
                merged.setdefault(mismatch, []).append(receiver.rank)
        mismatches = [msgspec.structs.replace(m, ranks=tuple(sorted(ranks))) for m, ranks in merged.items()]
        # With pipeline or expert parallelism a name may be another rank's; one that no rank uses is an error.
        unknown = [name for name, count in ignored_by.items() if count == len(self._receivers)]
        if not mismatches:
            unknown = self._settle_unused(unknown)
        everywhere = tuple(sorted(receiver.rank for receiver in self._receivers))
        listed = {mismatch.name for mismatch in mismatches}
        mismatches += [
            Mismatch("unknown", name, "no rank of the engine uses it", everywhere)
            for name in unknown
            if name not in listed
        ]
        if mismatches:
            raise manifest_error(mismatches, unknown)

    def _stream(
        self,
        manifest: Manifest,
        buckets: list[list[BucketEntry]],
        source: TensorSource,
        seconds: dict[str, float],
    ) -> None:
        """Pack buckets and announce them; while one is being loaded the next is packed."""
        tensors = source.tensors()
        for number, entries in enumerate(buckets):
            slot = number % self._slots
            with _timed(seconds, "wait"):
                self._await_slot(slot)
            with _timed(seconds, "pack"):
                placed = self._pack(slot, entries, manifest, tensors)
            for lane, places in placed.items():
                for receiver in lane.receivers:
                    receiver.unacknowledged.append(slot)
                    receiver.connection.send(wire.Bucket(slot, places), self._timeout_s)
        for extra, _ in tensors:
            raise WeightUpdateError(f"the source gives {extra}, which its specs do not list", name=extra)
        with _timed(seconds, "wait"):
            for slot in range(self._slots):
                self._await_slot(slot)

    def _await_slot(self, slot: int) -> None:
        """Wait until no receiver reads the slot any more."""
        while True:
            holding = [receiver for receiver in self._receivers if slot in receiver.unacknowledged]
            if not holding:
                return
            for receiver, ack in self._gather(holding, wire.Ack):
                if ack.slot not in receiver.unacknowledged:
                    raise WeightUpdateError(
                        f"{receiver.connection.peer} acknowledged slot {ack.slot}, which it did not hold"
                    )
                receiver.unacknowledged.remove(ack.slot)

    def _pack(
        self,
        slot: int,
        entries: Sequence[BucketEntry],
        manifest: Manifest,
        tensors: Iterator[tuple[str, torch.Tensor]],
    ) -> dict[_Lane, list[BucketEntry]]:
        """Put the next tensors into all buffers; where each lane's receivers find them."""
        placed: dict[_Lane, list[BucketEntry]] = {lane: [] for lane in self._in_use()}
        for entry in entries:
            spec = manifest.tensors[entry.index]
            if entry.start == 0:
                self._current = _next(spec, tensors)
            part = self._current
            if entry.nbytes != spec.nbytes:
                part = part.narrow(0, entry.start // spec.row_nbytes, entry.nbytes // spec.row_nbytes)
            for lane, places in placed.items():
                places.append(lane.buffer.put(slot, entry, spec, part))
            if entry.start + entry.nbytes == spec.nbytes:
                del self._current, part
        for lane in placed:
            lane.buffer.publish()
        return placed

    def _hold_leases(self) -> None:
        """Keep the connections by which receivers know that this process still has its memory."""
        if not self._keep_mapped:
            return
        for lane in self._in_use():
            if lane.transport == "cuda_direct":
                for receiver in lane.receivers:
                    self._receivers.remove(receiver)
                    cuda_ipc.leases.hold(receiver.connection.peer_process(), receiver.connection)

    # -- waiting ------------------------------------------------------------------------------------------

    def _broadcast(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        for receiver in self._receivers:
            receiver.connection.send(message, self._timeout_s, fds)

    def _gather(self, receivers: Sequence[_Receiver], *types: type[wire.M]) -> list[tuple[_Receiver, wire.M]]:
        """One message from each; the failure of any ends the wait for all."""
        waiting = {receiver.connection: receiver for receiver in receivers}
        messages: dict[int, wire.M] = {}
        deadline = wire.Deadline(self._timeout_s)
        while waiting:
            ready = self._select(list(waiting), deadline.remaining())
            if not ready:
                wanted = " or ".join(expected.__name__ for expected in types)
                error = next(iter(waiting)).stalled(f"did not send {wanted}", self._timeout_s)
                error.details["stalled_ranks"] = sorted(receiver.rank for receiver in waiting.values())
                raise error
            for connection in ready:
                receiver = waiting.pop(connection)
                messages[id(receiver)] = connection.receive(*types, timeout_s=self._timeout_s)
        return [(receiver, messages[id(receiver)]) for receiver in receivers]

    def _select(self, waiting: Sequence[Any], timeout_s: float) -> list[Any]:
        """Those that can be read; empty when the time is over.

        Raises:
            RLMemoryError: the one given to `cancel`.
        """
        poll = select.poll()  # not select(), which ends at descriptor 1023
        by_fd = {one.fileno(): one for one in (self._wakeable, *waiting)}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        ready = [by_fd[fd] for fd, _ in poll.poll(timeout_s * 1000)]
        # What receivers have said comes first: it is closer to the cause than the error given to `cancel`.
        if ready == [self._wakeable]:
            raise self._cancelled or WeightUpdateError("the update was cancelled")
        return [one for one in ready if one is not self._wakeable]


def ways(wanted: str, device: str, local: Collection[str], home: str | None) -> list[str]:
    """The transports to try for a receiver, the best first.

    Args:
        wanted: One of them, or `auto`.
        device: The receiver's.
        local: The GPUs that this process can use.
        home: The one of them on which all tensors lie, if they do.
    """
    if wanted != "auto":
        return [wanted]
    if not device.startswith(("GPU-", "MIG-")):
        return ["shm"]
    found = ["cuda_direct"] if device == home else []
    found += ["cuda_ipc"] if device in local else []
    return [*found, "shm_pinned", "shm"]


def _home(tensors: Sequence[torch.Tensor] | None, local: Mapping[str, int]) -> str | None:
    devices = {tensor.device for tensor in tensors or ()}
    indices = {device.index for device in devices if device.type == "cuda"}
    if len(devices) != 1 or not indices:
        return None
    (index,) = indices
    return next((name for name, ordinal in local.items() if ordinal == index), None)


def _smaller(manifest: Manifest) -> Manifest:
    """With buckets for host memory."""
    nbytes = min(manifest.bucket_bytes, HOST_BUCKET_BYTES)
    return msgspec.structs.replace(manifest, bucket_bytes=nbytes)


def _next(spec: TensorSpec, tensors: Iterator[tuple[str, torch.Tensor]]) -> torch.Tensor:
    name, tensor = next(tensors, ("", None))
    if tensor is None:
        raise WeightUpdateError(f"the source ended before {spec.name}", name=spec.name)
    if name != spec.name or tuple(tensor.shape) != spec.shape or str(tensor.dtype) != f"torch.{spec.dtype}":
        raise WeightUpdateError(
            f"the source gives {name} {tensor.dtype} {list(tensor.shape)} where its specs say {spec.name} "
            f"{spec.dtype} {list(spec.shape)}",
            name=spec.name,
        )
    return tensor


@contextlib.contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[step] = seconds.get(step, 0.0) + time.perf_counter() - start


def push_weights(
    post: Callable[[dict[str, Any]], Any],
    tensors: TensorSource | torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    receivers: int | Sequence[str] = 1,
    partial: bool = False,
    weight_version: str | None = None,
    mode: str = "keep",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    slots: int = 2,
    timeout_s: float | None = None,
    directory: str | os.PathLike[str] | None = None,
    transport: str = "auto",
    keep_mapped: bool = False,
) -> dict[str, Any]:
    """Update an engine's weights: the whole exchange in one call.

    Args:
        post: Sends the body that it is given to `/update_weights_from_ipc` and returns the answer; it raises
            where the answer is an error (this package's client raises the typed one).
        tensors: What to send; see `WeightSender.send` for this and `partial`.
        receivers: The devices of all ranks, or their number.
        weight_version: The engine's version of the weights after the update.
        mode: What happens to running requests meanwhile.
        timeout_s: The longest silence of either side. Where not given, `DEFAULT_TIMEOUT_S` on this side, and on the
            engine's its option `update_timeout_s`.
        transport: How the bytes travel; see `WeightSender` for this and `keep_mapped`.

    Returns: the sender's report, with the engine's answer under `"engine"`.

    Raises:
        RLMemoryError: the more specific one, where both sides fail.
    """
    wait_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    sender = WeightSender(
        receivers,
        bucket_bytes=bucket_bytes,
        slots=slots,
        timeout_s=wait_s,
        directory=directory,
        transport=transport,
        keep_mapped=keep_mapped,
    )
    body = {
        "endpoints": sender.endpoints,
        "token": sender.token,
        "weight_version": weight_version,
        "mode": mode,
        "timeout_s": timeout_s,
    }
    answers: list[Any] = []
    failures: list[Exception] = []

    def call() -> None:
        try:
            answers.append(post(body))
        except Exception as error:
            failures.append(error)
            sender.cancel(wire.as_update_error(error))

    thread = threading.Thread(target=call, name="rl-memory-update-weights", daemon=True)
    thread.start()
    report: dict[str, Any] = {}
    try:
        report = sender.send(tensors, partial=partial)
    except Exception as error:
        failures.append(error)
    thread.join(wait_s)
    if failures:
        raise max(failures, key=specificity)
    if not answers:
        raise WeightUpdateError(f"the engine has the weights but did not answer within {wait_s:g} s", reason="stalled")
    return {**report, "engine": answers[0]}


def specificity(error: Exception) -> int:
    """The sender's `ManifestError` covers all ranks; a `WeightUpdateError` may only say that a peer left."""
    if isinstance(error, ManifestError):
        return 3 if any("ranks" in mismatch for mismatch in error.details.get("mismatches", ())) else 2
    if isinstance(error, WeightUpdateError):
        return 1
    return 2 if isinstance(error, RLMemoryError) else 0
