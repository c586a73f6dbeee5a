"""HTTP responses of the control routes and of the gate: answers, and errors in one shape."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from rl_memory_plugins.admission import RETRY_AFTER_SECONDS
from rl_memory_plugins.errors import RLMemoryError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: `type` of every error body. OpenAI's clients expect the field; `code` distinguishes the errors.
ERROR_TYPE = "rl_memory_error"


class AnswerOf(Response):
    """The answer of another ASGI app to the same request, after the body has been read.

    Args:
        app: The other app.
        body: The body that the other app reads.
    """

    def __init__(self, app: ASGIApp, body: dict[str, Any]) -> None:
        super().__init__()
        self._app = app
        self._messages: list[Message] = [
            {"type": "http.request", "body": msgspec.json.encode(body), "more_body": False},
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_again() -> Message:
            return self._messages.pop() if self._messages else await receive()

        await self._app(scope, receive_again, send)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    plain = msgspec.to_builtins(content, str_keys=True, enc_hook=str)
    try:
        body = msgspec.json.encode(plain)
    except UnicodeEncodeError:  # the name of a file is no valid text
        body = json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    return Response(body, status, headers, media_type="application/json")


def error_body(error: RLMemoryError) -> dict[str, Any]:
    """`{"error": {"code", "type", "message", "details"}}`. Clients of OpenAI's API can read this form."""
    return {"error": {"code": error.code, "type": ERROR_TYPE, "message": error.message, "details": error.details}}


def error_response(error: RLMemoryError) -> Response:
    headers = {}
    if error.status == 503:
        headers["Retry-After"] = str(error.details.get("retry_after_s", RETRY_AFTER_SECONDS))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_body(error), error.status, headers)
