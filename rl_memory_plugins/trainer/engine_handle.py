"""What the trainer's side asks of an engine, and an engine object that can do it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

from rl_memory_plugins.errors import InvalidRequestError, RLMemoryError
from rl_memory_plugins.memory.threads import on_this_gpu

T = TypeVar("T")


@runtime_checkable
class EngineHandle(Protocol):
    """`client.EngineClient` is one."""

    def sleep(self, level: Any = 1, tags: Any = None, mode: Any = "abort") -> Any: ...

    def wake_up(self, tags: Any = None) -> Any: ...

    def devices(self) -> list[str]:
        """The devices of all ranks, as a weight update addresses them."""

    def post_update(self, body: dict[str, Any]) -> Any:
        """Have the engine connect to senders that wait for it; blocks until the update is over."""


class EngineObject:
    """An engine in this process: vLLM's `LLM` or `AsyncLLM`, SGLang's `Engine`, with this package enabled.

    Args:
        engine: The object. Where its methods are coroutines they run on `loop`, which another thread must be
            running, as `AsyncRolloutHandoff` sees to.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.loop: asyncio.AbstractEventLoop | None = None

    def sleep(self, level: Any = 1, tags: Any = None, mode: Any = "abort") -> Any:
        return self._result(self._engine.sleep(level=level, tags=tags, mode=mode))

    def wake_up(self, tags: Any = None) -> Any:
        return self._result(self._engine.wake_up(tags=tags))

    def devices(self) -> list[str]:
        return [rank.device for engine in self._result(self._engine.memory_status()) for rank in engine.ranks]

    def post_update(self, body: dict[str, Any]) -> Any:
        return self._result(self._engine.update_weights_from_ipc(**body))

    def _result(self, result: Any) -> Any:
        if not inspect.isawaitable(result):
            return result
        if self.loop is None:
            if inspect.iscoroutine(result):
                result.close()
            raise InvalidRequestError("this engine's methods are coroutines: use AsyncRolloutHandoff")

        async def wait() -> Any:
            return await result

        return asyncio.run_coroutine_threadsafe(wait(), self.loop).result()


def as_engines(engines: Any) -> list[EngineHandle]:
    """One engine or several, each an `EngineHandle` or an engine's own object."""
    if not isinstance(engines, (list, tuple)):
        engines = [engines]
    return [engine if isinstance(engine, EngineHandle) else EngineObject(engine) for engine in engines]


def on_all(engines: Sequence[EngineHandle], call: Callable[[EngineHandle], T]) -> list[T]:
    """Call all engines at the same time; the results in their order.

    Raises:
        Exception: the first engine's that failed, once all have answered; `details["engine"]` is its number
            where there are several.
    """
    if len(engines) == 1:
        return [call(engines[0])]
    if not engines:
        return []
    with ThreadPoolExecutor(len(engines), "rl-memory-engine") as pool:
        calls = [pool.submit(on_this_gpu(partial(call, engine))) for engine in engines]
    for number, one in enumerate(calls):
        error = one.exception()
        if isinstance(error, RLMemoryError):
            error.details.setdefault("engine", number)
    return [one.result() for one in calls]
