"""Bad input: a typed 422 that lists what is allowed, and nothing has happened."""

from __future__ import annotations

from typing import Any

import pytest

from integration.engines.base import Server
from tests.conformance.conftest import PROMPT

BAD = {
    "level 7": ("/sleep", {"level": 7}),
    "level -1": ("/sleep", {"level": -1}),
    "level as a float": ("/sleep", {"level": 1.5}),
    "level as a word": ("/sleep", {"level": "deep"}),
    "level true": ("/sleep", {"level": True}),
    "unknown mode": ("/sleep", {"mode": "gently"}),
    "unknown tag": ("/sleep", {"tags": ["weights", "optimizer"]}),
    "internal tag": ("/sleep", {"tags": ["runtime"]}),
    "empty tags": ("/sleep", {"tags": []}),
    "tags as a number": ("/sleep", {"tags": 5}),
    "misspelt parameter": ("/sleep", {"tag": ["weights"]}),
    "unknown tag to wake": ("/wake_up", {"tags": ["everything"]}),
    "empty tags to wake": ("/wake_up", {"tags": []}),
    "update without a token": ("/update_weights_from_ipc", {"endpoints": {"*": "/tmp/none"}}),
    "update without endpoints": ("/update_weights_from_ipc", {"token": "t", "endpoints": {}}),
    "update with a bad mode": (
        "/update_weights_from_ipc",
        {"token": "t", "endpoints": {"*": "/tmp/none"}, "mode": "now"},
    ),
    "update with a bad time": (
        "/update_weights_from_ipc",
        {"token": "t", "endpoints": {"*": "/tmp/none"}, "timeout_s": -1},
    ),
}


@pytest.mark.parametrize("prefix", ["", "/v1/rl_memory"], ids=["root", "prefixed"])
@pytest.mark.parametrize("route,body", BAD.values(), ids=BAD.keys())
def test_a_bad_call_is_a_422_and_changes_nothing(
    server: Server, prefix: str, route: str, body: dict[str, Any], first_tokens: list[int]
) -> None:
    response = server.http.post(prefix + route, json=body)
    assert response.status_code == 422, response.text
    error = response.json()["error"]
    assert error["code"] == "InvalidRequestError"
    assert error["message"]
    assert server.control.memory()["admitting"]
    assert server.generate(PROMPT) == first_tokens


def test_allowed_values_are_listed(server: Server) -> None:
    def allowed(body: dict[str, Any]) -> list[Any]:
        return server.http.post("/v1/rl_memory/sleep", json=body).json()["error"]["details"]["allowed"]

    assert allowed({"level": 7}) == [0, 1, 2]
    assert set(allowed({"tags": ["x"]})) == {"weights", "kv_cache", "cuda_graph"}
    assert set(allowed({"mode": "x"})) == {"abort", "wait", "keep", "freeze"}


MALFORMED = {
    "cut off": b"{",
    "a list": b"[1]",
    "not UTF-8": b"\xff\xfe",
    "a word": b'"sleep"',
    "deeply nested": b"{" * 100_000,
    "a field twice": b'{"level": 1, "level": 2}',
    "3 MiB": b" " * (3 << 20),
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_or_huge_body_is_refused(server: Server, content: bytes) -> None:
    response = server.http.post("/v1/rl_memory/sleep", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 422, response.text
    assert server.control.memory()["admitting"]


def test_duplicate_tags_fold(server: Server, first_tokens: list[int]) -> None:
    changes = server.control.sleep(1, ["weights", "weights"])["report"]["changes"]
    assert {change["tag"] for change in changes} == {"weights"}
    server.control.wake_up(["weights", "weights"])
    assert server.generate(PROMPT) == first_tokens


def test_parameters_may_come_in_the_query(server: Server, first_tokens: list[int]) -> None:
    response = server.http.post("/v1/rl_memory/sleep?level=1&tags=weights&tags=kv_cache&mode=abort")
    assert response.json()["tags"] == ["kv_cache", "weights"]
    response = server.http.post("/v1/rl_memory/wake_up?tags=weights,kv_cache")
    assert response.json()["status"] == "awake"
    assert server.generate(PROMPT) == first_tokens


def test_no_body_means_the_defaults(server: Server, first_tokens: list[int]) -> None:
    assert server.http.post("/v1/rl_memory/sleep").json()["level"] == 1
    assert server.http.post("/v1/rl_memory/wake_up").json()["status"] == "awake"
    assert server.generate(PROMPT) == first_tokens
