"""Adds the state of the engines to the engine's own `/metrics`.

The engine's route serves a registry that it makes by itself, in several ways: of one process or of many, at the start
or at each scrape. So the state is not put into that registry, but written behind the engine's answer, in its format.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder, gzip_accepted

from rl_memory_plugins.engine_api import AsyncioApi
from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.server.state_metrics import StateCollector

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PATHS = ("/metrics", "/metrics/")
_END = b"# EOF\n"  # of OpenMetrics


class StateAtScrape:
    """ASGI middleware that adds the gauges of `state_metrics.py` to what the app answers at `/metrics`.

    A scrape reads what the engines have published, and asks and awaits nothing. An app without `/metrics` stays so.

    Args:
        app: The app.
        engine: Returns the engine API. Raises while the engine is starting, and if it is not enabled: then nothing is
            added.
    """

    def __init__(self, app: ASGIApp, engine: Callable[[], AsyncioApi]) -> None:
        self._app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        api = self._enabled_engine() if _is_scrape(scope) else None
        if api is None:
            await self._app(scope, receive, send)
            return
        registry = CollectorRegistry()
        registry.register(StateCollector(api.status_at_scrape))
        head: Message = {}
        body = bytearray()

        async def complete(message: Message) -> None:
            nonlocal head
            if message["type"] == "http.response.start":
                head = message
            elif message["type"] != "http.response.body":
                await send(message)
            else:
                body.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    await _answer(scope, registry, head, bytes(body), send)

        plain = [header for header in scope["headers"] if header[0].lower() != b"accept-encoding"]
        await self._app({**scope, "headers": plain}, receive, complete)

    def _enabled_engine(self) -> AsyncioApi | None:
        try:
            return self._engine()
        except RLMemoryError:
            return None


async def _answer(scope: Scope, state: CollectorRegistry, head: Message, body: bytes, send: Send) -> None:
    """Send the engine's answer, with the state if the engine has metrics."""
    if head["status"] == 200:
        headers = {name.lower(): value for name, value in head["headers"]}
        encode, _ = choose_encoder(headers.get(b"content-type", b"").decode("latin-1"))
        names = parse_qs(scope["query_string"].decode("latin-1")).get("name[]")
        body = body.removesuffix(_END) + encode(state.restricted_registry(names) if names else state)
        if gzip_accepted(dict(scope["headers"]).get(b"accept-encoding", b"").decode("latin-1")):
            body = gzip.compress(body, compresslevel=1)
            headers[b"content-encoding"] = b"gzip"
        headers[b"content-length"] = str(len(body)).encode()
        head = {**head, "headers": list(headers.items())}
    await send(head)
    await send({"type": "http.response.body", "body": body})


def _is_scrape(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "GET":
        return False
    return scope["path"].removeprefix(scope.get("root_path", "")) in _PATHS
