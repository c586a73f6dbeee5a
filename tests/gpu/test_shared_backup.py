"""Two processes on one GPU with equal weights of 2 GiB keep one page-locked copy in host memory."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from processes import other_process

GiB = 1 << 30
SIZE = 2 * GiB
SLACK = 64 << 20  # what is no parameter

REPLICA = """
    import json, sys, time
    import torch
    from rl_memory_plugins.memory.allocator import Block
    from rl_memory_plugins.memory.cuda_vmm import CudaVmmAllocator
    from rl_memory_plugins.memory.manager import MemoryManager
    from rl_memory_plugins.memory.pinned import PinnedArena
    from rl_memory_plugins.memory.shared_buffers import SharedBuffers
    from rl_memory_plugins.tags import Level, Tag

    SIZE, SHARE, ORDER = {size}, {share}, {order}

    def content(seed, index):
        generator = torch.Generator(device="cuda").manual_seed(8 * seed + index)
        return torch.randint(0, 256, (SIZE // 4,), dtype=torch.uint8, device="cuda", generator=generator)

    vmm, arena = CudaVmmAllocator(0), PinnedArena(0, serves=True)
    if SHARE:
        arena.shared = SharedBuffers(arena)
    with vmm.region(Tag.WEIGHTS):
        made = {{index: torch.empty(SIZE // 4, dtype=torch.uint8, device="cuda") for index in ORDER}}
        scales = torch.full((1 << 20,), 3, dtype=torch.uint8, device="cuda")
    parameters = [made[index] for index in range(4)]
    blocks = [Block(parameter.data_ptr(), parameter.nbytes) for parameter in parameters]
    manager = MemoryManager(0, vmm, arena, lambda tag: blocks if tag is Tag.WEIGHTS else [], poison=True)

    def fill(seed):
        global now
        now = seed
        for index, parameter in enumerate(parameters):
            parameter.copy_(content(seed, index))
        torch.cuda.synchronize()

    def update(seed):
        manager.begin_writing()
        fill(seed)
        manager.finish_writing(complete=True)

    def prepared():
        for preparation in arena._preparations:
            preparation.join()

    def sleep():
        manager.prepare_sleep(Level.PRESERVE, [Tag.WEIGHTS])
        return sum(change.bytes_copied for change in manager.commit_sleep())

    def wake():
        manager.prepare_wake([Tag.WEIGHTS])
        manager.commit_wake()

    def right():
        equal = all(torch.equal(parameter, content(now, index)) for index, parameter in enumerate(parameters))
        return equal and int(scales.min()) == int(scales.max()) == 3

    def status():
        found = manager.status()
        return dict(own=found.host_arena_bytes, shared=found.host_shared, notes=found.notes, content=found.content)

    fill(1)
    print("ready", flush=True)
    for line in sys.stdin:
        begin = time.perf_counter()
        result = eval(line)
        print(json.dumps(dict(seconds=time.perf_counter() - begin, result=result)), flush=True)
"""


class Replica:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def call(self, expression: str) -> Any:
        self.begin(expression)
        return self.end()["result"]

    def seconds(self, expression: str) -> float:
        self.begin(expression)
        return self.end()["seconds"]

    def begin(self, expression: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(expression + "\n")
        self._process.stdin.flush()

    def end(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the replica has died"
        return json.loads(line)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def copy_pss(self) -> int:
        """The share of this process in the memory of shared copies, in bytes, as the kernel counts it."""
        total, inside = 0, False
        for line in Path(f"/proc/{self._process.pid}/smaps").read_text().splitlines():
            if "-" in line.split(maxsplit=1)[0]:
                inside = "rl-memory-copy" in line
            elif inside and line.startswith("Pss:"):
                total += int(line.split()[1]) << 10
        return total

    def pss(self) -> int:
        lines = Path(f"/proc/{self._process.pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


@contextmanager
def replicas(count: int, tmp_path: Path, share: bool = True) -> Iterator[list[Replica]]:
    with ExitStack() as stack:
        codes = [
            REPLICA.format(size=SIZE, share=share, order=[3, 0, 2, 1] if odd % 2 else [0, 1, 2, 3])
            for odd in range(count)
        ]
        yield [Replica(stack.enter_context(other_process(code, TMPDIR=str(tmp_path)))) for code in codes]


def together(pair: list[Replica], expression: str) -> list[float]:
    for each in pair:
        each.begin(expression)
    return [round(each.end()["seconds"], 4) for each in pair]


def cycle(pair: list[Replica], prepared: bool) -> dict[str, Any]:
    """Seconds of each replica's sleeps and wakes: one after the other, again, and at the same time with new weights."""
    if prepared:
        together(pair, "manager.warm_up()")
        together(pair, "prepared()")
    found: dict[str, Any] = {"pss_before": sum(each.pss() for each in pair)}
    found["first_sleep"] = [round(each.seconds("sleep()"), 4) for each in pair]
    found["host_bytes"] = sum(each.pss() for each in pair) - found["pss_before"]
    found["wake"] = [round(each.seconds("wake()"), 4) for each in pair]
    assert all(each.call("right()") for each in pair)
    found["clean_sleep"] = [round(each.seconds("sleep()"), 4) for each in pair]
    together(pair, "wake()")
    for seed in (2, 3):
        together(pair, f"update({seed})")
        found["sleep_together"] = together(pair, "sleep()")
        found["wake_together"] = together(pair, "wake()")
        assert all(each.call("right()") for each in pair)
    found["status"] = [each.call("status()") for each in pair]
    return found


@pytest.mark.parametrize("prepared", [False, True])
def test_equal_weights_take_one_copy(tmp_path, prepared):
    with replicas(2, tmp_path) as pair:
        shared = cycle(pair, prepared)
        pss = [each.copy_pss() for each in pair]
    with replicas(2, tmp_path, share=False) as pair:
        own = cycle(pair, prepared)
    print(json.dumps({"prepared": prepared, "bytes": SIZE, "copy_pss": pss, "shared": shared, "own": own}))
    names = [list(status["shared"]) for status in shared["status"]]
    assert names[0] == names[1] != []
    assert all(status["notes"] == [] for status in shared["status"]), "page-locked"
    assert sum(pss) <= 0.55 * 2 * SIZE
    assert all(status["own"] <= SLACK for status in shared["status"])


def test_unequal_weights_and_deaths(tmp_path):
    with replicas(3, tmp_path) as (first, second, third):
        second.call("update(2)")
        assert first.call("sleep()") >= SIZE
        assert second.call("sleep()") >= SIZE
        assert third.call("sleep()") <= SLACK
        first.kill()
        for each in (second, third):
            each.call("wake()")
            assert each.call("right()")
        third.call("update(2)")
        assert third.call("sleep()") <= SLACK
        second.kill()
        third.call("wake()")
        assert third.call("right()")
        assert third.call("status()")["content"] == "valid"


def test_all_is_given_back(tmp_path):
    with replicas(2, tmp_path) as pair:
        for each in pair:
            each.call("sleep()")
            each.call("wake()")
        for each in pair:
            each.call("manager.free_host_memory()")
        assert [each.copy_pss() for each in pair] == [0, 0]
        assert [each.call("status()")["shared"] for each in pair] == [{}, {}]
