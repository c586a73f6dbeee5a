"""SGLang's own update and ours have one route at the root; no SGLang is needed."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import pytest
from fake_control import FakeControl
from fastapi import Body, FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel

from rl_memory_plugins.engines.sglang.server import _native_update
from rl_memory_plugins.server.attach import attach
from rl_memory_plugins.server.parameters import MAX_BODY_BYTES

ROUTE = "/update_weights_from_ipc"
KEY = {"authorization": "Bearer k"}


class Native(BaseModel):
    """As SGLang's `UpdateWeightsFromIPCReqInput`, whose types SGLang's route checks too."""

    zmq_handles: dict[str, str]
    flush_cache: bool = True


@pytest.fixture
def app(control: FakeControl) -> FastAPI:
    app = FastAPI()
    app.state.updates = []

    @app.post(ROUTE)
    async def native(obj: Annotated[Native, Body()]) -> dict[str, Any]:
        app.state.updates.append(obj)
        return {"success": True, "message": ""}

    own = _native_update(app)
    attach(app, lambda: control, control.status_now, keys=["k"], generation=(), native_update=own)
    return app


@pytest.fixture
def client(app: FastAPI) -> TestClient:
    return TestClient(app, "http://localhost", client=("127.0.0.1", 1))


def test_each_caller_gets_its_own_update(app: FastAPI, client: TestClient, control: FakeControl) -> None:
    own = {"zmq_handles": {"gpu": "ipc:///x"}, "flush_cache": False}
    assert client.post(ROUTE, json=own, headers=KEY).json() == {"success": True, "message": ""}
    assert [one.model_dump() for one in app.state.updates] == [own]
    assert control.calls == []
    ours = {"endpoints": {"*": "/s"}, "token": "t"}
    assert client.post(ROUTE, json=ours, headers=KEY).json()["status"] == "updated"
    assert len(control.calls) == len(app.state.updates) == 1


@pytest.mark.parametrize("handles", [None, 5, [], {"gpu": 5}, {"gpu": None}, "ipc:///x"])
def test_the_engine_s_own_bodies_are_checked(app: FastAPI, client: TestClient, handles: Any) -> None:
    answer = client.post(ROUTE, json={"zmq_handles": handles}, headers=KEY)
    assert answer.status_code == 422 and "detail" in answer.json(), "the app's own way to say that"
    assert app.state.updates == []


def test_our_prefixed_route_takes_none_of_them(client: TestClient) -> None:
    answer = client.post(f"/v1/rl_memory{ROUTE}", json={"zmq_handles": {"gpu": "ipc:///x"}}, headers=KEY)
    assert answer.json()["error"]["details"]["got"] == ["zmq_handles"]


def test_no_more_is_read_than_may_be(client: TestClient) -> None:
    body = b'{"zmq_handles": {}}' + b" " * MAX_BODY_BYTES
    answer = client.post(ROUTE, content=body, headers=KEY)
    assert answer.json()["error"]["details"] == {"max_bytes": MAX_BODY_BYTES}


@pytest.mark.parametrize("path", [ROUTE, f"/v1/rl_memory{ROUTE}", "/sleep", "/wake_up"])
def test_nothing_is_read_of_a_caller_without_the_key(app: FastAPI, path: str) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the body was read")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "scheme": "http",
        "http_version": "1.1",
        "headers": [(b"host", b"localhost"), (b"content-length", b"67108864")],
        "client": ("127.0.0.1", 1),
        "server": ("localhost", 80),
    }
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 401


def test_both_bodies_are_described(app: FastAPI) -> None:
    update = app.openapi()["paths"][ROUTE]["post"]
    bodies = update["requestBody"]["content"]["application/json"]["schema"]["anyOf"]
    assert [body["required"] for body in bodies] == [["endpoints", "token"], ["zmq_handles"]]
    assert len(update["responses"]["200"]["content"]["application/json"]["schema"]["anyOf"]) == 2
