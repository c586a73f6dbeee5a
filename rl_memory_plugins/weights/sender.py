"""The trainer's side of one weight update. Needs torch, and no engine."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from rl_memory_plugins.errors import InvalidRequestError, RLMemoryError
from rl_memory_plugins.full_collections import postponed
from rl_memory_plugins.timing import LONGEST_S, timed
from rl_memory_plugins.weights import later, open_allocations, wire
from rl_memory_plugins.weights.answers import Alone, Findings, Senders, of_ranks
from rl_memory_plugins.weights.buffers import SENT, TRANSPORTS, NcclStaging, StreamedStaging
from rl_memory_plugins.weights.communicators import COMMUNICATORS, SEAL_BYTES, joining
from rl_memory_plugins.weights.communicators.kept import OF_TRAINER
from rl_memory_plugins.weights.connected_rank import ConnectedRank
from rl_memory_plugins.weights.division import Need
from rl_memory_plugins.weights.doors import Advertise
from rl_memory_plugins.weights.links import Outgoing, await_slot, give_up, send_buckets
from rl_memory_plugins.weights.listener import Listener
from rl_memory_plugins.weights.manifest import SLOTS, BucketEntry, Manifest, manifest_error, remembered
from rl_memory_plugins.weights.overrides import as_sharded, resident_of
from rl_memory_plugins.weights.packing import Packing
from rl_memory_plugins.weights.parts import Parts
from rl_memory_plugins.weights.routes import Packed, Route, Routes
from rl_memory_plugins.weights.slices import Slice
from rl_memory_plugins.weights.source import (
    GroupingSource,
    NegotiableSource,
    StableSource,
    TensorSource,
)
from rl_memory_plugins.weights.tls import Tls

if TYPE_CHECKING:
    import torch

    from rl_memory_plugins.weights.source import ShardedSource

DEFAULT_BUCKET_BYTES = 1 << 30

DEFAULT_TIMEOUT_S = 60.0


class WeightSender:
    """Serves one update to the ranks of an engine on this host; with `advertise`, also to engines on other hosts.

    Create a sender, post its `endpoints` and `token` to the engine (`POST /update_weights_from_ipc`) from another
    thread, and call `send`. `push_weights` does all of this.

    The sender makes a staging buffer on each GPU that this process sees and a receiver uses. Other receivers share a
    buffer in host memory.

    Args:
        receivers: The devices of all receivers (`RankStatus.device`), or their number. None of them if `senders` may
            let this process contribute its shards to an update of others.
        bucket_bytes: The largest bucket, in bytes; a single row of a tensor may exceed it. Large buckets are fastest on
            a GPU, because the two processes take turns there. If memory is short, the sender uses smaller ones.
        slots: The number of buckets that exist at a time; by default 2; see docs/trainers.md for when there are 3.
        timeout_s: The longest wait for a receiver at any point, in seconds.
        directory: The parent of the private directory for the socket; by default the directory for temporary files.
            The engine must see it under the same path, which must be short: the path of a socket has at most 107 bytes.
        token: The secret that receivers must show; by default a new one. Several senders of one update share it.
        senders: The senders of this update, by default this one alone.
        transport: One of `buffers.TRANSPORTS`; or `auto`: for each receiver, the first transport that works. `auto`
            tries CUDA only if this process uses CUDA already. With `tcp` there is no Unix socket.
        keep_mapped: Receivers leave the tensors' memory open until the next update or `release_mapped`, as opening
            takes longer than copying. Call `release_mapped` before the tensors are freed, moved or paused: otherwise
            their memory stays in use.
        advertise: Listen on TCP too: IP addresses or names of interfaces of this host, each with a port or without. A
            receiver that does not find the Unix socket takes the first of these addresses that answers. `None`: no
            TCP; with `transport="tcp"`, the loopback address.
        tls: Use TLS on TCP. `True` makes a certificate for this update, and needs the package `cryptography`; or give
            the files of a certificate and of its key. The control route carries the certificate's fingerprint.

    Raises:
        InvalidRequestError: an argument is out of range, `transport` is unknown, a socket cannot be opened in
            `directory` or at an address of `advertise`, or `tls` is unusable.
        WeightUpdateError: this process can open no more files.
    """

    def __init__(
        self,
        receivers: int | Sequence[str] = 1,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        slots: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        directory: str | os.PathLike[str] | None = None,
        token: str | None = None,
        senders: Senders | None = None,
        transport: str = "auto",
        keep_mapped: bool = False,
        advertise: Advertise | None = None,
        tls: Tls = False,
    ) -> None:
        allowed = ["auto", *TRANSPORTS]
        if transport not in allowed:
            raise InvalidRequestError(
                f"unknown transport {transport!r}", field="transport", got=transport, allowed=allowed
            )
        count = receivers if isinstance(receivers, int) else len(receivers)
        if (count < 1 and senders is None) or (slots is not None and slots < 1) or bucket_bytes < 1:
            raise InvalidRequestError(
                "an update needs at least one receiver, one slot, and buckets of at least one byte"
            )
        if not 0 < timeout_s <= LONGEST_S:
            raise InvalidRequestError(f"timeout_s must be positive and at most {LONGEST_S:g}", field="timeout_s")
        if tls and transport in COMMUNICATORS:
            raise InvalidRequestError(f"{transport} encrypts nothing: with tls= use tcp", field="tls")
        self._transport = transport
        self._keep_mapped = keep_mapped
        self._bucket_bytes = bucket_bytes
        self._slots = slots
        self._timeout_s = timeout_s
        self._senders = senders or Alone()
        self._seconds: dict[str, float] = {}  # by step
        self._taken: dict[ConnectedRank, int] = {}  # the bytes that ranks had taken at the last `cut`
        local = transport != "tcp"
        if advertise is None and not local:
            advertise = "127.0.0.1"
        self._listener = Listener(receivers, timeout_s, directory, token, advertise=advertise, tls=tls, local=local)
        self.endpoints = self._listener.endpoints
        self.token = self._listener.token

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release everything. May be called more than once."""
        self._listener.close()

    def cancel(self, error: RLMemoryError) -> None:
        """Make a `send` that waits in another thread abort the update at all receivers and raise `error`."""
        self._listener.cancel(error)

    def cut(self) -> None:
        """End a cancelled `send` in another thread that `cancel` does not reach, because a rank takes nothing.

        Called again and again: a rank that has taken bytes since the last call is left alone.
        """
        taken = {rank: rank.connection.sent_bytes for rank in list(self._listener.ranks) if not rank.may_read}
        for rank, count in taken.items():
            if self._taken.get(rank) == count:
                rank.connection.cut()
        self._taken = taken

    @postponed()
    def send(self, source: TensorSource, *, partial: bool = False) -> dict[str, Any]:
        """Send one update. Returns when all receivers have loaded it, and closes the sender.

        A failed update also closes the iterator of the source.

        Args:
            source: The tensors to send.
            partial: The update covers only some of the weights. The other weights must be valid.

        Returns: bytes, tensors, buckets, `staging_bytes` (of this process, over all devices), seconds by step,
        `unused` (names that the engine's loader skips by itself), `transport` (the slowest in use), `fallbacks`
        (device, transport, and the reason why it was not used), the reports of the receivers, `sent_from_shards` (the
        bytes that came from this process's own shards) and `gathered` (those of the tensors that the source gathered;
        `None` if it cannot tell).

        Raises:
            ManifestError: the tensors do not fit the model. The error lists the mismatches of all ranks. No weights
                have changed.
            WeightUpdateError: a receiver stalled, disconnected or failed; or the source failed.
            UnsupportedError: the requested transport does not work for a receiver.
            OutOfMemoryError: the memory for staging cannot be allocated.
            RLMemoryError: a receiver reported another error.
        """
        routes: Routes | None = None
        parts: Parts | None = None
        packing: Packing | None = None
        tensors: Iterator[tuple[str, torch.Tensor]] | None = None
        try:
            manifest = self._negotiate(source, partial)
            resident = resident_of(source)
            ranks = self._listener.ranks
            routes = Routes(
                manifest,
                self._transport,
                ranks,
                keep_mapped=self._keep_mapped,
                resident=resident,
                stable=resident is not None or (isinstance(source, StableSource) and source.stable),
                group_bytes=source.group_bytes if isinstance(source, GroupingSource) else 0,
                may_divide=self._senders.may_divide,
                free_slots=self._slots is None,
            )
            manifest = routes.manifest
            answers, buckets, slices = self._offer(manifest, routes)
            unused = self._require_accepted(answers)
            sharded = as_sharded(source)
            parts = None if sharded is None else self._divide(manifest, routes, sharded, answers)
            if parts is None:
                routes.cut(slices, buckets)
                packing = Packing(source, manifest, routes.in_use(), exist=resident is not None)
                tensors = packing.tensors
                self._stream(manifest.slots, buckets, packing)
            else:
                tensors = source.tensors()
                parts.run(tensors)
            with timed(self._seconds, "commit"):
                for rank in self._listener.ranks:
                    rank.connection.send(wire.Commit(unused), self._timeout_s)
                done = self._listener.gather(self._listener.ranks, wire.Done)
            self._hold(routes.in_use())
            report = {
                "bytes": sum(manifest.sizes()),
                "tensors": len(manifest.tensors),
                "buckets": len(buckets),
                "staging_bytes": routes.staging_bytes(),
                "unused": unused,
                "transport": max(routes.transports(), key=TRANSPORTS.index, default=""),
                "fallbacks": [refusal for rank, _ in done for refusal in rank.refused],
                "seconds": self._seconds,
                "receivers": [message.report for _, message in done if message.report],
                "sent_from_shards": 0 if parts is None else parts.sent_bytes,
                "gathered": None if sharded is None else sharded.gathered,
            }
            with timed(self._seconds, "close"):  # waits for all other work of this process on the GPU
                later.free(routes.close)
            return report
        except BaseException as error:
            known = wire.as_update_error(error)
            give_up(self._listener.ranks, known, self._timeout_s)
            if packing is not None:
                packing.close()
            if routes is not None:
                with contextlib.suppress(Exception):  # the first error is the cause
                    routes.close()
            # The frames of the traceback must not keep tensors alive as long as the error.
            packing = routes = resident = parts = None
            traceback.clear_frames(error.__traceback__)
            close_iterator(tensors)
            try:
                if known is error or not isinstance(error, Exception):
                    raise
                raise known from error
            finally:
                del known  # breaks a reference cycle of the error and this frame
        finally:
            self.close()

    def _offer(
        self, manifest: Manifest, routes: Routes
    ) -> tuple[
        list[tuple[ConnectedRank, wire.Answer]], list[list[BucketEntry]], dict[ConnectedRank, list[Slice | None]]
    ]:
        """Find a route for each rank, and let all ranks check the manifest.

        Returns: the answer of each rank, the buckets for the routes, and the slices of ranks that get only those.
        """
        answers: list[tuple[ConnectedRank, wire.Answer]] = []
        slices: dict[ConnectedRank, list[Slice | None]] = {}
        buckets: list[list[BucketEntry]] = []
        waiting = self._listener.ranks
        while waiting:
            for rank in waiting:
                with timed(self._seconds, "open"):
                    description, fds = routes.assign(rank).export(rank)
                    description = {**description, "timeout_s": self._timeout_s}
                rank.may_read = rank.candidate_transports[0].startswith("cuda")
                rank.connection.send(wire.Offer(manifest, description), self._timeout_s, fds)
            with timed(self._seconds, "open"):
                early = joining.join_all(waiting, self._timeout_s, routes.own_device)
            buckets = routes.buckets()  # overlaps with the ranks' checks
            with timed(self._seconds, "validate"):
                late = [rank for rank in waiting if rank not in early]
                got = [*early.items(), *self._listener.gather(late, wire.Answer, wire.Unopened)]
            waiting = []
            for rank, answer in got:
                if isinstance(answer, wire.Answer):
                    joining.require_joined(rank)
                    if isinstance(answer, wire.Accept) and rank.candidate_transports[0] in SENT:
                        slices[rank] = answer.slices
                    answers.append((rank, answer))
                elif isinstance(answer, wire.Unopened):
                    routes.refuse(rank, answer.reason)
                    waiting.append(rank)
        return answers, buckets or routes.buckets(), slices

    def _divide(
        self,
        manifest: Manifest,
        routes: Routes,
        source: ShardedSource,
        answers: Sequence[tuple[ConnectedRank, wire.Answer]],
    ) -> Parts | None:
        """Decide with the other senders whether all send their shards, and connect the ranks with all of them.

        Returns: `None` if each process sends whole tensors.
        """
        order = {rank: number for number, rank in enumerate(self._listener.ranks)}
        needs = [
            Need(rank.candidate_transports[0], answer.slices, answer.divisible)
            for rank, answer in sorted(answers, key=lambda one: order[one[0]])
            if isinstance(answer, wire.Accept)
        ]
        division = self._senders.divide(manifest, source, needs, self._listener.places)
        if division is None:
            return None

        def make() -> Parts:
            buckets = routes.divide({need.transport for need in division.needs})
            parts = Parts(division, manifest, buckets, source, self._listener, routes, self._timeout_s, self._seconds)
            parts.open()
            return parts

        return self._linked(make)

    def _linked(self, make: Callable[[], Parts]) -> Parts:
        """Connect the ranks with all senders. None sends a byte before all ranks are connected with all."""
        parts: Parts | None = None
        failure: RLMemoryError | None = None
        try:
            parts = make()
        except Exception as error:
            failure = wire.as_update_error(error)
            for rank in self._listener.ranks:  # now: the other senders may wait for these ranks
                rank.connection.fail(failure)
        try:
            self._senders.linked(failure)
        finally:
            del failure  # breaks a reference cycle of the error and this frame
        assert parts is not None
        return parts

    def _negotiate(self, source: TensorSource, partial: bool) -> Manifest:
        """The manifest to offer. Ask the ranks first if the source can change what it sends."""
        while True:
            manifest = Manifest(remembered(source.specs()), self._bucket_bytes, self._slots or SLOTS, partial)
            with timed(self._seconds, "connect"):
                self._listener.connect()
            if not (isinstance(source, NegotiableSource) and source.negotiable):
                return manifest
            with timed(self._seconds, "validate"):
                for rank in self._listener.ranks:
                    rank.connection.send(wire.Ask(manifest), self._timeout_s)
                answers = self._listener.gather(self._listener.ranks, wire.Answer)
            found = self._senders.consult(self._findings(answers))
            mismatches = found.all_mismatches()
            if not mismatches:
                return manifest
            if not source.revise(mismatches):
                raise manifest_error(mismatches, found.ignored.unknown)

    def _require_accepted(self, answers: Sequence[tuple[ConnectedRank, wire.Answer]]) -> list[str]:
        """Raise one error with the mismatches of all ranks if there are any. Returns the names that all skip."""
        found = self._findings(answers)
        if found is None or not found.mismatches:
            found = self._senders.settle(found)
        mismatches = found.all_mismatches()
        if mismatches:
            everywhere = tuple(sorted(rank.rank for rank in self._listener.ranks))
            mismatches = [one if one.ranks else msgspec.structs.replace(one, ranks=everywhere) for one in mismatches]
            raise manifest_error(mismatches, found.ignored.unknown)
        return found.ignored.skipped

    @staticmethod
    def _findings(answers: Sequence[tuple[ConnectedRank, wire.Answer]]) -> Findings | None:
        """What the ranks of this process answer; `None` if it serves none."""
        return of_ranks([(rank.rank, answer) for rank, answer in answers]) if answers else None

    def _stream(self, slots: int, buckets: list[list[BucketEntry]], packing: Packing) -> None:
        """Pack and announce the buckets. Packing overlaps with the loading of earlier buckets.

        A bucket whose copies have only begun is announced once they have ended, after the next one is packed behind it.
        """
        begun: Packed | None = None
        for number, entries in enumerate(buckets):
            slot = number % slots
            begun = self._announce_ended(begun, slot)
            with timed(self._seconds, "wait"):
                await_slot(self._listener, slot)
            begun = self._announce_ended(begun)
            with timed(self._seconds, "pack"):
                packed = packing.pack(slot, entries)
            if begun is not None:
                self._announce(begun)
            begun = packed
            if not packed.copies:
                self._announce(packed)
                begun = None
        if begun is not None:
            self._announce(begun)
        packing.finish()
        with timed(self._seconds, "wait"):
            for slot in range(slots):
                await_slot(self._listener, slot)

    def _announce_ended(self, begun: Packed | None, slot: int = -1) -> Packed | None:
        """Announce a bucket if its copies have ended, or if the next one needs its slot. Otherwise return it."""
        if begun is None or not (begun.slot == slot or begun.has_ended()):
            return begun
        self._announce(begun)
        return None

    def _announce(self, packed: Packed) -> None:
        """Tell the ranks of a bucket once its copies have ended."""
        if packed.copies:
            with timed(self._seconds, "travel"):
                for copy in packed.copies:
                    copy.synchronize()
        slot = packed.slot
        outgoing: list[Outgoing] = []
        for route, places in packed.placed.items():
            seal = os.urandom(SEAL_BYTES) if route.transport in COMMUNICATORS else b""
            message = wire.Bucket(slot, places, seal)
            for rank in route.ranks:
                rank.unacknowledged.append(slot)
            if isinstance(route.buffer, (NcclStaging, StreamedStaging)):
                data = route.buffer.sent(slot, places, seal)
                outgoing += [Outgoing(rank, message, data) for rank in route.ranks]
            else:
                for rank in route.ranks:
                    rank.connection.send(message, self._timeout_s)
        if outgoing:
            with timed(self._seconds, "send"):
                send_buckets(outgoing, self._timeout_s)

    def _hold(self, routes: list[Route]) -> None:
        """Keep the connections to receivers that leave this process's memory open, and communicators."""
        for rank in [rank for route in routes for rank in route.ranks if route.transport == "cuda_direct"]:
            if self._keep_mapped:
                self._listener.ranks.remove(rank)
                open_allocations.hold_lease(rank.connection.peer_process(), rank.connection)
        for rank in list(self._listener.ranks):
            if rank.communicator is not None:
                self._listener.ranks.remove(rank)
                OF_TRAINER.keep(rank.communicator, rank.connection)


def close_iterator(tensors: Iterator[tuple[str, torch.Tensor]] | None) -> None:
    """Close a source's generator, which releases its tensors. Ignores errors: the update has already failed."""
    close = getattr(tensors, "close", None)
    if close is not None:
        with contextlib.suppress(Exception):
            close()
