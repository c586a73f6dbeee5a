"""The sockets at which a trainer listens: a Unix socket in a new private directory, and TCP sockets."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rl_memory_plugins import keepalive
from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.own_host import interface_addresses
from rl_memory_plugins.weights.addresses import Address
from rl_memory_plugins.weights.tls import ServerTls, Tls

#: IP addresses or names of interfaces of this host, each with a port or without: `10.0.0.1:5000`, `[::1]:5000`, `eth0`.
Advertise = str | Sequence[str]

_WITH_PORT = re.compile(r"(?:\[(?P<bracketed>[^]]*)\]|(?P<plain>[^:]*))(?::(?P<port>\d{1,5}))?")


class Doors:
    """Opens the sockets.

    Args:
        backlog: How many connections may wait at a socket.
        directory: The parent of the directory for the Unix socket; see `WeightSender`.
        advertise: Where to listen on TCP; nowhere by default.
        local: Whether to listen on a Unix socket.
        tls: Whether TCP connections use TLS; see `tls.Tls`.

    Attributes:
        places: Where receivers can connect, as in `addresses.Endpoints`; the Unix socket first, because it is faster.
        sockets: The listening sockets, which do not block.

    Raises:
        InvalidRequestError: a socket cannot be opened, `advertise` names no address of this host, or `tls` is unusable.
    """

    def __init__(
        self,
        backlog: int,
        *,
        directory: str | os.PathLike[str] | None,
        advertise: Advertise | None,
        local: bool,
        tls: Tls,
    ) -> None:
        self.places: list[str] = []
        self.sockets: list[socket.socket] = []
        self._backlog = backlog
        self._directory: str | None = None
        self._tls: ServerTls | None = None
        try:
            if local:
                self._open_local(directory)
            targets = _targets(advertise)
            if not targets and tls:
                raise InvalidRequestError("tls has no use without advertise=: a Unix socket needs none", field="tls")
            self._tls = ServerTls(tls) if tls else None
            for host, port in targets:
                self._open_tcp(host, port)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the sockets and remove the directory. May be called more than once."""
        for sock in self.sockets:
            sock.close()
        self.sockets = []
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def prepare(self, sock: socket.socket) -> socket.socket:
        """Prepare an accepted TCP connection. The result owns the connection; with TLS it has yet to shake hands."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keepalive.keep_alive(sock)
        return sock if self._tls is None else self._tls.wrap(sock)

    def _open_local(self, directory: str | os.PathLike[str] | None) -> None:
        try:
            self._directory = tempfile.mkdtemp(prefix="rl-memory-", dir=directory)  # mode 0700
            path = str(Path(self._directory) / "weights.sock")
            self._listen(socket.AF_UNIX, path)
        except OSError as error:
            where = str(self._directory or directory or "the directory for temporary files")
            raise InvalidRequestError(
                f"cannot create a socket in {where}: {error}", field="directory", got=where
            ) from None
        self.places.append(path)

    def _open_tcp(self, host: str, port: int) -> None:
        try:
            bound = self._listen(socket.AF_INET6 if ":" in host else socket.AF_INET, (host, port))
        except OSError as error:
            raise InvalidRequestError(
                f"cannot listen on {host} port {port}: {error}; advertise an address of this host, and port 0 or none "
                "for any free port",
                field="advertise",
                got=host,
                port=port,
            ) from None
        fingerprint = None if self._tls is None else self._tls.fingerprint
        self.places.append(str(Address(host, bound.getsockname()[1], fingerprint)))

    def _listen(self, family: int, address: str | tuple[str, int]) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_STREAM)
        self.sockets.append(sock)
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the next update may use the same port
        sock.bind(address)
        sock.listen(self._backlog)
        sock.setblocking(False)
        return sock


def _targets(advertise: Advertise | None) -> list[tuple[str, int]]:
    """The addresses and ports that `advertise` names.

    Raises:
        InvalidRequestError: an entry names neither an address nor an interface of this host, or the port is too large.
    """
    entries = [advertise] if isinstance(advertise, str) else list(advertise or ())
    return [target for entry in entries for target in _targets_of(entry)]


def without_ports(advertise: Advertise | None) -> list[str]:
    """The addresses that `advertise` names, for any free ports.

    Raises:
        InvalidRequestError: see `_targets`.
    """
    return [host for host, _ in _targets(advertise)]


def _targets_of(entry: str) -> list[tuple[str, int]]:
    try:
        return [(_usable(entry, entry), 0)]  # before the port: an IPv6 address has colons of its own
    except ValueError:
        found = _WITH_PORT.fullmatch(entry)
    port = int(found["port"] or 0) if found else 0
    if found is None or port > 65535:
        raise _bad(entry, "write an address or an interface, and a port from 0 to 65535, e.g. 192.0.2.1:5000")
    host = found["bracketed"] or found["plain"] or ""
    try:
        return [(_usable(host, entry), port)]
    except ValueError:
        interfaces = interface_addresses()
    if not interfaces.get(host):
        known = ", ".join(f"{name} ({', '.join(own)})" for name, own in interfaces.items() if own)
        raise _bad(entry, f"this host has no such address or interface; it has {known}")
    return [(address, port) for address in interfaces[host]]


def _usable(host: str, entry: str) -> str:
    """The address in its usual form. Raises `ValueError` if `host` is none."""
    address = ipaddress.ip_address(host)
    if address.is_unspecified or address.is_link_local:
        raise _bad(entry, "name an address or an interface that the engine can connect to")
    return str(address)


def _bad(entry: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(f"cannot advertise {entry!r}: {remedy}", field="advertise", got=entry)
