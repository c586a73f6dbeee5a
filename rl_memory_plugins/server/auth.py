"""Who may call the control routes."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rl_memory_plugins.errors import AuthenticationError, PermissionDeniedError

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection

#: A proxy adds these. They are never believed, but their presence says that the caller is not the peer.
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")


class ControlAuth:
    """Admits a request to the control routes, reading ones included: they tell when an engine can be disturbed.

    With keys, a request needs `Authorization: Bearer <one of them>`; an absent, malformed or wrong one is a 401
    (RFC 6750 has no 403 for a token that is not valid).

    Without keys only clients on this machine are admitted (loopback addresses and Unix sockets), others get a
    403. Three cases look like a local client and are refused as well: a request that a reverse proxy on this
    machine passes on, which shows in its forwarding headers; one that a web page in a local browser sent, which
    shows in its `Origin`; and, with uvicorn told to trust every proxy (`FORWARDED_ALLOW_IPS=*`), a client that
    claims a loopback address in such a header. A proxy that adds no such header cannot be told from a local
    client: set a key behind one.

    Args:
        keys: The engine's admin or API keys; empty ones do not count.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key.encode()) for key in keys if key]

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
    if request.client is not None and not is_loopback(request.client.host):
        raise PermissionDeniedError(f"no key is set, so only this machine's clients are admitted; {hint}")
    if any(header in request.headers for header in _FORWARDED):
        raise PermissionDeniedError(f"no key is set, and this request came through a proxy; {hint}")
    for origin in request.headers.getlist("origin"):
        if not _is_loopback_origin(origin):
            raise PermissionDeniedError(f"no key is set, and this request came from a web page; {hint}")


def is_loopback(host: str) -> bool:
    """Whether `host` is an address of the loopback interface, IPv4-mapped ones included."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _is_loopback_origin(origin: str) -> bool:
    try:
        host = urlsplit(origin).hostname or ""
    except ValueError:
        return False
    return host == "localhost" or is_loopback(host)


def _digest(key: bytes) -> bytes:
    """Digests have one length: comparing them does not tell a key's."""
    return hashlib.sha256(key).digest()
