"""Finds the apps that serve an enabled engine. Imports no web framework: each process of an engine puts in the hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl_memory_plugins.hooking import Hooks
from rl_memory_plugins.server.gate import AdmissionGate


def attach_late(hooks: Hooks, attach_to: Callable[[Any], None], *, serves_enabled: Callable[[Any], bool]) -> None:
    """Attach to apps when they begin to serve, whoever built and serves them.

    Args:
        attach_to: Calls `server.attach.attach` with the app.
        serves_enabled: Whether the app serves an enabled engine.
    """

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        async def lifespan(router: Any, scope: Any, receive: Any, send: Any) -> None:
            app = scope.get("app")
            if app is not None and serves_enabled(app) and not _has_gate(app):
                app.middleware_stack = None  # built already; the first request builds it anew
                attach_to(app)
                # Inside of the app's own middleware: the engine checks its keys before the gate.
                app.user_middleware.append(app.user_middleware.pop(0))
            await original(router, scope, receive, send)

        return lifespan

    hooks.wrap("starlette.routing:Router.lifespan", wrapped)


def _has_gate(app: Any) -> bool:
    return any(middleware.cls is AdmissionGate for middleware in app.user_middleware)
