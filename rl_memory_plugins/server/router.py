"""The control routes, the same for both engines.

Every route answers JSON, also on errors (`responses.error_body`), whatever exception handlers the app has. `openapi.py`
describes the routes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from fastapi import APIRouter, Request, Response

from rl_memory_plugins import operations
from rl_memory_plugins.adapters import version_in
from rl_memory_plugins.admission import first_refusal, is_sleeping
from rl_memory_plugins.engine_api import AsyncioApi
from rl_memory_plugins.errors import RLMemoryError, as_rl_memory_error
from rl_memory_plugins.records import EngineStatus
from rl_memory_plugins.records import weight_version as version_of
from rl_memory_plugins.server.answers import (
    AdapterRemoved,
    AdapterUpdated,
    Installation,
    Memory,
    Sleeping,
    Slept,
    Updated,
    Version,
    Woken,
)
from rl_memory_plugins.server.auth import ControlAuth
from rl_memory_plugins.server.installation import installation
from rl_memory_plugins.server.parameters import read_arguments, read_body, read_since, reject_unknown
from rl_memory_plugins.server.responses import error_response, json_response
from rl_memory_plugins.tags import Content
from rl_memory_plugins.trace_context import continued

logger = logging.getLogger(__name__)

PREFIXES = ("", "/v1/rl_memory")
UPDATE_ROUTE = "/update_weights_from_ipc"

Handler = Callable[[Request], Awaitable[Any]]
NativeUpdate = Callable[[dict[str, Any]], "Response | None"]


def build_router(
    engine: Callable[[], AsyncioApi],
    auth: ControlAuth,
    *,
    prefixes: Sequence[str] = PREFIXES,
    native_update: NativeUpdate | None = None,
    waking: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    on_error: Callable[[RLMemoryError], None] = lambda error: None,
) -> APIRouter:
    """The routes under each of `prefixes`.

    A transition that has begun runs to its end even if its client goes away.

    Args:
        engine: Returns the engine API, Raises while the engine is starting.
        auth: The check of the caller.
        native_update: The engine's own route with the path `UPDATE_ROUTE`: returns its answer, or `None` for a body
            that is not meant for it.
        waking: Gives the context of a caller's wake.
        on_error: Called with each error that a route answers.
    """

    async def sleep(request: Request) -> Slept:
        command = operations.sleep(**await read_arguments(request, {"level", "tags", "mode", "keep"}))
        api = engine()
        return Slept("sleeping", command.level, command.tags, await api.run(api.transition(command)))

    async def wake_up(request: Request, as_engine: bool = False) -> Woken:
        given = await read_arguments(request, {"tags"})
        api = engine()
        async with waking():
            report = await api.run(api.wake_as_engine(**given) if as_engine else api.wake_up(**given))
        return Woken("sleeping" if is_sleeping(await status()) else "awake", given.get("tags"), report)

    async def update_weights(request: Request, native: NativeUpdate | None = None) -> Updated | Response:
        given = await read_body(request)
        answer = native(given) if native is not None else None
        if answer is not None:
            return answer
        reject_unknown(request.query_params.keys(), ())  # a token has no place in a URL
        reject_unknown(given, {"endpoints", "token", "weight_version", "mode", "timeout_s", "base_version"})
        command = operations.update_weights(**given)
        api = engine()
        report = await api.run(api.transition(command))
        return Updated("updated", *_version(await status()), report)

    async def update_from_checkpoint(request: Request) -> Updated:
        given = await read_body(request)
        reject_unknown(request.query_params.keys(), ())
        reject_unknown(given, {"path", "partial", "weight_version", "mode", "timeout_s", "base_version"})
        api = engine()
        report = await api.run(api.update_weights_from_checkpoint(given.pop("path", None), **given))
        return Updated("updated", *_version(await status()), report)

    async def update_adapter(request: Request) -> AdapterUpdated:
        given = await read_body(request)
        reject_unknown(request.query_params.keys(), ())
        reject_unknown(given, {"name", "config", "endpoints", "token", "adapter_version", "timeout_s", "base_version"})
        command = operations.update_adapter(**given)
        api = engine()
        report = await api.run(api.transition(command))
        return AdapterUpdated("updated", command.adapter, version_in(report), report)

    async def remove_adapter(request: Request) -> AdapterRemoved:
        command = operations.remove_adapter(**await read_arguments(request, {"name"}))
        api = engine()
        report = await api.run(api.transition(command))
        return AdapterRemoved("removed", command.adapter, version_in(report), report)

    async def sleeping(request: Request) -> Sleeping:
        return Sleeping(is_sleeping(await status()))

    async def memory(request: Request) -> Memory:
        engines = await status()
        refusal = first_refusal(engines)
        reason = None if refusal is None else refusal.details["reason"]
        version, content = _version(engines)
        return Memory(refusal is None, reason, is_sleeping(engines), version, content, engines)

    async def timeline(request: Request) -> Response:
        since = read_since(request)
        api = engine()
        return Response(api.recorder.answer(since, api.status_at_scrape()), media_type="application/json")

    async def weight_version(request: Request) -> Version:
        return Version(*_version(await status()))

    async def installed(request: Request) -> Installation:
        await status()  # the first one of a server finds the boards
        return installation(engine().boards(), has_key=auth.has_key)

    async def checksums(request: Request) -> Any:
        api = engine()
        return await api.run(api.weight_checksums())

    async def status() -> list[EngineStatus]:
        api = engine()
        engines: list[EngineStatus] = await api.run(api.status())
        return engines

    router = APIRouter()
    for prefix in prefixes:
        # At the root are the engine's own routes of these names.
        update = update_weights if prefix else functools.partial(update_weights, native=native_update)
        wake = wake_up if prefix else functools.partial(wake_up, as_engine=True)
        routes: list[tuple[str, str, Handler]] = [
            ("POST", "/sleep", sleep),
            ("POST", "/wake_up", wake),
            ("GET", "/is_sleeping", sleeping),
            ("GET", "/memory", memory),
            ("POST", UPDATE_ROUTE, update),
            ("POST", "/update_weights_from_checkpoint", update_from_checkpoint),
            ("POST", "/update_adapter", update_adapter),
            ("POST", "/remove_adapter", remove_adapter),
            ("GET", "/weight_version", weight_version),
            ("GET", "/installation", installed),
            ("GET", "/timeline", timeline),
            ("GET", "/weights/checksums", checksums),
        ]
        for method, path, handler in routes:  # described by `openapi.py`, not by FastAPI
            endpoint = answering(handler, auth, on_error)
            router.add_api_route(
                prefix + path, endpoint, methods=[method], response_model=None, include_in_schema=False
            )
    return router


def answering(
    handler: Handler, auth: ControlAuth, on_error: Callable[[RLMemoryError], None] = lambda error: None
) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint that checks the caller first, continues its trace, and turns results and errors into responses."""

    async def endpoint(request: Request) -> Response:
        try:
            auth.check(request)
            with continued(request.headers):
                answer = await handler(request)
            return answer if isinstance(answer, Response) else json_response(answer)
        except Exception as error:
            if not isinstance(error, RLMemoryError):
                logger.exception("%s %s failed", request.method, request.url.path)
            answered = as_rl_memory_error(error)
            on_error(answered)
            return error_response(answered)

    return endpoint


def _version(engines: list[EngineStatus]) -> tuple[str, Content]:
    """The weight version of all engines, and their worst content."""
    return version_of(engines), EngineStatus(ranks=[rank for engine in engines for rank in engine.ranks]).content
