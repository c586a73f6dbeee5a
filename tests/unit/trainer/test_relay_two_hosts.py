"""A relay on another host: the bytes that cross the link, as the kernel counts them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import toys
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
    """An engine or a relay on the other host; on this one with `enter=hosts.leave`."""

    def __init__(self, hosts, handle, enter=None):
        self._enter, self._handle = enter or hosts.enter, handle

    def __getattr__(self, name):
        return getattr(self._handle, name)

    def devices(self):
        return self._handle.devices()

    def sleep(self, *args, **options):
        return self._handle.sleep(*args, **options)

    def wake_up(self, tags=None):
        return self._handle.wake_up(tags)

    def post_update(self, body):
        self._enter()  # this thread, and those that it starts
        return self._handle.post_update(body)


def engines_there(hosts, count):
    engines = [ToyEngine() for _ in range(count)]
    for number, engine in enumerate(engines):
        engine.ranks = [Rank(ToyModel(0, 1), number, hosts=UpdateHosts(hosts.networks))]
    return engines


TCP = {"transport": "tcp", "bucket_bytes": 1 << 20}


def counted(hosts, way):
    return int(Path("/sys/class/net", hosts.interface, f"statistics/{way}_bytes").read_text())


def bytes_over_the_link(hosts, handles, tensors):
    before = counted(hosts, "tx")
    options = {**TCP, "advertise": hosts.addresses[0], "timeout_s": 60.0}
    push_from_all([There(hosts, handle) for handle in handles], tensors, **options)
    return counted(hosts, "tx") - before


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


@pytest.mark.parametrize("tls", [False, True])
def test_each_link_of_a_chain_carries_the_weights_once(hosts, tls, monkeypatch):
    """The first relay and its engines are on the other host; the second one and its engines on this one."""
    if tls:
        pytest.importorskip("cryptography")
    monkeypatch.setattr(toys, "HIDDEN", 4096)  # much more than the messages, some of which go the other way
    tensors, allowed = checkpoint(1), UpdateHosts(hosts.networks)
    one = bytes_over_the_link(hosts, engines_there(hosts, 1), tensors)
    near, far = engines_there(hosts, ENGINES), [ToyEngine() for _ in range(ENGINES)]
    second = There(hosts, Relay(far, hosts=allowed), hosts.leave)

    def first():
        hosts.enter()
        return Relay([*near, second], hosts=allowed, advertise=hosts.engine, tls=tls, **TCP)

    with ThreadPoolExecutor(1) as pool:
        relay = pool.submit(first).result()
    before = counted(hosts, "rx")
    assert bytes_over_the_link(hosts, [relay], tensors) < 1.5 * one
    assert 0.9 * one < counted(hosts, "rx") - before < 1.5 * one
    assert_loaded([*near, *far], tensors)
    assert all(engine.open for engine in [*near, *far])
