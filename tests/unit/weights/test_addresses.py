"""The places of a trainer, as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.weights import addresses
from rl_memory_plugins.weights.addresses import Address

DIGEST = "0123456789abcdef" * 4


@given(st.ip_addresses(), st.integers(1, 65535), st.sampled_from([None, DIGEST]))
def test_an_address_is_read_as_it_was_written(host, port, fingerprint):
    address = Address(str(host).partition("%")[0], port, fingerprint)
    assert addresses.parse(str(address)) == address


@pytest.mark.parametrize(
    "place", ["/tmp/x/weights.sock", "weights.sock", "", "http://192.0.2.1:80", "TCP://192.0.2.1:1"]
)
def test_all_else_is_the_path_of_a_unix_socket(place):
    assert addresses.parse(place) is None


@pytest.mark.parametrize(
    "place",
    [
        "tcp://",
        "tcp://192.0.2.1",
        "tcp://192.0.2.1:0",
        "tcp://192.0.2.1:65536",
        "tcp://192.0.2.1:x",
        "tcp://trainer.example:5000",
        "tcp://localhost:5000",
        "tcp://::1:5000",
        "tcp://192.0.2.1:5000/path",
        "tcp://192.0.2.1:5000?query",
        "tcp://user@192.0.2.1:5000",
        f"tcp://192.0.2.1:5000#{DIGEST}",
        "tls://192.0.2.1:5000",
        "tls://192.0.2.1:5000#",
        f"tls://192.0.2.1:5000#{DIGEST[1:]}",
        f"tls://192.0.2.1:5000#{DIGEST.upper()}",
        "tcp://[fe80::1",
    ],
)
def test_what_is_no_address_is_refused_with_the_form_that_is_wanted(place):
    with pytest.raises(InvalidRequestError, match="bad endpoint") as error:
        addresses.check({"cpu:0": ["/tmp/x.sock", place]})
    assert error.value.details == {"field": "endpoints", "got": place}


def test_a_device_needs_a_place():
    addresses.check({"cpu:0": "/tmp/x.sock", "cpu:1": ["tcp://[::1]:5000"]})
    with pytest.raises(InvalidRequestError, match="empty list for cpu:1"):
        addresses.check({"cpu:0": "/tmp/x.sock", "cpu:1": []})
