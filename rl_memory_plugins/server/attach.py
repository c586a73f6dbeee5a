"""Puts the control routes and the gate into an engine's own app."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rl_memory_plugins.engine_api import AsyncioApi
from rl_memory_plugins.records import EngineStatus
from rl_memory_plugins.server.auth import ControlAuth
from rl_memory_plugins.server.event_metrics import event_metrics
from rl_memory_plugins.server.gate import AdmissionGate, posts_to
from rl_memory_plugins.server.idle import IdleEngine
from rl_memory_plugins.server.openapi import described, specification
from rl_memory_plugins.server.router import PREFIXES, NativeUpdate, build_router
from rl_memory_plugins.server.scrape import StateAtScrape
from rl_memory_plugins.server.status_page import put_in_front


def attach(
    app: Any,
    engine: Callable[[], AsyncioApi],
    status: Callable[[], Iterable[EngineStatus]],
    *,
    keys: Iterable[str],
    generation: Iterable[str],
    native_update: NativeUpdate | None = None,
    is_held: Callable[[], bool] = lambda: False,
) -> list[Any]:
    """Put the control routes in front of the app's own, describe them, and put metrics, the gate and the status page
    around the app.

    Args:
        app: A FastAPI app that has not served a request yet.
        engine: As for `build_router`.
        status: As for `AdmissionGate`.
        keys: The keys of the engine. Without a key, only clients on this machine may call the control routes.
        generation: The paths of all routes that run the model.
        native_update: As for `build_router`.
        is_held: As for `AdmissionGate`.

    Returns: our routes.
    """
    auth = ControlAuth(keys)
    idle = IdleEngine(engine, status)
    router = build_router(
        engine,
        auth,
        native_update=native_update,
        waking=idle.called,
        on_error=lambda error: event_metrics().answered_error(error),
    )
    routes: list[Any] = list(router.routes)
    app.router.routes[:0] = routes
    ours = specification(PREFIXES, has_key=auth.has_key, native_update=native_update is not None)
    app.openapi = described(app.openapi, ours)
    app.router.lifespan_context = idle.watching(app.router.lifespan_context)
    app.add_middleware(StateAtScrape, engine=engine)
    app.add_middleware(
        AdmissionGate,
        status=status,
        is_generation=posts_to(generation),
        is_held=is_held,
        idle=idle,
        on_refusal=lambda error: event_metrics().refused(error),
    )
    put_in_front(app)
    return routes
