import asyncio
from urllib.parse import unquote

import pytest
from fake_control import rank_status
from fastapi import FastAPI, WebSocket
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from starlette.testclient import WebSocketDenialResponse

from rl_memory_plugins.errors import EngineAsleepError
from rl_memory_plugins.records import EngineStatus
from rl_memory_plugins.server.gate import AdmissionGate, posts_to, report_adapter, report_refusal
from rl_memory_plugins.tags import Content, TagState

AWAKE = EngineStatus([rank_status()])
ASLEEP = EngineStatus([rank_status(weights=TagState.PRESERVED)])


@pytest.fixture
def engines():
    return [AWAKE]


@pytest.fixture
def client(engines):
    app = FastAPI()
    app.add_middleware(
        AdmissionGate,
        status=lambda: engines,
        is_generation=posts_to(["/v1/completions", "/generate", "/ws"]),
    )

    @app.post("/v1/completions")
    async def completions(body: dict):
        return {"got": body}

    @app.get("/v1/completions")
    @app.get("/health")
    @app.post("/wake_up")
    async def other():
        return "other"

    @app.websocket("/ws")
    async def websocket(socket: WebSocket):
        await socket.accept()
        await socket.send_text(await socket.receive_text())

    with TestClient(app) as client:  # the lifespan goes through the gate too
        yield client


def test_an_admitting_engine_gets_its_requests_untouched(client):
    assert client.post("/v1/completions", json={"n": 1}).json() == {"got": {"n": 1}}


def test_a_sleeping_engine_refuses_at_once(client, engines):
    engines[:] = [AWAKE, ASLEEP]
    response = client.post("/v1/completions", json={"n": 1})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    error = response.json()["error"]
    assert error["code"] == "EngineAsleepError"
    assert error["details"] == {"reason": "asleep", "retry_after_s": 1, "tags": ["weights"]}
    assert isinstance(error["type"], str)
    assert "wake_up()" in error["message"]
    engines[:] = [AWAKE, AWAKE]
    assert client.post("/v1/completions", json={}).status_code == 200


@pytest.mark.parametrize(
    "engine, reason",
    [
        (EngineStatus([rank_status(content=Content.STALE)]), "stale"),
        (EngineStatus([rank_status(content=Content.UPDATING)]), "updating"),
        (EngineStatus([rank_status(content=Content.FAILED)]), "failed"),
        (EngineStatus([rank_status()], paused=True), "paused"),
        (EngineStatus([rank_status()], busy="sleep"), "asleep"),
    ],
)
def test_the_reason_is_told(client, engines, engine, reason):
    engines[:] = [engine]
    assert client.post("/v1/completions", json={}).json()["error"]["details"]["reason"] == reason


def test_a_pause_of_the_engine_s_own_holds_requests_back_during_an_update(engines):
    held = True
    app = FastAPI()
    app.add_middleware(
        AdmissionGate, status=lambda: engines, is_generation=posts_to(["/generate"]), is_held=lambda: held
    )

    @app.post("/generate")
    async def generate():
        return "generated"

    engines[:] = [EngineStatus([rank_status(content=Content.UPDATING)])]
    with TestClient(app) as client:
        assert client.post("/generate").json() == "generated"
        held = False
        assert client.post("/generate").status_code == 503


def test_other_requests_pass(client, engines):
    engines[:] = [ASLEEP]
    for method, path in [("GET", "/health"), ("POST", "/wake_up"), ("GET", "/v1/completions")]:
        assert client.request(method, path).json() == "other"
    assert client.post("/generate/x").status_code == 404


def test_a_websocket_is_refused_before_it_opens(client, engines):
    with client.websocket_connect("/ws") as socket:
        socket.send_text("hello")
        assert socket.receive_text() == "hello"
    engines[:] = [ASLEEP]
    with pytest.raises(WebSocketDenialResponse) as caught, client.websocket_connect("/ws"):
        pass
    assert caught.value.status_code == 503
    assert caught.value.headers["retry-after"] == "1"
    assert caught.value.json()["error"]["code"] == "EngineAsleepError"


def call(gate, scope):
    sent = []

    async def receive():
        raise AssertionError("the body was read")

    async def send(message):
        sent.append(message)

    asyncio.run(gate(scope, receive, send))
    return sent


async def unreachable(scope, receive, send):
    raise AssertionError("the app was called")


def test_the_body_is_not_read():
    gate = AdmissionGate(unreachable, lambda: [ASLEEP], lambda scope: True)
    start, _ = call(gate, {"type": "http"})
    assert start["status"] == 503


def test_a_server_that_knows_no_answer_to_a_handshake_closes_it():
    gate = AdmissionGate(unreachable, lambda: [ASLEEP], lambda scope: True)
    assert call(gate, {"type": "websocket"}) == [{"type": "websocket.close", "code": 1013}]


def test_a_status_that_cannot_be_read_admits_nothing():
    def broken():
        raise OSError("no board")

    gate = AdmissionGate(unreachable, broken, lambda scope: True)
    start, body = call(gate, {"type": "http"})
    assert start["status"] == 500
    assert b"EngineFaultError" in body["body"]


def test_status_is_read_for_generation_only():
    passed = []

    async def app(scope, receive, send):
        passed.append(scope["type"])

    def status():
        raise AssertionError("the status was read")

    gate = AdmissionGate(app, status, lambda scope: scope["path"] == "/generate")
    call(gate, {"type": "http", "path": "/health"})
    call(gate, {"type": "websocket", "path": "/chat"})
    call(gate, {"type": "lifespan"})
    assert passed == ["http", "websocket", "lifespan"]


@pytest.mark.parametrize(
    "scope, matches",
    [
        ({"method": "POST", "path": "/generate"}, True),
        ({"method": "PUT", "path": "/generate"}, True),
        ({"method": "GET", "path": "/generate"}, False),
        ({"method": "OPTIONS", "path": "/generate"}, False),
        ({"method": "POST", "path": "/generate/"}, False),
        ({"method": "POST", "path": "/generated"}, False),
        ({"method": "POST", "path": "/api/generate", "root_path": "/api"}, True),
        ({"method": "POST", "path": "/generate", "root_path": "/api"}, True),
        ({"method": "POST", "path": "/api/generate"}, False),
        ({"type": "websocket", "path": "/generate"}, True),
        ({"type": "websocket", "path": "/chat"}, False),
    ],
)
def test_posts_to(scope, matches):
    assert posts_to(["/generate"])({"type": "http", **scope}) is matches


def at_version(version: str) -> EngineStatus:
    return EngineStatus([rank_status()], weight_version=version)


def versions(response):
    return response.headers["x-weight-version"], response.headers["x-weight-version-end"]


def test_an_answer_names_the_weights_that_gave_it(client, engines):
    engines[:] = [at_version("step-41")]
    assert versions(client.post("/v1/completions", json={})) == ("step-41", "step-41")
    assert "x-weight-version" not in client.get("/v1/completions").headers


def test_an_answer_over_an_update_names_both_weights(client, engines):
    engines[:] = [at_version("41")]

    @client.app.post("/generate")
    async def generate():
        engines[:] = [at_version("42")]
        return "by both"

    assert versions(client.post("/generate")) == ("41", "42")


def test_a_stream_names_the_weights_that_it_begins_with(client, engines):
    engines[:] = [at_version("41")]

    @client.app.post("/generate")
    async def generate():
        async def tokens():
            yield "first"
            engines[:] = [at_version("42")]
            yield "second"

        return StreamingResponse(tokens())

    response = client.post("/generate")
    assert response.text == "firstsecond"
    assert versions(response) == ("41", "41")


@pytest.mark.parametrize("version", ["a b", "a, b", "a\r\nx-injected: 1", "100%", "schritt-ä"])
def test_any_version_fits_into_a_header(client, engines, version):
    engines[:] = [at_version(version)]
    response = client.post("/v1/completions", json={})
    assert [unquote(named) for named in versions(response)] == [version, version]
    assert "x-injected" not in response.headers


def test_an_answer_that_is_there_is_given_though_the_status_is_gone(client, engines):
    @client.app.post("/generate")
    async def generate():
        engines[:] = [None]
        return "an answer"

    response = client.post("/generate")
    assert response.status_code == 200
    assert response.headers["x-weight-version"] == "default"
    assert "x-weight-version-end" not in response.headers


def test_a_refusal_names_no_weights(client, engines):
    engines[:] = [ASLEEP]
    assert "x-weight-version" not in client.post("/v1/completions", json={}).headers


def test_an_answer_of_an_adapter_names_its_version():
    def ask(*used):
        async def app(scope, receive, send):
            for version in used:
                report_adapter(version)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        start, _ = call(AdmissionGate(app, lambda: [AWAKE], lambda scope: True), {"type": "http"})
        return [value for name, value in start["headers"] if name == b"x-adapter-version"]

    assert ask() == []
    assert ask("step 1") == [b"step%201"]
    assert ask("1", "1") == [b"1"]
    assert ask("1", "2") == []  # a batch
    report_adapter("outside a request")


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_a_refusal_is_told_once(kind):
    told = []
    gate = AdmissionGate(unreachable, lambda: [ASLEEP], lambda scope: True, on_refusal=told.append)
    call(gate, {"type": kind})
    assert [error.details["reason"] for error in told] == ["asleep"]


def test_a_stream_that_is_refused_before_its_first_byte_is_the_same_503(client):
    @client.app.post("/generate")
    async def generate():
        async def tokens():
            await asyncio.sleep(0)  # the server has sent the head
            yield ""
            report_refusal(EngineAsleepError("closed meanwhile", reason="updating", retry_after_s=1))
            yield "data: an error of the engine's own server"

        return StreamingResponse(tokens())

    response = client.post("/generate")
    assert response.status_code == 503 and response.headers["retry-after"] == "1"
    assert response.json()["error"]["details"]["reason"] == "updating"


def test_a_late_refusal_does_not_wait_for_the_servers_other_work():
    sent_before_the_work = []

    async def app(scope, receive, send):
        report_refusal(EngineAsleepError("closed meanwhile", reason="updating"))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"an error of the server", "more_body": True})
        sent_before_the_work[:] = sent
        await send({"type": "http.response.body", "body": b"more"})

    sent = []

    async def send(message):
        sent.append(message)

    told = []
    gate = AdmissionGate(app, lambda: [AWAKE], lambda scope: True, on_refusal=told.append)
    asyncio.run(gate({"type": "http"}, None, send))
    start, body = sent_before_the_work
    assert start["status"] == 503 and b"EngineAsleepError" in body["body"]
    assert sent == sent_before_the_work and len(told) == 1


def test_an_answer_without_a_byte_has_its_head():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    gate = AdmissionGate(app, lambda: [AWAKE], lambda scope: True)
    assert [message["type"] for message in call(gate, {"type": "http"})] == [
        "http.response.start",
        "http.response.body",
    ]


def test_a_late_refusal_is_told_once_and_an_answer_never():
    told = []

    async def app(scope, receive, send):
        if scope["path"] == "/late":
            report_refusal(EngineAsleepError("closed meanwhile", reason="updating"))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    gate = AdmissionGate(app, lambda: [AWAKE], lambda scope: True, on_refusal=told.append)
    call(gate, {"type": "http", "path": "/answered"})
    assert told == []
    call(gate, {"type": "http", "path": "/late"})
    assert [error.details["reason"] for error in told] == ["updating"]
