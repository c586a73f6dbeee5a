"""The client against servers that behave badly on the wire."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import httpx
import pytest

from rl_memory_plugins.client import STATUS_S, TRANSITION_S, EngineClient
from rl_memory_plugins.errors import AuthenticationError, InvalidRequestError, NoAnswerError, RLMemoryError


class OneAnswer(BaseHTTPRequestHandler):
    """Promises to keep the connection, and drops it at the next request: a server's idle limit, met by a call."""

    protocol_version = "HTTP/1.1"
    body = b'{"is_sleeping": false}'
    answered = False
    released: ClassVar[threading.Event] = threading.Event()
    asked_to_close: ClassVar[list[bool]] = []

    def do_GET(self) -> None:
        self.asked_to_close.append(self.headers.get("Connection") == "close")
        if self.headers.get("Slow"):
            self.released.wait(60)
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
    OneAnswer.released.clear()
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
    with EngineClient(url) as client, pytest.raises(NoAnswerError, match="no answer from .* may have been carried out"):
        client._http.headers["Silent"] = "1"
        client.is_sleeping()


@pytest.mark.parametrize(
    "limits", [({"timeout_s": 0.2}, {}), ({}, {"timeout_s": 0.2}), ({"timeout_s": None}, {"timeout_s": 0.2})]
)
def test_a_server_that_answers_too_late(url: str, limits: tuple[dict[str, float | None], dict[str, float]]) -> None:
    of_client, of_call = limits
    with EngineClient(url, **of_client) as client:  # type: ignore[arg-type]
        client._http.headers["Slow"] = "1"
        try:
            with pytest.raises(NoAnswerError, match=r"within 0\.2 s") as caught:
                client.memory(**of_call)
        finally:
            OneAnswer.released.set()
    assert (caught.value.status, caught.value.details) == (504, {"timeout_s": 0.2})


def limits_of(client: EngineClient, monkeypatch: pytest.MonkeyPatch, **of_call: float) -> list[float | None]:
    """The limits with which a client makes its calls."""
    seen: list[float | None] = []

    def request(method: str, url: str, json: Any, headers: Any, timeout: httpx.Timeout) -> httpx.Response:
        assert timeout.connect is not None
        seen.append(timeout.read)
        return httpx.Response(200, json={"is_sleeping": False, "engines": [], "weight_version": "1"})

    monkeypatch.setattr(client._http, "request", request)
    for call in (client.sleep, client.wake_up, client.checksums):
        call(**of_call)  # type: ignore[operator]
    for ask in (client.is_sleeping, client.memory, client.devices, client.weight_version):
        ask(**of_call)  # type: ignore[operator]
    client.remove_adapter("policy", **of_call)
    client.post_update({}, **of_call)
    client.post_adapter({}, **of_call)
    return seen


def test_the_bytes_that_a_wake_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(device: str, state: str, nbytes: int) -> dict[str, Any]:
        return {"device": device, "tags": {"weights": {"state": state, "bytes": nbytes}}}

    engines = [
        {"ranks": [rank("GPU-a", "discarded", 5), rank("GPU-b", "preserved", 6)]},
        {"ranks": [rank("GPU-a", "resident", 7)]},
    ]
    with EngineClient("http://127.0.0.1:1") as client:
        monkeypatch.setattr(client._http, "request", lambda *_, **__: httpx.Response(200, json={"engines": engines}))
        assert client.asleep_bytes("weights") == [("GPU-a", 5), ("GPU-b", 6), ("GPU-a", 0)]
        with pytest.raises(RLMemoryError):
            client.asleep_bytes("none")


def test_the_limits_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    with EngineClient("http://127.0.0.1:1") as client:
        assert limits_of(client, monkeypatch) == [TRANSITION_S] * 3 + [STATUS_S] * 4 + [TRANSITION_S] + [None] * 2
        assert limits_of(client, monkeypatch, timeout_s=5) == [5] * 10
        assert limits_of(client, monkeypatch, timeout_s=math.inf) == [None] * 10
    with EngineClient("http://127.0.0.1:1", timeout_s=7) as client:
        assert limits_of(client, monkeypatch) == [7] * 10
    with EngineClient("http://127.0.0.1:1", timeout_s=None) as client:
        assert limits_of(client, monkeypatch) == [None] * 10


def test_an_update_from_files_names_the_version_that_the_weights_must_have(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[dict[str, Any]] = []
    monkeypatch.setattr(EngineClient, "call", lambda self, method, path, body, **_: bodies.append(body))
    EngineClient("http://127.0.0.1:9").update_weights_from_checkpoint("/models/any", base_version="41")
    assert bodies[0]["base_version"] == "41"


def test_an_address_with_a_path_is_shown_where_it_leads(url: str) -> None:
    with EngineClient(f"{url}/v1") as client, pytest.raises(RLMemoryError, match="/v1/v1/rl_memory/is_sleeping"):
        client.is_sleeping()


@pytest.mark.parametrize("body", [b'{"error": "Unauthorized"}', b"Unauthorized"])
def test_the_engines_own_refusal_of_a_key_is_typed_like_ours(body: bytes) -> None:
    """vLLM and SGLang check the key before any route runs, and answer in their own form."""
    transport = httpx.MockTransport(lambda request: httpx.Response(401, content=body))
    with EngineClient("http://engine", "wrong", transport=transport) as engine, pytest.raises(AuthenticationError):
        engine.memory()


@pytest.mark.parametrize("key", ["schlüssel", "two\nlines", "a\x7fb", "tab\tbed", "nul\x00"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_told(key: str) -> None:
    with pytest.raises(InvalidRequestError, match="API key") as caught:
        EngineClient("http://127.0.0.1:1", api_key=key)
    assert key not in str(caught.value)


@pytest.mark.parametrize("key", [None, "", " \n"])
def test_no_key_sends_none(key: str | None) -> None:
    """`None` is what `os.environ.get` gives for a variable that is not set."""
    with EngineClient("http://127.0.0.1:1", api_key=key) as client:
        assert "Authorization" not in client._http.headers


@pytest.mark.parametrize("key", ["secret\n", " secret", "secret\r\n", "\tsecret "])
def test_a_key_as_a_file_holds_it_is_sent_without_its_line_break(key: str) -> None:
    shown: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        shown.append(request.headers["authorization"])
        return httpx.Response(200, json={})

    with EngineClient("http://engine", key, transport=httpx.MockTransport(answer)) as engine:
        engine.memory()
    assert shown == ["Bearer secret"]


@pytest.mark.parametrize("body", [b"{}", b'{"engines": [1]}', b'{"engines": 3}'])
@pytest.mark.parametrize("ask", [EngineClient.is_sleeping, EngineClient.devices, EngineClient.weight_version])
def test_another_servers_answer_is_an_error_of_ours(
    url: str, ask: Callable[[EngineClient], Any], body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OneAnswer, "body", body)
    with EngineClient(url) as client, pytest.raises(RLMemoryError, match="did not answer as"):
        ask(client)
