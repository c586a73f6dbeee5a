"""The version in SGLang's own metadata is ours, whoever names it."""

from __future__ import annotations

from typing import Any

import pytest

from integration.engines.base import Server
from tests.sglang.conftest import PROMPT


def meta_info(server: Server) -> Any:
    response = server.post(PROMPT)
    info = response.json()["meta_info"]
    assert response.headers["x-weight-version"] == info["weight_version"] == server.control.weight_version()
    return info


def test_an_answer_s_metadata_names_its_weights(server: Server, other_weights: Any) -> None:
    assert meta_info(server)["weight_version"] != "step-41"
    server.control.update_weights(other_weights, weight_version="step-41")
    info = meta_info(server)
    assert info["weight_version"] == "step-41"
    assert info["weight_versions"] == [{"version": "step-41", "start": 0, "end": 8}]


@pytest.mark.long
def test_a_kept_request_tells_which_tokens_are_by_which_weights(server: Server, other_weights: Any) -> None:
    server.control.update_weights(other_weights, weight_version="before")
    with server.generating(PROMPT, 1000) as request:
        server.control.update_weights(other_weights, weight_version="after", mode="keep")
        spans = request.answer()["meta_info"]["weight_versions"]
    first, second = spans
    assert (first["version"], first["start"]) == ("before", 0)
    assert (second["version"], second["start"], second["end"]) == ("after", first["end"], 1000)


def test_sglang_s_own_way_to_name_the_weights(server: Server) -> None:
    response = server.http.post("/update_weight_version", json={"new_version": "renamed"})
    assert response.status_code == 200
    assert meta_info(server)["weight_version"] == "renamed"
