"""The tensors of an update that arrives: what a relay passes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from rl_memory_plugins.errors import RLMemoryError, UnsupportedError, WeightUpdateError
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.buffers import AttachedBuffer, StreamedAttached, attach
from rl_memory_plugins.weights.entries import next_spec, tensor_of
from rl_memory_plugins.weights.manifest import Manifest, TensorSpec
from rl_memory_plugins.weights.slices import Slice


class Incoming:
    """The tensors of an update, as they arrive from the trainer: the source of the update of the relay's engines.

    Args:
        connection: To the trainer; this object owns it.
        device, token: How the relay shows that it is the one whom the trainer waits for.
        timeout_s: The longest silence of the trainer, in seconds.

    Attributes:
        manifest: What the trainer sends, after `open`.
        silent_s: See `weights.source`.
        trainer_s: The longest silence of the relay that the trainer bears, in seconds.
    """

    def __init__(self, connection: wire.Connection, device: str, token: str, timeout_s: float) -> None:
        self._connection = connection
        self._device = device
        self._token = token
        self._timeout_s = self.silent_s = timeout_s
        self._buffer: AttachedBuffer | None = None
        self._cuts = False
        self._bytes = 0
        self.manifest = Manifest([], 0, 0, False)
        self.trainer_s = timeout_s

    def open(self) -> None:
        """Receive the offer. The relay takes every manifest: its engines answer for theirs when the update begins."""
        self._connection.send(wire.Hello(wire.PROTOCOL, self._device, self._token, 0), self._timeout_s)
        while self._buffer is None:
            offer, fds = self._connection.receive_with_fds(wire.Offer, wire.Ask, timeout_s=self._timeout_s)
            try:
                if isinstance(offer, wire.Offer):
                    self._buffer = attach(offer.buffer, fds, device=self._device)
                    self._cuts = bool(offer.buffer.get("slices"))
                    self.manifest, self.trainer_s = offer.manifest, float(offer.buffer["timeout_s"])
                else:
                    self._connection.send(wire.Accept([]), self._timeout_s)
            except UnsupportedError as error:
                self._connection.send(wire.Unopened(str(error)), self._timeout_s)
            finally:
                wire.close_fds(fds)

    def specs(self) -> list[TensorSpec]:
        return self.manifest.tensors

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors. Ends after the trainer's commit, so the engines commit after the trainer.

        It begins when all engines that are left have accepted the manifest, and only then does the trainer begin.
        """
        assert self._buffer is not None
        whole: list[Slice | None] = [None] * len(self.manifest.tensors) if self._cuts else []
        self._connection.send(wire.Accept([], slices=whole), self._timeout_s)
        index = received = 0
        rows: torch.Tensor | None = None  # of a tensor that comes in several buckets
        while True:
            message = self._connection.receive(wire.Bucket, wire.Commit, timeout_s=self._timeout_s)
            if isinstance(message, wire.Commit):
                break
            assert isinstance(message, wire.Bucket)
            if not 0 <= message.slot < self.manifest.slots:
                raise WeightUpdateError(f"the trainer announced slot {message.slot}")
            if isinstance(self._buffer, StreamedAttached):
                self._buffer.receive(self._connection, message, self._timeout_s)
            for entry in message.entries:
                memory = self._buffer.memory(message.slot, entry)
                spec = next_spec(entry, (index, received), self.manifest, len(memory))
                part = tensor_of(memory, entry, spec)
                received += entry.nbytes
                self._bytes += entry.nbytes
                if entry.nbytes != spec.nbytes:
                    if rows is None:
                        rows = torch.empty(spec.shape, dtype=part.dtype, device="cpu")
                    rows.narrow(0, entry.start // spec.row_nbytes, len(part)).copy_(part)
                if received == spec.nbytes:
                    yield spec.name, part if rows is None else rows
                    index, received, rows = index + 1, 0, None
                del memory, part
            self._connection.send(wire.Ack(message.slot), self._timeout_s)
        if index != len(self.manifest.tensors):
            missing = [spec.name for spec in self.manifest.tensors[index:]]
            raise WeightUpdateError(f"the trainer committed without {missing[0]}", missing=missing)

    def done(self, report: dict[str, Any]) -> None:
        """Tell the trainer that the update is over. `report` is that of the engines' update."""
        assert self._buffer is not None
        found = {
            "rank": 0,
            "device": self._device,
            "bytes": self._bytes,
            "tensors": len(self.manifest.tensors),
            "partial": self.manifest.partial,
            "unused": report["unused"],
            "transport": self._buffer.transport,
            "seconds": {},
            "relayed": msgspec.to_builtins(report["receivers"], enc_hook=str),
        }
        self._connection.send(wire.Done(found), self._timeout_s)

    def fail(self, error: RLMemoryError) -> None:
        self._connection.fail(error)

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
        self._connection.close()
