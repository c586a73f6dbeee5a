"""The addresses of this machine."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from pathlib import Path

from rl_memory_plugins.extras import needs


def host_id() -> str:
    """The same for two processes only if they share this host, its network and its files.

    They then reach each other by a Unix socket or the loopback interface. Containers of one host may not.
    """
    found = [socket.gethostname()]
    with contextlib.suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        found += [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("net", "mnt")]
    return " ".join(found)


def is_loopback(host: str) -> bool:
    """Whether `host` is an address of the loopback interface, IPv4-mapped ones included."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def is_this_machine(host: str) -> bool:
    """Whether `host` is an address of this machine. Addresses come and go, so they are looked up each time."""
    if is_loopback(host):
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_unspecified:
        return False
    return any(str(address) in addresses for addresses in _by_interface().values())


def interface_addresses() -> dict[str, list[str]]:
    """By interface, its IP addresses that other machines can use. Link-local ones need a scope and are left out."""
    return {
        name: [one for one in addresses if not ipaddress.ip_address(one).is_link_local]
        for name, addresses in _by_interface().items()
    }


def _by_interface() -> dict[str, list[str]]:
    with needs("remote"):  # here, because a trainer on the engine's host needs it not
        import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [one.address.partition("%")[0] for one in found if one.family in families]
        for name, found in psutil.net_if_addrs().items()
    }
