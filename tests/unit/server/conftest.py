import pytest
from fake_control import FakeControl
from fastapi import FastAPI
from fastapi.testclient import TestClient

from rl_memory_plugins.server.attach import attach


@pytest.fixture
def app(control: FakeControl) -> FastAPI:
    app = FastAPI()
    attach(app, lambda: control, control.status_now, keys=(), generation=["/generate"])
    return app


@pytest.fixture
def client(app: FastAPI) -> TestClient:
    return local_client(app)


def local_client(app: FastAPI, host: str = "127.0.0.1") -> TestClient:
    return TestClient(app, "http://localhost", client=(host, 1234))
