"""Engines that start one after the other, and again when they have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import until

from rl_memory_plugins import private_directory
from rl_memory_plugins.serve import supervisor
from rl_memory_plugins.serve.supervisor import Supervisor
from rl_memory_plugins.server.lease import GpuLease

Scenario = Callable[[], Coroutine[Any, Any, None]]


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(private_directory.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(supervisor, "FIRST_DELAY_S", 0.01)
    yield


class Engine:
    """An engine that starts and ends when a test says so."""

    def __init__(self, name: str, calls: list[str], device: str = "gpu") -> None:
        self.name = name
        self.devices: set[str] = set()
        self.pid = 1
        self.end = "ended"
        self.delays: list[float] = []
        self.may_start, self.dies = asyncio.Event(), asyncio.Event()
        self.fails = 0  # the next starts
        self.raises = 0  # the next starts
        self.wakes_that_fail = 0
        self.free_in_start: list[bool] = []
        self.free_in_warm_up: list[bool] = []
        self.taken: list[set[str]] = []
        self._calls, self._device = calls, device

    async def start(self, taken: Collection[str]) -> bool:
        self._calls.append(f"{self.name} starts")
        self.taken.append({*taken})
        self.free_in_start.append(is_free(self._device))
        await self.may_start.wait()
        if self.raises:
            self.raises -= 1
            raise ValueError("illegal environment variable name")
        if self.fails:
            self.fails -= 1
            return False
        self.devices = {self._device}
        self._calls.append(f"{self.name} has started")
        return True

    async def warmed_up(self) -> None:
        self.free_in_warm_up.append(is_free(self._device))

    async def ended(self) -> None:
        await self.dies.wait()
        self.dies.clear()

    async def stop(self) -> None:
        self._calls.append(f"{self.name} stops")

    def rests(self, delay_s: float, why: str = "") -> None:
        self.delays.append(delay_s)
        self.end = why or "ended"

    async def wake_up(self) -> str:
        if self.wakes_that_fail:
            self.wakes_that_fail -= 1
            return "409: no turn"
        self._calls.append(f"{self.name} wakes")
        return ""


def is_free(device: str) -> bool:
    lease = GpuLease([device])
    try:
        return lease.try_acquire()
    finally:
        lease.close()


def test_engines_start_one_after_the_other_and_the_first_is_awake_at_the_end() -> None:
    async def main() -> None:
        calls: list[str] = []
        engines = [Engine(name, calls) for name in "abc"]
        async with Supervisor(engines):
            for count, engine in enumerate(engines, 1):
                await until(lambda engine=engine: calls[-1:] == [f"{engine.name} starts"])
                await asyncio.sleep(0.05)
                assert calls[-1] == f"{engine.name} starts" and len(calls) == 2 * count - 1
                engine.may_start.set()
            await until(lambda: calls[-1] == "a wakes")
        assert calls[-3:] == ["a stops", "b stops", "c stops"]
        # The first has nobody to wait for. While the others start, the turn is theirs, and they end asleep.
        assert [engine.taken for engine in engines] == [[set()], [{"gpu"}], [{"gpu"}]]
        assert [engine.free_in_start for engine in engines] == [[True], [False], [False]]
        # A request of its own server gets a turn like any other.
        assert [engine.free_in_warm_up for engine in engines] == [[True]] * 3

    asyncio.run(main())


def test_a_start_waits_for_the_engine_that_has_the_turn() -> None:
    async def main() -> None:
        calls: list[str] = []
        first, second = (Engine(name, calls) for name in "ab")
        holds = GpuLease(["gpu"])
        assert await holds.acquire(1)
        async with Supervisor([first, second]):
            first.may_start.set()
            await until(lambda: holds.is_wanted())  # by which an engine sees that it should sleep
            assert "b starts" not in calls
            holds.release()
            await until(lambda: "b starts" in calls)
        holds.close()

    asyncio.run(main())


def test_an_engine_that_ends_starts_again_later_and_later_and_the_others_go_on() -> None:
    async def main() -> None:
        calls: list[str] = []
        first, second = (Engine(name, calls) for name in "ab")
        async with Supervisor([first, second]):
            first.may_start.set()
            second.may_start.set()
            await until(lambda: "b has started" in calls)
            for count in (2, 3):
                first.dies.set()
                await until(lambda count=count: calls.count("a has started") == count)
            first.fails = 2
            first.dies.set()
            await until(lambda: calls.count("a has started") == 4)
            assert first.delays == [0.01, 0.02, 0.04, 0.08, 0.16]
            assert calls.count("b starts") == 1 and second.delays == []
            assert set(first.free_in_start[1:]) == {False}  # each start has the turn

    asyncio.run(main())


def test_an_engine_that_ran_for_long_starts_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STEADY_S", 0.0)

    async def main() -> None:
        calls: list[str] = []
        engine = Engine("a", calls)
        engine.may_start.set()
        async with Supervisor([engine]):
            for count in (1, 2, 3):
                await until(lambda count=count: calls.count("a has started") == count)
                engine.dies.set()
            await until(lambda: len(engine.delays) == 3)
        assert engine.delays == [0.01, 0.01, 0.01]

    asyncio.run(main())


def test_the_delay_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LONGEST_DELAY_S", 0.03)

    async def main() -> None:
        engine = Engine("a", [])
        engine.may_start.set()
        engine.fails = 4
        async with Supervisor([engine]):
            await until(lambda: len(engine.delays) == 4)
        assert engine.delays == [0.01, 0.02, 0.03, 0.03]

    asyncio.run(main())


def test_engines_on_other_gpus_do_not_wait_for_each_other_when_they_start_again() -> None:
    async def main() -> None:
        calls: list[str] = []
        first, second = Engine("a", calls, "gpu0"), Engine("b", calls, "gpu1")
        async with Supervisor([first, second]):
            first.may_start.set()
            second.may_start.set()
            await until(lambda: "b has started" in calls)
            busy = GpuLease(["gpu1"])
            assert await busy.acquire(5)
            first.dies.set()
            await until(lambda: calls.count("a has started") == 2)
            busy.close()

    asyncio.run(main())


def test_an_error_of_a_start_is_logged_and_the_engine_starts_again(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        calls: list[str] = []
        first, second = (Engine(name, calls) for name in "ab")
        first.may_start.set()
        second.may_start.set()
        second.raises = 2
        async with Supervisor([first, second]):
            await until(lambda: "a wakes" in calls)  # it waits for a start of each, also for one that fails
            await until(lambda: "b has started" in calls)
        assert second.delays == [0.01, 0.02]
        assert calls.count("b stops") == 3

    asyncio.run(main())
    assert "Traceback" in caplog.text
    assert "model 'b': its engine was stopped after ValueError: illegal environment variable name" in caplog.text


def test_the_lease_itself_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [OSError("too many open files")]

    class Lease(GpuLease):
        def __init__(self, devices: Collection[str]) -> None:
            if left:
                raise left.pop()
            super().__init__(devices)

    async def main() -> None:
        calls: list[str] = []
        first, second = (Engine(name, calls) for name in "ab")
        first.may_start.set()
        second.may_start.set()
        monkeypatch.setattr(supervisor, "GpuLease", Lease)
        async with Supervisor([first, second]):
            await until(lambda: "b has started" in calls)

    asyncio.run(main())
    assert not left


def test_a_first_wake_that_fails_is_logged_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        calls: list[str] = []
        engine = Engine("a", calls)
        engine.may_start.set()
        engine.wakes_that_fail = 2
        async with Supervisor([engine]):
            await until(lambda: "a wakes" in calls)

    asyncio.run(main())
    assert caplog.text.count("model 'a': its engine could not wake: 409: no turn") == 2


def test_a_stop_that_fails_does_not_keep_the_others_from_theirs(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        calls: list[str] = []

        class Stuck(Engine):
            async def stop(self) -> None:
                raise PermissionError("not allowed")

        class Slow(Engine):
            async def stop(self) -> None:
                await asyncio.sleep(0.05)
                await super().stop()

        async with Supervisor([Stuck("a", calls), Slow("b", calls)]):
            pass
        assert calls[-1] == "b stops"

    asyncio.run(main())
    assert "model 'a': its engine could not be stopped" in caplog.text


def test_an_engine_that_waits_for_a_turn_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "SAY_S", 0.05)
    caplog.set_level("INFO")
    said = "model 'b': its engine waits for the turn of 'a' or another process to end"

    async def main() -> None:
        calls: list[str] = []
        first, second = (Engine(name, calls) for name in "ab")
        holds = GpuLease(["gpu"])
        assert await holds.acquire(1)
        async with Supervisor([first, second]):
            first.may_start.set()
            await until(lambda: caplog.text.count(said) >= 2)
            holds.release()
            await until(lambda: "b starts" in calls)
            count = caplog.text.count(said)
            await asyncio.sleep(0.2)
            assert caplog.text.count(said) == count
        holds.close()

    asyncio.run(main())
