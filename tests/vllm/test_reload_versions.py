"""vLLM's `reload_weights`: the version of the weights that it loads, and reloads that break off."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.models import new_model
from rl_memory_plugins.loaded_versions import PREFIX
from tests.vllm.calls import generate, push, refused
from tests.vllm.child import Child
from tests.vllm.conftest import OTHER_SEED, greedy

THIRD_SEED = 3


def rolled_back(llm: Any, folder: Path, other_folder: Path, first: list[int], other: list[int]) -> None:
    push(llm, new_model(folder, OTHER_SEED), weight_version="step-5")
    llm.collective_rpc("reload_weights")
    assert llm.weight_version() == "default"
    assert generate(llm) == first
    assert llm.llm_engine.get_weight_version() == "default"  # vLLM's own name of it
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other_folder)})
    assert llm.weight_version() == "step-5"
    assert generate(llm) == other
    llm.sleep(2)
    llm.wake_up(["weights"])
    llm.collective_rpc(lambda worker: worker.reload_weights(weights_path=str(folder)))
    llm.wake_up()
    assert llm.weight_version() == "default"
    assert generate(llm) == first


def test_a_rollback_to_the_first_checkpoint_says_so(
    llm: Child, model_folder: Path, other_folder: Path, first_tokens: list[int], other_tokens: list[int]
) -> None:
    """TRL#5312. Stock: the weights are those of the checkpoint, and their version is that of the trainer's step."""
    llm(rolled_back, model_folder, other_folder, first_tokens, other_tokens)


def changed_on_disk(llm: Any, folder: Path, changed: Path, first: list[int], third: list[int]) -> None:
    file = changed / "model.safetensors"
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(changed)})
    assert (generate(llm), llm.weight_version()) == (first, "default")
    file.unlink()  # a new file in the place of the old one
    new_model(changed, THIRD_SEED).save_pretrained(changed)
    llm.collective_rpc("reload_weights")
    version = llm.weight_version()
    assert generate(llm) == third and version.startswith(PREFIX)
    file.write_bytes((folder / file.name).read_bytes())  # the same file
    llm.collective_rpc("reload_weights")
    assert (generate(llm), llm.weight_version()) == (first, "default")
    new_model(changed, THIRD_SEED).save_pretrained(changed)
    llm.sleep(2)
    llm.wake_up(["weights"])
    llm.collective_rpc("reload_weights")
    llm.wake_up()
    assert (generate(llm), llm.weight_version()) == (third, version)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})


def test_a_checkpoint_that_has_changed_on_disk_is_read_again(
    llm: Child, model_folder: Path, tmp_path: Path, first_tokens: list[int]
) -> None:
    """vLLM#32718."""
    changed = tmp_path / "changed"
    shutil.copytree(model_folder, changed)
    third_tokens = greedy(new_model(model_folder, THIRD_SEED))
    llm(changed_on_disk, model_folder, changed, first_tokens, third_tokens)


def from_an_iterator(llm: Any, folder: Path) -> None:
    def load(worker: Any, seed: int) -> None:
        worker.reload_weights(weights_iterator=iter(new_model(folder, seed).state_dict().items()))

    def load_nothing(worker: Any) -> None:
        worker.reload_weights(weights_path="/nowhere")

    def load_past_every_call(worker: Any) -> None:
        worker.model_runner.model.load_weights(iter(new_model(folder, 77).state_dict().items()))

    llm.collective_rpc(load, args=(55,))
    version = llm.weight_version()
    assert version.startswith(PREFIX)
    llm.collective_rpc(load, args=(66,))
    assert llm.weight_version() not in (version, "default")
    llm.collective_rpc(load, args=(55,))
    assert llm.weight_version() == version
    with pytest.raises(Exception, match="No such file|does not|Cannot find|not found|Repo id"):
        llm.collective_rpc(load_nothing)
    llm.collective_rpc(load_past_every_call)  # a trainer names its own loads
    assert llm.weight_version() == version


def test_other_weights_have_another_version(llm: Child, model_folder: Path) -> None:
    llm(from_an_iterator, model_folder)


def kernel_format(llm: Any, folder: Path, first: list[int]) -> None:
    def reload(worker: Any, count: int | None, fail: bool) -> None:
        def weights() -> Any:
            yield from list(worker.remembered.items())[:count]
            if fail:
                raise ConnectionError("the trainer is gone")

        with torch.no_grad():
            worker.reload_weights(weights(), None, False)

    def remember(worker: Any) -> None:
        worker.remembered = {name: one.clone() for name, one in worker.model_runner.model.named_parameters()}

    llm.collective_rpc(remember)
    push(llm, new_model(folder, OTHER_SEED), weight_version="step-5")
    with pytest.raises(Exception, match="the trainer is gone"):
        llm.collective_rpc(reload, args=(0, True))
    assert llm.weight_version() == "step-5"
    with pytest.raises(Exception, match="the trainer is gone"):
        llm.collective_rpc(reload, args=(5, True))
    assert refused(lambda: generate(llm)) == "failed"
    llm.collective_rpc(reload, args=(5, False))
    assert refused(lambda: generate(llm)) == "failed"
    llm.collective_rpc(reload, args=(None, False))
    assert llm.weight_version() != "step-5"
    assert generate(llm) == first


def test_weights_in_the_format_of_the_kernels(llm: Child, model_folder: Path, first_tokens: list[int]) -> None:
    """vLLM copies them past the model's `load_weights`."""
    llm(kernel_format, model_folder, first_tokens)
