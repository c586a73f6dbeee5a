"""A relay on another host: the bytes that cross the link, as the kernel counts them."""

from pathlib import Path

import pytest
from test_push_from_all import assert_loaded
from toy_engine import ToyEngine
from toys import Rank, ToyModel, checkpoint

from integration.two_hosts import TwoHosts, namespaces_work
from rl_memory_plugins.trainer import push_from_all
from rl_memory_plugins.trainer.relay import Relay
from rl_memory_plugins.weights.update_hosts import UpdateHosts

ENGINES = 4


@pytest.fixture(scope="module")
def hosts():
    if not namespaces_work():
        pytest.skip("this machine makes no network namespaces")
    with TwoHosts() as two:
        yield two


class There:
    """An engine or a relay on the other host."""

    def __init__(self, hosts, handle):
        self._hosts, self._handle = hosts, handle

    def __getattr__(self, name):
        return getattr(self._handle, name)

    def devices(self):
        return self._handle.devices()

    def sleep(self, *args, **options):
        return self._handle.sleep(*args, **options)

    def wake_up(self, tags=None):
        return self._handle.wake_up(tags)

    def post_update(self, body):
        self._hosts.enter()  # this thread, and those that it starts
        return self._handle.post_update(body)


def engines_there(hosts, count):
    engines = [ToyEngine() for _ in range(count)]
    for number, engine in enumerate(engines):
        engine.ranks = [Rank(ToyModel(0, 1), number, hosts=UpdateHosts(hosts.networks))]
    return engines


def bytes_over_the_link(hosts, handles, tensors):
    counter = Path("/sys/class/net", hosts.interface, "statistics/tx_bytes")
    before = int(counter.read_text())
    options = {"transport": "tcp", "advertise": hosts.addresses[0], "bucket_bytes": 1 << 20, "timeout_s": 60.0}
    push_from_all([There(hosts, handle) for handle in handles], tensors, **options)
    return int(counter.read_text()) - before


def test_the_link_carries_once_what_several_engines_of_a_host_get(hosts):
    tensors = checkpoint(1)
    one = bytes_over_the_link(hosts, engines_there(hosts, 1), tensors)
    engines = engines_there(hosts, ENGINES)
    assert bytes_over_the_link(hosts, engines, tensors) > 0.8 * ENGINES * one
    assert_loaded(engines, tensors)
    engines = engines_there(hosts, ENGINES)
    relay = Relay(engines, hosts=UpdateHosts(hosts.networks))
    assert bytes_over_the_link(hosts, [relay], tensors) < 1.5 * one
    assert_loaded(engines, tensors)
