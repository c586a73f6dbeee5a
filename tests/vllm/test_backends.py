"""Weight transfer backends that write past the model's loader, on two ranks. vLLM's protocol is all that they keep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.models import new_model
from tests.vllm.calls import generate, push, refused, restore
from tests.vllm.child import Child
from tests.vllm.conftest import OTHER_SEED, SEED, engine_options, environment

HALF = 10  # of some thirty parameters


def make(folder: Path) -> Any:
    from rl_memory_plugins.vllm import LLM
    from tests.vllm.backends import BACKEND

    return LLM(
        **engine_options(
            folder,
            tensor_parallel_size=2,
            worker_extension_cls="tests.vllm.backends.RememberExtension",
            weight_transfer_config={"backend": BACKEND},
        ),
        rl_memory={"poison": True},
    )


@pytest.fixture(scope="module")
def started(model_folder: Path) -> Iterator[Child]:
    with Child(make, model_folder, environment=environment(model_folder, tp=2)) as child:
        child(prepare, model_folder)
        yield child


def prepare(llm: Any, folder: Path) -> None:
    llm.init_weight_transfer_engine({"init_info": {}})
    push(llm, new_model(folder, OTHER_SEED), receivers=2)
    llm.collective_rpc("remember")
    restore(llm, folder)


def content(llm: Any) -> str:
    return str(llm.memory_status()[0].content)


def sleep_and_wake(llm: Any, level: int) -> str:
    llm.sleep(level)
    llm.wake_up()
    return content(llm)


def update(llm: Any, **info: Any) -> None:
    llm.update_weights({"update_info": info})


def nothing(llm: Any, level: int) -> None:
    before = sleep_and_wake(llm, level)
    llm.start_weight_update()
    assert refused(lambda: generate(llm)) == "updating"
    llm.finish_weight_update()
    assert content(llm) == before


@pytest.mark.parametrize("level", [0, 2], ids=["valid", "stale"])
def test_an_update_that_brings_nothing(llm: Child, level: int) -> None:
    llm(nothing, level)


def half_that_fails(llm: Any, level: int, how: str, other: list[int]) -> None:
    sleep_and_wake(llm, level)
    llm.start_weight_update()
    with pytest.raises(Exception, match="the trainer is gone"):
        update(llm, how=how, count=HALF, fail=True)
    assert refused(lambda: generate(llm)) == "failed"
    llm.start_weight_update()
    update(llm, how=how)
    assert refused(lambda: generate(llm)) == "updating"
    llm.finish_weight_update()
    assert content(llm) == "valid"
    assert generate(llm) == other


@pytest.mark.parametrize("how", ["memmove", "thread", "deferred"])
@pytest.mark.parametrize("level", [0, 2], ids=["valid", "stale"])
def test_half_of_an_update_fails_and_a_whole_one_opens_the_engine(
    llm: Child, level: int, how: str, other_tokens: list[int]
) -> None:
    """Stock: the engine answers from a mixture of two sets of weights."""
    llm(half_that_fails, level, how, other_tokens)


def half_that_ends(llm: Any, how: str, other: list[int]) -> None:
    sleep_and_wake(llm, 2)
    llm.start_weight_update()
    update(llm, how=how, count=HALF)
    llm.finish_weight_update()
    assert refused(lambda: generate(llm)) == "stale"
    llm.start_weight_update()
    update(llm, how=how)
    llm.finish_weight_update("step-2")
    assert llm.weight_version() == "step-2"
    assert generate(llm) == other


@pytest.mark.parametrize("how", ["memmove", "deferred"])
def test_half_of_an_update_that_its_trainer_ends_opens_nothing(llm: Child, how: str, other_tokens: list[int]) -> None:
    """Stock: the engine answers from undefined memory."""
    llm(half_that_ends, how, other_tokens)


def writes_after_the_failure(llm: Any, folder: Path, first: list[int], act: str) -> None:
    llm.start_weight_update()
    if act == "failed":
        with pytest.raises(Exception, match="the trainer is gone"):
            update(llm, how="deferred", fail=True)
    else:
        update(llm, how="deferred")  # and its trainer is never heard of again
    push(llm, new_model(folder, SEED), receivers=2)
    assert content(llm) == "valid"
    for _ in range(5):
        assert generate(llm) == first  # nothing writes into these weights


@pytest.mark.parametrize("act", ["failed", "left open"])
def test_no_write_of_a_former_update_comes_into_the_next(
    llm: Child, model_folder: Path, first_tokens: list[int], act: str
) -> None:
    llm(writes_after_the_failure, model_folder, first_tokens, act)


def sleep_within(llm: Any, level: int, other: list[int]) -> None:
    llm.start_weight_update()
    update(llm, how="deferred")
    llm.sleep(level)
    llm.wake_up()
    assert refused(lambda: generate(llm)) == ("updating" if level == 1 else "stale")
    llm.finish_weight_update()
    if level == 1:
        assert content(llm) == "valid"
        assert generate(llm) == other
    else:
        assert refused(lambda: generate(llm)) == "stale"


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_waits_for_deferred_writes(llm: Child, level: int, other_tokens: list[int]) -> None:
    """Stock: they go into memory that the sleep has released."""
    llm(sleep_within, level, other_tokens)


def fail_later(llm: Any) -> None:
    llm.start_weight_update()
    update(llm, how="deferred", breaks=True)
    llm.sleep(1)
    llm.wake_up()
    assert refused(lambda: generate(llm)) == "failed"
    with pytest.raises(Exception, match="without a matching start_weight_update"):
        llm.finish_weight_update()


def test_deferred_writes_that_fail_end_the_update(llm: Child) -> None:
    llm(fail_later)


def bake_asleep(llm: Any, level: int) -> None:
    llm.sleep(level)
    with pytest.raises(Exception, match="the weights are asleep"):
        llm.init_weight_transfer_engine({"init_info": {"bakes": True}})
    llm.wake_up()


def bake_awake(llm: Any, first: list[int]) -> None:
    llm.init_weight_transfer_engine({"init_info": {"bakes": True}})
    assert content(llm) == "valid"
    assert generate(llm) == first


def test_a_backend_that_runs_the_loader_to_connect(llm: Child, first_tokens: list[int]) -> None:
    """As `sharded_rdt`. Asleep it is refused, and leaves no layer without memory."""
    llm(bake_awake, first_tokens)
    llm(bake_asleep, 1)
    llm(bake_awake, first_tokens)
    llm(bake_asleep, 2)
