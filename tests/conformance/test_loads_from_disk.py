"""Loads from disk by the engine's own call, whose weight version tells them from the weights before; and by ours."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from integration.engines.base import Server
from integration.models import SHAPES, write_model
from rl_memory_plugins import InvalidRequestError, ManifestError, StateConflictError
from rl_memory_plugins.loaded_versions import PREFIX
from tests.conformance.conftest import OTHER_SEED, PROMPT, SEED, Weights, greedy


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


# -- our own route ------------------------------------------------------------------------------------------------


def test_an_engine_comes_back_from_level_2_without_a_trainer(
    server: Server, weights: Weights, model_folder: Path, other_folder: Path, first_tokens: list[int]
) -> None:
    server.control.sleep(2)
    with pytest.raises(StateConflictError, match="asleep"):
        server.control.update_weights_from_checkpoint(other_folder)
    server.control.wake_up(["weights"])
    answer = server.control.update_weights_from_checkpoint(other_folder, weight_version="from-files")
    assert (answer["weight_version"], answer["content"]) == ("from-files", "valid")
    server.control.wake_up()
    assert server.generate(PROMPT) == greedy(weights.other, PROMPT)
    assert versions_of_an_answer(server) == {"from-files"}
    assert server.control.update_weights_from_checkpoint(model_folder)["weight_version"] != "from-files"
    assert server.generate(PROMPT) == first_tokens


def test_one_file_with_some_of_the_weights(
    server: Server, weights: Weights, tmp_path: Path, first_tokens: list[int]
) -> None:
    file = tmp_path / "some.safetensors"
    norm = weights.first.state_dict()["model.norm.weight"]
    save_file({"model.norm.weight": (norm * -3).cpu()}, file)
    with pytest.raises(ManifestError):
        server.control.update_weights_from_checkpoint(file)
    server.control.update_weights_from_checkpoint(file, partial=True)
    assert server.generate(PROMPT) != first_tokens
    save_file({"model.norm.weight": norm.cpu().contiguous()}, file)
    server.control.update_weights_from_checkpoint(file, partial=True)
    assert server.generate(PROMPT) == first_tokens


@pytest.mark.parametrize(
    "files", ["none", "a file of the index is missing", "cut", "of another model", "a name too many"]
)
def test_files_that_do_not_serve_leave_the_weights_as_they_are(
    server: Server, tmp_path: Path, model_folder: Path, first_tokens: list[int], files: str
) -> None:
    folder = tmp_path / "broken"
    if files == "none":
        folder.mkdir()
    elif files == "of another model":
        write_model(folder, SHAPES["tiny"], dtype=server.launch.dtype, seed=SEED)
    else:
        shutil.copytree(model_folder, folder)
        file = folder / "model.safetensors"
        if files == "a name too many":
            save_file({**load_file(file), "model.bogus.weight": torch.zeros(2)}, file, {"format": "pt"})
        elif files == "cut":
            file.write_bytes(file.read_bytes()[:-100])
        else:
            (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "absent.safetensors"}}')
    version = server.control.weight_version()
    with pytest.raises(InvalidRequestError):
        server.control.update_weights_from_checkpoint(folder)
    assert server.control.weights_state() == {
        "content": "valid",
        "weight_version": version,
        "admitting": True,
        "reason": None,
    }
    assert server.generate(PROMPT) == first_tokens
