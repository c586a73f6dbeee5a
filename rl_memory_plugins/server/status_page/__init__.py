"""The status page: static files in front of an engine's app. The page's script asks the control routes for the data.

Browsers send no key when they open a page, and both engines check their key before any route runs. So the page lies
around the whole app. It holds nothing of the engine, and every caller may load it; the control routes check who asks
for the data.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.responses import Response

from rl_memory_plugins.client import ROUTES

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

PAGE = f"{ROUTES}/ui"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

#: No page can be built into another site, load anything from elsewhere, send a form, or make markup of a text.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # ask whether it has changed: a page and a server of two versions do not fit
}


class _File(NamedTuple):
    content: bytes
    media_type: str
    etag: str


class StatusPage:
    """ASGI middleware that answers GET and HEAD of `PAGE` and of the files below it. The app gets everything else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._files = _files()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = self._answer(scope) if scope["type"] == "http" and scope["method"] in ("GET", "HEAD") else None
        await (self._app if response is None else response)(scope, receive, send)

    def _answer(self, scope: Scope) -> Response | None:
        """The answer, whose body the server leaves away for a HEAD. `None` if the path is not the page's."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path == f"{PAGE}/":
            return Response(status_code=308, headers={"Location": "../ui"})  # as seen by a browser behind a proxy
        file = self._files.get(path)
        if file is None:
            return None
        headers = {**HEADERS, "ETag": file.etag}
        if dict(scope["headers"]).get(b"if-none-match") == file.etag.encode():
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.media_type)


def put_in_front(app: Any) -> None:
    """Put the page around an app of Starlette whose first request has not come: outside of all its middleware."""
    build = app.build_middleware_stack
    app.build_middleware_stack = lambda: StatusPage(build())


def _files() -> dict[str, _File]:
    """By path. The page is `index.html`."""
    found = {}
    for path in sorted(Path(__file__).parent.iterdir()):
        if path.suffix in MEDIA_TYPES:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            where = PAGE if path.name == "index.html" else f"{PAGE}/{path.name}"
            found[where] = _File(content, MEDIA_TYPES[path.suffix], etag)
    return found
