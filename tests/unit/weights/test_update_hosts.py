"""Where receivers may connect to."""

import psutil
import pytest

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.errors import InvalidRequestError, PermissionDeniedError
from rl_memory_plugins.weights.update_hosts import UpdateHosts

ELSEWHERE = ["192.0.2.77", "2001:db8::7", "0.0.0.0", "::", "169.254.169.254", "::ffff:192.0.2.77"]


def own_addresses():
    return {
        one.address.partition("%")[0]
        for found in psutil.net_if_addrs().values()
        for one in found
        if one.family.name in ("AF_INET", "AF_INET6")
    }


def allowed(host):
    try:
        UpdateHosts().require(host)
        UpdateHosts("198.51.100.0/24").require(host)
    except PermissionDeniedError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_the_engines_own_host_is_always_allowed(host):
    assert allowed(host)


def test_the_addresses_of_the_engines_own_host_are_always_allowed():
    """Another program may make and remove interfaces meanwhile."""
    before = own_addresses()
    found = {host for host in before if allowed(host)}
    lasting = before & own_addresses()
    assert lasting and lasting <= found


@pytest.mark.parametrize("host", ELSEWHERE)
def test_all_other_hosts_need_the_option(host):
    with pytest.raises(PermissionDeniedError, match=f"update_hosts={host}") as error:
        UpdateHosts("198.51.100.0/24").require(host)
    assert error.value.details == {"field": "endpoints", "got": host, "update_hosts": ["198.51.100.0/24"]}


def test_networks_and_addresses_are_allowed():
    hosts = UpdateHosts("192.0.2.64/26 2001:db8::/32 198.51.100.9")
    for host in ("192.0.2.77", "::ffff:192.0.2.77", "2001:db8::7", "198.51.100.9"):
        hosts.require(host)
    for host in ("192.0.2.63", "192.0.2.128", "2001:db9::7", "198.51.100.8"):
        with pytest.raises(PermissionDeniedError):
            hosts.require(host)


@pytest.mark.parametrize("networks", ["10.0.0.1/8", "trainer.example", "10.0.0.0/33", "*"])
def test_a_malformed_network_stops_the_start(networks):
    with pytest.raises(InvalidRequestError, match="update_hosts"):
        RLMemoryConfig.parse({"update_hosts": networks})


def test_the_option_is_written_with_spaces():
    config = RLMemoryConfig.parse("update_hosts=10.0.0.0/8 fd00::/8,poison=true")
    assert config.update_hosts == "10.0.0.0/8 fd00::/8" and config.poison
    assert RLMemoryConfig.from_dict(config.to_dict()) == config
