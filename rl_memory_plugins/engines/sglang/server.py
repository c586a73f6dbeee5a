"""The HTTP server's side: routes, authentication and the gate, put into SGLang's app before it starts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from rl_memory_plugins.engines.sglang.client import SglangFace, face_of
from rl_memory_plugins.hooking import Hooks

HTTP = "sglang.srt.entrypoints.http_server"
SHARED_ROUTE = "/update_weights_from_ipc"  # SGLang has a route of this name, and so has the contract

#: Every route of SGLang that runs the model.
GENERATION = (
    "/generate",
    "/encode",
    "/classify",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/v1/classify",
    "/v1/score",
    "/v1/decisions",
    "/v1/rerank",
    "/v1/responses",
    "/v1/messages",
    "/v1/systemone",
    "/v1/audio/transcriptions",
    "/v1/realtime",
    "/api/chat",
    "/api/generate",
    "/invocations",
    "/vertex_generate",
)


def install(hooks: Hooks) -> None:
    hooks.require(f"{HTTP}:app")
    hooks.wrap(f"{HTTP}:_setup_and_run_http_server", _setup)


def _setup(original: Callable[..., Any]) -> Callable[..., Any]:
    def setup_and_run(server_args: Any, tokenizer_manager: Any, *args: Any, **kwargs: Any) -> Any:
        face = face_of(tokenizer_manager)
        if face is not None:
            from sglang.srt.entrypoints.http_server import app

            attach(app, face, server_args)
        return original(server_args, tokenizer_manager, *args, **kwargs)

    return setup_and_run


def attach(app: Any, face: SglangFace, server_args: Any) -> None:
    """Put the control routes in front of SGLang's own, and the gate around the app."""
    from sglang.srt.utils.auth import AuthLevel
    from starlette.routing import Route

    from rl_memory_plugins.server.auth import ControlAuth
    from rl_memory_plugins.server.control import Control
    from rl_memory_plugins.server.gate import AdmissionGate, posts_to
    from rl_memory_plugins.server.router import build_router

    # SGLang's own check comes first: the admin key if there is one, else the API key. Ours then agrees with it,
    # and without keys admits local clients only.
    keys = [server_args.admin_api_key or server_args.api_key or ""]
    router = build_router(Control(lambda: face), ControlAuth(keys))
    routes: list[Any] = [
        Route(SHARED_ROUTE, _shared(route.endpoint, app), methods=["POST"]) if route.path == SHARED_ROUTE else route
        for route in cast("list[Any]", router.routes)
    ]
    for route in routes:
        route.endpoint._auth_level = AuthLevel.ADMIN_OPTIONAL
    app.router.routes[:0] = routes
    app.router.lifespan_context = _knowing(face, app.router.lifespan_context)
    app.add_middleware(AdmissionGate, status=face.status_now, is_generation=posts_to(GENERATION))


def _knowing(face: SglangFace, lifespan: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Before the first request the schedulers tell where their status is shown."""

    @asynccontextmanager
    async def started(app: Any) -> AsyncIterator[Any]:
        await face.run(face.status())
        async with lifespan(app) as state:
            yield state

    return started


def _shared(ours: Callable[[Any], Awaitable[Any]], app: Any) -> Callable[..., Awaitable[Any]]:
    """One route for two callers: SGLang's own bodies name `zmq_handles`."""
    native = next(route.endpoint for route in app.router.routes if getattr(route, "path", "") == SHARED_ROUTE)

    async def endpoint(request: Any) -> Any:
        from sglang.srt.managers.io_struct import UpdateWeightsFromIPCReqInput

        try:
            body = json.loads(await request.body() or b"{}")
        except (ValueError, RecursionError):
            body = None
        if isinstance(body, dict) and "zmq_handles" in body:
            return await native(UpdateWeightsFromIPCReqInput(**body), request)
        return await ours(request)

    return endpoint
