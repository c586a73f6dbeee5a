"""The HTTP server's side: routes, authentication and the gate, put into SGLang's app before it starts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from rl_memory_plugins.engines.sglang.client import SglangApi, api_of
from rl_memory_plugins.hooking import Hooks

HTTP = "sglang.srt.entrypoints.http_server"

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
        api = api_of(tokenizer_manager)
        if api is not None:
            from sglang.srt.entrypoints.http_server import app

            attach(app, api, server_args)
        return original(server_args, tokenizer_manager, *args, **kwargs)

    return setup_and_run


def attach(app: Any, api: SglangApi, server_args: Any) -> None:
    """Put the control routes in front of SGLang's own, and the gate around the app."""
    from sglang.srt.utils.auth import AuthLevel

    from rl_memory_plugins.server.attach import attach as attach_routes

    # SGLang checks the admin key if there is one, else the API key, before this package does. This package checks the
    # same key, and without a key admits local clients only.
    keys = [server_args.admin_api_key or server_args.api_key or ""]
    routes = attach_routes(
        app,
        lambda: api,
        api.status_now,
        keys=keys,
        generation=GENERATION,
        native_update=_native_update(app),
        is_held=api.is_held,
    )
    for route in routes:
        route.endpoint._auth_level = AuthLevel.ADMIN_OPTIONAL
    app.router.lifespan_context = _asking_first(api, app.router.lifespan_context)


def _asking_first(api: SglangApi, lifespan: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Ask the schedulers for the paths of their status boards before the first request."""

    @asynccontextmanager
    async def started(app: Any) -> AsyncIterator[Any]:
        await api.run(api.status())
        async with lifespan(app) as state:
            yield state

    return started


def _native_update(app: Any) -> Callable[[dict[str, Any]], Any]:
    """Send bodies with `zmq_handles` to SGLang's own route, which has the same path as our update."""
    from rl_memory_plugins.server.responses import AnswerOf
    from rl_memory_plugins.server.router import UPDATE_ROUTE

    native = next(route for route in app.router.routes if getattr(route, "path", "") == UPDATE_ROUTE)
    return lambda body: AnswerOf(native.app, body) if "zmq_handles" in body else None
