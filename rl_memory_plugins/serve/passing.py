"""Passes requests on to an engine's server, by `fastapi-proxy-lib`.

The library carries the request, and the answer as it comes. What it does not know is a client that leaves before its
answer begins: then the request to the engine is given up too, and the engine computes nothing for nobody.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx

from rl_memory_plugins.extras import needs
from rl_memory_plugins.serve.engine import ServedEngine
from rl_memory_plugins.server.responses import error_response

with needs("serve"):
    from fastapi_proxy_lib.core.http import ReverseHttpProxy
    from starlette.requests import Request

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

CONNECT_S = 10.0


def proxying_client() -> httpx.AsyncClient:
    """The client of all requests that are passed on.

    It opens a connection for each: a server closes an idle one after some seconds, and a request that is sent at that
    moment fails. An answer may take any time.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=httpx.Timeout(None, connect=CONNECT_S), limits=limits, trust_env=False)


class Passage:
    """The way to one engine's server."""

    def __init__(self, engine: ServedEngine, http: httpx.AsyncClient) -> None:
        self._engine = engine
        self._proxy = ReverseHttpProxy(http, base_url=f"{engine.url}/")

    async def __call__(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Answer a request whose body has been read, until its client leaves.

        Args:
            scope: Of the request.
            body: What has been read.
            receive: Tells from now on only that the client has left.
            send: Takes the answer.
        """
        left = asyncio.ensure_future(_until_left(receive))
        answering = asyncio.ensure_future(self._answer(_forwarded(scope), body, left, send))
        try:
            await asyncio.wait({left, answering}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (left, answering):
                task.cancel()
            await asyncio.wait({left, answering})
        if not answering.cancelled():
            answering.result()

    async def _answer(self, scope: Scope, body: bytes, left: asyncio.Future[None], send: Send) -> None:
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await asyncio.wait([left])
            return {"type": "http.disconnect"}

        request = Request(scope, receive)
        try:
            answer = await self._proxy.send_request_to_target(
                request=request, target_url=httpx.URL(self._engine.url + scope["path"])
            )
        except httpx.TransportError as error:
            await error_response(self._engine.lost(f"{type(error).__name__}: {error}"))(scope, receive, send)
            return
        if not answer.headers.get("connection"):  # the library leaves an empty one
            del answer.headers["connection"]
        try:
            await answer(scope, receive, send)
        finally:  # closes the connection to the engine, which the library does only after a whole answer
            if answer.background is not None:
                await answer.background()


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _forwarded(scope: Scope) -> Scope:
    """The scope, with the header by which control routes know that a proxy sends a request for another client."""
    client = scope.get("client")
    host = client[0].encode() if client else b"unknown"
    return {**scope, "headers": [*scope["headers"], (b"x-forwarded-for", host)]}
