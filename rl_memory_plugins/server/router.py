"""The control routes, the same for both engines.

`POST /sleep`, `POST /wake_up`, `GET /is_sleeping`, `GET /memory`, `POST /update_weights_from_ipc`,
`GET /weight_version` and `GET /weights/checksums`. Parameters come in the query or in a JSON body; the body
wins. Every route answers JSON, also on errors (`responses.error_body`), whatever handlers the app has.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from rl_memory_plugins import operations
from rl_memory_plugins.admission import first_refusal, is_sleeping
from rl_memory_plugins.commands import UpdateWeights
from rl_memory_plugins.errors import InvalidRequestError, RLMemoryError, as_rl_memory_error
from rl_memory_plugins.records import EngineStatus, Report
from rl_memory_plugins.records import weight_version as version_of
from rl_memory_plugins.server.auth import ControlAuth
from rl_memory_plugins.server.responses import error_response, json_response

logger = logging.getLogger(__name__)

PREFIXES = ("", "/v1/rl_memory")
MAX_BODY_BYTES = 1 << 20

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Any]]


class ControlPlane(Protocol):
    """What the routes need of an engine; all its engines (data-parallel ranks) are meant by every call.

    Values are the caller's own; an implementation builds its commands with `operations.sleep` and
    `operations.wake_up`, which check them.
    """

    async def sleep(self, level: object, tags: object, mode: object) -> Report: ...

    async def wake_up(self, tags: object) -> Report: ...

    async def update_weights(self, command: UpdateWeights) -> Report: ...

    async def status(self) -> list[EngineStatus]:
        """Never waits for a transition."""

    async def checksums(self) -> Any:
        """What `weights.checksums.merge_engines` gives."""


def build_router(
    control: ControlPlane,
    auth: ControlAuth,
    *,
    prefixes: Sequence[str] = PREFIXES,
) -> APIRouter:
    """The routes over `control`, under each of `prefixes`.

    A transition that has begun runs to its end even if its client goes away.
    """
    to_completion = _Transitions().to_completion

    async def sleep(request: Request) -> dict[str, Any]:
        """Release memory. Parameters: `level` (0, 1 or 2), `tags`, `mode` (`abort`, `wait` or `keep`)."""
        given = await _arguments(request, {"level", "tags", "mode"})
        command = operations.sleep(**given)
        report = await to_completion(control.sleep(command.level, command.tags, command.mode))
        return {"status": "sleeping", "level": command.level, "tags": command.tags, "report": report}

    async def wake_up(request: Request) -> dict[str, Any]:
        """Take memory back. Parameter: `tags`. `status` is `awake` once nothing sleeps any more."""
        given = await _arguments(request, {"tags"})
        report = await to_completion(control.wake_up(given.get("tags")))
        asleep = is_sleeping(await control.status())
        return {
            "status": "sleeping" if asleep else "awake",
            "tags": given.get("tags"),  # the caller's own, as vLLM answers
            "report": report,
        }

    async def update_weights_from_ipc(request: Request) -> dict[str, Any]:
        """Take weights from a trainer's sockets. Parameters: of `commands.UpdateWeights`, but `hold` and `call`."""
        allowed = {"endpoints", "token", "weight_version", "mode", "timeout_s"}
        _reject_unknown(request.query_params.keys(), ())  # a token has no place in a URL
        given = await _body(request)
        _reject_unknown(given, allowed)
        report = await to_completion(control.update_weights(operations.update_weights(**given)))
        return {"status": "updated", **_version(await control.status()), "report": report}

    async def sleeping(request: Request) -> dict[str, Any]:
        """Whether any tag is released or the engine is paused."""
        return {"is_sleeping": is_sleeping(await control.status())}

    async def memory(request: Request) -> dict[str, Any]:
        """Every rank's memory by tag, and whether requests are admitted. Never waits for a transition."""
        engines = await control.status()
        refusal = first_refusal(engines)
        return {
            "admitting": refusal is None,
            "reason": None if refusal is None else refusal.details["reason"],
            "is_sleeping": is_sleeping(engines),
            **_version(engines),
            "engines": engines,
        }

    async def weight_version(request: Request) -> dict[str, Any]:
        """The version the last complete update gave, and whether the content may be used."""
        return _version(await control.status())

    async def checksums(request: Request) -> Any:
        """Checksums of the weights as they are."""
        return await to_completion(control.checksums())

    router = APIRouter(tags=["rl_memory"])
    routes: list[tuple[str, str, Handler]] = [
        ("POST", "/sleep", sleep),
        ("POST", "/wake_up", wake_up),
        ("GET", "/is_sleeping", sleeping),
        ("GET", "/memory", memory),
        ("POST", "/update_weights_from_ipc", update_weights_from_ipc),
        ("GET", "/weight_version", weight_version),
        ("GET", "/weights/checksums", checksums),
    ]
    for prefix in prefixes:
        for method, path, handler in routes:
            router.add_api_route(prefix + path, _answering(handler, auth), methods=[method], response_model=None)
    return router


class _Transitions:
    """Calls that have begun; the event loop itself holds its tasks only weakly."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def to_completion(self, call: Coroutine[Any, Any, T]) -> T:
        """Await `call`. Cancelling the awaiting request leaves `call` running."""
        task = asyncio.ensure_future(call)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)


def _answering(handler: Handler, auth: ControlAuth) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint that admits the caller first and turns results and errors into responses."""

    @functools.wraps(handler)
    async def endpoint(request: Request) -> Response:
        try:
            auth.check(request)
            return json_response(await handler(request))
        except Exception as error:
            if not isinstance(error, RLMemoryError):
                logger.exception("%s %s failed", request.method, request.url.path)
            return error_response(as_rl_memory_error(error))

    return endpoint


async def _arguments(request: Request, allowed: Collection[str]) -> dict[str, Any]:
    """The parameters of the query and of the body, unchecked but for their names.

    An unknown name is an error: a misspelt `tags` would otherwise mean all tags.
    """
    query: dict[str, Any] = {}
    for name in request.query_params:
        values = request.query_params.getlist(name)
        if name == "tags":
            query[name] = [tag for value in values for tag in value.split(",")]
        elif len(values) == 1:
            query[name] = values[0]
        else:
            raise InvalidRequestError(f"{name} is given {len(values)} times", field=name, got=values)
    arguments = {**query, **await _body(request)}
    _reject_unknown(arguments, allowed)
    return arguments


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object in the request's body; no body is an empty one.

    Raises:
        InvalidRequestError: not a JSON object, or larger than `MAX_BODY_BYTES`, of which no more is read.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise InvalidRequestError(f"the body exceeds {MAX_BODY_BYTES} bytes", max_bytes=MAX_BODY_BYTES)
    if not body.strip():
        return {}
    try:
        content = msgspec.json.decode(bytes(body))
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InvalidRequestError(f"the body must be a JSON object, not {type(content).__name__}")
    return content


def _reject_unknown(names: Collection[str], allowed: Collection[str]) -> None:
    unknown = sorted(set(names) - set(allowed))
    if unknown:
        choice = f"use {', '.join(sorted(allowed))}" if allowed else "send them in the body"
        raise InvalidRequestError(
            f"parameters not allowed here: {', '.join(unknown)}; {choice}", got=unknown, allowed=sorted(allowed)
        )


def _version(engines: Sequence[EngineStatus]) -> dict[str, Any]:
    """The weights' version and the worst content of all engines."""
    content = EngineStatus(ranks=[rank for engine in engines for rank in engine.ranks]).content
    return {"weight_version": version_of(engines), "content": content}
