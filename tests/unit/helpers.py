"""What several unit tests share: an engine's ranks within one process, and managers over fake memory."""

from __future__ import annotations

import asyncio
import fnmatch
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rl_memory_plugins.capabilities import Capabilities
from rl_memory_plugins.commands import decode_reply
from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.fake import FakeAllocator, FakeDevice
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.rank import RankAgent, encode_call
from rl_memory_plugins.records import EngineStatus, Reply, TagChange
from rl_memory_plugins.tags import PUBLIC_TAGS, Level, Tag


class LocalRanks:
    """A `RankGroup` of agents in this process; calls and replies pass through their encodings."""

    def __init__(self, agents: list[RankAgent]) -> None:
        self.agents = agents

    def call(self, method: str, **arguments: Any) -> list[Reply[Any]]:
        return [decode_reply(agent.handle(encode_call(method, arguments))) for agent in self.agents]

    def status(self) -> EngineStatus:
        return EngineStatus(ranks=[agent.manager.status() for agent in self.agents])


class ScriptedReceiver:
    """A `WeightReceiver` that runs `script(manager)` as its update."""

    def __init__(self, manager: MemoryManager) -> None:
        self.manager = manager
        self.script: Callable[[MemoryManager], None] = MemoryManager.begin_writing
        self.declared = Capabilities()
        self.has_transformed = True  # the checksums are by the engine's names

    def receive(self, endpoints: dict[str, str], token: str, timeout_s: float) -> dict[str, Any]:
        self.script(self.manager)
        return {"bytes": 0, "seconds": {}}

    def checksums(self, *, by_engine_names: bool = False) -> dict[str, Any]:
        return {"layout": "engine" if by_engine_names or self.has_transformed else "checkpoint"}

    def identity(self) -> str:
        return f"{self.manager.device.fingerprint(list(self.manager._discardable(Tag.WEIGHTS))):032x}"

    def capabilities(self) -> Capabilities:
        return self.declared


class FakeNames:
    """A `NamedWeights` of two parameters: the halves of the memory that an update writes."""

    def __init__(self, parameter: Block) -> None:
        half = parameter.nbytes // 2
        self.blocks = {
            "model.frozen": Block(parameter.address, half),
            "model.trained": Block(parameter.address + half, half),
        }

    def chosen(self, globs: Sequence[str]) -> dict[str, Block]:
        names = {name for glob in globs for name in fnmatch.filter(self.blocks, glob)}
        return {name: self.blocks[name] for name in names}

    def unmatched(self, globs: Sequence[str]) -> dict[str, list[str]]:
        return {glob: list(self.blocks) for glob in globs if not fnmatch.filter(self.blocks, glob)}


class FakeRank:
    """One rank in fake memory: a parameter and a buffer, a KV cache and its scales, and a graph."""

    def __init__(self, rank: int = 0, capacity: int = 1 << 20, **options: Any) -> None:
        self.device = FakeDevice(f"fake:{rank}", capacity)
        self.allocator = FakeAllocator(self.device, maps_zeroed=options.pop("maps_zeroed", False))
        with self.allocator.region(Tag.WEIGHTS):
            self.parameter = self.allocator.allocate(8192)
            self.buffer = self.allocator.allocate(100)
        with self.allocator.region(Tag.KV_CACHE):
            self.kv_cache = self.allocator.allocate(16384)
            self.scales = self.allocator.allocate(64)
        with self.allocator.region(Tag.CUDA_GRAPH):
            self.graph = self.allocator.allocate(4096)
        self.arena = PagedArena(options.pop("arena_bytes", 0))
        self.manager = MemoryManager(rank, self.allocator, self.arena, self._discardable, **options)
        self.receiver = ScriptedReceiver(self.manager)
        self.names = FakeNames(self.parameter)
        self.agent = RankAgent(self.manager, self.receiver, self.names)  # type: ignore[arg-type]
        for index, block in enumerate(self._blocks().values()):
            self.allocator.write(block, bytes([index + 1 + 16 * rank]) * block.nbytes)

    def _discardable(self, tag: Tag) -> list[Block]:
        return {Tag.WEIGHTS: [self.parameter], Tag.KV_CACHE: [self.kv_cache]}.get(tag, [])

    def _blocks(self) -> dict[str, Block]:
        return {
            "parameter": self.parameter,
            "buffer": self.buffer,
            "kv_cache": self.kv_cache,
            "scales": self.scales,
            "graph": self.graph,
        }

    def contents(self) -> dict[str, bytes]:
        return {name: self.allocator.read(block) for name, block in self._blocks().items()}

    def mapped_bytes(self) -> int:
        """What the states say is mapped; `device.used` says what is."""
        return sum(tag.bytes for tag in self.manager.status().tags.values() if tag.state == "resident")


def sleep(
    rank: FakeRank, level: Level = Level.PRESERVE, tags: Sequence[Tag] = PUBLIC_TAGS, keep: Sequence[str] = ()
) -> dict[str, TagChange]:
    rank.manager.prepare_sleep(level, tags, rank.names.chosen(keep))
    changes = rank.manager.commit_sleep()
    rank.manager.check_integrity()
    return {change.tag: change for change in changes}


def wake(rank: FakeRank, tags: Sequence[Tag] = PUBLIC_TAGS) -> dict[str, TagChange]:
    rank.manager.prepare_wake(tags)
    changes = rank.manager.commit_wake()
    rank.manager.check_integrity()
    return {change.tag: change for change in changes}


def refuse_threads(monkeypatch: Any, first: int = 0, last: int | None = None) -> list[str]:
    """Let threads of the package start no more, from one number to another, until `monkeypatch` is undone.

    Returns: the names of those that were refused, so far.
    """
    start, names, refused = threading.Thread.start, [], []

    def start_or_not(thread: threading.Thread) -> None:
        if thread.name.startswith("rl-memory"):
            names.append(thread.name)
            if first < len(names) <= (last or len(names)):
                refused.append(thread.name)
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_not)
    return refused


@contextmanager
def no_collection() -> Iterator[None]:
    """Cycles stay."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def interrupts(begin: threading.Event, times: int = 1) -> Iterator[None]:
    """Real interrupts of the main thread, some 50 ms after the event has been set and then 50 ms apart."""

    def send() -> None:
        assert begin.wait(60)
        for _ in range(times):
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGUSR1)

    former = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    sending = threading.Thread(target=send)
    sending.start()
    try:
        yield
    finally:
        sending.join()
        signal.signal(signal.SIGUSR1, former)


class InterruptedLock:
    """A lock. The given wait for it, or end of its use, is interrupted; both are counted."""

    def __init__(self, lock: Any, at: int) -> None:
        self._lock, self._at, self._count = lock, at, 0
        self.interrupted = False

    def _step(self) -> None:
        self.interrupted |= self._count == self._at
        self._count += 1
        if self._count == self._at + 1:
            raise KeyboardInterrupt

    def __enter__(self) -> None:
        self._step()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._step()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition in an event loop. Raises `TimeoutError` after some 20 s."""
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise TimeoutError
