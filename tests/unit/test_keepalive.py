"""TCP connections are probed at both ends."""

import contextlib
import http.server
import socket
import threading

import pytest

from rl_memory_plugins import keepalive
from rl_memory_plugins.client import EngineClient
from rl_memory_plugins.weights.dial import dial
from rl_memory_plugins.weights.doors import Doors

CHOSEN = {"IDLE_S": 7, "INTERVAL_S": 3, "PROBES": 2}


@pytest.fixture
def chosen(monkeypatch):
    for name, value in CHOSEN.items():
        monkeypatch.setattr(keepalive, name, value)


def assert_probed(sock):
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    assert [sock.getsockopt(socket.IPPROTO_TCP, option) for option in options] == list(CHOSEN.values())


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_both_ends_of_an_update_are_probed(chosen, address):
    with contextlib.ExitStack() as end:
        doors = Doors(1, directory=None, advertise=address, local=False, tls=False)
        end.callback(doors.close)
        dialled = end.enter_context(dial(doors.places, None, 10.0))
        accepted, _ = doors.sockets[0].accept()
        prepared = end.enter_context(doors.prepare(accepted))
        assert_probed(dialled)
        assert_probed(prepared)


def test_calls_of_control_routes_are_probed(chosen):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(204)
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        answering = threading.Thread(target=server.handle_request, daemon=True)
        answering.start()
        with (
            EngineClient(f"http://127.0.0.1:{server.server_port}") as engine,
            engine._http.stream("GET", "/") as response,
        ):
            assert_probed(response.extensions["network_stream"].get_extra_info("socket"))
        answering.join(10)
