"""An update between two hosts: two network namespaces, which share neither interfaces nor loopback addresses.

Only root may make namespaces, and some containers forbid it to root too. There the first test runs on one host, over
two loopback addresses, and the tests of a cut cable do not run; `test_network_update.py` cuts connections everywhere.
"""

import itertools
import threading
import warnings
from types import SimpleNamespace

import pytest
from toys import Rank, Receiving, checkpoint, loaded

from integration.two_hosts import TwoHosts, namespaces_work
from integration.waiting import wait_until
from rl_memory_plugins import keepalive
from rl_memory_plugins.errors import PermissionDeniedError, RLMemoryError, WeightUpdateError
from rl_memory_plugins.tags import Content
from rl_memory_plugins.trainer.sources.model import as_source
from rl_memory_plugins.weights import addresses
from rl_memory_plugins.weights.communicators import kept
from rl_memory_plugins.weights.communicators.over_gloo import GlooCommunicator
from rl_memory_plugins.weights.sender import WeightSender
from rl_memory_plugins.weights.update_hosts import UpdateHosts


class OneHost:
    """In place of `TwoHosts`."""

    addresses = ["127.0.0.2", "::1"]
    interface = "lo"
    networks = ""

    def enter(self):
        """The engine stays on this host."""


@pytest.fixture(scope="module")
def hosts():
    if not namespaces_work():
        warnings.warn("no network namespaces here: trainer and engine are on one host", stacklevel=1)
        yield OneHost()
        return
    with TwoHosts() as two:
        yield two
        # an end that waits for a host which is gone would do so into the tests that follow
        wait_until(lambda: not any("communicator" in one.name for one in threading.enumerate()), "all ends are closed")


@pytest.fixture(autouse=True)
def none_kept():
    kept.close_communicators()  # those of other files
    yield
    kept.close_communicators()


class Elsewhere(Receiving):
    """A receiver on the engine's host, which has no Unix socket of the trainer's."""

    def __init__(self, hosts, rank, sender, **options):
        self._hosts = hosts
        endpoints = {
            device: [place for place in addresses.places_of(places) if addresses.parse(place)]
            for device, places in sender.endpoints.items()
        }
        super().__init__(rank, SimpleNamespace(endpoints=endpoints, token=sender.token), **options)

    def run(self):
        self._hosts.enter()
        super().run()


def update(hosts, rank, source, *, timeout_s=30.0, during=lambda: None, **options):
    with WeightSender(1, bucket_bytes=256, timeout_s=timeout_s, **options) as sender:
        thread = Elsewhere(hosts, rank, sender, timeout_s=timeout_s)
        during()
        try:
            return sender.send(as_source(source)), thread.join()
        except RLMemoryError as error:
            sender.close()
            return error, thread.join()


TRANSPORTS = pytest.mark.parametrize(
    ("transport", "tls"), [("tcp", False), ("tcp", True), ("gloo", False)], ids=["tcp", "tls", "gloo"]
)


@TRANSPORTS
@pytest.mark.parametrize("which", ["IPv4", "IPv6", "both", "interface"])
def test_the_weights_reach_the_other_host(hosts, which, transport, tls):
    advertise = {
        "IPv4": hosts.addresses[0],
        "IPv6": f"[{hosts.addresses[1]}]:0",
        "both": hosts.addresses,
        "interface": hosts.interface,
    }[which]
    rank, names = Rank(hosts=UpdateHosts(hosts.networks)), []
    for seed in (4, 5):
        tensors = checkpoint(seed)
        report, thread = update(hosts, rank, tensors, advertise=advertise, tls=tls, transport=transport)
        assert thread.error is None, report
        rank.model.assert_unchanged(loaded(tensors))
        assert report["transport"] == transport
        names.append(kept.OF_TRAINER.names())
    assert names[0] == names[1] and len(names[0]) == (transport == "gloo")  # the second update makes none


@pytest.fixture
def two_hosts(hosts):
    if isinstance(hosts, OneHost):
        pytest.skip("this machine makes no network namespaces")
    return hosts


def test_the_other_host_must_be_allowed(two_hosts):
    rank = Rank()
    with WeightSender(1, timeout_s=1, transport="tcp", advertise=two_hosts.addresses) as sender:
        thread = Elsewhere(two_hosts, rank, sender).join()
    assert isinstance(thread.error, PermissionDeniedError) and f"update_hosts={two_hosts.addresses[1]}" in str(
        thread.error
    )
    assert rank.manager.content is Content.VALID


def test_the_loopback_address_of_the_trainer_is_not_that_of_the_engine(two_hosts):
    with WeightSender(1, timeout_s=1, transport="tcp") as sender:
        thread = Elsewhere(two_hosts, Rank(), sender).join()
    assert thread.error.details["reason"] == "unreachable"


def test_an_interface_that_is_down_is_passed_over(two_hosts):
    rank, tensors = Rank(hosts=UpdateHosts("0.0.0.0/0 ::/0")), checkpoint(5)
    places = ["tcp://203.0.113.1:5000", "tcp://[2001:db8::1]:5000"]  # there is no way there
    with WeightSender(1, timeout_s=10, transport="tcp", advertise=two_hosts.addresses[0]) as sender:
        sender.endpoints["*"] = [*places, sender.endpoints["*"]]
        thread = Elsewhere(two_hosts, rank, sender)
        sender.send(as_source(tensors))
    assert thread.join().error is None
    rank.model.assert_unchanged(loaded(tensors))


def pulled_at_tensor(number, pull, monkeypatch):
    """A source that calls `pull` before it gives so many more tensors."""

    class Pulling:
        def specs(self):
            return as_source(checkpoint(1)).specs()

        def tensors(self):
            for place, item in enumerate(as_source(checkpoint(1)).tensors()):
                if place == number:
                    pull()
                yield item

    return Pulling()


def pulled_at_bytes(number, pull, monkeypatch):
    """A source during whose update `pull` is called between the message of a bucket and its bytes over Gloo."""
    places, send = itertools.count(), GlooCommunicator.send

    def pulling(*arguments):
        if next(places) == number:
            pull()
        send(*arguments)

    monkeypatch.setattr(GlooCommunicator, "send", pulling)
    return as_source(checkpoint(1))


@pytest.mark.parametrize(
    ("transport", "tls", "family", "pulled", "number", "content"),
    [
        ("tcp", False, 0, pulled_at_tensor, 9, Content.FAILED),
        ("tcp", True, 0, pulled_at_tensor, 9, Content.FAILED),
        ("gloo", False, 1, pulled_at_tensor, 0, Content.VALID),
        ("gloo", False, 0, pulled_at_bytes, 2, Content.FAILED),
    ],
)
def test_a_cable_that_is_pulled_fails_both_sides_in_time(
    two_hosts, monkeypatch, transport, tls, family, pulled, number, content
):
    """Nobody is told: no packet says that the connection is over.

    The rank has got the first bucket by the tenth tensor, and by the bytes of the third bucket, which takes its slot.
    Before that the former weights stay valid.
    """
    rank, pulls = Rank(hosts=UpdateHosts(two_hosts.networks)), []
    options = {"advertise": two_hosts.addresses[family], "transport": transport, "tls": tls}
    update(two_hosts, rank, checkpoint(5), **options)  # what a first update does takes long on a busy machine
    former = rank.model.snapshot()

    def pull():
        pulls.append(two_hosts.cut())

    try:
        with monkeypatch.context() as patched:
            outcome, thread = update(two_hosts, rank, pulled(number, pull, patched), timeout_s=3.0, **options)
    finally:
        two_hosts.mend()
    assert pulls
    for error in (outcome, thread.error):
        assert isinstance(error, WeightUpdateError) and error.details["reason"] == "stalled"
    assert rank.manager.content is content
    if content is Content.VALID:
        rank.model.assert_unchanged(former)
    assert kept.OF_TRAINER.names() == rank.receiver._communicators.names() == []
    tensors = checkpoint(6)
    _, thread = update(two_hosts, rank, tensors, **options)
    assert thread.error is None
    rank.model.assert_unchanged(loaded(tensors))


def test_a_host_that_goes_between_updates_takes_its_communicator_along(two_hosts, monkeypatch):
    """Neither end gets a packet that says so, and each has memory for the other one."""
    for name in ("IDLE_S", "INTERVAL_S", "PROBES"):
        monkeypatch.setattr(keepalive, name, 1)
    rank, options = Rank(hosts=UpdateHosts(two_hosts.networks)), {"advertise": two_hosts.addresses, "transport": "gloo"}
    _, thread = update(two_hosts, rank, checkpoint(5), **options)
    assert thread.error is None
    assert len(kept.OF_TRAINER.names()) == len(rank.receiver._communicators.names()) == 1
    two_hosts.cut()
    try:
        wait_until(lambda: kept.OF_TRAINER.names() == [], "the trainer has closed it")
        wait_until(lambda: rank.receiver._communicators.names() == [], "the engine has closed it")
    finally:
        two_hosts.mend()
    tensors = checkpoint(6)
    _, thread = update(two_hosts, rank, tensors, **options)
    assert thread.error is None
    rank.model.assert_unchanged(loaded(tensors))
