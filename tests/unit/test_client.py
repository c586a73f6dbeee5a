"""The client against servers that behave badly on the wire."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from rl_memory_plugins.client import EngineClient
from rl_memory_plugins.errors import InvalidRequestError, RLMemoryError


class OneAnswer(BaseHTTPRequestHandler):
    """Promises to keep the connection, and drops it at the next request: a server's idle limit, met by a call."""

    protocol_version = "HTTP/1.1"
    body = b'{"is_sleeping": false}'
    answered = False
    asked_to_close: ClassVar[list[bool]] = []

    def do_GET(self) -> None:
        self.asked_to_close.append(self.headers.get("Connection") == "close")
        if self.answered or self.headers.get("Silent"):
            self.close_connection = True
            return
        if self.path.startswith("/v1/v1"):
            self.send_error(404)
            return
        self.answered = True
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

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


@pytest.mark.parametrize("address", ["http://[::1", "http://a:b", "http://a\x00", "not a url", ""])
def test_an_address_that_is_none_is_an_error_of_ours(address: str) -> None:
    with pytest.raises(RLMemoryError, match="cannot reach"):
        EngineClient(address).is_sleeping()


def test_a_server_that_was_reached_and_says_nothing_is_not_called_unreachable(url: str) -> None:
    with EngineClient(url) as client, pytest.raises(RLMemoryError, match="no answer from .* may have been carried out"):
        client._http.headers["Silent"] = "1"
        client.is_sleeping()


def test_an_address_with_a_path_is_shown_where_it_leads(url: str) -> None:
    with EngineClient(f"{url}/v1") as client, pytest.raises(RLMemoryError, match="/v1/v1/rl_memory/is_sleeping"):
        client.is_sleeping()


def test_a_key_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="API key"):
        EngineClient("http://127.0.0.1:1", api_key="schlüssel")


@pytest.mark.parametrize("body", [b"{}", b'{"engines": [1]}', b'{"engines": 3}'])
@pytest.mark.parametrize("ask", [EngineClient.is_sleeping, EngineClient.devices, EngineClient.weight_version])
def test_another_servers_answer_is_an_error_of_ours(
    url: str, ask: Callable[[EngineClient], Any], body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OneAnswer, "body", body)
    with EngineClient(url) as client, pytest.raises(RLMemoryError, match="did not answer as"):
        ask(client)
