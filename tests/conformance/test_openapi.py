"""`/openapi.json` of a real server: our routes are in it as they are, beside the engine's own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from integration.engines.base import Server
from rl_memory_plugins.server.openapi import specification
from rl_memory_plugins.server.router import PREFIXES
from tests.conformance.conftest import PROMPT


@pytest.fixture(scope="module")
def schema(running_server: Server) -> dict[str, Any]:
    return running_server.http.get("/openapi.json").raise_for_status().json()  # type: ignore[no-any-return]


def test_our_routes_are_whole(schema: dict[str, Any], running_server: Server) -> None:
    is_sglang = running_server.kind.name == "sglang"
    ours = specification(PREFIXES, has_key=bool(running_server.launch.api_key), native_update=is_sglang)
    ours = json.loads(json.dumps(ours))  # tuples are lists there
    for path, operations in ours["paths"].items():
        assert {method: schema["paths"][path].get(method) for method in operations} == operations
    for kind, named in ours["components"].items():
        assert {name: schema["components"][kind].get(name) for name in named} == named


def test_no_operation_id_is_there_twice(schema: dict[str, Any], running_server: Server) -> None:
    ids = [operation["operationId"] for item in schema["paths"].values() for operation in item.values()]
    assert {id_ for id_ in ids if ids.count(id_) > 1} == set()
    assert "Duplicate Operation ID" not in running_server.log.read_text(errors="replace")


def test_the_page_of_the_routes_can_sleep_and_wake_the_engine(server: Server, first_tokens: list[int]) -> None:
    """With what `/docs` sends of itself: the defaults in the query, the first example as the body."""
    page = server.http.get("/docs")
    assert page.status_code == 200 and "openapi.json" in page.text
    paths = server.http.get("/openapi.json").json()["paths"]
    browser = {"origin": server.url, "sec-fetch-site": "same-origin"}
    for route, status in (("/v1/rl_memory/sleep", "sleeping"), ("/v1/rl_memory/wake_up", "awake")):
        operation = paths[route]["post"]
        query = {one["name"]: one["schema"]["default"] for one in operation["parameters"] if "default" in one["schema"]}
        body = next(iter(operation["requestBody"]["content"]["application/json"]["examples"].values()))["value"]
        answer = server.http.post(route, params=query, json=body, headers=browser)
        assert answer.json()["status"] == status, answer.text
    assert server.generate(PROMPT) == first_tokens
