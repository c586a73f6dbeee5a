"""Where the receivers of an engine may connect to: the option `update_hosts`.

A control route is asked to connect to an address that the caller names. Without a limit, whoever may call the route
could make the engine connect to any service that the engine's host can reach.
"""

from __future__ import annotations

import ipaddress

from rl_memory_plugins.errors import PermissionDeniedError
from rl_memory_plugins.own_host import is_this_machine


class UpdateHosts:
    """The hosts of trainers. The engine's own host always is one.

    Args:
        networks: Addresses, and networks in CIDR notation, with spaces between them.

    Raises:
        ValueError: a network is malformed.
    """

    def __init__(self, networks: str = "") -> None:
        self._networks = [ipaddress.ip_network(one) for one in networks.split()]

    def require(self, host: str) -> None:
        """
        Raises:
            PermissionDeniedError: no receiver may connect to this address.
        """
        address = ipaddress.ip_address(host)
        address = getattr(address, "ipv4_mapped", None) or address
        if is_this_machine(host) or any(address in network for network in self._networks):
            return
        raise PermissionDeniedError(
            f"this engine takes no weights from {host}: start the engine with the option update_hosts={host}, or name "
            "the network of the trainer there",
            field="endpoints",
            got=host,
            update_hosts=[str(network) for network in self._networks],
        )
