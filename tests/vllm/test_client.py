"""vLLM's own pause and resume of engines that step together, as one server's event loop orders them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rl_memory_plugins.engines.vllm import client


class Api(client.AsyncApi):
    """An API whose `number`th look at the status meets the begin of a pause."""

    def __init__(self, number: int, log: list[str]) -> None:
        self._pauses = set()
        self._number, self._log, self._looks = number, log, 0
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self, operation: Any) -> Any:
        return await operation

    async def status(self) -> list[Any]:
        self._looks += 1
        if self._looks == self._number:
            self._tasks.append(asyncio.create_task(self._pause()))
        await asyncio.sleep(0)  # as the call of an engine gives way to other tasks
        return [SimpleNamespace(capabilities=SimpleNamespace(steps_with_peers=True))]

    async def _pause(self) -> None:
        with self.pausing():
            self._log.append("pause begins")
            await asyncio.sleep(0.05)
            self._log.append("pause ends")


@pytest.mark.parametrize("number", [1, 2, 3])
def test_no_pause_is_under_way_when_a_resume_reaches_the_engines(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """An engine that meets a resume in the midst of a pause answers 500, and stays paused."""
    monkeypatch.setattr(client.admission, "first_refusal", lambda engines: None)
    log: list[str] = []

    async def resume(engine: Any) -> None:
        log.append("resume")

    async def main() -> None:
        engine = SimpleNamespace(rl_memory=Api(number, log))
        await client._native_resume(resume)(engine)
        await asyncio.sleep(0.1)

    asyncio.run(main())
    expected = ["pause begins", "pause ends", "resume"]
    assert log == (expected if number < 3 else ["resume"])
