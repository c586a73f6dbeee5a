"""Passes requests on to an engine's server.

A client that leaves, before its answer begins or later, ends the request to the engine: the engine computes nothing for
nobody. No library for proxies passes on that a client has left before its answer begins, therefore this is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

import httpx

from rl_memory_plugins.serve.engine import ServedEngine
from rl_memory_plugins.server.responses import error_response

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    Headers = list[tuple[bytes, bytes]]

CONNECT_S = 10.0

_OF_A_CONNECTION = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"te", b"transfer-encoding", b"upgrade")  # RFC 9110, 7.6.1
)

_SET_AGAIN = frozenset((b"host", b"content-length"))


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
        self._http = http

    async def __call__(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Answer a request whose body has been read, until its client leaves.

        Args:
            scope: Of the request.
            body: What has been read.
            receive: Tells from now on only that the client has left.
            send: Takes the answer.
        """
        left = asyncio.ensure_future(_until_left(receive))
        answering = asyncio.ensure_future(self._answer(scope, body, receive, send))
        try:
            await asyncio.wait({left, answering}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (left, answering):
                task.cancel()
            await asyncio.wait({left, answering})
        if not answering.cancelled():
            answering.result()

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        try:
            answer = await self._http.send(self._request(scope, body), stream=True)
        except httpx.TransportError as error:
            await error_response(self._engine.lost(f"{type(error).__name__}: {error}"))(scope, receive, send)
            return
        try:
            headers = _end_to_end(answer.headers.raw)
            await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
            async for part in answer.aiter_raw():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await answer.aclose()

    def _request(self, scope: Scope, body: bytes) -> httpx.Request:
        """The request as it came; `build_request` of the client would add headers, e.g. for answers that are packed."""
        query = scope["query_string"]
        target = scope["path"].encode() + (b"?" + query if query else b"")
        return httpx.Request(
            scope["method"],
            httpx.URL(self._engine.url).copy_with(raw_path=target),
            headers=_forwarded(scope),
            content=body,
            extensions={"timeout": self._http.timeout.as_dict()},
        )


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _forwarded(scope: Scope) -> Headers:
    """The headers, with the one by which control routes know that a proxy sends a request for another client."""
    client = scope.get("client")
    host = client[0].encode() if client else b"unknown"
    kept = [(name, value) for name, value in _end_to_end(scope["headers"]) if name not in _SET_AGAIN]
    return [*kept, (b"x-forwarded-for", host)]


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Without those of one connection, and those that its `Connection` names; with names in small letters."""
    listed = [(name.lower(), value) for name, value in headers]
    named = {one.strip().lower() for name, value in listed if name == b"connection" for one in value.split(b",")}
    return [(name, value) for name, value in listed if name not in _OF_A_CONNECTION | named]
