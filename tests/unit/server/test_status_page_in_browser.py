"""The status page in a real browser, with a server that has no engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
from fake_control import FakeControl, rank_status
from fastapi import FastAPI

from integration.browser import Visit
from rl_memory_plugins import operations
from rl_memory_plugins.errors import DeviceMemoryError, StateConflictError
from rl_memory_plugins.observing import Course
from rl_memory_plugins.records import AdapterStatus, EngineStatus, Report, StepTime
from rl_memory_plugins.server.attach import attach
from rl_memory_plugins.tags import TagState
from tests.browser import shows, visit  # noqa: F401

KEY = "ключ-5"  # a header of a browser cannot hold these characters as they are
MARKUP = "<img src=x onerror=\"document.title='owned'\">"
MIB = 1 << 20


class Served:
    """A server in a thread. `control` may be replaced: the page then sees a server that has started again."""

    def __init__(self, control: FakeControl, *keys: str) -> None:
        self.control = control
        app = FastAPI()
        attach(app, lambda: self.control, lambda: self.control.status_now(), keys=keys, generation=())
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve()))
        self._thread.start()
        while not self._server.started:
            time.sleep(0.05)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        self.page = f"{self.url}/v1/rl_memory/ui"

    def post(self, route: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/rl_memory/{route}", json=body, trust_env=False)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture
def served(control: FakeControl) -> Iterator[Served]:
    served = Served(control)
    yield served
    served.stop()


@pytest.fixture
def with_key(control: FakeControl) -> Iterator[Served]:
    served = Served(control, KEY)
    yield served
    served.stop()


STORED = "[localStorage.length, sessionStorage.length, document.cookie, history.state, name]"


def test_the_key_stays_in_the_page(with_key: Served, visit: Visit) -> None:  # noqa: F811
    page = visit.page
    page.goto(with_key.page)
    field, button = page.get_by_role("textbox", name="Key"), page.get_by_role("button", name="Use this key")
    field.wait_for()
    assert page.locator("#problem").is_hidden() and page.locator("#data").is_hidden()
    field.fill("wrong")
    button.click()
    shows(visit, "problem", "does not accept this key")
    field.fill(KEY)
    button.click()
    shows(visit, "state", "admitted")
    assert page.locator("#key").is_hidden() and page.locator("#key").input_value() == ""
    assert page.evaluate(STORED) == [0, 0, "", None, ""]
    assert page.url == with_key.page and not [one for one in visit.asked if "5" in one.removeprefix(with_key.url)]
    shows(visit, "state", "admitted")
    for leave in (page.reload, page.get_by_role("button", name="Forget the key").click):
        leave()
        field.wait_for()
        assert page.locator("#state").inner_text() == ""
        field.fill(KEY)
        button.click()
        shows(visit, "state", "admitted")


def test_a_flood_of_refused_calls_is_one_row_that_counts(
    served: Served,
    control: FakeControl,
    visit: Visit,  # noqa: F811
) -> None:
    visit.page.goto(served.page)
    served.post("sleep")
    control.failure = StateConflictError("busy")
    for _ in range(3):
        assert served.post("wake_up").status_code == 409
    control.failure = None
    rows = visit.page.locator("#transitions tbody tr")
    shows(visit, "transitions", "3 calls", "StateConflictError")
    control.failure = StateConflictError("busy")
    served.post("wake_up")
    control.failure = None
    shows(visit, "transitions", "4 calls")
    assert rows.count() == 2


def test_steps_of_all_ranks_by_their_times(served: Served, control: FakeControl, visit: Visit) -> None:  # noqa: F811
    course = slept(1, control)
    at = course.start_ns
    ran = [
        ("backup", 0, 2_000_000, 5_000_000),
        ("backup", 1, 1_000_000, 4_000_000),
        ("release", 1, 3_000_000, 9_000_000),
    ]
    steps = [StepTime(name, rank, at + start, at + end, 0.001) for name, rank, start, end in ran]
    course.report = Report(changes=[], seconds={"total": 0.1}, steps=steps)
    control.recorder.note(course)
    visit.page.goto(served.page)
    shows(visit, "transitions", "backup 0.001 to 0.005 s", "release 0.003 to 0.009 s")


def test_what_is_left_and_whose_it_is(served: Served, control: FakeControl, visit: Visit) -> None:  # noqa: F811
    asleep = rank_status(weights=TagState.PRESERVED)
    held = dict(host_arena_bytes=3 * MIB, host_shared={"a": 5 * MIB}, left={"context": 7 * MIB, "nccl": MIB})
    control.engines = [
        EngineStatus(
            [msgspec.structs.replace(asleep, rank=rank, **held) for rank in range(2)], "v7", engine_rank=engine
        )
        for engine in range(2)
    ]
    visit.page.goto(served.page)
    shows(visit, "left", "context", "7 MiB", "nccl", "1 MiB", "8 MiB", "engine 1, rank 1")
    shows(visit, "tags", "preserved")
    shows(visit, "device-chart", "Left besides 32 MiB", "KV cache 16 KiB", "Weights 0 B")
    shows(visit, "host-chart", "Copies 12 MiB", "Shared copies 5 MiB")  # each shared copy counts once
    assert visit.complaints == []


def test_markup_is_a_text_wherever_the_engine_says_it(
    served: Served,
    control: FakeControl,
    visit: Visit,  # noqa: F811
) -> None:
    rank = msgspec.structs.replace(rank_status(), device=MARKUP, left={MARKUP: 1})
    adapter = AdapterStatus(MARKUP, MARKUP, 1, 5)
    control.engines = [EngineStatus([rank], MARKUP, adapters=(adapter,), busy=MARKUP)]
    visit.page.goto(served.page)
    shows(visit, "state", MARKUP)
    control.failure = DeviceMemoryError(MARKUP)
    served.post("wake_up")
    control.failure = None
    for where in ("tags", "left", "versions", "transitions"):
        shows(visit, where, MARKUP)
    shows(visit, "transitions", "DeviceMemoryError", "Free memory on the device")
    assert visit.page.title() == "Engine memory"
    assert visit.page.locator("img").count() == 0
    assert [said for said in visit.complaints if "500" not in said and "507" not in said] == []


def slept(level: int, control: FakeControl) -> Course:
    course = Course(operations.sleep(level))
    course.before = course.after = control.status_now()
    course.report = Report(changes=[], seconds={"total": 0.1})
    return course


def test_transitions_of_a_server_that_started_again(served: Served, visit: Visit) -> None:  # noqa: F811
    visit.page.goto(served.page)
    served.post("sleep")
    served.post("wake_up")
    rows = visit.page.locator("#transitions tbody tr")
    rows.nth(1).wait_for()
    control = FakeControl()  # its timeline counts from 1 again
    for level in (0, 1, 2):
        control.recorder.note(slept(level, control))
    served.control = control
    rows.nth(4).wait_for()
    assert [f"level {level}" in rows.nth(2 - level).inner_text() for level in (0, 1, 2)] == [True] * 3


def test_a_server_that_goes_away(control: FakeControl, visit: Visit) -> None:  # noqa: F811
    served = Served(control)
    visit.page.goto(served.page)
    shows(visit, "state", "admitted")
    served.stop()
    shows(visit, "problem", "The engine does not answer: no connection", "The last answer came at")
    assert visit.page.locator("#problem").get_attribute("role") == "alert"
    assert "old" in (visit.page.locator("#data").get_attribute("class") or "")
    shows(visit, "device-chart", "the engine did not answer")
