"""One engine in a Ray actor.

Ray restarts an actor whose process has died, with the same arguments and in the same bundle. The restarted actor has no
engine: an engine takes device memory, which a trainer may have at that moment, and would serve the checkpoint's
weights, which the fleet has left behind. `start` makes the engine when the fleet asks for it.

The actor answers the control routes of the engine's server, without a server: the same router, the same answers, and
the same errors as over HTTP. `handle.EngineActorHandle` is the client.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from rl_memory_plugins.client import ROUTES
from rl_memory_plugins.errors import EngineFaultError, RLMemoryError, as_rl_memory_error
from rl_memory_plugins.ray.engines import Engine, Generated, engine_class
from rl_memory_plugins.tags import Level, Tag

LOOK_S = 1.0
"""Seconds between two looks for a dead process of an idle engine."""

logger = logging.getLogger(__name__)


class About(msgspec.Struct, frozen=True):
    """What an actor says of itself, whatever its engine does.

    Attributes:
        phase: `empty` without an engine; `starting`; `joining` if the engine has started and waits for the weights of
            the others; or `started`.
        node: The address of the actor's node.
        pid: The process of the actor.
    """

    phase: str
    node: str
    pid: int


class EngineActor:
    """The class of the actors. Results travel as builtins, and errors as records; no exception of ours is pickled.

    Args:
        engine: A key of `engines.ENGINES`.
        arguments: The arguments of the engine's own class.
        rl_memory: The options of this package, for the engine's argument `rl_memory`.
    """

    def __init__(self, engine: str, arguments: dict[str, Any], rl_memory: Any) -> None:
        self._make = lambda: engine_class(engine)(arguments, rl_memory)
        self._engine: Engine | None = None
        self._starting: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._joined = False
        self._ready = False  # the engine has started to the end
        self._loop: asyncio.AbstractEventLoop | None = None  # the engine's
        self._http = self._client()

    async def about(self) -> dict[str, Any]:
        """The record `About`."""
        import ray

        return msgspec.to_builtins(About(self._phase(), ray.util.get_node_ip_address(), os.getpid()))  # type: ignore[no-any-return]

    async def start(self, closed: bool) -> dict[str, Any]:
        """Start the engine, unless it has started. Other calls are answered meanwhile.

        Args:
            closed: Discard the weights, so that the engine admits nothing before a complete update. The actor is
                `joining` until `join`.
        """

        async def run() -> None:
            if self._starting is None and not (self._living() and self._ready):
                self._starting = asyncio.create_task(self._start(closed))
                self._starting.add_done_callback(self._has_started)
            if self._starting is not None:
                await asyncio.shield(self._starting)  # it goes on if the caller is cancelled

        return await _recorded(run)

    async def join(self) -> None:
        """The engine takes part in the fleet from now on."""
        self._joined = True

    async def leave(self) -> None:
        """The engine takes no part until it has the weights of the others."""
        self._joined = False

    async def call(self, method: str, route: str, body: bytes, trace: dict[str, str]) -> tuple[int, bytes] | None:
        """Call a control route. Returns the status and the body of the answer; `None` without an engine.

        Args:
            trace: The headers of `trace_context.outgoing`.
        """
        if self._living() is None:
            return None
        headers = {**trace, "Content-Type": "application/json"} if body else trace
        response = await self._http.request(method, route, content=body, headers=headers)
        self._living()
        return response.status_code, response.content

    async def generate(self, prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any] | None:
        """See `Engine.generate`. Returns `None` without an engine."""
        engine = self._living()
        if engine is None:
            return None

        async def run() -> Generated:
            # Ray runs each concurrency group in a thread and an event loop of its own.
            assert self._loop is not None
            return await asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(engine.generate(prompt, sampling), self._loop)
            )

        answer = await _recorded(run)
        self._living()
        return answer

    async def _start(self, closed: bool) -> None:
        """Start the engine. After a failure the next call goes on with the engine that has been made."""
        self._loop = asyncio.get_running_loop()
        engine = self._living()
        if engine is None:
            engine = self._engine = await asyncio.to_thread(self._make)  # takes long, and this loop answers meanwhile
            self._watch = asyncio.create_task(self._look())
        api = engine.api
        if api is None:
            raise EngineFaultError("the engine has started without rl_memory")
        await api.run(api.status())
        if closed:
            await api.run(api.sleep(Level.DISCARD, [Tag.WEIGHTS]))
            await api.run(api.wake_up([Tag.WEIGHTS]))
        self._joined, self._ready = not closed, True

    def _has_started(self, task: asyncio.Task[None]) -> None:
        self._starting = None
        if not task.cancelled():
            task.exception()  # nobody else may look

    def _phase(self) -> str:
        if self._living() is None:
            return "empty" if self._starting is None else "starting"
        return "started" if self._joined else "joining"

    def _living(self) -> Engine | None:
        """The engine, if there is one. Ends this process if the engine has died: Ray restarts the actor."""
        if self._engine is not None and not self._engine.lives():
            logger.error("a process of the engine has died: the actor ends")
            os._exit(1)  # an exit that Ray takes for a failure
        return self._engine

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._living()

    def _client(self) -> Any:
        """A client of the control routes in this process."""
        import httpx
        from fastapi import FastAPI

        from rl_memory_plugins.server.auth import ControlAuth
        from rl_memory_plugins.server.router import build_router

        app = FastAPI()
        app.include_router(build_router(self._api, ControlAuth(), prefixes=[ROUTES]))  # Ray has let the caller in
        transport = httpx.ASGITransport(app)
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None)

    def _api(self) -> Any:
        assert self._engine is not None
        return self._engine.api


async def _recorded(run: Callable[[], Awaitable[Any]]) -> dict[str, Any]:
    """The result under `answer`, or the record of the error under `error`."""
    try:
        return {"answer": msgspec.to_builtins(await run())}
    except Exception as error:
        if not isinstance(error, RLMemoryError):
            logger.exception("a call of the engine failed")
        return {"error": as_rl_memory_error(error).to_record()}
