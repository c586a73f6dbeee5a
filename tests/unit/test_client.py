"""The client against servers that behave badly on the wire."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from rl_memory_plugins.client import EngineClient


class OneAnswer(BaseHTTPRequestHandler):
    """Promises to keep the connection, and drops it at the next request: a server's idle limit, met by a call."""

    protocol_version = "HTTP/1.1"
    answered = False
    asked_to_close: ClassVar[list[bool]] = []

    def do_GET(self) -> None:
        self.asked_to_close.append(self.headers.get("Connection") == "close")
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
    OneAnswer.asked_to_close.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), OneAnswer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_call_never_meets_a_connection_that_is_being_closed(url: str) -> None:
    with EngineClient(url) as client:
        for _ in range(3):
            assert client.is_sleeping() is False


def test_no_call_can_close_the_connection_of_another_thread(url: str) -> None:
    """Connections end with their answers; httpcore's pool, where it ended idle ones, took some from other calls."""
    with EngineClient(url) as client, ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(lambda _: client.is_sleeping(), range(20)))
    assert OneAnswer.asked_to_close == [True] * 20
