"""One iteration over a source for several senders, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch

from rl_memory_plugins.errors import from_record
from rl_memory_plugins.memory.threads import await_that
from rl_memory_plugins.trainer.offloading import host_view
from rl_memory_plugins.trainer.once import Once
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.manifest import Mismatch, TensorSpec

Item = tuple[str, torch.Tensor]


class FanOut:
    """Gives each tensor of a source to all readers, and takes the next once no reader needs it any more.

    The source runs in the thread of its owner, with its collectives. A source whose tensors all exist is read by each
    reader at the reader's own pace.

    Args:
        source: The source. The owner lists it, revises it and iterates over it; readers get what the owner has found.

    Attributes:
        specs: What the source lists, as of the last `ask`.
        negotiable: Whether the source could change that.
        revised: Whether the last `revise` has changed it.
        stable, group_bytes, silent_s: What the source says of its tensors; see `weights.source`.
    """

    def __init__(self, source: Once) -> None:
        self._source = source
        self.specs: list[TensorSpec] = []
        self.negotiable = self.revised = False
        self.resident: list[torch.Tensor] | None = None
        self._names: list[str] = []  # those of `resident`, once the source has ended
        self.stable, self.group_bytes, self.silent_s = False, 0, 0.0
        self._changed = threading.Condition()
        self._readers: set[object] = set()
        self._reading: set[object] = set()  # those that still need `_item`
        self._item: Item | None = None
        self._stream: torch.cuda.Stream | None = None  # that of the item's GPU which is current for the source
        self._turn = 0  # counts the items
        self._is_over = False
        self._error: BaseException | None = None

    @property
    def gathered(self) -> int | None:
        """See `weights.source.ShardedSource`."""
        return self._source.gathered

    # -- the owner's thread -------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Ask the source what it will send."""
        self.specs = self._source.specs()
        self.negotiable = self._source.negotiable
        self.resident = self._source.resident()
        self.stable, self.group_bytes = self._source.stable, self._source.group_bytes
        self.silent_s = self._source.silent_s

    def revise(self, mismatches: Sequence[Mismatch]) -> bool:
        """Let the source change what it will send."""
        self.revised = self._source.revise(mismatches)
        if self.revised:
            self.ask()
        return self.revised

    def run(self, *, for_others: bool = False) -> None:
        """Iterate over the source to its end, or until all readers have left.

        Args:
            for_others: Go on when all readers have left: other processes gather with the source.

        Raises:
            Exception: the source failed. All readers get an error of the same type.
        """
        try:
            if self.resident is not None:
                self._names = [name for name, _ in self._source.tensors()]  # a subclass may list them in another order
            else:
                tensors = self._source.tensors()
                for item in tensors:
                    is_read = self._give(item)
                    del item  # the source may make the next tensor in this one's memory
                    if not (is_read or for_others):
                        break
        except BaseException as error:  # an interrupt too: the readers would wait for ever
            self.fail(error)
            raise
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _give(self, item: Item) -> bool:
        """Have all readers read a tensor. Returns whether any is left."""
        with self._changed:
            self._item = item
            self._stream = torch.cuda.current_stream(item[1].device) if item[1].is_cuda else None
            del item
            self._turn += 1
            self._reading = set(self._readers)
            self._changed.notify_all()
            await_that(lambda: not self._reading, self._changed)
            self._item = None
            return bool(self._readers)

    def fail(self, error: BaseException) -> None:
        """End the iteration of all readers with an error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def close(self) -> None:
        """Drop the tensors and the iteration."""
        self._source.close()
        self._item = self.resident = self._error = None

    # -- the readers' threads -----------------------------------------------------------------------------------

    def join(self, reader: object) -> None:
        """Add a reader, before `run`."""
        self._readers.add(reader)

    def leave(self, reader: object) -> None:
        """Wait for this reader no longer. May be called more than once."""
        with self._changed:
            self._readers.discard(reader)
            self._reading.discard(reader)
            self._changed.notify_all()

    def read(self, reader: object) -> Iterator[Item]:
        """The tensors for one reader. When it takes the next one, it has read the last.

        A reader copies a tensor on the stream that was current when the source gave it, as a lone sender does.

        Raises:
            RLMemoryError: the source failed.
        """
        resident = self.resident
        turn = 0
        try:
            while True:
                with self._changed:
                    if turn:  # the first tensor may lie here already, and this reader has not read it yet
                        self._reading.discard(reader)
                        self._changed.notify_all()
                    self._changed.wait_for(lambda turn=turn: self._turn > turn or self._is_over or self._error)  # type: ignore[misc]
                    if self._error is not None:  # a copy: an error has one traceback, and each reader is a thread
                        raise from_record(wire.as_update_error(self._error).to_record())
                    if self._turn == turn:
                        break
                    item, stream = self._item, self._stream
                    assert item is not None
                if stream is not None:
                    with torch.cuda.device(stream.device):  # `set_stream` alone would change the device, too
                        torch.cuda.set_stream(stream)
                turn += 1
                yield item
                del item
            if resident is not None:
                # each as it lies when its turn comes: it may have fallen asleep
                yield from zip(self._names, map(host_view, resident), strict=False)
        finally:
            self.leave(reader)


class Reader:
    """The source of one sender: see `weights.source`."""

    def __init__(self, fan: FanOut) -> None:
        self._fan = fan
        fan.join(self)

    @property
    def negotiable(self) -> bool:
        return self._fan.negotiable

    def specs(self) -> list[TensorSpec]:
        return self._fan.specs

    def revise(self, mismatches: Sequence[Mismatch]) -> bool:
        return self._fan.revised

    def resident(self) -> list[torch.Tensor] | None:
        return self._fan.resident

    @property
    def stable(self) -> bool:
        return self._fan.stable

    @property
    def group_bytes(self) -> int:
        return self._fan.group_bytes

    def tensors(self) -> Iterator[Item]:
        return self._fan.read(self)

    def leave(self) -> None:
        self._fan.leave(self)
