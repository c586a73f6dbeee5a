"""Every answer names the weights that gave it."""

from __future__ import annotations

import httpx
import pytest

from integration.engines.base import Server
from rl_memory_plugins.errors import StateConflictError
from rl_memory_plugins.trainer import push_from_all
from tests.conformance.conftest import PROMPT, Weights, long_answer
from tests.conformance.trainers import push


def versions(response: object) -> tuple[str, str]:
    """The weights when the request was admitted, and when the answer began."""
    assert isinstance(response, httpx.Response) and response.status_code == 200, response
    return response.headers["x-weight-version"], response.headers["x-weight-version-end"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streaming"])
def test_an_answer_names_its_weights(server: Server, weights: Weights, stream: bool) -> None:
    for version, model in (("step-41", weights.other), ("step-42", weights.first)):
        push(server, model, weight_version=version)
        response = server.http.post(server.kind.generation_route, json=server.kind.request(PROMPT, 8, stream))
        assert versions(response) == (version, version)
        assert server.control.weight_version() == version


def test_a_request_that_is_kept_over_an_update_names_both_weights(server: Server, weights: Weights) -> None:
    push(server, weights.other, weight_version="before")
    with server.generating(PROMPT, long_answer(server)) as request:
        push(server, weights.first, weight_version="after", mode="keep")
        request.answer()
    assert versions(request.outcome) == ("before", "after")
    assert versions(server.post(PROMPT)) == ("after", "after")


def test_an_update_for_other_weights_is_refused(server: Server, weights: Weights) -> None:
    push(server, weights.other, weight_version="step-41")
    norm = {"model.norm.weight": weights.other.state_dict()["model.norm.weight"]}
    options = {"partial": True, "weight_version": "step-42"}
    with pytest.raises(StateConflictError, match="'step-40'") as refused:
        push_from_all(server.control, norm, base_version="step-40", **options)
    assert refused.value.details["weight_version"] == "step-41"
    assert versions(server.post(PROMPT)) == ("step-41", "step-41")
    push_from_all(server.control, norm, base_version="step-41", **options)
    assert versions(server.post(PROMPT)) == ("step-42", "step-42")


def test_a_sleep_that_preserves_the_weights_keeps_their_version(server: Server, weights: Weights) -> None:
    push(server, weights.other, weight_version="step-41")
    server.control.sleep(1)
    assert "x-weight-version" not in server.post(PROMPT).headers  # nothing answered
    server.control.wake_up()
    assert versions(server.post(PROMPT)) == ("step-41", "step-41")
