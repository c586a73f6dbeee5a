"""A `RolloutHandoff` for an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from rl_memory_plugins.memory.threads import on_this_gpu
from rl_memory_plugins.trainer.engine_handle import EngineObject
from rl_memory_plugins.trainer.handoff import RolloutHandoff
from rl_memory_plugins.trainer.handoff_report import HandoffReport

T = TypeVar("T")


class AsyncRolloutHandoff:
    """`RolloutHandoff` for an event loop. Also works with engines whose methods are coroutines (`AsyncLLM`).

    `RolloutHandoff` documents the arguments and methods. The steps run in a thread. If a task is cancelled, its step
    runs to its end, and the next call waits for it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._handoff = RolloutHandoff(*args, **kwargs)

    @asynccontextmanager
    async def training(self, weight_version: str | None = None) -> AsyncIterator[HandoffReport]:
        report = await self.release()
        try:
            with report.noted("training"):
                yield report
        except BaseException as error:
            self._handoff._body_failed(error)
            raise
        await self._run(self._handoff._body_ended)
        await self.sync(weight_version, report)

    async def release(self) -> HandoffReport:
        return await self._run(self._handoff.release)

    async def sync(self, weight_version: str | None = None, report: HandoffReport | None = None) -> HandoffReport:
        return await self._run(lambda: self._handoff.sync(weight_version, report))

    async def _run(self, call: Callable[[], T]) -> T:
        for engine in self._handoff.engines:
            if isinstance(engine, EngineObject):
                engine.loop = asyncio.get_running_loop()
        return await asyncio.to_thread(on_this_gpu(call))
