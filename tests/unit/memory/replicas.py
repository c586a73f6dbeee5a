"""Processes that each hold one rank in fake memory, as data-parallel replicas do. A test can stop and kill them."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

from helpers import FakeRank, sleep, wake

from rl_memory_plugins.errors import RLMemoryError, from_record
from rl_memory_plugins.memory import pinned, shared_buffers
from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.pinned import PinnedArena
from rl_memory_plugins.memory.shared_buffer import SharedBuffer
from rl_memory_plugins.memory.shared_buffers import SharedBuffers
from rl_memory_plugins.tags import Level, Tag

ANSWER_S = 60.0
SIZE = 6 << 20
#: Where `stop_at` can stop a process that writes the copy, in this order.
PHASES = ("map", "copy", "check", "share", "after")


class UnlockedArena(PinnedArena):
    """The arena of a GPU host, without page-locking."""

    def _register(self, address: int, nbytes: int) -> int:
        return 0

    def _unregister(self, address: int) -> int:
        return 0


class ReplicaRank(FakeRank):
    """A rank with two large parameters and a buffer of its own.

    Args:
        seed: Of the parameters' bytes.
        own: The value of every byte that is no parameter, and the order of the allocations if it is odd.
        on_gpu: Host memory is made as on a GPU host, but not page-locked.
    """

    def __init__(self, seed: int, own: int = 0, on_gpu: bool = False, **options: Any) -> None:
        super().__init__(0, capacity=64 << 20, **options)
        if on_gpu:
            self.arena = self.manager.arena = UnlockedArena(0, threads=2)
        self.arena.shared = SharedBuffers(self.arena)
        sizes = [SIZE // 3, SIZE - SIZE // 3]
        order = [1, 0] if own % 2 else [0, 1]
        with self.allocator.region(Tag.WEIGHTS):
            made = {index: self.allocator.allocate(sizes[index]) for index in order}
        self.parameters = [made[0], made[1]]
        self.allocator.write(self.buffer, bytes([own]) * self.buffer.nbytes)
        self.fill(seed)

    def _discardable(self, tag: Tag) -> list[Block]:
        return self.parameters if tag is Tag.WEIGHTS else super()._discardable(tag)

    def fill(self, seed: int) -> None:
        source = random.Random(seed)
        for parameter in self.parameters:
            self.allocator.write(parameter, source.randbytes(parameter.nbytes))

    def weights(self) -> bytes:
        return b"".join(self.allocator.read(block) for block in [*self.parameters, self.parameter, self.buffer])


class Actions:
    """What a test asks a replica to do. Each method answers over a pipe."""

    def __init__(self, rank: ReplicaRank, reached: Any) -> None:
        self.rank = rank
        self._reached = reached

    def sleep(self, level: int = 1, keep: tuple[str, ...] = ()) -> int:
        """Returns the bytes that were copied of the weights."""
        return sleep(self.rank, Level(level), [Tag.WEIGHTS], keep)[Tag.WEIGHTS].bytes_copied

    def prepare(self) -> None:
        self.rank.manager.prepare_sleep(Level.PRESERVE, [Tag.WEIGHTS])

    def commit(self) -> int:
        [change] = self.rank.manager.commit_sleep()
        return change.bytes_copied

    def warm_up(self) -> None:
        self.rank.manager.warm_up()

    def await_preparation(self) -> None:
        for preparation in self.rank.arena._running():
            preparation.join(ANSWER_S)

    def abort(self) -> None:
        self.rank.manager.abort_sleep()

    def wake(self) -> bytes:
        """Returns the weights."""
        wake(self.rank, [Tag.WEIGHTS])
        return self.rank.weights()

    def weights(self) -> bytes:
        return self.rank.weights()

    def fill(self, seed: int) -> None:
        """Other code writes to the weights, and does not say so."""
        self.rank.fill(seed)

    def update(self, seed: int) -> None:
        self.rank.manager.begin_writing()
        self.rank.fill(seed)
        self.rank.manager.finish_writing(complete=True)

    def load(self, seed: int) -> None:
        """The engine's own load, which says so afterwards."""
        self.rank.fill(seed)
        self.rank.manager.note_foreign_load(complete=True)

    def status(self) -> dict[str, Any]:
        status = self.rank.manager.status()
        return {
            "shared": status.host_shared,
            "own": status.host_arena_bytes,
            "content": str(status.content),
            "state": str(status.tags[Tag.WEIGHTS].state),
            "notes": list(status.notes),
        }

    def free(self) -> None:
        self.rank.manager.free_host_memory()

    def bound(self, nbytes: int) -> None:
        self.rank.arena._max_bytes = nbytes

    def patience(self, seconds: float) -> None:
        shared_buffers.WAIT_S = seconds

    def deny(self) -> None:
        """The kernel shows no files of other processes, as a hardened host does."""

        def denied(path: Path) -> Path:
            raise PermissionError(13, "Permission denied", str(path))

        Path.readlink = denied

    def scribble(self) -> None:
        """Write to the mapped copy, which no code of the package does while the copy is in use."""
        faulthandler.disable()  # the test expects the fault
        ctypes.memset(self.rank.arena.shared._buffer.address, 0, 1)

    def fork(self) -> int:
        """A process that has all files open, and outlives this one."""
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        return child

    def stop_at(self, phase: str) -> None:
        """Make the next write of a copy stop for ever in one of its phases; see `Replica.wait_until_stopped`."""
        device = self.rank.device

        def stop(call: Any) -> Any:
            def stopped(*arguments: Any, **named: Any) -> Any:
                if phase == "after":
                    call(*arguments, **named)
                self._reached.send(phase)
                signal.pause()

            return stopped

        if phase == "pages":
            pinned.populate = stop(pinned.populate)
        elif phase == "map":
            PagedArena.map_file = stop(PagedArena.map_file)
        elif phase == "copy":
            device.begin_copy_to_host = stop(device.begin_copy_to_host)
        elif phase == "check":
            copy = device.begin_copy_to_host

            def copied(pairs: Any) -> Any:
                device.fingerprint = stop(device.fingerprint)
                return copy(pairs)

            device.begin_copy_to_host = copied
        else:
            SharedBuffer.share_lock = stop(SharedBuffer.share_lock)


class Replica:
    """A process with a `ReplicaRank`; the methods of `Actions` are called by `call`."""

    def __init__(self, seed: int, own: int = 0, **options: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, inside = context.Pipe()
        self._reached, reached = context.Pipe()
        self.process = context.Process(target=_serve, args=(inside, reached, seed, own, options), daemon=True)
        self.process.start()
        inside.close()
        reached.close()
        assert self._answer() is None

    def call(self, action: str, *arguments: Any) -> Any:
        self.begin(action, *arguments)
        return self._answer()

    def begin(self, action: str, *arguments: Any) -> None:
        """Call without waiting; `end` gives the answer."""
        self._pipe.send((action, arguments))

    def end(self) -> Any:
        return self._answer()

    def has_answered(self, within_s: float) -> bool:
        return self._pipe.poll(within_s)

    def wait_until_stopped(self) -> None:
        assert self._reached.poll(ANSWER_S), "the process did not reach the phase"
        self._reached.recv()

    def pause(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def kill(self) -> int:
        """Returns the exit code."""
        self.process.kill()
        self.process.join(ANSWER_S)
        return self.process.exitcode

    def died_of(self) -> int:
        """The number of the signal."""
        self.process.join(ANSWER_S)
        return -self.process.exitcode

    def open_copies(self) -> int:
        """How many shared buffers this process has open or mapped."""
        root = Path(f"/proc/{self.process.pid}")
        names = [str(link.readlink()) for link in (root / "fd").iterdir() if link.is_symlink()]
        return sum("rl-memory-copy" in name for name in [*names, *(root / "maps").read_text().splitlines()])

    def copy_pss(self) -> int:
        """The share of this process in the memory of the copies that it maps, in bytes, as the kernel counts it."""
        total, inside = 0, False
        for line in Path(f"/proc/{self.process.pid}/smaps").read_text().splitlines():
            if "-" in line.split(maxsplit=1)[0]:
                inside = "rl-memory-copy" in line
            elif inside and line.startswith("Pss:"):
                total += int(line.split()[1]) << 10
        return total

    def _answer(self) -> Any:
        assert self._pipe.poll(ANSWER_S), "the process does not answer"
        kind, value = self._pipe.recv()
        if kind == "error":
            raise from_record(value)
        return value


def _serve(pipe: Any, reached: Any, seed: int, own: int, options: dict[str, Any]) -> None:
    pinned.numa_node = lambda index: None
    actions = Actions(ReplicaRank(seed, own, **options), reached)
    pipe.send(("result", None))
    while True:
        try:
            action, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send(("result", getattr(actions, action)(*arguments)))
        except RLMemoryError as error:
            pipe.send(("error", error.to_record()))
        except BaseException as error:
            pipe.send(("error", {"error": "EngineFaultError", "message": repr(error)}))
