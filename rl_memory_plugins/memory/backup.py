"""Backups: copies of device memory in host memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from rl_memory_plugins.errors import DeviceMemoryError
from rl_memory_plugins.memory.allocator import Block, Device
from rl_memory_plugins.memory.arena import STEP_BYTES, PagedArena
from rl_memory_plugins.memory.copies import bytes_of_pairs, copies_of, pairs_outside
from rl_memory_plugins.memory.preparation import SLEEP, Asked, Caller
from rl_memory_plugins.memory.ranges import subtract

#: Smaller unused parts are copied with their surroundings: skipping them takes more time.
MIN_LEFT_OUT = 1 << 20


class Backup:
    """A copy of device blocks in host memory.

    A backup stores the content epoch and the fingerprint of its source. It is clean, and needs no new copy, while both
    still match. The epoch reveals changes through this package; the fingerprint reveals changes by other code of the
    engine or the trainer.

    Args:
        identified: The part of the blocks that is fingerprinted. An engine may change the rest with every request;
            `begin_save` copies the rest again before a clean backup is used.
        caller: For whom host memory is made.

    Raises:
        HostMemoryError: too little host memory; see `PagedArena.acquire`.
        AllocationCancelled: by the caller.
    """

    is_shared = False

    def __init__(
        self,
        arena: PagedArena,
        blocks: Sequence[Block],
        identified: Sequence[Block] = (),
        caller: Caller = SLEEP,
    ) -> None:
        self.identified = list(identified)
        self._arena = arena
        self.blocks = list(blocks)
        self.nbytes = sum(block.nbytes for block in blocks)
        self.epoch = -1
        self._fingerprint: int | None = None
        self._left_out: list[Block] = []
        self._wait: Callable[[], None] | None = None  # waits for the running copy
        self._address = arena.acquire(self.nbytes, caller) if self.nbytes else 0
        self._copies = copies_of(self.blocks, self._address)

    def begin_save(
        self, device: Device, epoch: int, gone: Sequence[Block] = (), unused: Sequence[Block] = (), clean: bool = False
    ) -> int:
        """Start to copy the blocks to the host. They must not change until `finish` or `free`.

        Args:
            gone: Parts of the blocks that have been freed since the backup was made.
            unused: Parts of the blocks that need no copy; `begin_restore` skips them too.
            clean: The fingerprinted parts match their copy. Only the other parts are copied.

        Returns: the bytes to copy.
        """
        large = [block for block in unused if block.nbytes >= MIN_LEFT_OUT]
        self._left_out = subtract(large, self.identified)
        pairs = pairs_outside(self._copies, [*gone, *self._left_out, *(self.identified if clean else ())])
        if not clean:
            self._fingerprint = None
        if pairs:
            self._wait = device.begin_copy_to_host(pairs)
        if not clean:
            self.epoch = epoch
            if self.identified and not gone:
                self._fingerprint = self._identity(device)
        return bytes_of_pairs(pairs)

    def finish(self) -> None:
        """Wait for the running copy, if any. An interrupted wait can be made again."""
        if self._wait is not None:
            try:
                self._wait()
            except Exception:
                self._wait = None
                raise
            self._wait = None

    def save_in_steps(self, device: Device, epoch: int, go_on: Asked) -> bool:
        """Copy the blocks to the host while other code may write to them.

        Args:
            go_on: Called between steps; `False` cancels the copy.

        Returns: whether the copy is consistent, i.e. no write overlapped it. An inconsistent backup is never clean.
        """
        self._fingerprint, self._left_out = None, []
        before = self._identity(device)
        for block, address in pairs_outside(self._copies, ()):
            for start in range(0, block.nbytes, STEP_BYTES):
                if not go_on():
                    return False
                step = Block(block.address + start, min(STEP_BYTES, block.nbytes - start))
                device.begin_copy_to_host([(step, address + start)])()
        if not go_on() or before is None or self._identity(device) != before:
            return False
        self._fingerprint, self.epoch = before, epoch
        return True

    def begin_restore(self, device: Device, blocks: Sequence[Block]) -> int:
        """Start to copy the bytes in `blocks` back to the device. They must not be used until `finish` or `free`.

        Returns: the bytes to copy.
        """
        pairs = pairs_outside(self._copies, [*subtract(self.blocks, blocks), *self._left_out])
        if pairs:
            self._wait = device.begin_copy_from_host(pairs)
        return bytes_of_pairs(pairs)

    def arrived(self, device: Device, blocks: Sequence[Block]) -> bool:
        """Whether `begin_restore` has brought these blocks their own bytes. Only a shared copy needs the check."""
        return True

    def copies(self, part: Block) -> list[tuple[Block, int]]:
        """The parts of `part` that the backup holds, each with the address of its copy."""
        first = bisect_right(self._copies, part.address, key=lambda copy: copy[0].end)
        near = self._copies[first : bisect_left(self._copies, part.end, key=lambda copy: copy[0].address)]
        if not near:
            return []
        return pairs_outside(near, [*subtract([block for block, _ in near], [part]), *self._left_out])

    def forget(self, live: Sequence[Block]) -> None:
        """Hold nothing of blocks that have been freed: another tensor may lie there. `live`: the others."""
        self._left_out = [*self._left_out, *subtract(self.blocks, [*live, *self._left_out])]

    @property
    def fingerprint(self) -> int | None:
        """The fingerprint of `identified` in the copy; `None` if it is not known."""
        return self._fingerprint

    def is_clean(self, device: Device, blocks: Sequence[Block], epoch: int) -> bool:
        """Whether the backup matches the present content of these resident blocks, in all fingerprinted parts."""
        return (
            bool(self.identified)
            and self.epoch == epoch
            and self.blocks == list(blocks)
            and self._fingerprint is not None
            and self._fingerprint == self._identity(device)
        )

    def _identity(self, device: Device) -> int | None:
        """The fingerprint; None if the device lacks memory to compute it. Without a fingerprint no backup is clean."""
        try:
            return device.fingerprint(self.identified)
        except DeviceMemoryError:
            return None

    def free(self) -> None:
        try:
            self.finish()  # the memory must not be reused during a copy
        except Exception:
            self._release()
            raise
        self._release()  # not after an interrupt, which leaves the copy running: `free` can be called again

    def _release(self) -> None:
        address, self.nbytes, self._address = self._address, 0, 0
        if address:
            self._arena.release(address)
