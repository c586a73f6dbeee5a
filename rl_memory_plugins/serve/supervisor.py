"""Starts the engines one after the other, and starts one that has ended again.

An engine that starts needs memory of its GPUs. Therefore the supervisor takes the engines' own turn (`server/lease.py`)
for each start: the engine that is awake gets its time, answers its requests and sleeps. The new engine finds the turn
taken and sleeps as soon as it has started. Requests of the others wait meanwhile, as for any turn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from rl_memory_plugins.server.lease import GpuLease

logger = logging.getLogger(__name__)

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 300.0
"""An engine starts again after a delay, which doubles with each end: each start takes a turn of the others."""

SAY_S = 60.0
"""An engine that waits for its turn says so at once, and then after each such time."""

FIRST_WAKES = 8
"""The first engine is woken at most so often. Then only a request wakes it."""

STEADY_S = 600.0
"""An engine that has run for so long starts again after the first delay."""

_TURN_S = 3600.0  # the lease gives up after a time; the supervisor does not


class Supervised(Protocol):
    """What of `ServedEngine` the supervisor uses."""

    name: str
    devices: set[str]

    @property
    def pid(self) -> int | None: ...

    @property
    def end(self) -> str: ...

    async def start(self, taken: Collection[str]) -> bool: ...

    async def warmed_up(self) -> None: ...

    async def ended(self) -> None: ...

    async def stop(self) -> None: ...

    def rests(self, delay_s: float, why: str = "") -> None: ...

    async def wake_up(self) -> str: ...


class Supervisor:
    """`async with`: the engines start in their order; at the end all of them have stopped.

    Once all have been started, the first engine is awake.
    """

    def __init__(self, engines: Sequence[Supervised]) -> None:
        self._engines = engines
        self._one_start = asyncio.Lock()  # the first to wait is the first to start
        self._tried = [asyncio.Event() for _ in engines]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Supervisor:
        kept = [self._keep(engine, tried) for engine, tried in zip(self._engines, self._tried, strict=True)]
        self._tasks = [asyncio.ensure_future(task) for task in (*kept, self._wake_first())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._stop(engine) for engine in self._engines))

    async def _stop(self, engine: Supervised) -> None:
        try:
            await engine.stop()
        except Exception:
            logger.exception("model %r: its engine could not be stopped", engine.name)

    async def _keep(self, engine: Supervised, tried: asyncio.Event) -> None:
        delay_s = FIRST_DELAY_S
        while True:
            why = ""
            try:
                if await self._one_life(engine, tried) >= STEADY_S:
                    delay_s = FIRST_DELAY_S
            except Exception as error:
                logger.exception("model %r: its engine cannot be watched, and is stopped", engine.name)
                await self._stop(engine)
                why = f"was stopped after {type(error).__name__}: {error}"
            tried.set()
            engine.rests(delay_s, why)
            logger.error(
                "model %r: its engine %s; it starts again in %g s, or later if it waits for its turn then",
                engine.name,
                engine.end,
                delay_s,
            )
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    async def _one_life(self, engine: Supervised, tried: asyncio.Event) -> float:
        """From a start to the end. Returns for how many seconds the engine has run."""
        async with self._one_start:
            async with self._turn(engine) as taken:
                logger.info("model %r: its engine starts", engine.name)
                has_started = await engine.start(taken)
            if has_started:
                await engine.warmed_up()
        tried.set()
        if not has_started:
            return 0.0
        began = time.monotonic()
        logger.info("model %r: its engine has started (process %s)", engine.name, engine.pid)
        await engine.ended()
        return time.monotonic() - began

    @asynccontextmanager
    async def _turn(self, engine: Supervised) -> AsyncIterator[set[str]]:
        """The body has the turn of the engine's GPUs; of all known ones, if the engine's are not known yet.

        Yields these GPUs.
        """
        devices = engine.devices or {device for other in self._engines for device in other.devices}
        if not devices:
            yield devices
            return
        lease = GpuLease(devices)
        try:
            if not lease.try_acquire():
                saying = asyncio.ensure_future(self._say_that_it_waits(engine, devices))
                try:
                    while not await lease.acquire(_TURN_S):
                        pass
                finally:
                    saying.cancel()
            yield devices
        finally:
            lease.close()

    async def _say_that_it_waits(self, engine: Supervised, devices: set[str]) -> None:
        others = [repr(other.name) for other in self._engines if other is not engine and other.devices & devices]
        whose = " or ".join([*others, "another process"])
        while True:
            logger.info("model %r: its engine waits for the turn of %s to end", engine.name, whose)
            await asyncio.sleep(SAY_S)

    async def _wake_first(self) -> None:
        for tried in self._tried:
            await tried.wait()
        first = self._engines[0]
        for count in range(FIRST_WAKES):
            why = await first.wake_up()
            if not why:
                return
            logger.warning("model %r: its engine could not wake: %s", first.name, why)
            await asyncio.sleep(FIRST_DELAY_S * 2**count)
