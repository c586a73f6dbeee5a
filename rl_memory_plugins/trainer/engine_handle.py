"""The interface through which a trainer calls an engine, and its implementation for an engine in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

from rl_memory_plugins import admission
from rl_memory_plugins.errors import InvalidRequestError, RLMemoryError, UnsupportedError
from rl_memory_plugins.memory.threads import in_parallel
from rl_memory_plugins.records import EngineStatus, weight_version
from rl_memory_plugins.tags import TagState

#: Posts the body of an update to an engine, and returns the answer.
Post = Callable[[dict[str, Any]], Any]


@runtime_checkable
class EngineHandle(Protocol):
    """The calls that a trainer makes to an engine. `client.EngineClient` and `EngineObject` implement them.

    A handle may have two more methods of theirs: `post_adapter` for adapters; and `weights_state`, without which errors
    do not tell the state of the engine.
    """

    def sleep(self, level: Any = 1, tags: Any = None, mode: Any = "abort", keep: Any = None) -> Any:
        """`keep` is left out where no weights are to be kept."""

    def wake_up(self, tags: Any = None) -> Any: ...

    def devices(self) -> list[str]:
        """The device names of all ranks, which a weight update uses as addresses."""

    def post_update(self, body: dict[str, Any]) -> Any:
        """Make the engine connect to the waiting senders. Blocks until the update is over."""


class EngineObject:
    """An engine in this process: vLLM's `LLM` or `AsyncLLM`, SGLang's `Engine`, with this package enabled.

    Args:
        engine: The engine. If its methods are coroutines, they run on the event loop `loop` in another thread;
            `AsyncRolloutHandoff` sets `loop`.

    Raises:
        InvalidRequestError: a call of a coroutine method while `loop` is not set.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.loop: asyncio.AbstractEventLoop | None = None

    def sleep(self, level: Any = 1, tags: Any = None, mode: Any = "abort", keep: Any = None) -> Any:
        given = {} if keep is None else {"keep": keep}
        return self._result(self._engine.sleep(level=level, tags=tags, mode=mode, **given))

    def wake_up(self, tags: Any = None) -> Any:
        return self._result(self._engine.wake_up(tags=tags))

    def devices(self) -> list[str]:
        return [rank.device for engine in self._result(self._engine.memory_status()) for rank in engine.ranks]

    def asleep_bytes(self, tag: str) -> list[tuple[str, int]]:
        """See `EngineClient.asleep_bytes`."""
        ranks = [rank for engine in self._result(self._engine.memory_status()) for rank in engine.ranks]
        tags = [(rank.device, rank.tags[tag]) for rank in ranks]
        return [(device, 0 if one.state is TagState.RESIDENT else one.bytes) for device, one in tags]

    def weights_state(self) -> dict[str, Any]:
        """See `EngineClient.weights_state`."""
        engines = self._result(self._engine.memory_status())
        refusal = admission.first_refusal(engines)
        return {
            "content": EngineStatus(ranks=[rank for engine in engines for rank in engine.ranks]).content.value,
            "weight_version": weight_version(engines),
            "admitting": refusal is None,
            "reason": None if refusal is None else refusal.details["reason"],
        }

    def post_update(self, body: dict[str, Any]) -> Any:
        return self._result(self._engine.update_weights_from_ipc(**body))

    def post_adapter(self, body: dict[str, Any]) -> Any:
        return self._result(self._engine.update_adapter_from_ipc(**body))

    def _result(self, result: Any) -> Any:
        if not asyncio.iscoroutine(result):
            return result
        if self.loop is None:
            result.close()
            raise InvalidRequestError("the methods of this engine are coroutines: use AsyncRolloutHandoff")
        return asyncio.run_coroutine_threadsafe(result, self.loop).result()


def as_engines(engines: Any) -> list[EngineHandle]:
    """Convert one engine or several to handles. Each is an `EngineHandle` or the engine's own Python object."""
    if not isinstance(engines, (list, tuple)):
        engines = [engines]
    return [engine if isinstance(engine, EngineHandle) else EngineObject(engine) for engine in engines]


def on_all(engines: Sequence[EngineHandle], call: Callable[[EngineHandle], object]) -> None:
    """Call all engines in parallel, and wait for all of them.

    Raises:
        Exception: the error of the first engine that failed. With several engines, `details["engine"]` is its index.
    """
    if len(engines) < 2:
        for engine in engines:
            call(engine)
        return

    def numbered(index: int, engine: EngineHandle) -> None:
        try:
            call(engine)
        except RLMemoryError as error:
            error.details.setdefault("engine", index)
            raise

    in_parallel([partial(numbered, index, engine) for index, engine in enumerate(engines)], "rl-memory-engine")


def post_update_of(engine: EngineHandle) -> Post:
    return engine.post_update


def post_adapter_of(engine: EngineHandle) -> Post:
    """`post_update` for a LoRA adapter: the method `post_adapter` of a handle, which not every handle has.

    Raises:
        UnsupportedError: this handle has none.
    """
    post = getattr(engine, "post_adapter", None)
    if post is None:
        raise UnsupportedError(f"{type(engine).__name__} has no method post_adapter, which sends adapters")
    return post  # type: ignore[no-any-return]
