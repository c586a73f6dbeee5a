"""Several engines on a host each, by push_from_all: network namespaces, which only root may make."""

import threading
from contextlib import ExitStack

import pytest
from test_push_from_all import assert_loaded
from test_relay_two_hosts import There
from toy_engine import ToyEngine
from toys import Rank, ToyModel, Tracked, checkpoint

from integration.two_hosts import TwoHosts, namespaces_work
from integration.waiting import wait_until
from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.tags import Content
from rl_memory_plugins.trainer import push_from_all
from rl_memory_plugins.weights import addresses
from rl_memory_plugins.weights.communicators import kept
from rl_memory_plugins.weights.update_hosts import UpdateHosts

HOSTS = 3


@pytest.fixture(scope="module")
def hosts():
    if not namespaces_work():
        pytest.skip("this machine makes no network namespaces")
    with ExitStack() as stack:
        yield [stack.enter_context(TwoHosts(number)) for number in range(HOSTS)]
        # an end that waits for a host which is gone would do so into the tests that follow
        wait_until(lambda: not any("communicator" in one.name for one in threading.enumerate()), "all ends are closed")


@pytest.fixture(autouse=True)
def none_kept():
    yield
    kept.close_communicators()


class Alone(There):
    """An engine on a host of its own, which has no Unix socket of the trainer's."""

    error = None

    def post_update(self, body):
        endpoints = {
            device: [place for place in addresses.places_of(places) if addresses.parse(place)]
            for device, places in body["endpoints"].items()
        }
        try:
            return super().post_update({**body, "endpoints": endpoints})
        except RLMemoryError as error:
            self.error = error
            raise


class Pulling(Tracked):
    """A source that pulls the cable of a host before it gives a tensor."""

    def __init__(self, tensors, host, at):
        super().__init__(tensors)
        self._host, self._at = host, at

    def tensors(self):
        for number, item in enumerate(super().tensors()):
            if number == self._at:
                self._host.cut()
            yield item


def engines_on(hosts):
    engines = [ToyEngine() for _ in hosts]
    for number, (engine, host) in enumerate(zip(engines, hosts, strict=True)):
        engine.ranks = [Rank(ToyModel(), number, hosts=UpdateHosts(host.networks))]
    return engines


def push(hosts, engines, source, version, **options):
    handles = [Alone(*one) for one in zip(hosts, engines, strict=True)]
    options = {"timeout_s": 30.0, "transport": "tcp", **options}
    advertise = [address for host in hosts for address in host.addresses]
    options |= {"bucket_bytes": 256, "advertise": advertise, "on_failure": "continue"}
    return push_from_all(handles, source, weight_version=version, **options), handles


@pytest.mark.parametrize(
    ("transport", "tls"), [("tcp", False), ("tcp", True), ("gloo", False)], ids=["tcp", "tls", "gloo"]
)
def test_the_engines_of_all_hosts_get_the_weights(hosts, transport, tls):
    engines = engines_on(hosts)
    for version in ("1", "2"):
        tensors = checkpoint(int(version))
        report, _ = push(hosts, engines, tensors, version, transport=transport, tls=tls)
        assert report["failed"] == []
        assert [received["transport"] for received in report["receivers"]] == [transport] * HOSTS
        assert_loaded(engines, tensors)
        assert [engine.version for engine in engines] == [version] * HOSTS


@pytest.mark.parametrize(("at", "content"), [(0, Content.VALID), (9, Content.FAILED)])
def test_an_engine_whose_cable_is_pulled_is_left_out_until_the_next_update(hosts, at, content):
    """By the tenth tensor its first bucket is loaded; before the first byte its former weights are valid."""
    engines = engines_on(hosts)
    push(hosts, engines, checkpoint(1), "1")
    cut, others = engines[1], [engines[0], engines[2]]
    former = cut.ranks[0].model.snapshot()
    try:
        report, handles = push(hosts, engines, Pulling(checkpoint(2), hosts[1], at), "2", timeout_s=2.0)
        [failure] = report["failed"]
        assert failure.engine == 1 and failure.error.details["reason"] == "stalled"
        assert failure.state["content"] == content.value and failure.state["weight_version"] == "1"
        assert_loaded(others, checkpoint(2))
        assert all(engine.open and engine.version == "2" for engine in others)
        wait_until(lambda: handles[1].error is not None, "the engine has given up too")
    finally:
        hosts[1].mend()
    assert cut.ranks[0].manager.content is content and cut.open == (content is Content.VALID)
    if content is Content.VALID:
        cut.ranks[0].model.assert_unchanged(former)
    report, _ = push(hosts, engines, checkpoint(3), "3")
    assert report["failed"] == []
    assert_loaded(engines, checkpoint(3))
    assert all(engine.open and engine.version == "3" for engine in engines)
