"""Several servers' engines on one GPU, of which at most one is awake."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from test_idle import Engine, Server, until

from rl_memory_plugins import private_directory
from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.server.idle import IdleEngine
from rl_memory_plugins.server.lease import GpuLease


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(private_directory.tempfile, "tempdir", str(tmp_path))
    yield tmp_path


def served(scenario: Callable[..., Any], *engines: Engine) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            servers = [await stack.enter_async_context(Server(engine).running()) for engine in engines]
            await until(lambda: sum(not engine.asleep for engine in engines) == 1)
            watching = asyncio.ensure_future(never_two_awake(engines))
            await asyncio.wait_for(scenario(*servers), 200)
            assert not watching.done(), watching.result()
            watching.cancel()

    asyncio.run(main())


async def never_two_awake(engines: tuple[Engine, ...]) -> str:
    while sum(not engine.asleep for engine in engines) < 2:
        await asyncio.sleep(0.002)
    return "two engines are awake at a time"


def an_engine(turn_s: float = 0.05, wait_s: float = 200) -> Engine:
    return Engine(None, wait_s, take_turns_s=turn_s)


def test_requests_at_any_moment_are_answered_and_one_engine_is_awake() -> None:
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)

    async def ask(server: Server) -> None:
        for _ in range(8):
            await asyncio.sleep(rng.uniform(0, 0.3))
            assert (await server.post()).status_code == 200, f"seed {seed}"

    async def scenario(*servers: Server) -> None:
        await asyncio.gather(*(ask(server) for server in servers for _ in range(2)))
        assert not any(server.answered_while_asleep for server in servers)

    served(scenario, *(an_engine() for _ in range(3)))


def test_a_running_request_ends_before_the_turn_does_and_later_ones_wait() -> None:
    first, second = an_engine(), an_engine()

    async def scenario(one: Server, other: Server) -> None:
        assert (await one.post()).status_code == 200
        one.answering.clear()
        running = asyncio.ensure_future(one.post())
        await asyncio.sleep(0.2)
        asking = asyncio.ensure_future(other.post())
        await asyncio.sleep(0.3)
        late = asyncio.ensure_future(one.post())
        await asyncio.sleep(0.1)
        assert not running.done() and not asking.done()
        one.answering.set()
        assert (await running).status_code == 200
        assert (await asking).status_code == 200
        assert (await late).status_code == 200

    served(scenario, first, second)


def test_an_engine_that_always_has_requests_does_not_keep_the_turn() -> None:
    first, second = an_engine(), an_engine()

    async def scenario(one: Server, other: Server) -> None:
        stop = False

        async def always() -> None:
            while not stop:
                assert (await one.post()).status_code == 200
                await asyncio.sleep(0)

        busy = [asyncio.ensure_future(always()) for _ in range(3)]
        for _ in range(3):
            assert (await other.post()).status_code == 200
        stop = True
        await asyncio.gather(*busy)

    served(scenario, first, second)


def test_a_turn_lasts_as_long_as_the_option_says() -> None:
    async def scenario(one: Server, other: Server) -> None:
        assert (await one.post()).status_code == 200
        assert (await other.post()).status_code == 200
        start = time.monotonic()
        assert (await one.post()).status_code == 200
        assert time.monotonic() - start > 1.0

    served(scenario, an_engine(2.0), an_engine(2.0))


def test_a_request_for_which_no_turn_comes_is_refused_and_so_is_a_wake() -> None:
    first, second = an_engine(), an_engine(wait_s=0.3)

    async def scenario(one: Server, other: Server) -> None:
        assert (await one.post()).status_code == 200
        one.answering.clear()
        running = asyncio.ensure_future(one.post())
        await until(lambda: one.asked == 2)
        assert (await other.post()).status_code == 503
        refused = await other.post("/wake_up")
        assert refused.status_code == 409 and refused.json()["error"]["details"] == {"reason": "no_turn"}
        one.answering.set()
        assert (await running).status_code == 200
        while (last := await other.post()).status_code == 503:  # until the turn comes within its wait
            pass
        assert last.status_code == 200

    served(scenario, first, second)


def test_a_caller_who_puts_the_engine_to_sleep_gives_its_turn_back() -> None:
    first, second = an_engine(100.0), an_engine(100.0)

    async def scenario(one: Server, other: Server) -> None:
        assert (await one.post("/wake_up")).status_code == 200
        assert (await one.post("/sleep")).status_code == 200
        assert (await other.post()).status_code == 200
        assert (await one.post()).status_code == 503
        assert (await other.post("/sleep")).status_code == 200
        assert (await one.post("/wake_up")).status_code == 200
        assert (await one.post()).status_code == 200

    served(scenario, first, second)


HOLDER = """
import asyncio, sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from rl_memory_plugins.server.lease import GpuLease
lease = GpuLease(["GPU-b", "GPU-a"])
assert asyncio.run(lease.acquire(20))
print("held", flush=True)
time.sleep(600)
"""


def test_a_lease_ends_with_its_process(folder: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        mine, other = GpuLease(["GPU-a"]), GpuLease(["GPU-c"])
        assert not mine.try_acquire()
        assert not asyncio.run(mine.acquire(0.1))
        assert other.try_acquire()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert asyncio.run(mine.acquire(20))
        mine.close()
        other.close()
    finally:
        holder.kill()
        holder.wait()


def test_who_waits_is_seen_and_comes_first() -> None:
    async def main() -> None:
        holder, waiting, late = (GpuLease(["GPU-a", "GPU-b"]) for _ in range(3))
        assert holder.try_acquire() and not holder.is_wanted()
        acquiring = asyncio.ensure_future(waiting.acquire(20))
        await until(holder.is_wanted)
        holder.release()
        assert not late.try_acquire() or waiting.held
        assert await acquiring and not waiting.is_wanted()
        for lease in (holder, waiting, late):
            lease.close()

    asyncio.run(main())


def test_turns_need_wakes() -> None:
    with pytest.raises(InvalidRequestError, match="take_turns_s: .*needs wake_on_request_s"):
        RLMemoryConfig.parse({"take_turns_s": 1})


def test_a_callers_wake_keeps_its_turn_until_it_has_ended(folder: Path) -> None:
    """Looks at the engine, which still sleeps, come between the turn's begin and the wake's."""
    engine = an_engine()

    async def main() -> None:
        async with Server(engine).running() as server:
            await server.post("/v1/rl_memory/sleep")
            idle = IdleEngine(lambda: engine, engine.status_now)
            other = GpuLease([rank.device for rank in engine.status_now()[0].ranks])
            await until(other.try_acquire)  # the server's engine has given up its turn
            other.release()
            async with idle.called():
                await idle._look()
                assert not other.try_acquire()
            await idle._look()
            assert other.try_acquire()
            other.close()

    asyncio.run(main())


def test_a_release_does_not_take_what_a_wait_already_has(folder: Path) -> None:
    async def main() -> None:
        first, second, third = GpuLease(["a", "b"]), GpuLease(["b"]), GpuLease(["a"])
        assert second.try_acquire()
        waiting = asyncio.ensure_future(first.acquire(10))  # has `a`, and waits for `b`
        await until(third.is_wanted)
        await asyncio.sleep(0.05)
        first.release()
        assert not await third.acquire(0.05)
        second.release()
        assert await waiting
        for lease in (first, second, third):
            lease.close()

    asyncio.run(main())


def test_the_files_of_a_lease_stay_young(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = GpuLease(["a"])
    files = list(folder.rglob("*.lock"))
    for file in files:
        os.utime(file, (0, 0))
    lease.is_wanted()
    assert all(file.stat().st_mtime == 0 for file in files), "not at each look"
    lease._touch_at = 0.0
    lease.is_wanted()
    assert files and all(file.stat().st_mtime > 0 for file in files)
    lease.close()
