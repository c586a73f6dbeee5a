"""The control routes of a relay, for an `EngineClient`: those that a handoff and an update call."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

from fastapi import FastAPI, Request

from rl_memory_plugins import answer_time, operations
from rl_memory_plugins.client import ROUTES
from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.server.auth import ControlAuth
from rl_memory_plugins.server.parameters import read_arguments, read_body, reject_unknown
from rl_memory_plugins.server.router import UPDATE_ROUTE, Handler, answering
from rl_memory_plugins.trainer.relay import Relay


def build_relay_app(relay: Relay, auth: ControlAuth) -> FastAPI:
    """An app whose routes lead to a relay. A call that has begun runs to its end, even if its client goes away."""

    async def memory(request: Request) -> dict[str, Any]:
        return await asyncio.to_thread(relay.memory)

    async def update(request: Request) -> dict[str, Any]:
        given = await read_body(request)
        reject_unknown(request.query_params.keys(), ())  # a token has no place in a URL
        reject_unknown(given, {"endpoints", "token", "weight_version", "mode", "timeout_s", "base_version"})
        operations.update_weights(**given)  # checks the fields
        return {"status": "updated", **await asyncio.to_thread(relay.post_update, given)}

    async def sleep(request: Request) -> dict[str, Any]:
        given = await read_arguments(request, {"level", "tags", "mode", "keep"})
        return {"status": "sleeping", **await asyncio.to_thread(relay.sleep, **given)}

    async def wake_up(request: Request) -> dict[str, Any]:
        given = await read_arguments(request, {"tags"})
        return {"status": "awake", **await asyncio.to_thread(relay.wake_up, **given)}

    app = FastAPI(openapi_url=None)
    routes: list[tuple[str, str, Handler]] = [
        ("GET", "/memory", memory),
        ("POST", UPDATE_ROUTE, update),
        ("POST", "/sleep", sleep),
        ("POST", "/wake_up", wake_up),
    ]
    passed_on = [f"{method} {path}" for method, path, _ in routes]

    async def other(request: Request) -> NoReturn:
        got = f"{request.method} /{request.path_params['path']}"
        raise UnsupportedError(
            f"a relay passes on only {', '.join(passed_on)}, and not {got}: call the engines themselves",
            got=got,
            allowed=passed_on,
        )

    routes += [(method, "/{path:path}", other) for method in ("GET", "POST")]  # after the others: the first one answers
    for method, path, handler in routes:
        app.add_api_route(ROUTES + path, answering(in_time(handler), auth), methods=[method], response_model=None)
    return app


def in_time(handler: Handler) -> Handler:
    """The handler answers before its caller gives up, if the caller tells when that is."""

    async def limited(request: Request) -> Any:
        with answer_time.within(answer_time.heard(request.headers)):
            return await handler(request)

    return limited
