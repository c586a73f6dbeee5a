"""Trainers that know nothing of this package, with worker extensions and vLLM's own reload. On two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.models import new_model
from rl_memory_plugins.errors import ManifestError
from rl_memory_plugins.trainer import ModelSource, RolloutHandoff
from rl_memory_plugins.weights.manifest import Mismatch, manifest_error
from tests.vllm.calls import generate, push, refused
from tests.vllm.child import Child
from tests.vllm.conftest import OTHER_SEED, SEED, engine_options, environment

EXTENSION = "tests.vllm.extensions.TrainerExtension"


def make(folder: Path) -> Any:
    from rl_memory_plugins.vllm import LLM

    return LLM(
        **engine_options(folder, tensor_parallel_size=2, worker_extension_cls=EXTENSION, enable_prefix_caching=True),
        rl_memory={"poison": True},
    )


@pytest.fixture(scope="module")
def started(model_folder: Path) -> Iterator[Child]:
    """That it starts shows that no name of the extension is one of the worker's."""
    variables = environment(model_folder, tp=2, VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    with Child(make, model_folder, environment=variables) as child:
        yield child


def content(llm: Any) -> str:
    return str(llm.memory_status()[0].content)


def discard_and_wake_weights(llm: Any) -> None:
    llm.sleep(2)
    llm.wake_up(["weights"])
    assert content(llm) == "stale"


def whole(llm: Any, folder: str, other: list[int]) -> None:
    discard_and_wake_weights(llm)
    loaded = llm.collective_rpc("update_weights_from_ipc", args=(folder, OTHER_SEED))
    assert len(loaded) == 2
    assert content(llm) == "valid"
    assert refused(lambda: generate(llm)) == "asleep"
    llm.wake_up(["kv_cache"])
    assert generate(llm) == other


def test_a_load_of_everything_in_one_call(llm: Child, model_folder: Path, other_tokens: list[int]) -> None:
    llm(whole, str(model_folder), other_tokens)


def one_by_one(llm: Any, folder: str, other: list[int]) -> None:
    discard_and_wake_weights(llm)
    llm.wake_up()
    names = llm.collective_rpc("prepare_refit_info", args=(folder, OTHER_SEED))[0]
    for name in reversed(names):
        assert refused(lambda: generate(llm)) == "stale", name
        llm.collective_rpc("update_weight_cuda_ipc", args=(folder, OTHER_SEED, name))
    assert content(llm) == "valid"
    assert generate(llm) == other


@pytest.mark.long
def test_a_load_parameter_by_parameter(llm: Child, model_folder: Path, other_tokens: list[int]) -> None:
    llm(one_by_one, str(model_folder), other_tokens)


def partly(llm: Any, folder: str, other: list[int]) -> None:
    discard_and_wake_weights(llm)
    llm.wake_up()
    llm.collective_rpc("update_weights_via_ipc_zmq", args=(folder, OTHER_SEED))
    assert refused(lambda: generate(llm)) == "stale"  # q of every fused qkv is there, k and v are not
    llm.collective_rpc("update_weights_ipc", args=(folder, OTHER_SEED, 0, 10))
    assert refused(lambda: generate(llm)) == "stale"
    llm.collective_rpc("update_weights_ipc", args=(folder, OTHER_SEED, 10, 1000))
    assert generate(llm) == other


def test_a_load_of_only_a_part_keeps_the_engine_closed(llm: Child, model_folder: Path, other_tokens: list[int]) -> None:
    llm(partly, str(model_folder), other_tokens)


def parts_of_two_cycles(llm: Any, folder: str) -> None:
    names = llm.collective_rpc("prepare_refit_info", args=(folder, OTHER_SEED))[0]
    half = len(names) // 2
    discard_and_wake_weights(llm)
    llm.collective_rpc("update_weights_ipc", args=(folder, OTHER_SEED, 0, half))
    discard_and_wake_weights(llm)  # loses the first half again
    llm.collective_rpc("update_weights_ipc", args=(folder, OTHER_SEED, half, len(names)))
    llm.wake_up()
    assert refused(lambda: generate(llm)) == "stale"


def test_parts_from_before_and_after_a_sleep_do_not_add_up(llm: Child, model_folder: Path) -> None:
    llm(parts_of_two_cycles, str(model_folder))


def load_asleep(llm: Any, folder: str, first: list[int]) -> None:
    llm.sleep(1)
    with pytest.raises(Exception, match="asleep"):
        llm.collective_rpc("update_weights_from_ipc", args=(folder, OTHER_SEED))
    assert llm.is_sleeping()
    llm.wake_up()
    assert generate(llm) == first


def test_a_load_while_asleep_is_refused(llm: Child, model_folder: Path, first_tokens: list[int]) -> None:
    """Stock vLLM: a write into unmapped memory ends the process."""
    llm(load_asleep, str(model_folder), first_tokens)


def fail_on_one_rank(llm: Any, first: list[int]) -> None:
    for _ in range(3):
        with pytest.raises(Exception, match="rank 0 cannot"):
            llm.collective_rpc("fail_on_rank_0")
    assert llm.collective_rpc("rank_of_worker") == [0, 1]
    report = llm.sleep(1)
    assert {change.rank for change in report.changes} == {0, 1}
    llm.wake_up()
    assert generate(llm) == first
    assert llm.collective_rpc(lambda worker: worker.rank_of_worker() + 10) == [10, 11]


def test_a_call_that_fails_on_one_rank_leaves_no_stale_reply(llm: Child, first_tokens: list[int]) -> None:
    """Stock vLLM: the other rank's reply stays in its queue and answers the next call."""
    llm(fail_on_one_rank, first_tokens)


def reject_once_on_rank_1(worker: Any) -> None:
    """As if the second rank's part of the model were another."""
    if worker.rank != 1:
        return
    model = worker.rl_memory.agent.receiver._model
    plan = model.plan

    def reject(*arguments: Any) -> Any:
        model.plan = plan
        raise manifest_error([Mismatch("shape", "model.norm.weight", "only here")])

    model.plan = reject


def one_rank_rejects(llm: Any, folder: str, first: list[int], other: list[int]) -> None:
    handoff = RolloutHandoff(llm, ModelSource(new_model(Path(folder), OTHER_SEED)))
    llm.collective_rpc(reject_once_on_rank_1)
    with pytest.raises(ManifestError) as caught:
        handoff.sync()
    assert caught.value.details["step"] == "sync"
    (mismatch,) = caught.value.details["mismatches"]
    assert (mismatch["kind"], mismatch["name"], mismatch["ranks"]) == ("shape", "model.norm.weight", [1])
    assert generate(llm) == first  # nothing was written on the other rank either
    handoff.sync()
    assert generate(llm) == other


def test_one_rank_that_rejects_stops_both(
    llm: Child, model_folder: Path, first_tokens: list[int], other_tokens: list[int]
) -> None:
    llm(one_rank_rejects, str(model_folder), first_tokens, other_tokens)


def prefix(llm: Any, folder: str) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompt = {"prompt_token_ids": list(range(5, 165))}

    def ask() -> list[int]:
        return list(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)

    before = ask()
    assert ask() == before
    llm.collective_rpc("update_weights_from_ipc", args=(folder, OTHER_SEED))
    after = ask()
    llm.reset_prefix_cache()
    return [before, after, ask()]


def test_a_load_forgets_the_prefix_cache(llm: Child, model_folder: Path) -> None:
    """Stock vLLM answers from keys and values that the old weights computed."""
    before, after, again = llm(prefix, str(model_folder))
    assert after == again != before


def trl(llm: Any, other_folder: str, first: list[int]) -> list[int]:
    """TRL's vLLM client, colocated: the same tag twice, vLLM's own reload, then the cache."""
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights")
    assert content(llm) == "valid"
    llm.wake_up(tags=["kv_cache"])
    assert generate(llm) == first
    llm.collective_rpc("reload_weights", kwargs={"weights_path": other_folder})
    return generate(llm)


def test_trl_s_cycle_with_reload_weights(
    llm: Child, other_folder: Path, first_tokens: list[int], other_tokens: list[int]
) -> None:
    assert llm(trl, str(other_folder), first_tokens) == other_tokens


def stock_cycle(llm: Any, first: list[int]) -> list[int]:
    """A caller that knows vLLM's two tags only."""
    llm.sleep(level=1)
    llm.wake_up(tags=["weights"])
    llm.wake_up(tags=["kv_cache"])
    return generate(llm)


def test_a_caller_that_knows_only_vllm_s_tags(llm: Child, first_tokens: list[int]) -> None:
    assert llm(stock_cycle, first_tokens) == first_tokens


def sleep_of_the_worker(llm: Any, first: list[int]) -> None:
    for _ in range(2):  # no reply stays in a queue
        with pytest.raises(Exception, match=r"collective_rpc\('sleep'\)"):
            llm.collective_rpc("sleep_by_myself", args=(1,))
    assert llm.collective_rpc("rank_of_worker") == [0, 1]
    assert not llm.is_sleeping()
    assert generate(llm) == first


def test_an_extension_that_calls_the_worker_s_own_sleep(llm: Child, first_tokens: list[int]) -> None:
    """One rank's memory is no concern of that rank alone: the scheduler must have stopped first."""
    llm(sleep_of_the_worker, first_tokens)


# -- vLLM's own updates in several calls ------------------------------------------------------------------------


def call(llm: Any, method: str, *args: Any) -> None:
    llm.collective_rpc(method, args=args)


def half_of_an_update(llm: Any, folder: str) -> None:
    call(llm, "start_weight_update")
    assert refused(lambda: generate(llm)) == "updating"  # the parameters are on the meta device
    call(llm, "update_weights", {"folder": folder, "seed": OTHER_SEED, "start": 0, "count": 10})
    assert refused(lambda: generate(llm)) == "updating"


def rest_of_an_update(llm: Any, folder: str, other: list[int]) -> None:
    call(llm, "update_weights", {"folder": folder, "seed": OTHER_SEED, "start": 10, "count": 1000})
    assert refused(lambda: generate(llm)) == "updating"
    call(llm, "finish_weight_update")
    assert content(llm) == "valid"
    assert generate(llm) == other


def in_several_calls(llm: Any, folder: str, other: list[int], level: int) -> None:
    call(llm, "connect")
    llm.sleep(level)
    llm.wake_up()
    half_of_an_update(llm, folder)
    rest_of_an_update(llm, folder, other)


@pytest.mark.parametrize("level", [0, 2], ids=["valid", "stale"])
def test_an_update_in_several_calls(llm: Child, model_folder: Path, other_tokens: list[int], level: int) -> None:
    """Stock: requests are answered from memory that nothing has written."""
    llm(in_several_calls, str(model_folder), other_tokens, level)


def never_finished(llm: Any, folder: str, first: list[int], other: list[int], act: str) -> None:
    call(llm, "connect")
    half_of_an_update(llm, folder)
    if act == "ours":
        push(llm, new_model(Path(folder), OTHER_SEED), receivers=2)
        assert generate(llm) == other
    elif act == "ours, broken off":
        with pytest.raises(ManifestError):
            push(llm, {"nonsense": new_model(Path(folder), SEED).lm_head.weight}, receivers=2)
        assert refused(lambda: generate(llm)) == "failed"
    elif act == "failed":
        with pytest.raises(Exception, match="the trainer is gone"):
            call(llm, "update_weights", {"fail": True})
        assert refused(lambda: generate(llm)) == "failed"
    else:
        call(llm, "finish_weight_update")  # says that this was all
        return
    half_of_an_update(llm, folder)
    rest_of_an_update(llm, folder, other)


@pytest.mark.parametrize("act", ["ours", "ours, broken off", "failed", "finished"])
def test_an_update_that_its_trainer_never_finishes(
    llm: Child, model_folder: Path, first_tokens: list[int], other_tokens: list[int], act: str
) -> None:
    """Stock: half of the model stays on the meta device, and what comes next adds to what was collected."""
    llm(never_finished, str(model_folder), first_tokens, other_tokens, act)


def fails_before_it_writes(llm: Any, folder: str, first: list[int], other: list[int]) -> None:
    call(llm, "connect")
    call(llm, "start_weight_update")
    with pytest.raises(Exception, match="the trainer is gone"):
        call(llm, "update_weights", {"fail": True})
    assert content(llm) == "valid"
    assert generate(llm) == first
    with pytest.raises(Exception, match="start_weight_update must be called"):
        call(llm, "update_weights", {"folder": folder, "seed": OTHER_SEED, "start": 0, "count": 10})
    assert generate(llm) == first
    with pytest.raises(Exception, match="No such file|does not|Cannot find|not found|Repo id"):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": "/nowhere"})
    assert content(llm) == "valid"
    assert generate(llm) == first
    half_of_an_update(llm, folder)
    with pytest.raises(Exception, match="already active"):
        call(llm, "start_weight_update")
    rest_of_an_update(llm, folder, other)


def test_an_update_that_fails_before_it_writes_changes_nothing(
    llm: Child, model_folder: Path, first_tokens: list[int], other_tokens: list[int]
) -> None:
    llm(fails_before_it_writes, str(model_folder), first_tokens, other_tokens)
