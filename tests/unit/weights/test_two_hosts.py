"""An update between two hosts: two network namespaces, which share neither interfaces nor loopback addresses.

Only root may make namespaces, and some containers forbid it to root too. There the first test runs on one host, over
two loopback addresses, and the tests of a cut cable do not run; `test_network_update.py` cuts connections everywhere.
"""

import functools
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
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.communicators.kept import KeptCommunicators
from rl_memory_plugins.weights.dial import dial
from rl_memory_plugins.weights.doors import Doors
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


class Elsewhere(Receiving):
    """A receiver on the engine's host."""

    def __init__(self, hosts, *arguments, **options):
        self._hosts = hosts
        super().__init__(*arguments, **options)

    def run(self):
        self._hosts.enter()
        super().run()


def update(hosts, rank, source, *, timeout_s=10.0, during=lambda: None, **options):
    with WeightSender(1, bucket_bytes=256, timeout_s=timeout_s, **options) as sender:
        thread = Elsewhere(hosts, rank, sender, timeout_s=timeout_s)
        during()
        try:
            return sender.send(as_source(source)), thread.join()
        except RLMemoryError as error:
            sender.close()
            return error, thread.join()


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("which", ["IPv4", "IPv6", "both", "interface"])
def test_the_weights_reach_the_other_host(hosts, which, tls):
    advertise = {
        "IPv4": hosts.addresses[0],
        "IPv6": f"[{hosts.addresses[1]}]:0",
        "both": hosts.addresses,
        "interface": hosts.interface,
    }[which]
    rank, tensors = Rank(hosts=UpdateHosts(hosts.networks)), checkpoint(4)
    report, thread = update(hosts, rank, tensors, advertise=advertise, tls=tls, transport="tcp")
    assert thread.error is None, report
    rank.model.assert_unchanged(loaded(tensors))
    assert report["transport"] == "tcp"


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


@pytest.mark.parametrize("tls", [False, True])
def test_a_cable_that_is_pulled_in_the_middle_fails_both_sides_in_time(two_hosts, tls):
    """Nobody is told: no packet says that the connection is over."""
    rank = Rank(hosts=UpdateHosts(two_hosts.networks))
    pulled = threading.Event()

    class Pulling:
        def specs(self):
            return as_source(checkpoint(1)).specs()

        def tensors(self):
            for number, item in enumerate(as_source(checkpoint(1)).tensors()):
                if number == 4:
                    two_hosts.cut()
                    pulled.set()
                yield item

    options = {"advertise": two_hosts.addresses[0], "transport": "tcp", "tls": tls}
    try:
        outcome, thread = update(two_hosts, rank, Pulling(), timeout_s=5.0, **options)
    finally:
        two_hosts.mend()
    assert pulled.is_set()
    for error in (outcome, thread.error):
        assert isinstance(error, WeightUpdateError) and error.details["reason"] == "stalled"
    assert rank.manager.content is Content.FAILED
    tensors = checkpoint(6)
    _, thread = update(two_hosts, rank, tensors, **options)
    assert thread.error is None
    rank.model.assert_unchanged(loaded(tensors))


def test_both_ends_close_a_kept_communicator_whose_cable_is_pulled(two_hosts, monkeypatch):
    """Between updates neither end sends anything."""
    for name in ("IDLE_S", "INTERVAL_S", "PROBES"):
        monkeypatch.setattr(keepalive, name, 1)
    doors = Doors(1, directory=None, advertise=two_hosts.addresses[0], local=False, tls=False)
    dialled = []

    def connect():
        two_hosts.enter()
        dialled.append(dial(doors.places, None, 10.0))

    there = threading.Thread(target=connect)
    there.start()
    there.join(20)
    accepted, _ = doors.sockets[0].accept()
    closed = []
    ends = [KeptCommunicators(), KeptCommunicators()]
    for number, (end, sock) in enumerate(zip(ends, [doors.prepare(accepted), *dialled], strict=True)):
        communicator = SimpleNamespace(
            name="one", transport="gloo", settle=lambda: None, close=functools.partial(closed.append, number)
        )
        end.keep(communicator, wire.Connection(sock, "the other end"))
    two_hosts.cut()
    try:
        wait_until(lambda: sorted(closed) == [0, 1], "both have noticed")
    finally:
        two_hosts.mend()
        doors.close()
    assert [end.names() for end in ends] == [[], []]
