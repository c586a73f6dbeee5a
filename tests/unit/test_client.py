"""The client against servers that behave badly on the wire."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rl_memory_plugins.client import EngineClient


class OneAnswer(BaseHTTPRequestHandler):
    """Promises to keep the connection, and drops it at the next request: a server's idle limit, met by a call."""

    protocol_version = "HTTP/1.1"
    answered = False

    def do_GET(self) -> None:
        if self.answered:
            self.close_connection = True
            return
        self.answered = True
        body = b'{"is_sleeping": false}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), OneAnswer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_call_never_meets_a_connection_that_is_being_closed(url: str) -> None:
    with EngineClient(url) as client:
        for _ in range(3):
            assert client.is_sleeping() is False
