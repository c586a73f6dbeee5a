import socket
from types import SimpleNamespace

import psutil
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.requests import HTTPConnection

from rl_memory_plugins.errors import AuthenticationError, PermissionDeniedError, RLMemoryError
from rl_memory_plugins.server.auth import ControlAuth
from rl_memory_plugins.server.router import build_router

ROUTES = [
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("POST", "/update_weights_from_ipc"),
    ("GET", "/is_sleeping"),
    ("GET", "/memory"),
    ("GET", "/weight_version"),
    ("GET", "/installation"),
    ("GET", "/weights/checksums"),
]


def connection(host="127.0.0.1", **headers):
    raw = [(name.rstrip("_").replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return HTTPConnection({"type": "http", "client": host and (host, 5), "headers": raw})


def admitted(auth, request):
    try:
        auth.check(request)
    except RLMemoryError as error:
        return type(error)
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1", None])
def test_local_clients_need_no_key_when_none_is_set(host):
    assert admitted(ControlAuth(), connection(host)) is True


@pytest.mark.parametrize(
    "host",
    [
        "10.0.0.1",
        "128.0.0.1",
        "0.0.0.0",
        "::",
        "::ffff:10.0.0.1",
        "fe80::1%eth0",
        "2001:db8::1",
        "localhost",
        "",
        "x",
    ],
)
def test_others_are_refused_when_no_key_is_set(host):
    assert admitted(ControlAuth(), connection(host or "?")) is PermissionDeniedError


def own_addresses():
    return {
        one.address
        for all_of in psutil.net_if_addrs().values()
        for one in all_of
        if one.family in (socket.AF_INET, socket.AF_INET6)
    }


def test_the_addresses_of_this_machine_s_interfaces_are_local():
    """Trainers under Ray call `http://NODE_IP`. Another program may make and remove interfaces meanwhile."""
    before = own_addresses()
    without_key = {host for host in before if admitted(ControlAuth(), connection(host)) is True}
    with_key = {host for host in before if admitted(ControlAuth(["k"]), connection(host)) is AuthenticationError}
    lasting = before & own_addresses()
    assert lasting and lasting <= without_key & with_key


def test_an_address_is_local_while_an_interface_has_it(monkeypatch):
    address = SimpleNamespace(address="10.11.12.13", family=socket.AF_INET)
    link_local = SimpleNamespace(address="fe80::5%eth0", family=socket.AF_INET6)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [address, link_local]})
    assert admitted(ControlAuth(), connection("10.11.12.13")) is True
    assert admitted(ControlAuth(), connection("::ffff:10.11.12.13")) is True
    assert admitted(ControlAuth(), connection("fe80::5%eth0")) is True
    assert admitted(ControlAuth(), connection("10.11.12.14")) is PermissionDeniedError
    monkeypatch.setattr(psutil, "net_if_addrs", dict)
    assert admitted(ControlAuth(), connection("10.11.12.13")) is PermissionDeniedError


@pytest.mark.parametrize(
    "header", ["x_forwarded_for", "forwarded", "x_real_ip"], ids=lambda header: header.replace("_", "-")
)
@pytest.mark.parametrize("host", ["127.0.0.1", None])
def test_a_proxy_on_this_machine_does_not_make_its_clients_local(host, header):
    assert admitted(ControlAuth(), connection(host, **{header: "127.0.0.1"})) is PermissionDeniedError


@pytest.mark.parametrize(
    "origin, allowed",
    [
        ("http://localhost:3000", True),
        ("http://127.0.0.1", True),
        ("https://[::1]:8443", True),
        ("https://evil.example", False),
        ("http://localhost.evil.example", False),
        ("http://127.0.0.1.evil.example", False),
        ("http://localhost@evil.example", False),
        ("null", False),
        ("", False),
        ("http://[", False),
    ],
)
def test_web_pages_cannot_use_a_local_browser(origin, allowed):
    expected = True if allowed else PermissionDeniedError
    assert admitted(ControlAuth(), connection(origin=origin)) is expected


@pytest.mark.parametrize("site", ["none", "same-origin", "same-site"])
def test_a_browser_on_this_machine_may_ask_for_a_person_and_for_pages_of_this_machine(site):
    assert admitted(ControlAuth(), connection(sec_fetch_site=site, host_="localhost:8000")) is True


@pytest.mark.parametrize("site", ["cross-site", "", "something new"])
def test_a_page_cannot_have_a_browser_get_anything(site):
    """As an image, a link or a script, without an `Origin`."""
    assert admitted(ControlAuth(), connection(sec_fetch_site=site)) is PermissionDeniedError
    assert admitted(ControlAuth(["k"]), connection(sec_fetch_site=site, authorization="Bearer k")) is True


@pytest.mark.parametrize(
    "name, allowed",
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("10.1.2.3:30000", True),  # an address is no name that somebody may change
        ("engine.localhost", True),
        (socket.gethostname(), True),
        (socket.gethostname().upper() + ":8000", True),
        ("rebound.example", False),
        ("rebound.example:8000", False),
        ("127.0.0.1.rebound.example", False),
        ("localhost.rebound.example", False),
        ("localhost@rebound.example", False),
        ("", False),
        ("[", False),
        (".localhost.", False),
    ],
)
def test_a_page_cannot_come_in_by_another_name_of_this_machine(name, allowed):
    assert admitted(ControlAuth(), connection(host_=name)) is (allowed or PermissionDeniedError)
    assert admitted(ControlAuth(), connection(None, host_=name)) is True, "no browser reaches a Unix socket"
    assert admitted(ControlAuth(["k"]), connection(host_=name, authorization="Bearer k")) is True


@pytest.mark.parametrize(
    "header, allowed",
    [
        ("Bearer admin", True),
        ("bearer admin", True),
        ("Bearer api", True),
        ("Bearer  admin ", True),
        ("Bearer Admin", False),
        ("Bearer admi", False),
        ("Bearer adminn", False),
        ("Bearer ", False),
        ("Bearer", False),
        ("Basic admin", False),
        ("admin", False),
        ("", False),
        ("Bearer \xe9", False),
    ],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1", None])
def test_with_keys_one_of_them_is_needed_from_anywhere(host, header, allowed):
    auth = ControlAuth(["admin", "api"])
    expected = True if allowed else AuthenticationError
    assert admitted(auth, connection(host, authorization=header)) is expected


def test_a_key_is_needed_even_from_here():
    assert admitted(ControlAuth(["k"]), connection("127.0.0.1")) is AuthenticationError


def test_a_key_opens_to_proxies_and_pages():
    request = connection("10.0.0.1", authorization="Bearer k", origin="https://ui.example", x_forwarded_for="1.2.3.4")
    assert admitted(ControlAuth(["k"]), request) is True


def test_keys_outside_ascii():
    header = "Bearer schlüssel".encode().decode("latin-1")  # UTF-8 on the wire
    assert admitted(ControlAuth(["schlüssel"]), connection(authorization=header)) is True
    assert admitted(ControlAuth(["schlussel"]), connection(authorization=header)) is AuthenticationError


def test_empty_keys_are_no_keys():
    auth = ControlAuth(["", ""])
    assert admitted(auth, connection("127.0.0.1")) is True
    assert admitted(auth, connection("10.0.0.1", authorization="Bearer ")) is PermissionDeniedError


@pytest.mark.parametrize("prefix", ["", "/v1/rl_memory"])
@pytest.mark.parametrize("method, route", ROUTES)
@pytest.mark.parametrize("page", [{"sec-fetch-site": "cross-site"}, {"host": "rebound.example"}])
def test_no_route_answers_a_page(client, control, prefix, method, route, page):
    response = client.request(method, prefix + route, headers=page)
    assert response.json()["error"]["code"] == "PermissionDeniedError"
    assert control.calls == []


@pytest.mark.parametrize("prefix", ["", "/v1/rl_memory"])
@pytest.mark.parametrize("method, route", ROUTES)
@pytest.mark.parametrize(
    "keys, host, header, status",
    [
        (["k"], "127.0.0.1", None, 401),
        (["k"], "127.0.0.1", "Bearer wrong", 401),
        ([], "10.0.0.1", None, 403),
        ([], "10.0.0.1", "Bearer k", 403),
    ],
)
def test_every_route_is_guarded(control, prefix, method, route, keys, host, header, status):
    app = FastAPI()
    app.include_router(build_router(lambda: control, ControlAuth(keys)))
    client = TestClient(app, "http://localhost", client=(host, 1))
    response = client.request(method, prefix + route, headers={"authorization": header} if header else {})
    assert response.status_code == status
    assert response.json()["error"]["code"] == {401: "AuthenticationError", 403: "PermissionDeniedError"}[status]
    assert response.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)
    assert control.calls == []
    if keys:
        allowed = client.request(method, prefix + route, headers={"authorization": "Bearer k"})
        assert allowed.status_code not in (401, 403)
