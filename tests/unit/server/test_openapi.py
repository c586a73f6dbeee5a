"""What `/openapi.json` says of the control routes: all of it, and nothing that they do not do."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from safetensors.torch import save_file

from rl_memory_plugins import errors, operations
from rl_memory_plugins.server import openapi
from rl_memory_plugins.server.attach import attach
from rl_memory_plugins.server.openapi import specification
from rl_memory_plugins.server.router import PREFIXES, build_router

METHODS = {"get", "post", "put", "delete", "patch"}
ERRORS_PAGE = Path(__file__).parents[3] / "docs" / "errors.md"


def operations_of(schema: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(method, path): item[method] for path, item in schema["paths"].items() for method in METHODS & item.keys()}


@pytest.fixture
def schema(client: TestClient) -> dict[str, Any]:
    return client.get("/openapi.json").json()


def test_all_routes_are_there_and_no_others(app: FastAPI, schema: dict[str, Any], control: Any) -> None:
    from rl_memory_plugins.server.auth import ControlAuth

    routes = build_router(lambda: control, ControlAuth()).routes
    expected = {(method.lower(), route.path) for route in routes for method in route.methods}
    assert operations_of(schema).keys() == expected
    assert len(expected) == 24


def test_every_operation_is_whole(schema: dict[str, Any]) -> None:
    for (method, path), operation in operations_of(schema).items():
        assert operation["summary"] and operation["description"], path
        answer = operation["responses"]["200"]["content"]["application/json"]
        assert answer["schema"] and answer["examples"], path
        assert {"401", "403", "500", "503"} <= operation["responses"].keys()
        if method == "post":
            body = operation["requestBody"]["content"]["application/json"]
            assert body["schema"]["properties"] and body["examples"], path
            assert body["schema"]["additionalProperties"] is False
            assert "422" in operation["responses"]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_parameters_are_those_that_are_taken(client: TestClient, schema: dict[str, Any], prefix: str) -> None:
    for route in sorted(path for path in schema["paths"] if "post" in schema["paths"][path] and "v1" not in path):
        operation = schema["paths"][prefix + route]["post"]
        body = operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
        allowed = client.post(prefix + route, json={"bogus": 1}).json()["error"]["details"]["allowed"]
        assert sorted(body) == allowed
        assert [parameter["name"] for parameter in operation["parameters"]] == ([] if "update" in route else [*body])


def test_the_defaults_are_those_that_are_taken(schema: dict[str, Any]) -> None:
    sleep = schema["paths"]["/sleep"]["post"]
    said = {parameter["name"]: parameter["schema"].get("default") for parameter in sleep["parameters"]}
    assert operations.sleep(**said) == operations.sleep()
    said = sleep["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert operations.sleep(said["level"]["default"], None, said["mode"]["default"]) == operations.sleep()
    update = schema["paths"]["/update_weights_from_ipc"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    command = operations.update_weights({"*": "/s"}, "t")
    assert update["properties"]["mode"]["default"] == command.mode


def test_no_id_is_there_twice(schema: dict[str, Any]) -> None:
    ids = [operation["operationId"] for operation in operations_of(schema).values()]
    assert len(ids) == len(set(ids))


def test_every_reference_leads_somewhere(schema: dict[str, Any]) -> None:
    references = re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(schema))
    assert {"RLMemoryFailed", "RLMemorySlept"} <= set(references) <= schema["components"]["schemas"].keys()


@pytest.mark.parametrize("route", openapi._routes(), ids=lambda route: route.path)
def test_examples_are_what_is_sent(route: openapi._Route, client: TestClient, control: Any, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    for example in route.answers.values():
        sent = msgspec.json.decode(msgspec.json.encode(msgspec.convert(example, route.answer)))
        assert {key: sent[key] for key in example} == example
    for body in route.bodies.values():
        if "path" in body:  # a folder that this host has; no rank of a stand-in connects to the thread that sends it
            body = {**body, "path": str(tmp_path), "timeout_s": 0.1}
        assert client.post(route.path, json=body).status_code == 200
    assert len(control.calls) == len(route.bodies)


def test_answers_are_as_described(client: TestClient) -> None:
    for route in openapi._routes():
        if route.method == "get":
            msgspec.convert(client.get(route.path).json(), route.answer)
    msgspec.convert(client.post("/sleep").json(), openapi.Slept)
    for body in ({}, {"tags": "weights"}, {"tags": ["weights"]}):
        msgspec.convert(client.post("/wake_up", json=body).json(), openapi.Woken)
    msgspec.convert(client.post("/sleep", json={"level": 9}).json(), openapi.Failed)


def test_each_error_is_listed_with_its_status() -> None:
    statuses = {
        error.status for error in vars(errors).values() if isinstance(error, type) and issubclass(error, Exception)
    }
    assert openapi.ERRORS.keys() == statuses
    for status, description in openapi.ERRORS.items():
        for name in re.findall(r"`(\w+Error)`", description):
            assert getattr(errors, name).status == status
    for status, examples in openapi.examples.ERRORS.items():
        for example in examples.values():
            failed = msgspec.convert(example, openapi.Failed)
            assert getattr(errors, failed.error.code).status == status


def test_a_key_is_asked_for_where_there_is_one() -> None:
    for has_key in (True, False):
        paths = specification(["/p"], has_key=has_key)["paths"]
        assert all(bool(operation["security"]) is has_key for item in paths.values() for operation in item.values())


def test_the_engine_s_own_routes_stay_and_hidden_ones_go(control: Any) -> None:
    app = FastAPI()

    @app.post("/sleep", operation_id="sleep_sleep_post")
    @app.api_route("/own", methods=["GET", "POST", "PUT"])
    @app.get("/sleep")
    async def sleep(level: int = 5) -> None: ...

    attach(app, lambda: control, control.status_now, keys=(), generation=())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schema = app.openapi()
    assert schema is app.openapi(), "it is made once"
    assert schema["paths"]["/sleep"]["post"]["operationId"] == "rl_memory_sleep_at_root"
    assert schema["paths"]["/sleep"]["get"]["operationId"] != "rl_memory_sleep_at_root"
    own = {operation["operationId"] for operation in schema["paths"]["/own"].values()}
    assert len(own) == 3
    ids = [operation["operationId"] for operation in operations_of(schema).values()]
    assert len(ids) == len(set(ids))


def test_a_page_that_tries_the_routes_can_sleep_and_wake(client: TestClient, control: Any, schema: Any) -> None:
    """`/docs` sends the query's parameters with their defaults and the first example of the body."""
    page = client.get("/docs")
    assert page.status_code == 200 and "/openapi.json" in page.text
    browser = {"origin": "http://localhost", "sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}
    sleep = schema["paths"]["/v1/rl_memory/sleep"]["post"]
    body = next(iter(sleep["requestBody"]["content"]["application/json"]["examples"].values()))["value"]
    answer = client.post("/v1/rl_memory/sleep?level=2&tags=weights&mode=abort", json=body, headers=browser)
    assert control.calls == [("sleep", (2, ["weights"], "abort"))]
    assert answer.json()["status"] == "sleeping"
    assert client.post("/v1/rl_memory/wake_up", json=body, headers=browser).json()["status"] == "awake"
