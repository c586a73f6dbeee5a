"""The HTTP server's side: routes, authentication and the gate, put into SGLang's app when it begins to serve.

SGLang's own launcher serves the app, or a framework that has started the engine's processes itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from rl_memory_plugins.engines.sglang.client import SglangApi, api_of
from rl_memory_plugins.engines.sglang.generation import GENERATION
from rl_memory_plugins.engines.sglang.options import config_of
from rl_memory_plugins.engines.sglang.remote_instance import guard_info
from rl_memory_plugins.hooking import Hooks
from rl_memory_plugins.server.late import attach_late

HTTP = "sglang.srt.entrypoints.http_server"


def install(hooks: Hooks) -> None:
    hooks.require(f"{HTTP}:app")
    hooks.require(f"{HTTP}:get_global_state")
    hooks.wrap(f"{HTTP}:_wait_and_warmup", _without_warm_up)
    attach_late(hooks, _attach, serves_enabled=lambda app: _api_of(app) is not None)


def _api_of(app: Any) -> SglangApi | None:
    """The engine that the app serves, if it is enabled."""
    from sglang.srt.entrypoints import http_server

    state = http_server.get_global_state() if app is http_server.app else None
    return None if state is None else api_of(state.tokenizer_manager)


def _without_warm_up(original: Callable[..., None]) -> Callable[..., None]:
    """Send no warm-up request to an engine that starts stale: it would be refused, and SGLang would end the server."""

    def wait_and_warmup(server_args: Any, *args: Any, **kwargs: Any) -> None:
        config = config_of(server_args)
        if config is not None and config.start_stale:
            kwargs["execute_warmup_func"] = _is_up
        original(server_args, *args, **kwargs)

    return wait_and_warmup


def _is_up(server_args: Any) -> bool:
    """What SGLang's own warm-up does at its end."""
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    get_global_state().tokenizer_manager.server_status = ServerStatus.Up
    return True


def _attach(app: Any) -> None:
    """Put the control routes in front of SGLang's own, and the gate around the app."""
    from sglang.srt.utils.auth import AuthLevel

    from rl_memory_plugins.engines.sglang.health import health_routes
    from rl_memory_plugins.server.attach import attach
    from rl_memory_plugins.server.event_metrics import event_metrics

    api = _api_of(app)
    assert api is not None
    api.observer = event_metrics()
    server_args = api.server_args
    # SGLang checks the admin key if there is one, else the API key, before this package does. This package checks the
    # same key, and without a key admits local clients only.
    keys = [server_args.admin_api_key or server_args.api_key or ""]
    routes = attach(
        app,
        lambda: api,
        api.status_now,
        keys=keys,
        generation=GENERATION,
        native_update=_native_update(app),
        is_held=api.is_held,
    )
    guard_info(app, api.status_now)
    app.router.routes[:0] = health_routes(app, api)
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
