"""Times of the driver and the hardware for the parts of a sleep and a wake, without an engine: the bounds of bench_gpu.

    python -m integration.bench_driver --out results.json

An engine with a 7B model at 0.6 of an H200 holds about 15 GB of weights and 65 GB of KV cache. This script allocates
the same bytes, and copies, hashes, maps and unmaps them with the plugin's own functions. Each cycle leaves the driver
half a second to scrub freed memory.

    unmap_s, create_s, map_s          unmap 150 blocks of 512 MiB, create their physical memory again, and map it
    unmap_5_s, create_5_s, map_5_s    the same for the same bytes in 5 blocks
    reclaim_s                         make the driver reclaim scrubbed memory, 0.3 s after the unmapping
    create_reclaimed_s                create the memory of the 150 blocks after that
    copy_to_host_s                    copy the weights to page-locked host memory
    copy_and_unmap_s                  the same copy, while the KV cache is unmapped
    copy_hash_and_unmap_s             the same, while the weights are hashed too: a sleep at level 1 does this
    hash_s                            hash the weights by the Triton kernel
    hash_by_torch_s                   hash the weights by torch's operators
    step_s                            a step of 20 small kernels, with nothing beside it
    lock_s, longest_step_lock_s       allocate page-locked memory for the weights in the background, as an engine does
                                      it, and the longest of the steps that run meanwhile
    unlock_s, longest_step_unlock_s   give it back, likewise
    lock_whole_s, ...                 the same four, with all pages locked by one call, as a trainer does it
    lock_elsewhere_s, ...             the same four again, by another process, as a trainer beside an engine does it
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch

from integration.records import Records
from integration.subjects import add_commit, described
from rl_memory_plugins.memory import hash_kernel
from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.cuda_device import CudaDevice
from rl_memory_plugins.memory.cuda_driver import Driver
from rl_memory_plugins.memory.fingerprint import fingerprint
from rl_memory_plugins.memory.pinned import PinnedArena
from rl_memory_plugins.memory.reclaim import DELAY_S

MiB = 1 << 20
TOTAL = 150 * 512 * MiB
WEIGHTS = 30 * 512 * MiB
PAUSE_S = 0.5


class Bench:
    def __init__(self, records: Records) -> None:
        self._records = records
        self._driver = Driver(0)
        self._device = CudaDevice(0)
        self._counts = torch.zeros(MiB, device="cuda")

    def timed(self, metric: str, run: Callable[[], Any], nbytes: int = TOTAL) -> Any:
        self._device.synchronize()
        start = time.perf_counter()
        result = run()
        self._records.add(metric, [time.perf_counter() - start], "s", {"bytes": nbytes})
        return result

    def allocate(self, count: int) -> list[Block]:
        blocks = []
        for _ in range(count):
            address = self._driver.allocate(TOTAL // count)
            assert address is not None
            blocks.append(Block(address, TOTAL // count))
        return blocks

    def unmap(self, blocks: list[Block]) -> None:
        with self._driver.context():
            for block in blocks:
                self._driver.unmap(*block)

    def create(self, blocks: list[Block]) -> list[Any]:
        with self._driver.context():
            return [self._driver.create(block.nbytes) for block in blocks]

    def map(self, blocks: list[Block], handles: list[Any]) -> None:
        with self._driver.context():
            for block, handle in zip(blocks, handles, strict=True):
                self._driver.map(*block, handle)

    def cycle(self, blocks: list[Block], suffix: str) -> None:
        self.timed(f"unmap{suffix}_s", lambda: self.unmap(blocks))
        time.sleep(PAUSE_S)
        handles = self.timed(f"create{suffix}_s", lambda: self.create(blocks))
        self.timed(f"map{suffix}_s", lambda: self.map(blocks, handles))

    def reclaimed(self, blocks: list[Block]) -> None:
        self.unmap(blocks)
        time.sleep(DELAY_S)
        self.timed("reclaim_s", self._driver.reclaim)
        time.sleep(PAUSE_S - DELAY_S)
        self.map(blocks, self.timed("create_reclaimed_s", lambda: self.create(blocks)))

    def copies(self, blocks: list[Block], host: int) -> None:
        weights, cache = blocks[: len(blocks) * WEIGHTS // TOTAL], blocks[len(blocks) * WEIGHTS // TOTAL :]
        pairs = [(block, host + number * block.nbytes) for number, block in enumerate(weights)]
        self.timed("copy_to_host_s", lambda: self._device.begin_copy_to_host(pairs)(), WEIGHTS)

        def both(hashed: list[Block]) -> None:
            wait = self._device.begin_copy_to_host(pairs)
            self._device.fingerprint(hashed)
            self.unmap(cache)
            wait()

        for metric, hashed in (("copy_and_unmap_s", []), ("copy_hash_and_unmap_s", weights)):
            self.timed(metric, functools.partial(both, hashed))
            time.sleep(PAUSE_S)
            self.map(cache, self.create(cache))
        time.sleep(PAUSE_S)  # the GPU clears new memory, and kernels wait for that
        self.timed("hash_s", lambda: self._device.fingerprint(weights), WEIGHTS)
        self.timed("hash_by_torch_s", lambda: fingerprint([self._device.view(block) for block in weights]), WEIGHTS)

    def locks(self, *, serves: bool) -> None:
        """Lock and unlock host memory beside small kernels. `serves`: as an engine."""
        suffix = "" if serves else "_whole"
        arena = PinnedArena(0, serves=serves)
        preparation = arena.prepare([WEIGHTS])
        assert preparation is not None
        self._beside_steps(f"lock{suffix}", lambda: not preparation.is_alive())
        assert arena.held_bytes == WEIGHTS
        assert not arena.notes, arena.notes
        closing = threading.Thread(target=arena.close)
        closing.start()
        self._beside_steps(f"unlock{suffix}", lambda: not closing.is_alive())
        assert arena.held_bytes == 0
        assert not arena._kept, "host memory stays locked"

    def locks_elsewhere(self) -> None:
        context = multiprocessing.get_context("spawn")
        begun, locked, unlocked = (context.Event() for _ in range(3))
        process = context.Process(target=_lock, args=(begun, locked, unlocked))
        process.start()
        try:
            assert begun.wait(60)
            self._beside_steps("lock_elsewhere", lambda: locked.is_set() or not process.is_alive())
            self._beside_steps("unlock_elsewhere", lambda: unlocked.is_set() or not process.is_alive())
            process.join(60)
            assert process.exitcode == 0, f"the other process ended with {process.exitcode}"
        finally:
            process.kill()

    def _beside_steps(self, name: str, is_over: Callable[[], bool]) -> None:
        start = time.perf_counter()
        longest = 0.0
        while not is_over():
            longest = max(longest, self._step())
        self._records.add(f"{name}_s", [time.perf_counter() - start], "s", {"bytes": WEIGHTS})
        self._records.add(f"longest_step_{name}_s", [longest], "s")

    def steps(self) -> None:
        for _ in range(100):
            self._step()  # the first load the kernel
        self._records.add("step_s", [self._step() for _ in range(1000)], "s")

    def _step(self) -> float:
        start = time.perf_counter()
        for _ in range(20):
            self._counts.add_(1)
        self._counts.sum().item()  # with a copy to the host
        return time.perf_counter() - start

    def free(self, blocks: list[Block]) -> None:
        self.unmap(blocks)
        for block in blocks:
            self._driver.free_address(*block)


def _lock(begun: Event, locked: Event, unlocked: Event) -> None:
    """The other process."""
    torch.zeros(1, device="cuda")  # as a trainer, it has a context
    arena = PinnedArena(0)
    begun.set()
    preparation = arena.prepare([WEIGHTS])
    assert preparation is not None
    preparation.join()
    assert arena.held_bytes == WEIGHTS
    locked.set()
    arena.close()
    unlocked.set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=5, help="repetitions of each measurement")
    add_commit(parser)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the records")
    arguments = parser.parse_args()
    words = ["--cycles", str(arguments.cycles), "--out", "results.json"]
    common = described("bench_driver", "none", "driver", "plugin", arguments.commit, words=words)
    assert hash_kernel.usable(torch.device("cuda", 0))  # compiles the kernel
    bench = Bench(Records(arguments.out, common))
    bench.steps()
    for _ in range(arguments.cycles):
        for serves in (True, False):
            bench.locks(serves=serves)
        bench.locks_elsewhere()
    arena = PinnedArena(0, serves=True)
    host = arena.acquire(WEIGHTS)
    for count, suffix in ((5, "_5"), (150, "")):
        blocks = bench.allocate(count)
        for _ in range(arguments.cycles):
            bench.cycle(blocks, suffix)
        if count == 150:
            for _ in range(arguments.cycles):
                bench.reclaimed(blocks)
            for _ in range(arguments.cycles):
                bench.copies(blocks, host)
        bench.free(blocks)
    arena.close()


if __name__ == "__main__":
    main()
