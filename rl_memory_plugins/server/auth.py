"""Who may call the control routes."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rl_memory_plugins.errors import AuthenticationError, PermissionDeniedError
from rl_memory_plugins.own_host import is_loopback, is_this_machine

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection

#: A proxy adds these. They are never believed, but their presence says that the caller is not the peer.
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")

#: Of `Sec-Fetch-Site`: this server's own pages, those of other servers on this machine, and the person at the browser.
_OWN_SITES = frozenset({"same-origin", "same-site", "none"})


class ControlAuth:
    """Admits a request to the control routes, reading ones included: they tell when an engine can be disturbed.

    With keys, a request needs `Authorization: Bearer <one of them>`; an absent, malformed or wrong one is a 401
    (RFC 6750 has no 403 for a token that is not valid).

    Without keys only clients on this machine are admitted, others get a 403. Local are Unix sockets, loopback
    addresses, and the addresses of this machine's own interfaces, by which trainers under Ray call an engine. Requests
    that only look like a local client's are refused as well:

    - A reverse proxy on this machine passed it on. It shows in the forwarding headers, and so does a client that
      claims a loopback address in such a header while uvicorn trusts every proxy (`FORWARDED_ALLOW_IPS=*`). A proxy
      that adds no such header cannot be told from a local client: set a key behind one.
    - A web page of another site had a local browser send it. It shows in `Origin`, and in `Sec-Fetch-Site` where a
      browser sends no `Origin`: for images, links and scripts, which are GET requests.
    - A web page of a site whose name was made to lead to this machine (DNS rebinding) had a browser send it. It shows
      in `Host`, which then names that site.

    Args:
        keys: The engine's admin or API keys; empty ones do not count, nor do spaces and line breaks around a key.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key.strip().encode()) for key in keys if key.strip()]

    @property
    def has_key(self) -> bool:
        return bool(self._digests)

    def check(self, request: HTTPConnection) -> None:
        """Return if `request` may go on.

        Raises:
            AuthenticationError: a key is set and the request does not show one.
            PermissionDeniedError: no key is set and the request is not a local client's.
        """
        if self._digests:
            self._check_key(request)
        else:
            _check_local(request)

    def _check_key(self, request: HTTPConnection) -> None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise AuthenticationError("send the server's key: Authorization: Bearer <key>")
        shown = _digest(token.strip().encode("latin-1"))  # as Starlette decoded it
        # a list, so that the time taken does not tell which key matched
        if not any([hmac.compare_digest(shown, digest) for digest in self._digests]):
            raise AuthenticationError("this key is not the server's")


def _check_local(request: HTTPConnection) -> None:
    hint = "set the engine's API key to control it from elsewhere"
    if request.client is not None and not is_this_machine(request.client.host):
        raise PermissionDeniedError(f"no key is set, so only this machine's clients are admitted; {hint}")
    if any(header in request.headers for header in _FORWARDED):
        raise PermissionDeniedError(f"no key is set, and this request came through a proxy; {hint}")
    origins, sites = request.headers.getlist("origin"), request.headers.getlist("sec-fetch-site")
    if not all(map(_is_loopback_origin, origins)) or not _OWN_SITES.issuperset(sites):
        raise PermissionDeniedError(f"no key is set, and this request came from a web page; {hint}")
    hosts = request.headers.getlist("host")
    if request.client is not None and not all(map(_is_own_host, hosts)):  # no browser reaches a Unix socket
        raise PermissionDeniedError(
            f"no key is set, and this request is for {', '.join(hosts)}, which may be a web page's name for this "
            f"machine: use localhost or an IP address, or {hint}"
        )


def _is_loopback_origin(origin: str) -> bool:
    host = _hostname(origin)
    return host == "localhost" or is_loopback(host)


def _is_own_host(host: str) -> bool:
    """Whether `Host` holds an IP address, which no page can choose, or a name that leads here for everybody here."""
    name = _hostname(f"//{host}")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        own = socket.gethostname().lower()
        return name in ("localhost", own, own.partition(".")[0]) or name.endswith(".localhost")
    return True


def _hostname(url: str) -> str:
    """In lower case; empty where there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _digest(key: bytes) -> bytes:
    """Digests have one length: comparing them does not tell a key's."""
    return hashlib.sha256(key).digest()
