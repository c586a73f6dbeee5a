"""The way from `POST /sleep` to the allocator: as few frames of ours as architecture.md says."""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from helpers import FakeRank, LocalRanks

import rl_memory_plugins
from rl_memory_plugins.board import StatusBoard
from rl_memory_plugins.commands import AnyCommand, decode_reply, encode_command
from rl_memory_plugins.controller import Controller
from rl_memory_plugins.engine_api import AsyncioApi
from rl_memory_plugins.records import Reply
from rl_memory_plugins.server.auth import ControlAuth
from rl_memory_plugins.server.router import build_router
from rl_memory_plugins.tags import PauseMode, Tag

PACKAGE = Path(rl_memory_plugins.__file__).parent
ARCHITECTURE = PACKAGE.parent / "docs" / "architecture.md"


class IdleEngine:
    def drain(self, mode: PauseMode, *, for_update: bool = False) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def resume(self, *, lift_pause: bool) -> None: ...

    def is_idle(self, seconds: float) -> bool:
        return True

    def has_requests(self) -> bool:
        return True

    def reset_caches(self, *, frozen: bool = False, released: bool = False) -> None: ...

    def adapters_in_use(self) -> set[int]:
        return set()

    def call_after_reply(self, act: Any) -> None: ...

    def show(self, asleep_tags: list[str], weight_version: str) -> None: ...


class ApiOf(AsyncioApi):
    """Of a controller in this process."""

    def __init__(self, controller: Controller) -> None:
        super().__init__(drain_timeout_s=60)
        self._controller = controller

    async def _call(self, command: AnyCommand) -> list[Reply[Any]]:
        return [decode_reply(self._controller.execute(encode_command(command)).result(timeout=0))]


def suspended(awaited: Any) -> Iterator[FrameType]:
    """The frames of a coroutine or a generator, and of all that it waits for."""
    while awaited is not None:
        generator = inspect.isgenerator(awaited)
        frame = getattr(awaited, "gi_frame" if generator else "cr_frame", None)
        if frame is None:
            return
        yield frame
        awaited = awaited.gi_yieldfrom if generator else awaited.cr_await


def live_frames() -> list[FrameType]:
    """Those of this stack and of all tasks, with those of the operation that a driver has suspended."""
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    for task in asyncio.all_tasks():
        if task is not asyncio.current_task():
            found.extend(suspended(task.get_coro()))
    for driver in [frame for frame in found if frame.f_code.co_name == "run_async"]:
        found.extend(suspended(driver.f_locals["operation"]))
    return list({id(frame): frame for frame in found}.values())


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`file:function` of each frame of ours that is live when the first tag is released."""
    rank, board = FakeRank(), StatusBoard()
    controller = Controller(LocalRanks([rank.agent]), IdleEngine(), board, update_timeout_s=1)
    api, ours, release = ApiOf(controller), [], rank.allocator.release

    def recording(tag: Tag) -> int:
        ours.append(
            [
                f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)}:{frame.f_code.co_name}"
                for frame in live_frames()
                if Path(frame.f_code.co_filename).is_relative_to(PACKAGE)
            ]
        )
        return release(tag)

    monkeypatch.setattr(rank.allocator, "release", recording)
    app = FastAPI()
    app.include_router(build_router(lambda: api, ControlAuth()))

    async def sleep() -> httpx.Response:
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/sleep?level=1")

    try:
        assert asyncio.run(sleep()).status_code == 200
    finally:
        board.close()
    return ours[0]


def test_the_frames_are_as_many_as_the_page_says(seen: list[str]) -> None:
    named = re.search(r"(\d+) Python frames of this package", ARCHITECTURE.read_text())
    assert named is not None
    assert len(seen) == int(named[1]), "\n".join(seen)


def test_each_part_of_the_way_is_there_once(seen: list[str]) -> None:
    """So none is counted that is not on the way, and none is missed."""
    parts = {"server/router.py:sleep", "engine_api.py:transition", "operations.py:transition", "controller.py:execute"}
    assert {part: seen.count(part) for part in parts} == dict.fromkeys(parts, 1)
    assert seen.count("memory/manager.py:commit_sleep") == 1
