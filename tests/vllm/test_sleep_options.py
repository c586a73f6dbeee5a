"""Options of vLLM's own sleep, which this package honours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.models import new_model
from rl_memory_plugins import EngineAsleepError, EngineFaultError, InvalidRequestError, ManifestError
from tests.vllm.calls import generate, push, restore
from tests.vllm.child import Child
from tests.vllm.conftest import OTHER_SEED, SEED, engine_options, environment

OPTIONS = {
    "sleep_preserve_parameter_names": ["*.embed_tokens.*", "draft.*"],
    "enable_nccl_comm_suspend": True,
    "sleep_mode_offload_cudagraph": True,
}


def make_llm(folder: Path) -> Any:
    from rl_memory_plugins.vllm import LLM

    return LLM(rl_memory={"poison": True}, **engine_options(folder), **OPTIONS)


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> Iterator[Child]:
    with Child(
        make_llm, model_folder, environment=environment(model_folder, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    ) as child:
        yield child


def keep_the_embedding(llm: Any, folder: Path) -> None:
    first = generate(llm)
    tensors = new_model(folder, OTHER_SEED).state_dict()
    push(
        llm, {**tensors, "model.embed_tokens.weight": new_model(folder, SEED).state_dict()["model.embed_tokens.weight"]}
    )
    mixed = generate(llm)
    assert mixed != first
    restore(llm, folder)
    del tensors["model.embed_tokens.weight"]
    for sleep in (lambda: llm.sleep(level=2), lambda: llm.collective_rpc("sleep", args=(2,))):
        sleep()
        llm.wake_up()
        push(llm, tensors)
        assert generate(llm) == mixed
        restore(llm, folder)
    llm.sleep(level=2, keep=[])
    llm.wake_up()
    with pytest.raises(ManifestError):
        push(llm, tensors)
    with pytest.raises(InvalidRequestError):
        llm.sleep(level=2, keep=["*.no_such_weight"])
    assert restore(llm, folder) == first


def test_preserved_parameters_are_kept_at_level_2(llm: Child, model_folder: Path) -> None:
    llm(keep_the_embedding, model_folder)


def suspend_and_resume(llm: Any) -> None:
    """vLLM's communicators make collective calls of NCCL. Here they note the worker's tags, and fail once."""
    from types import SimpleNamespace
    from unittest.mock import patch

    from vllm.distributed import parallel_state

    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    log: list[tuple[str, str]] = []
    failures: list[Exception] = []

    def note(name: str) -> Any:
        def call() -> None:
            log.append((name, worker.rl_memory.manager.status().tags["weights"].state.value))
            if failures:
                raise failures.pop()

        return call

    first = generate(llm)
    communicator = SimpleNamespace(suspend=note("suspend"), resume=note("resume"))
    group = SimpleNamespace(device_communicator=communicator, device_group=None)
    with patch.object(parallel_state, "_groups", {**parallel_state._groups, "added": lambda: group}):
        llm.sleep(level=1)
        llm.wake_up(tags=["weights"])
        llm.wake_up()
        assert log == [("suspend", "preserved"), ("resume", "preserved")]
        assert generate(llm) == first
        failures.append(RuntimeError("NCCL error: unhandled system error"))
        with pytest.raises(EngineFaultError, match="not suspended: NCCL error"):
            llm.sleep(level=1)
        with pytest.raises(EngineAsleepError):
            generate(llm)
        assert llm.wake_up()
        llm.sleep(level=1)
        failures.append(RuntimeError("NCCL error: unhandled system error"))
        with pytest.raises(EngineFaultError, match="nothing was mapped: NCCL error"):
            llm.wake_up()
        with pytest.raises(EngineAsleepError):
            generate(llm)
        assert llm.wake_up()
        assert generate(llm) == first
    for level in (1, 0):  # no communicator on a CPU
        llm.sleep(level=level)
        llm.wake_up()
        assert generate(llm) == first


def test_communicators_are_suspended_with_the_memory(llm: Child) -> None:
    llm(suspend_and_resume)
