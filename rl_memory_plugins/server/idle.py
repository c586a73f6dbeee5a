"""A server's engine that sleeps while nobody asks it or at the end of its turn, and wakes for a request.

The gate counts the requests of this server. The engine itself refuses to sleep if it had other requests: of another
server of the same engine, or of Python callers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any

from rl_memory_plugins import operations
from rl_memory_plugins.admission import first_refusal, is_sleeping, refusal
from rl_memory_plugins.errors import DeviceMemoryError, RLMemoryError, StateConflictError, UnsupportedError
from rl_memory_plugins.observing import trying_again
from rl_memory_plugins.records import EngineStatus
from rl_memory_plugins.server.turn import Turn
from rl_memory_plugins.tags import Tag

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""The longest time between two looks at an engine that starts, or that a caller has closed."""

LOOK_IN_TURN_S = 0.05
"""The time between two looks for others who wait for the GPUs."""

LONGEST_SLEEP_RETRY_S = 60.0
"""Between two tries to put an engine to sleep that cannot sleep: at first `LOOK_S`, then twice the time before."""

RETRY_S = 0.2
"""Between two tries to wake an engine, e.g. while another process still holds the memory."""

LONGEST_RETRY_S = 10.0
"""The same, after other failures. Each try is a failure in metrics, timeline and traces."""


class IdleEngine:
    """The idle time of one server, and the sleeps and wakes that follow from it and from the engine's turn.

    Args:
        engine: Returns the engine API. Raises while the engine is starting.
        status: Returns the status of the engines; must not block.
    """

    def __init__(self, engine: Callable[[], Any], status: Callable[[], Iterable[EngineStatus]]) -> None:
        self._engine = engine
        self._status = status
        self._waiting = 0  # requests that wait for the engine to open
        self._running = 0  # requests that the engine has
        self._called = 0  # wakes by callers
        self._retry_s = RETRY_S
        self._since = time.monotonic()  # of the idle time
        self._closing: asyncio.Future[None] | None = None  # done when the engine has fallen asleep, or has not
        self._waking: asyncio.Task[Any] | None = None
        self._turn: Turn | None = None
        self._sleep_retry_s = LOOK_S  # after a sleep that failed

    # -- for the gate and the routes ----------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[Callable[[], None]]:
        """The body is a request that the engine has: it does not fall asleep. Yields a function that ends this earlier:
        an app may do other work after the answer (SGLang waits for 2 s)."""
        self._running += 1
        runs = True

        def end() -> None:
            nonlocal runs
            if runs:
                runs = False
                self._running -= 1
                self._since = time.monotonic()

        try:
            yield end
        finally:
            end()

    async def opened(self) -> None:
        """Wake the engine for a request, if it sleeps because it was idle or for a turn of others, and wait for it.

        Returns when the engine admits requests, when it does not sleep for such a reason, or after `wake_on_request_s`.
        """
        api = self._api()
        wake_on_request_s = None if api is None or api.options is None else api.options.wake_on_request_s
        deadline = time.monotonic() + (wake_on_request_s or 0.0)
        self._waiting += 1
        try:
            while self._closing is not None or (wake_on_request_s is not None and _may_wake(self._status())):
                left = deadline - time.monotonic()
                if self._closing is not None:
                    await asyncio.wait([self._closing], timeout=None if wake_on_request_s is None else max(left, 0.0))
                elif left > 0:
                    if self._waking is None:
                        self._waking = asyncio.ensure_future(self._wake(api, left))
                        self._waking.add_done_callback(self._woken)
                    await asyncio.wait([self._waking], timeout=left)
                if wake_on_request_s is not None and left <= 0:
                    return
        finally:
            self._waiting -= 1

    @asynccontextmanager
    async def called(self) -> AsyncIterator[None]:
        """The body is a caller's wake. It begins with the turn of this engine, which does not end before the wake.

        Raises:
            StateConflictError: another engine keeps the GPUs busy for longer than `wake_on_request_s`.
        """
        api = self._api()
        turn = None if api is None else self._turn_of(api)
        self._called += 1
        try:
            if turn is not None and is_sleeping(self._status()) and not await turn.begin(api.options.wake_on_request_s):
                raise StateConflictError("another engine has the GPUs and is busy: try again later", reason="no_turn")
            yield
        finally:
            self._called -= 1

    # -- wakes ------------------------------------------------------------------------------------------------------

    async def _wake(self, api: Any, timeout_s: float) -> None:
        turn = self._turn_of(api)
        if turn is not None and not await turn.begin(timeout_s):
            return
        try:
            with trying_again():
                await api.run(api.wake_as_engine())
            if turn is not None:
                turn.count_from_now()
            self._retry_s = RETRY_S
        except RLMemoryError as error:
            logger.warning("the engine could not wake for a request: %s", error.message)
            await asyncio.sleep(self._retry_s)
            if not isinstance(error, DeviceMemoryError):  # which ends as soon as another process frees its memory
                self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)

    def _woken(self, done: asyncio.Task[Any]) -> None:
        self._waking = None
        if not done.cancelled() and done.exception() is not None:
            logger.error("the engine could not wake for a request", exc_info=done.exception())

    # -- sleeps -----------------------------------------------------------------------------------------------------

    def watching(
        self, lifespan: Callable[[Any], AbstractAsyncContextManager[Any]]
    ) -> Callable[[Any], AbstractAsyncContextManager[Any]]:
        """The lifespan of an app, during which the engine is watched."""

        @asynccontextmanager
        async def watched(app: Any) -> AsyncIterator[Any]:
            watch = asyncio.ensure_future(self._watch())
            try:
                async with lifespan(app) as state:
                    yield state
            finally:
                watch.cancel()
                await asyncio.wait([watch])
                if self._turn is not None:
                    self._turn.close()

        return watched

    async def _watch(self) -> None:
        while True:
            try:
                wait_s = await self._look()
            except UnsupportedError:  # the engine is not enabled
                return
            except Exception:
                logger.exception("the idle time of the engine is not known")
                wait_s = LOOK_S
            if wait_s is None:
                return
            await asyncio.sleep(wait_s)

    async def _look(self) -> float | None:
        """Put the engine to sleep if it is time. Returns the seconds until the next look; `None` if there is none."""
        try:
            api = self._engine()
        except UnsupportedError:
            raise
        except RLMemoryError:
            return LOOK_S
        options = api.options
        if options is None or (options.idle_sleep_s is None and options.take_turns_s is None):
            return None
        engines = list(self._status())
        turn = self._turn_of(api)
        longest: float = options.idle_sleep_s if options.take_turns_s is None else LOOK_IN_TURN_S
        if not engines or first_refusal(engines) is not None:
            self._since = time.monotonic()
            if turn is not None and self._waking is None and not self._called and _has_left(engines):
                turn.end()  # a caller has put the engine to sleep
            return min(LOOK_S, longest)
        if turn is not None and turn.is_over():
            await self._fall_asleep(api, 0.0)
        elif options.idle_sleep_s is not None and not self._running and not self._waiting:
            left: float = self._since + options.idle_sleep_s - time.monotonic()
            if left > 0:
                return min(left, longest)
            await self._fall_asleep(api, options.idle_sleep_s)
        return longest

    async def _fall_asleep(self, api: Any, idle_s: float) -> None:
        """Sleep once the running requests have ended. New requests wait meanwhile."""
        self._closing = asyncio.get_running_loop().create_future()
        try:
            while self._running:
                await asyncio.sleep(LOOK_IN_TURN_S)
            await api.run(api.transition(operations.sleep_if_idle(idle_s)))
            logger.info("the engine sleeps until the next request")
            if self._turn is not None:
                self._turn.end()
            self._sleep_retry_s = LOOK_S
            return
        except StateConflictError:  # requests that this server does not see; or a caller was faster
            return
        except RLMemoryError as error:  # e.g. no room for the backup
            logger.warning(
                "the engine could not fall asleep; the next try is in %g s: %s", self._sleep_retry_s, error.message
            )
        finally:
            self._closing.set_result(None)
            self._closing = None
            self._since = time.monotonic()
        until = time.monotonic() + self._sleep_retry_s
        self._sleep_retry_s = min(2 * self._sleep_retry_s, LONGEST_SLEEP_RETRY_S)
        while time.monotonic() < until and first_refusal(list(self._status())) is None:  # a caller may be faster
            await asyncio.sleep(LOOK_IN_TURN_S)

    # -- the engine -------------------------------------------------------------------------------------------------

    def _api(self) -> Any:
        """The engine API; `None` if there is no engine yet, or none that is enabled."""
        try:
            return self._engine()
        except RLMemoryError:
            return None

    def _turn_of(self, api: Any) -> Turn | None:
        """The turn; `None` for an engine that takes none, and before its status names its GPUs."""
        if self._turn is None and api.options is not None and api.options.take_turns_s is not None:
            devices = [rank.device for engine in self._status() for rank in engine.ranks]
            self._turn = Turn(devices, api.options.take_turns_s) if devices else None
        return self._turn


def _has_left(engines: Iterable[EngineStatus]) -> bool:
    """Whether no engine has weights or KV cache on its GPUs, and none is about to take them back."""
    wanted = {Tag.WEIGHTS.value, Tag.KV_CACHE.value}
    return all(not engine.busy and wanted <= {*engine.asleep_tags()} for engine in engines)


def _may_wake(engines: Iterable[EngineStatus]) -> bool:
    """Whether idle sleeps are the only reason why the engines admit no requests."""
    closed = [engine for engine in engines if refusal(engine) is not None]
    return bool(closed) and all(engine.idle for engine in closed)
