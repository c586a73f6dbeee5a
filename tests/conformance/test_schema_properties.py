"""Requests that a program makes up from `/openapi.json`, right and wrong ones, against a live server.

Part of `make test-long` only. Whatever is asked: the specification describes the answer, an answer of the 500s is an
error that docs/errors.md lists for something else than a bug, and the engine answers rightly afterwards.
"""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, assume, given, settings
from schemathesis import checks

from integration.engines.base import Server
from rl_memory_plugins import errors
from rl_memory_plugins.server.openapi import specification
from rl_memory_plugins.server.router import PREFIXES
from tests.conformance.conftest import PROMPT

OPERATIONS = [
    (method.upper(), path) for path, item in specification(PREFIXES, has_key=False)["paths"].items() for method in item
]
MODES = {"POST": list(schemathesis.GenerationMode), "GET": [schemathesis.GenerationMode.POSITIVE]}  # no parameters
CASES = [(method, path, mode) for method, path in OPERATIONS for mode in MODES[method]]
REQUESTS = {"POST": 40, "GET": 5}
TIMEOUT_S = 60.0  # of one request
KNOWN = {
    name: found for name, found in vars(errors).items() if isinstance(found, type) and issubclass(found, Exception)
}
BUGS = ("RLMemoryError", "EngineFaultError")


@pytest.fixture(scope="module")
def schema(running_server: Server) -> Any:
    checks.load_all_checks()
    found = running_server.http.get("/openapi.json").json()
    found["paths"] = {
        path: item
        for path, item in found["paths"].items()
        if ("POST", path) in OPERATIONS or ("GET", path) in OPERATIONS
    }
    return schemathesis.openapi.from_dict(found)


@pytest.mark.parametrize(("method", "path", "mode"), CASES, ids=str)
def test_any_request_has_an_answer_that_is_described(
    server: Server, first_tokens: list[int], schema: Any, method: str, path: str, mode: Any
) -> None:
    operation = schema[path][method]
    statuses: dict[int, int] = {}

    @settings(
        max_examples=REQUESTS[method],
        phases=[Phase.explicit, Phase.generate],
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        assume(not is_native_update(case.body))
        if mode is schemathesis.GenerationMode.POSITIVE:
            for_every_device(case.body)
        key = server.launch.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = case.call(base_url=server.url, headers=headers, timeout=TIMEOUT_S)
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        if answer.status_code >= 500:
            error = answer.json()["error"]
            assert error["code"] not in BUGS, error
            assert KNOWN[error["code"]].status == answer.status_code
        named = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
        case.validate_response(answer, checks=[checks.CHECKS.get_one(name) for name in named])

    ask()
    print(f"{method} {path} {mode.value}: {statuses}")
    assert sum(statuses.values()) >= (1 if method == "GET" else REQUESTS[method] // 4), "hardly anything was asked"
    server.control.wake_up()
    if server.control.memory()["content"] == "valid":
        assert server.generate(PROMPT) == first_tokens


def for_every_device(body: Any) -> None:
    """Made-up names of devices are none of the engine's, and would end each update before it looks for a socket."""
    if isinstance(body, dict) and body.get("endpoints"):
        body["endpoints"]["*"] = next(iter(body["endpoints"].values()))


def is_native_update(body: Any) -> bool:
    """SGLang's own update by the same path: what it does with the sockets that are named is SGLang's."""
    return isinstance(body, dict) and isinstance(body.get("zmq_handles"), dict)
