"""The places where a trainer listens, as the `endpoints` of an update name them.

    /tmp/rl-memory-x/weights.sock           a Unix socket
    tcp://192.0.2.1:5000                    a TCP socket
    tls://[2001:db8::1]:5000#<fingerprint>  a TCP socket with TLS; the SHA-256 of the trainer's certificate, in hex

The fingerprint comes over the control route. A receiver therefore needs no authority that signs certificates.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from rl_memory_plugins.errors import InvalidRequestError

#: By device, where the trainer listens: one place, or several of which the receiver takes the first that answers.
Endpoints = dict[str, str | list[str]]

_SCHEMES = ("tcp://", "tls://")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


class Address(NamedTuple):
    """A TCP socket of a trainer.

    Attributes:
        host: An IPv4 or IPv6 address, never a name: the receiver looks nothing up.
        fingerprint: The SHA-256 of the trainer's certificate, in hex; `None` without TLS.
    """

    host: str
    port: int
    fingerprint: str | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        if self.fingerprint is None:
            return f"tcp://{host}:{self.port}"
        return f"tls://{host}:{self.port}#{self.fingerprint}"


def parse(place: str) -> Address | None:
    """The TCP socket that a place of `Endpoints` names; `None` for the path of a Unix socket.

    Raises:
        InvalidRequestError: the place looks like a TCP socket and is none.
    """
    if not place.startswith(_SCHEMES):
        return None
    try:
        url = urlsplit(place)
        host, port = str(ipaddress.ip_address(url.hostname or "")), url.port
    except ValueError:
        raise _invalid(place, "write an IP address and a port, e.g. tcp://192.0.2.1:5000") from None
    if not port or url.path or url.query or url.username is not None:
        raise _invalid(place, "write an address and a port from 1 to 65535, and nothing else")
    fingerprint = url.fragment or None
    if (url.scheme == "tls") != (fingerprint is not None):
        raise _invalid(place, "tls:// ends with # and the fingerprint of the certificate; tcp:// has none")
    if fingerprint is not None and not _FINGERPRINT.fullmatch(fingerprint):
        raise _invalid(place, "a fingerprint has 64 lower-case hexadecimal digits")
    return Address(host, port, fingerprint)


def check(endpoints: Mapping[str, str | list[str]]) -> None:
    """Check every place of `endpoints`.

    Raises:
        InvalidRequestError: a place is malformed, or a device has none.
    """
    for device, places in endpoints.items():
        for place in places_of(places):
            parse(place)
        if not places:
            raise InvalidRequestError(f"endpoints has an empty list for {device}", field="endpoints", device=device)


def places_of(places: str | list[str]) -> list[str]:
    return [places] if isinstance(places, str) else places


def _invalid(place: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(f"bad endpoint {place}: {remedy}", field="endpoints", got=place)
