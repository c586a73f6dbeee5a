"""The trainer's side of an update to which each process contributes its shards; see `shards`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rl_memory_plugins.errors import UnsupportedError, WeightUpdateError
from rl_memory_plugins.timing import timed
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.buffers import NcclStaging, StreamedStaging
from rl_memory_plugins.weights.communicators import COMMUNICATORS, SEAL_BYTES, joining
from rl_memory_plugins.weights.links import Outgoing, await_slot, send_buckets
from rl_memory_plugins.weights.manifest import BucketEntry, Manifest, TensorSpec, align
from rl_memory_plugins.weights.shards import Piece, Pieces, checksum_of, turn
from rl_memory_plugins.weights.slices import Cut, Slice
from rl_memory_plugins.weights.source import ShardedSource, name_of, next_tensor

if TYPE_CHECKING:
    import torch

    from rl_memory_plugins.weights.connected_rank import ConnectedRank
    from rl_memory_plugins.weights.division import Division
    from rl_memory_plugins.weights.listener import Listener
    from rl_memory_plugins.weights.routes import Routes


class _Part(NamedTuple):
    """What a group of ranks gets of one bucket."""

    entries: list[BucketEntry]  # as the ranks have it
    pieces: list[Piece]  # those of this process


class _Group:
    """Ranks that get the same from this process.

    Attributes:
        is_first: Whether this process serves them: they get the tensors without a layout from it.
        parts: By bucket.
    """

    def __init__(
        self, division: Division, manifest: Manifest, slices: Sequence[Slice | None], *, is_first: bool
    ) -> None:
        self.is_first = is_first
        self.ranks: list[ConnectedRank] = []
        self.cut = Cut(manifest, slices)
        self.pieces = Pieces(manifest.tensors, slices, division.layouts)
        self.parts: list[_Part] = []
        self.slot_bytes = 1
        self.buffer: StreamedStaging | NcclStaging | None = None
        self._process = division.process

    def plan(self, buckets: Sequence[Sequence[BucketEntry]]) -> int:
        """Compute the parts. Returns the bytes of the largest bucket of these ranks."""
        largest = 1
        for bucket in buckets:
            entries = list(self.cut.left_of(bucket).values())
            pieces = self.pieces.of_bucket(entries, self._process, rest=self.is_first)
            self.parts.append(_Part(entries, pieces))
            largest = max([largest, *(entry.offset + entry.nbytes for entry in entries)])
            self.slot_bytes = max([self.slot_bytes, *(one.packed.offset + one.packed.nbytes for one in pieces)])
        return align(largest)


class Parts:
    """Sends to all ranks what this process contributes.

    Args:
        division: What the processes have decided.
        manifest, buckets: The same on all processes.
        source: The tensors.
        listener: Has the ranks that this process serves; here the others connect, too.
        routes: Makes the buffers, and closes them.
        seconds: The durations by step.

    Attributes:
        sent_bytes: The bytes that have come from this process's own shards.
        staging_bytes: Those of the buffers.
    """

    def __init__(
        self,
        division: Division,
        manifest: Manifest,
        buckets: Sequence[Sequence[BucketEntry]],
        source: ShardedSource,
        listener: Listener,
        routes: Routes,
        timeout_s: float,
        seconds: dict[str, float],
    ) -> None:
        self._division = division
        self._manifest = manifest
        self._buckets = buckets
        self._source = source
        self._listener = listener
        self._routes = routes
        self._timeout_s = timeout_s
        self._seconds = seconds
        self._groups: dict[tuple[bool, str, tuple[Slice | None, ...]], _Group] = {}
        self._by_turn: list[tuple[ConnectedRank, _Group]] = []
        self._held: tuple[int, torch.Tensor] | None = None  # the tensor that was read last
        self.sent_bytes = self.staging_bytes = 0

    def open(self) -> None:
        """Tell the ranks of this process where the others listen, and wait for the ranks of the others.

        Returns when the ranks of this process are connected with all processes, and this process with all ranks.

        Raises:
            UnsupportedError: a rank cannot receive from here.
            RLMemoryError: a rank has failed, or did not connect.
        """
        with timed(self._seconds, "open"):
            self._open()

    def _open(self) -> None:
        division = self._division
        own = range(division.first, division.first + division.served)
        contributors = division.layouts.holders()
        by_number: dict[int, _Group] = {}
        for number, need in enumerate(division.needs):
            key = (number in own, need.transport, tuple(need.slices))
            if key not in self._groups:
                self._groups[key] = _Group(division, self._manifest, need.slices, is_first=number in own)
            by_number[number] = self._groups[key]
        largest = {group: group.plan(self._buckets) for group in self._groups.values()}
        ranks = dict(zip(own, self._listener.ranks, strict=True))
        for number, rank in ranks.items():
            places = [
                places if one in contributors and one != division.process else []
                for one, places in enumerate(division.places)
            ]
            message = wire.Divide(
                division.layouts, division.process, number, len(division.needs), places, largest[by_number[number]]
            )
            rank.connection.send(message, self._timeout_s)
        if division.process in contributors:
            others = [number for number in range(len(division.needs)) if number not in own]
            self._listener.expect(others)
            self._listener.connect()
            ranks |= {rank.number: rank for rank in self._listener.ranks if rank.number >= 0}
        for (_, transport, _), group in self._groups.items():
            group.ranks = [ranks[number] for number in by_number if by_number[number] is group and number in ranks]
            if group.ranks:
                group.buffer = self._routes.part_buffer(transport, align(group.slot_bytes))
                self.staging_bytes += group.buffer.nbytes
        self._link([(ranks[number], division.needs[number].transport, by_number[number]) for number in sorted(ranks)])
        self._listener.gather([ranks[number] for number in own], wire.Accept)
        numbers = sorted(ranks, key=lambda number: turn(division.process, number, len(division.needs)))
        self._by_turn = [(ranks[number], by_number[number]) for number in numbers]

    def _link(self, ranks: Sequence[tuple[ConnectedRank, str, _Group]]) -> None:
        """Offer the buffers to ranks that other processes serve."""
        waiting = []
        for rank, transport, group in ranks:
            if group.is_first:
                continue
            assert group.buffer is not None
            description, _ = group.buffer.export()
            if transport == "nccl":
                self._routes.require_nccl(rank)
            if transport in COMMUNICATORS:
                joining.choose(rank, transport, self._routes.own_device)
                description = {**description, **rank.offered}
            rank.connection.send(wire.Link({**description, "timeout_s": self._timeout_s}), self._timeout_s)
            waiting.append(rank)
        early = joining.join_all(waiting, self._timeout_s, self._routes.own_device)
        late = [rank for rank in waiting if rank not in early]
        for rank, answer in [*early.items(), *self._listener.gather(late, wire.Answer, wire.Unopened)]:
            if isinstance(answer, wire.Unopened):
                raise UnsupportedError(
                    f"{rank.connection.peer} cannot receive from this process: {answer.reason}", device=rank.device
                )
            joining.require_joined(rank)

    def run(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send all buckets.

        Args:
            tensors: Those without a layout.

        Raises:
            WeightUpdateError: the source does not yield what it lists.
            RLMemoryError: a rank has failed, stalled, or is gone.
        """
        for number, entries in enumerate(self._buckets):
            slot = number % self._manifest.slots
            with timed(self._seconds, "wait"):
                await_slot(self._listener, slot)
            with timed(self._seconds, "pack"):
                self._pack(number, slot, entries, tensors)
                packed = {
                    group: self._packed(group, slot, group.parts[number].pieces)
                    for group in self._groups.values()
                    if group.ranks and group.parts[number].pieces
                }
            for rank, group in self._by_turn:  # first: the rank reads from no other process before
                rank.unacknowledged.append(slot)  # also of a bucket to which this process contributes nothing
                if group.is_first:
                    rank.connection.send(wire.Bucket(slot, group.parts[number].entries), self._timeout_s)
            with timed(self._seconds, "send"):
                outgoing = [Outgoing(rank, *packed[group]) for rank, group in self._by_turn if group in packed]
                send_buckets(outgoing, self._timeout_s)
        for extra, _ in tensors:
            raise WeightUpdateError(f"the source yielded {extra}, which its specs do not list", name=extra)
        with timed(self._seconds, "wait"):
            for slot in range(self._manifest.slots):
                await_slot(self._listener, slot)

    @staticmethod
    def _packed(group: _Group, slot: int, pieces: Sequence[Piece]) -> tuple[wire.Bucket, torch.Tensor]:
        """The message of what a group gets of a bucket, and the bytes that follow it."""
        packed = [piece.packed for piece in pieces]
        assert group.buffer is not None
        checksum = checksum_of(group.buffer.sent(slot, packed, b""), pieces)
        seal = os.urandom(SEAL_BYTES)
        data = group.buffer.sent(slot, packed, seal if group.ranks[0].communicator is not None else b"")
        return wire.Bucket(slot, packed, seal, checksum), data

    def _pack(
        self, number: int, slot: int, entries: Sequence[BucketEntry], tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        groups = [group for group in self._groups.values() if group.ranks]
        pieces: list[Mapping[int, Piece]] = [
            {one.packed.index: one for one in group.parts[number].pieces} for group in groups
        ]
        for entry in entries:
            spec, layout = self._manifest.tensors[entry.index], self._division.layouts.layout(entry.index)
            if layout is None and (self._held is None or self._held[0] != entry.index):
                self._held = None  # the source may make the next tensor in this one's memory
                self._held = entry.index, next_tensor(spec, tensors)
            for group, of_group in zip(groups, pieces, strict=True):
                piece = of_group.get(entry.index)
                if piece is None:
                    continue
                assert group.buffer is not None
                if layout is None:
                    assert self._held is not None
                    whole = self._held[1]
                    if entry.nbytes != spec.nbytes:
                        whole = whole.narrow(0, entry.start // spec.row_nbytes, entry.nbytes // spec.row_nbytes)
                    part = group.cut.part(entry, whole)
                else:
                    box = layout.box(self._division.process)
                    assert box is not None
                    part = group.pieces.cut_out(piece, box, self._own(entry.index, spec, box))
                    self.sent_bytes += piece.packed.nbytes * len(group.ranks)
                group.buffer.put(slot, piece.packed, spec, part)
            if layout is None and entry.start + entry.nbytes == spec.nbytes:
                self._held = None
        for group in groups:
            assert group.buffer is not None
            group.buffer.publish()

    def _own(self, index: int, spec: TensorSpec, box: Sequence[tuple[int, int]]) -> torch.Tensor:
        """What this process holds of a tensor."""
        if self._held is None or self._held[0] != index:
            self._held = None
            held = self._source.held(spec.name)
            shape = tuple(count for _, count in box)
            if tuple(held.shape) != shape or name_of(held.dtype) != spec.dtype:
                raise WeightUpdateError(
                    f"the source holds {held.dtype} {list(held.shape)} of {spec.name}, but should hold {spec.dtype} "
                    f"{list(shape)}",
                    name=spec.name,
                )
            self._held = index, held.resolve_neg()  # a lazy negation is not in the bytes
        return self._held[1]
