"""How answers and errors look on the wire; one shape for the control routes and for the gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from rl_memory_plugins.admission import RETRY_AFTER_SECONDS
from rl_memory_plugins.errors import RLMemoryError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: `type` of every error body. OpenAI's clients expect the field; programs tell errors apart by `code`.
ERROR_TYPE = "rl_memory_error"


class AnswerOf(Response):
    """What another ASGI app answers to the same request, of which the body has been read.

    Args:
        app: The other app.
        body: What it reads.
    """

    def __init__(self, app: ASGIApp, body: dict[str, Any]) -> None:
        super().__init__()
        self._app = app
        self._read = msgspec.json.encode(body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = [self._read]

        async def receive_read() -> Message:
            if left:
                return {"type": "http.request", "body": left.pop(), "more_body": False}
            return await receive()

        await self._app(scope, receive_read, send)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = msgspec.json.encode(msgspec.to_builtins(content, str_keys=True, enc_hook=str))
    return Response(body, status, headers, media_type="application/json")


def error_body(error: RLMemoryError) -> dict[str, Any]:
    """`{"error": {"code", "type", "message", "details"}}`, which clients of OpenAI's API can read too."""
    return {"error": {"code": error.code, "type": ERROR_TYPE, "message": error.message, "details": error.details}}


def error_response(error: RLMemoryError) -> Response:
    headers = {}
    if error.status == 503:
        headers["Retry-After"] = str(error.details.get("retry_after_s", RETRY_AFTER_SECONDS))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_body(error), error.status, headers)
