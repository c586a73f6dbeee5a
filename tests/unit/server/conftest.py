import pytest
from fake_control import FakeControl
from fastapi import FastAPI
from fastapi.testclient import TestClient

from rl_memory_plugins.server.auth import ControlAuth
from rl_memory_plugins.server.router import build_router


@pytest.fixture
def app(control: FakeControl) -> FastAPI:
    app = FastAPI()
    app.include_router(build_router(control, ControlAuth()))
    return app


@pytest.fixture
def client(app: FastAPI) -> TestClient:
    return TestClient(app, client=("127.0.0.1", 1234))
