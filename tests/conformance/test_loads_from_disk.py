"""Loads from disk by the engine's own call: the weight version tells them from the weights before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from integration.engines.base import Server
from integration.models import SHAPES, write_model
from rl_memory_plugins.loaded_versions import PREFIX
from tests.conformance.conftest import OTHER_SEED, PROMPT, SEED, Weights


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory, launch: Any) -> Path:
    folder = tmp_path_factory.mktemp("model") / "other"
    return write_model(folder, SHAPES["small"], dtype=launch.dtype, seed=OTHER_SEED)


def load(server: Server, folder: Path) -> str:
    """Load a checkpoint by the engine's own route. Returns the version that `/memory` shows after the load."""
    if server.kind.name == "vllm":
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        response = server.http.post("/collective_rpc", json=call)
    else:
        response = server.http.post("/update_weights_from_disk", json={"model_path": str(folder)})
    assert response.status_code == 200, response.text
    memory = server.control.memory()
    assert memory["content"] == "valid"
    assert {engine["weight_version"] for engine in memory["engines"]} == {memory["weight_version"]}
    return str(memory["weight_version"])


def versions_of_an_answer(server: Server) -> set[str]:
    """All versions in the headers and the body of an answer."""
    response = server.post(PROMPT)
    assert response.status_code == 200, response.text
    found = {response.headers["x-weight-version"], response.headers["x-weight-version-end"]}
    body = response.json()
    return found | ({body["meta_info"]["weight_version"]} if "meta_info" in body else set())


def test_a_load_of_other_weights_changes_the_version(
    server: Server, weights: Weights, model_folder: Path, other_folder: Path, first_tokens: list[int]
) -> None:
    """Stock: a reload rolls the weights back, and the version stays that of the trainer's last update."""
    server.control.update_weights(weights.other, weight_version="step-5")
    other_tokens = server.generate(PROMPT)
    rolled_back = load(server, model_folder)
    assert rolled_back != "step-5"
    assert server.generate(PROMPT) == first_tokens
    assert versions_of_an_answer(server) == {rolled_back}
    assert load(server, other_folder) == "step-5"  # the same weights, from disk
    assert server.generate(PROMPT) == other_tokens
    assert versions_of_an_answer(server) == {"step-5"}
    assert load(server, other_folder) == "step-5"
    assert load(server, model_folder) == rolled_back


def test_the_first_checkpoint_keeps_its_version_after_a_level_2_sleep(server: Server, model_folder: Path) -> None:
    version = load(server, model_folder)
    server.control.sleep(2)
    server.control.wake_up(["weights"])
    assert load(server, model_folder) == version
    server.control.wake_up()


def test_weights_that_nobody_has_named_are_named_by_their_bytes(
    server: Server, tmp_path: Path, model_folder: Path
) -> None:
    folder = write_model(tmp_path / "third", SHAPES["small"], dtype=server.launch.dtype, seed=SEED + OTHER_SEED)
    server.control.sleep(2)
    server.control.wake_up()
    version = load(server, folder)
    assert version.startswith(PREFIX)
    load(server, model_folder)
    assert load(server, folder) == version
    assert f"their version is now '{version}'" in server.log.read_text(errors="replace")
