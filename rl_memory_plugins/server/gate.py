"""The gate before generation requests: while the engine does not admit any, they are refused at once.

The engine refuses them too. The gate is earlier: before the body is read and tokenised, and before a streaming
answer has begun with status 200. A request that passed the gate and found the engine closed when it got there
is reported by the adapter (`report_refusal`), and gets the same 503 whatever the engine's own server makes of it.

Answers that pass carry the version of the weights when the request was admitted, and when the answer began to be
sent. A version changes only by an update, so no token of an answer is by older weights than the first says, and no
token that was there when it began by newer ones than the second. Answers that are sent whole begin when they are
complete: where both versions are the same, all of it is by these weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING
from urllib.parse import quote

from rl_memory_plugins.admission import first_refusal
from rl_memory_plugins.errors import RLMemoryError, as_rl_memory_error
from rl_memory_plugins.records import EngineStatus, weight_version
from rl_memory_plugins.server.responses import error_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

ADMITTED_VERSION = b"x-weight-version"
ANSWERED_VERSION = b"x-weight-version-end"

_TRY_AGAIN_LATER = 1013

_PLAIN = "/:=+@"  # besides letters, digits and "_.-~"; other characters of a version are percent-encoded

_refusals: ContextVar[list[RLMemoryError] | None] = ContextVar("rl_memory_refusals", default=None)


def report_refusal(error: RLMemoryError) -> None:
    """Tell the gate of the request that this code runs for that the engine has refused it after all."""
    refusals = _refusals.get()
    if refusals is not None:
        refusals.append(error)


def refuse_if_closed(engines: Iterable[EngineStatus]) -> None:
    """For calls into an engine from Python.

    Raises:
        EngineAsleepError: the engines would not admit a request; the gate of a request that this code runs for
            answers with it too.
    """
    refusal = first_refusal(engines)
    if refusal is not None:
        report_refusal(refusal)
        raise refusal


class AdmissionGate:
    """ASGI middleware that answers 503 with `Retry-After` to generation requests that would not be admitted.

    Answers to the others get the headers `X-Weight-Version` and `X-Weight-Version-End`. A WebSocket is refused before
    it opens; of what is asked later, by one that is open, the engine's own check is the only one.

    Args:
        app: What all other requests go to, untouched.
        status: The engines' status; must not block (`board.BoardReader.read`).
        is_generation: Whether the scope of a request or a WebSocket is a generation's, e.g. `posts_to(...)`.
    """

    def __init__(
        self,
        app: ASGIApp,
        status: Callable[[], Iterable[EngineStatus]],
        is_generation: Callable[[Scope], bool],
    ) -> None:
        self._app = app
        self._status = status
        self._is_generation = is_generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or not self._is_generation(scope):
            await self._app(scope, receive, send)
            return
        try:
            engines = list(self._status())
            refusal: RLMemoryError | None = first_refusal(engines)
        except Exception as error:  # a status that cannot be read does not show that the weights are valid
            refusal = as_rl_memory_error(error)
        if refusal is not None:
            await _refuse(refusal, scope, receive, send)
            return
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return
        admitted = [(ADMITTED_VERSION, _encoded(weight_version(engines)))] if engines else []
        await self._pass_on(scope, receive, send, admitted)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, admitted: list[tuple[bytes, bytes]]) -> None:
        """Run the request; if it is refused late, answer in the place of the engine's server.

        Args:
            admitted: The header with the version of the weights when the request was admitted, where that is known.
        """
        late: list[RLMemoryError] = []
        _refusals.set(late)
        started = replaced = False

        async def send_or_replace(message: Message) -> None:
            nonlocal started, replaced
            if late and not started:
                started = replaced = True
                await error_response(late[0])(scope, receive, send)
            elif not replaced:
                started = True
                if message["type"] == "http.response.start":
                    headers = [*admitted, *self._answered_version()]
                    message = {**message, "headers": [*message.get("headers", ()), *headers]}
                await send(message)

        try:
            await self._app(scope, receive, send_or_replace)
        except Exception:
            if not late or (started and not replaced):
                raise
            if not started:  # the server's handler for unforeseen errors is outside of this middleware
                await error_response(late[0])(scope, receive, send)

    def _answered_version(self) -> list[tuple[bytes, bytes]]:
        """The header, unless the status cannot be read any more: the answer is there all the same."""
        try:
            engines = list(self._status())
            return [(ANSWERED_VERSION, _encoded(weight_version(engines)))] if engines else []
        except Exception:
            return []


async def _refuse(refusal: RLMemoryError, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http" or "websocket.http.response" in scope.get("extensions", {}):
        await error_response(refusal)(scope, receive, send)
    else:  # a server that cannot answer a handshake otherwise makes a 403 of it
        await send({"type": "websocket.close", "code": _TRY_AGAIN_LATER})


def _encoded(version: str) -> bytes:
    return quote(version, safe=_PLAIN).encode()


def posts_to(paths: Iterable[str]) -> Callable[[Scope], bool]:
    """A predicate for `AdmissionGate`: POST and PUT requests and WebSockets to exactly these paths, below the app's
    root path."""
    guarded = frozenset(paths)

    def matches(scope: Scope) -> bool:
        if scope["type"] == "http" and scope["method"] not in ("POST", "PUT"):  # SGLang generates for both
            return False
        path: str = scope["path"]
        return path.removeprefix(scope.get("root_path", "")) in guarded or path in guarded

    return matches
