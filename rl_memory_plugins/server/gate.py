"""The gate before generation requests: it refuses them at once while the engine admits none.

The engine refuses them too. The gate refuses earlier: before the server reads and tokenises the body, and before a
streaming answer has begun with status 200. If the engine closes after a request has passed the gate, the adapter calls
`report_refusal`, and the gate answers the same 503 whatever the engine's own server would answer.

An answer that passes carries two weight versions: the version when the request was admitted, and the version when the
answer began. Only an update changes the version. Therefore no token comes from weights older than the first version,
and no token that existed when the answer began comes from weights newer than the second. An answer that is sent whole
begins when it is complete: if both versions are equal, all of it comes from these weights.

The answer of an adapter also carries the version of the adapter. All of the answer comes from this version.
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

    from rl_memory_plugins.server.idle import IdleEngine

ADMITTED_VERSION = b"x-weight-version"
ANSWERED_VERSION = b"x-weight-version-end"

ADAPTER_VERSION = b"x-adapter-version"

_TRY_AGAIN_LATER = 1013

_UNQUOTED = "/:=+@"  # besides letters, digits and "_.-~"; other characters of a version are percent-encoded

_refusals: ContextVar[list[RLMemoryError] | None] = ContextVar("rl_memory_refusals", default=None)
_adapters: ContextVar[list[str] | None] = ContextVar("rl_memory_adapters", default=None)


def report_refusal(error: RLMemoryError) -> None:
    """Report to the gate that the engine has refused the request that this code runs for."""
    refusals = _refusals.get()
    if refusals is not None:
        refusals.append(error)


def report_adapter(version: str) -> None:
    """Report to the gate the version of the adapter that answers the request that this code runs for."""
    adapters = _adapters.get()
    if adapters is not None:
        adapters.append(version)


def refuse_if_closed(engines: Iterable[EngineStatus], *, held: bool = False) -> None:
    """Check admission for a Python call into an engine.

    Args:
        held: As for `first_refusal`.

    Raises:
        EngineAsleepError: the engines do not admit requests. If this code runs for an HTTP request, the gate answers
            this error.
    """
    refusal = first_refusal(engines, held=held)
    if refusal is not None:
        report_refusal(refusal)
        raise refusal


class AdmissionGate:
    """ASGI middleware that answers 503 with `Retry-After` to generation requests that the engines do not admit.

    Answers to admitted requests get the headers `X-Weight-Version` and `X-Weight-Version-End`, and `X-Adapter-Version`
    if an adapter of `update_adapter` answers. The gate refuses a WebSocket before it opens. Only the engine checks the
    requests that an open WebSocket sends.

    Args:
        app: The app. It gets all other requests unchanged.
        status: Returns the status of the engines; must not block (`board.BoardReader.read`).
        is_generation: Whether the scope of a request or a WebSocket runs the model, e.g. `posts_to(...)`.
        is_held: Whether the engine's own pause holds back a request that comes now.
        idle: Sleeps and wakes of an engine that nobody asks.
        on_refusal: Called with the error of each request that is refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        status: Callable[[], Iterable[EngineStatus]],
        is_generation: Callable[[Scope], bool],
        is_held: Callable[[], bool] = lambda: False,
        idle: IdleEngine | None = None,
        on_refusal: Callable[[RLMemoryError], None] = lambda error: None,
    ) -> None:
        self._app = app
        self._idle = idle
        self._status = status
        self._is_generation = is_generation
        self._is_held = is_held
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or not self._is_generation(scope):
            await self._app(scope, receive, send)
            return
        if self._idle is None:
            await self._admit(scope, receive, send)
            return
        await self._idle.opened()
        with self._idle.running() as end:

            async def send_and_end(message: Message) -> None:
                await send(message)
                if message["type"] == "http.response.body" and not message.get("more_body", False):
                    end()

            await self._admit(scope, receive, send_and_end)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            engines = list(self._status())
            refusal: RLMemoryError | None = first_refusal(engines, held=self._is_held())
        except Exception as error:  # a status that cannot be read does not show that the weights are valid
            refusal = as_rl_memory_error(error)
        if refusal is not None:
            self._on_refusal(refusal)
            await _refuse(refusal, scope, receive, send)
            return
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return
        await self._pass_on(scope, receive, send, _version_header(ADMITTED_VERSION, engines))

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, admitted: list[tuple[bytes, bytes]]) -> None:
        """Run the request. If the engine refuses it before the answer begins, answer instead of the engine's server.

        Args:
            admitted: The header with the version of the weights when the request was admitted, if it is known.
        """
        late: list[RLMemoryError] = []
        _refusals.set(late)
        adapters: list[str] = []
        _adapters.set(adapters)
        started = refused = False
        head: Message | None = None  # of an answer without a byte so far: a server sends a stream's head in advance

        async def refuse_late() -> None:
            nonlocal refused
            refused = True
            self._on_refusal(late[0])
            await error_response(late[0])(scope, receive, send)

        async def send_unless_refused(message: Message) -> None:
            nonlocal started, head
            if late and not started:  # the refusal takes the place of this answer
                if not refused:  # at once: the server may do other work before it returns
                    await refuse_late()
                return
            if message["type"] == "http.response.start":
                head = message
                return
            if head is not None:
                if not message.get("body") and message.get("more_body"):
                    return
                used = [(ADAPTER_VERSION, _quoted(version)) for version in set(adapters)]
                own = used if len(used) == 1 else []  # the requests of a batch may use several
                headers = [*head.get("headers", ()), *admitted, *self._answered_version(), *own]
                started = True
                await send({**head, "headers": headers})
                head = None
            await send(message)

        try:
            await self._app(scope, receive, send_unless_refused)
        except Exception:
            if not late or started:
                raise
        if late and not started and not refused:
            await refuse_late()

    def _answered_version(self) -> list[tuple[bytes, bytes]]:
        """The header, or none if the status cannot be read any more: the answer is complete without it."""
        try:
            return _version_header(ANSWERED_VERSION, list(self._status()))
        except Exception:
            return []


async def _refuse(refusal: RLMemoryError, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http" or "websocket.http.response" in scope.get("extensions", {}):
        await error_response(refusal)(scope, receive, send)
    else:  # the server cannot send a body in answer to a handshake; it makes a 403 of the close message
        await send({"type": "websocket.close", "code": _TRY_AGAIN_LATER})


def _version_header(name: bytes, engines: list[EngineStatus]) -> list[tuple[bytes, bytes]]:
    return [(name, _quoted(weight_version(engines)))] if engines else []


def _quoted(version: str) -> bytes:
    return quote(version, safe=_UNQUOTED).encode()


def posts_to(paths: Iterable[str]) -> Callable[[Scope], bool]:
    """A predicate for `AdmissionGate`: POST and PUT requests and WebSockets to exactly these paths, with or without
    the root path of the app."""
    guarded = frozenset(paths)

    def matches(scope: Scope) -> bool:
        if scope["type"] == "http" and scope["method"] not in ("POST", "PUT"):  # SGLang generates for both
            return False
        path: str = scope["path"]
        return path.removeprefix(scope.get("root_path", "")) in guarded or path in guarded

    return matches
