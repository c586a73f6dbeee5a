"""vLLM's endpoint plugin on servers whose engine is enabled, and on those whose engine is not; no vLLM is needed."""

import asyncio
from argparse import Namespace
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from rl_memory_plugins.engines.vllm import endpoint_plugin
from rl_memory_plugins.engines.vllm.server import _register_routers


def serve(engine_config, **arguments):
    """A client of an app that has the plugin, once its engine is there; with routes of vLLM's own."""
    app = FastAPI()
    app.state.args = Namespace(api_key=None, **arguments)

    @app.post("/v1/completions")
    @app.post("/sleep")
    async def native():
        return "native"

    plugin = endpoint_plugin()
    plugin.attach_router(app)
    engine = SimpleNamespace(vllm_config=SimpleNamespace(additional_config=engine_config))
    asyncio.run(plugin.init_state(engine, app.state, app.state.args))
    return TestClient(app, "http://localhost", client=("127.0.0.1", 50000))


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    monkeypatch.delenv("RL_MEMORY", raising=False)
    monkeypatch.setenv("RLMEM_VLLM_HOOKS", "1")  # as an enabled parent leaves it


@pytest.mark.parametrize("additional_config", [{}, None, {"rl_memory": False}])
def test_a_server_that_nobody_asked_to_enable_stays_as_it_is(additional_config):
    client = serve({}, additional_config=additional_config)
    assert client.post("/v1/completions", json={}).json() == "native"
    assert client.post("/sleep").json() == "native"
    assert client.get("/memory").status_code == 404


def test_a_plain_engine_behind_an_enabled_server_answers():
    client = serve({}, additional_config={"rl_memory": {}})
    assert client.post("/v1/completions", json={}).json() == "native"
    response = client.get("/memory")
    assert response.status_code == 422 and response.json()["error"]["code"] == "UnsupportedError"


def test_without_endpoint_plugins_the_routes_come_with_vllms_first_ones():
    """vLLM 0.25 and earlier. Middleware that vLLM adds afterwards, as for its API key, stands before the gate."""
    app = FastAPI()
    app.state.args = Namespace(api_key=None, additional_config={"rl_memory": {}})

    def register(app):
        app.post("/sleep")(lambda: "native")

    _register_routers(register)(app)
    app.post("/v1/completions")(lambda: "native")
    seen = []

    @app.middleware("http")
    async def of_vllm(request, call_next):
        seen.append(request.url.path)
        return await call_next(request)

    client = TestClient(app, "http://localhost", client=("127.0.0.1", 50000))
    response = client.post("/v1/completions", json={})
    assert response.status_code == 503 and response.json()["error"]["details"]["reason"] == "starting"
    assert seen == ["/v1/completions"]
    assert client.post("/sleep").status_code == 503
    app.state.engine_client = SimpleNamespace(vllm_config=SimpleNamespace(additional_config={}))
    with client:  # the app begins to serve, and the engine is there
        assert client.post("/v1/completions", json={}).json() == "native"
        assert client.post("/sleep").status_code == 422  # a plain engine
