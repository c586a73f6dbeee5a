"""An engine that sleeps while nobody asks it, and wakes for a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest
from fake_control import FakeControl
from fastapi import FastAPI
from starlette.background import BackgroundTask
from starlette.responses import JSONResponse

from rl_memory_plugins.commands import AnyCommand, Sleep, Transition, WakeUp
from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.errors import (
    DeviceMemoryError,
    EngineAsleepError,
    HostMemoryError,
    StateConflictError,
    UnsupportedError,
)
from rl_memory_plugins.observing import Observer, tries_again
from rl_memory_plugins.records import EngineStatus, Reply
from rl_memory_plugins.server import idle
from rl_memory_plugins.server.attach import attach
from rl_memory_plugins.server.idle import IdleEngine


class Engine(FakeControl):
    """Sleeps for `idle_s` unless it is `elsewhere` in use."""

    def __init__(self, idle_sleep_s: float | None, wake_on_request_s: float | None, **options: Any) -> None:
        super().__init__()
        given = {"idle_sleep_s": idle_sleep_s, "wake_on_request_s": wake_on_request_s, **options}
        self.options = RLMemoryConfig.from_dict(given)
        self.elsewhere = False
        self.idle = False
        self.full = 0  # failures of the next wakes
        self.no_room = 0  # failures of the next sleeps
        self.failed_at: list[float] = []

    def status_now(self) -> list[EngineStatus]:
        [status] = super().status_now()
        return [EngineStatus(status.ranks, status.weight_version, idle=self.idle)]

    async def _call(self, command: AnyCommand) -> list[Reply[Any]]:
        if isinstance(command, Sleep) and command.idle_s is not None and self.elsewhere:
            raise StateConflictError("not idle")
        if isinstance(command, Sleep) and command.idle_s is not None and self.no_room:
            self.no_room -= 1
            self.failed_at.append(time.monotonic())
            raise HostMemoryError("no room for the backup")
        if isinstance(command, WakeUp) and self.full:
            self.full -= 1
            raise DeviceMemoryError("another process holds the memory")
        reply = await super()._call(command)
        self.idle = isinstance(command, Sleep) and command.idle_s is not None
        return reply

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


class Server:
    """An app with the control routes, in this event loop."""

    def __init__(self, engine: Engine) -> None:
        self.app = FastAPI()
        self.answering = asyncio.Event()
        self.answering.set()
        self.answered_while_asleep = False
        self.asked = 0

        self.leaving = asyncio.Event()
        self.leaving.set()

        @self.app.post("/generate")
        async def generate() -> JSONResponse:
            self.asked += 1
            await self.answering.wait()
            self.answered_while_asleep |= bool(engine.asleep)
            return JSONResponse("answer", background=BackgroundTask(self.leaving.wait))

        attach(self.app, lambda: engine, engine.status_now, keys=[], generation=["/generate"])
        transport = httpx.ASGITransport(self.app, client=("127.0.0.1", 1))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async def post(self, path: str = "/generate") -> httpx.Response:
        return await self.http.post(path)

    @asynccontextmanager
    async def running(self) -> Any:
        async with self.app.router.lifespan_context(self.app):
            yield self
        await self.http.aclose()


def served(engine: Engine, scenario: Callable[[Server], Any]) -> None:
    async def main() -> None:
        async with Server(engine).running() as server:
            await asyncio.wait_for(scenario(server), 30)

    asyncio.run(main())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_it_sleeps_and_a_request_wakes_it() -> None:
    engine = Engine(0.05, 20)

    async def scenario(server: Server) -> None:
        for cycle in range(1, 4):
            await until(lambda: engine.idle)
            answers = await asyncio.gather(*(server.post() for _ in range(5)))
            assert {answer.status_code for answer in answers} == {200}
            assert engine.names[: 2 * cycle] == ["sleep", "wake_up"] * cycle
        assert not server.answered_while_asleep

    served(engine, scenario)


def test_without_the_option_it_does_not_sleep() -> None:
    engine = Engine(None, 20)

    async def scenario(server: Server) -> None:
        await asyncio.sleep(0.3)
        assert (await server.post()).status_code == 200
        assert engine.names == []

    served(engine, scenario)


def test_work_of_the_server_after_an_answer_keeps_nobody_awake() -> None:
    engine = Engine(0.05, 20)

    async def scenario(server: Server) -> None:
        server.leaving.clear()
        asked = asyncio.ensure_future(server.post())
        await until(lambda: engine.idle and server.asked)
        assert not asked.done()
        server.leaving.set()
        assert (await asked).status_code == 200

    served(engine, scenario)


def test_a_request_keeps_it_awake_however_long_it_takes() -> None:
    engine = Engine(0.05, 20)

    async def scenario(server: Server) -> None:
        server.answering.clear()
        request = asyncio.ensure_future(server.post())
        await until(lambda: server.asked)
        before = engine.names
        await asyncio.sleep(0.4)
        assert engine.names == before
        server.answering.set()
        assert (await request).status_code == 200
        await until(lambda: engine.idle)

    served(engine, scenario)


def test_requests_that_this_server_does_not_see_keep_it_awake() -> None:
    engine = Engine(0.05, 20)
    engine.elsewhere = True

    async def scenario(server: Server) -> None:
        await asyncio.sleep(0.4)
        assert engine.names == []
        engine.elsewhere = False
        await until(lambda: engine.idle)

    served(engine, scenario)


def test_requests_during_the_sleep_wait_for_its_end_and_wake_it() -> None:
    engine = Engine(0.05, 20)

    async def scenario(server: Server) -> None:
        engine.may_finish = asyncio.Event()
        await until(lambda: engine.names == ["sleep"])
        requests = [asyncio.ensure_future(server.post()) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert not any(request.done() for request in requests)
        engine.may_finish.set()
        assert {(await request).status_code for request in requests} == {200}
        assert engine.names[:2] == ["sleep", "wake_up"]

    served(engine, scenario)


@pytest.mark.parametrize("by_hand", ["/sleep", "/sleep?level=2", "/sleep?level=0"])
def test_a_request_never_wakes_an_engine_that_a_caller_has_put_to_sleep(by_hand: str) -> None:
    engine = Engine(0.05, 20)

    async def scenario(server: Server) -> None:
        await until(lambda: engine.idle)
        assert (await server.post(by_hand)).status_code == 200
        before = engine.names
        if not by_hand.endswith("0"):
            assert (await server.post()).status_code == 503
        await asyncio.sleep(0.2)
        assert engine.names == before

    served(engine, scenario)


def test_without_wake_on_request_a_request_is_refused_at_once() -> None:
    engine = Engine(0.05, None)

    async def scenario(server: Server) -> None:
        await until(lambda: engine.idle)
        refused = await server.post()
        assert refused.status_code == 503
        assert refused.json()["error"]["details"]["reason"] == "asleep"
        while (await server.post()).status_code != 200:  # a slow machine may be idle again before the request
            assert (await server.post("/wake_up")).status_code == 200

    served(engine, scenario)


def test_a_wake_without_room_is_tried_again() -> None:
    engine = Engine(0.05, 20)
    engine.full = 2
    tried: list[bool] = []

    class Noting(Observer):
        def failed(self, command: Transition, error: Exception) -> None:
            tried.append(tries_again())

    engine.observer = Noting()

    async def scenario(server: Server) -> None:
        await until(lambda: engine.idle)
        assert (await server.post()).status_code == 200
        assert engine.full == 0
        assert tried == [True, True]
        engine.full = 1
        assert (await server.post("/sleep")).status_code == 200
        assert (await server.post("/wake_up")).status_code == 507
        assert tried == [True, True, False], "a caller's wake is not"

    served(engine, scenario)


def test_a_sleep_without_room_is_tried_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(idle, "LOOK_S", 0.1)
    engine = Engine(0.05, 20)
    engine.no_room = 4

    async def scenario(server: Server) -> None:
        await until(lambda: engine.idle)
        pauses = [after - before for before, after in pairwise(engine.failed_at)]
        assert all(pause >= least for pause, least in zip(pauses, (0.1, 0.2, 0.4), strict=True))

    served(engine, scenario)
    assert caplog.text.count("the engine could not fall asleep") == 4
    assert "Traceback" not in caplog.text


def test_a_sleep_that_failed_keeps_no_request_waiting() -> None:
    engine = Engine(0.05, 20)
    engine.no_room = 1

    async def scenario(server: Server) -> None:
        await until(lambda: engine.failed_at)
        assert (await server.post()).status_code == 200
        assert not engine.idle

    served(engine, scenario)


def test_a_request_waits_no_longer_than_the_option_says() -> None:
    engine = Engine(0.05, 0.3)
    engine.full = 10**6

    async def scenario(server: Server) -> None:
        await until(lambda: engine.idle)
        start = time.monotonic()
        assert (await server.post()).status_code == 503
        assert time.monotonic() - start >= 0.3

    served(engine, scenario)


def test_a_client_that_goes_away_does_not_stop_the_wake() -> None:
    engine = Engine(0.05, 20)

    async def scenario(server: Server) -> None:
        await until(lambda: engine.idle)
        engine.may_finish = asyncio.Event()
        gone, other = (asyncio.ensure_future(server.post()) for _ in range(2))
        await until(lambda: engine.names[-1] == "wake_up")
        gone.cancel()
        await asyncio.sleep(0.05)
        engine.may_finish.set()
        assert (await other).status_code == 200
        assert engine.names.count("wake_up") == 1

    served(engine, scenario)


def test_an_engine_that_starts_or_is_not_enabled() -> None:
    """The first is asked again; the second has nothing to be asked."""
    engine = Engine(0.05, 20)
    asked = []

    def starting() -> Engine:
        asked.append(1)
        if len(asked) == 1:
            raise EngineAsleepError("starting")
        raise UnsupportedError("not enabled")

    async def main() -> None:
        idle = IdleEngine(starting, list)
        assert await idle._look() == 1.0
        await asyncio.wait_for(idle._watch(), 20)

    asyncio.run(main())
    assert len(asked) == 2 and not engine.calls
