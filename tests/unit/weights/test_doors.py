"""The sockets of a trainer: which addresses it listens on, and what it refuses to listen on."""

import socket
import ssl
import sys

import psutil
import pytest

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.weights import addresses
from rl_memory_plugins.weights.doors import Doors, _targets
from rl_memory_plugins.weights.sender import WeightSender


def opened(advertise, tmp_path, tls=False, local=True):
    return Doors(4, directory=tmp_path, advertise=advertise, local=local, tls=tls)


@pytest.fixture
def interfaces(monkeypatch):
    def address(family, text):
        return type("Address", (), {"family": family, "address": text})

    found = {
        "lo": [address(socket.AF_INET, "127.0.0.1"), address(socket.AF_INET6, "::1")],
        "eth1": [
            address(psutil.AF_LINK, "02:fc:00:00:00:01"),
            address(socket.AF_INET, "192.0.2.2"),
            address(socket.AF_INET6, "2001:db8::2"),
            address(socket.AF_INET6, "fe80::1%eth1"),
        ],
        "down": [],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)


@pytest.mark.parametrize(
    ("advertise", "expected"),
    [
        (None, []),
        ("192.0.2.2", [("192.0.2.2", 0)]),
        ("192.0.2.2:5000", [("192.0.2.2", 5000)]),
        ("192.0.2.2:0", [("192.0.2.2", 0)]),
        ("2001:db8::2", [("2001:db8::2", 0)]),
        ("[2001:0db8::2]:5000", [("2001:db8::2", 5000)]),
        ("[2001:db8::2]", [("2001:db8::2", 0)]),
        ("eth1", [("192.0.2.2", 0), ("2001:db8::2", 0)]),
        (["eth1:5000", "127.0.0.1"], [("192.0.2.2", 5000), ("2001:db8::2", 5000), ("127.0.0.1", 0)]),
    ],
)
def test_addresses_interfaces_and_ports(advertise, expected, interfaces):
    assert _targets(advertise) == expected


@pytest.mark.parametrize(
    "entry", ["", "0.0.0.0", "::", "fe80::1", "eth9", "down", "192.0.2.2:70000", "192.0.2.2:x", "a:b:c", "[::1]x"]
)
def test_what_no_engine_can_connect_to_is_refused(entry, interfaces):
    with pytest.raises(InvalidRequestError, match="cannot advertise") as error:
        _targets([entry])
    assert error.value.details["field"] == "advertise" and error.value.details["got"] == entry


def test_the_remedy_lists_the_interfaces(interfaces):
    with pytest.raises(InvalidRequestError, match=r"it has lo \(127.0.0.1, ::1\), eth1 \(192.0.2.2, 2001:db8::2\)"):
        _targets("eth9")


def test_an_address_of_another_host_and_a_port_in_use_are_refused(tmp_path):
    with pytest.raises(InvalidRequestError, match="advertise an address of this host"):
        opened("192.0.2.77", tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidRequestError, match="in use") as error:
            opened(["127.0.0.1", f"127.0.0.1:{port}"], tmp_path)
    assert error.value.details["port"] == port
    assert list(tmp_path.iterdir()) == []  # nor does the Unix socket stay


def test_the_unix_socket_comes_first_and_port_0_is_any_free_port(tmp_path):
    doors = opened(["127.0.0.1", "127.0.0.2", "::1"], tmp_path)
    path, *others = doors.places
    assert path.startswith(str(tmp_path))
    found = [addresses.parse(place) for place in others]
    assert [address.host for address in found] == ["127.0.0.1", "127.0.0.2", "::1"]
    assert all(address.port and address.fingerprint is None for address in found)
    doors.close()
    doors.close()
    assert list(tmp_path.iterdir()) == []
    for address in found:
        with pytest.raises(OSError):
            socket.create_connection(address[:2], timeout=1)


def test_a_port_can_be_used_again_at_once(tmp_path):
    doors = opened("127.0.0.1", tmp_path)
    port = addresses.parse(doors.places[1]).port
    with socket.create_connection(("127.0.0.1", port)):
        accepted, _ = doors.sockets[1].accept()
        accepted.close()  # this end waits for the last packets now
    doors.close()
    opened(f"127.0.0.1:{port}", tmp_path).close()


def test_without_advertise_there_is_no_tcp_and_tls_is_refused(tmp_path):
    with WeightSender(1, directory=tmp_path) as sender:
        assert isinstance(sender.endpoints["*"], str) and addresses.parse(sender.endpoints["*"]) is None
    with pytest.raises(InvalidRequestError, match="advertise"):
        WeightSender(1, directory=tmp_path, tls=True)
    assert list(tmp_path.iterdir()) == []


def test_the_transport_tcp_opens_no_unix_socket(tmp_path):
    with WeightSender(1, directory=tmp_path, transport="tcp") as sender:
        assert addresses.parse(sender.endpoints["*"]).host == "127.0.0.1"
        assert list(tmp_path.iterdir()) == []
    with WeightSender(["a", "b"], directory=tmp_path, transport="tcp", advertise=["::1", "127.0.0.1"]) as sender:
        assert [addresses.parse(place).host for place in sender.endpoints["b"]] == ["::1", "127.0.0.1"]


def test_a_certificate_is_made_for_each_session(tmp_path):
    prints = set()
    for _ in range(2):
        doors = opened("127.0.0.1", tmp_path, tls=True, local=False)
        prints.add(addresses.parse(doors.places[0]).fingerprint)
        doors.close()
    assert len(prints) == 2 and None not in prints


@pytest.mark.parametrize("missing", ["certificate", "key", "both", "noise", "number"])
def test_unusable_files_are_refused(tmp_path, missing, certificate_files):
    certificate, key = certificate_files
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing")
    tls = {
        "certificate": (tmp_path / "none.pem", key),
        "key": (certificate, tmp_path / "none.pem"),
        "both": (key, certificate),
        "noise": (empty, empty),
        "number": 7,
    }[missing]
    with pytest.raises(InvalidRequestError, match="tls=") as error:
        opened("127.0.0.1", tmp_path, tls=tls, local=False)
    assert error.value.details["field"] == "tls"


def test_without_the_package_files_are_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(InvalidRequestError, match=r"rl_memory_plugins\[remote\].*or give the files"):
        WeightSender(1, transport="tcp", tls=True)


def test_tls_is_of_version_1_3_alone(certificate_files):
    with WeightSender(1, transport="tcp", tls=certificate_files, timeout_s=5) as sender:
        address = addresses.parse(sender.endpoints["*"])
        assert sender._listener._doors._tls._context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert address.fingerprint
