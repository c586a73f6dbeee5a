"""The contract in Python: `LLM` with the engine core in its own process and in this one, and `AsyncLLM`."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.models import new_model
from integration.waiting import AT_ONCE_S
from rl_memory_plugins import (
    EngineAsleepError,
    InvalidRequestError,
    ManifestError,
    StateConflictError,
    WeightUpdateError,
)
from rl_memory_plugins.trainer import AsyncRolloutHandoff, ModelSource, Offloader
from rl_memory_plugins.weights.checksums import tensor_checksum
from rl_memory_plugins.weights.sender import WeightSender
from tests.vllm.calls import generate, push, refused, restore
from tests.vllm.child import Child
from tests.vllm.conftest import OTHER_SEED, PROMPT, SEED, engine_options, environment, greedy

NUMBERS = itertools.count()


def sleep_and_wake(llm: Any, folder: Path, first: list[int]) -> None:
    assert generate(llm) == first
    assert llm.is_sleeping() is False
    report = llm.sleep(1)
    released = {change.tag: change.bytes_released for change in report.changes}
    assert released["weights"] > 8 << 20 and released["kv_cache"] > 32 << 20
    assert report.seconds["total"] > 0
    assert llm.is_sleeping() is True
    (status,) = llm.memory_status()
    assert status.asleep_tags() == ["cuda_graph", "kv_cache", "weights"]
    assert status.ranks[0].tags["weights"].host_bytes >= released["weights"]
    assert sum(change.bytes_released for change in llm.sleep(1).changes) == 0  # idempotent
    assert refused(lambda: generate(llm)) == "asleep"
    assert llm.wake_up(["weights"]) is False
    assert refused(lambda: generate(llm)) == "asleep"
    assert llm.wake_up_with_report(["kv_cache"]).changes[0].tag == "kv_cache"
    assert llm.is_sleeping() is True  # the graphs
    assert llm.wake_up() is True
    assert generate(llm) == first
    *_, sleep, _, weights, kv_cache, graphs = llm.timeline().events
    assert (sleep.operation, sleep.before[0].tags["weights"], sleep.after[0].tags["weights"]) == (
        *("sleep", released["weights"], 0),
    )
    assert [event.tags for event in (weights, kv_cache)] == [["weights"], ["kv_cache"]]
    assert llm.timeline(kv_cache.seq).events == [graphs]


def test_sleep_and_wake(llm: Child, model_folder: Path, first_tokens: list[int]) -> None:
    llm(sleep_and_wake, model_folder, first_tokens)


def tags_and_positions(llm: Any, first: list[int]) -> None:
    report = llm.sleep(1, tags=["kv_cache"])
    assert [change.tag for change in report.changes] == ["kv_cache"]
    assert llm.wake_up(["weights", "kv_cache"]) is True  # one of them is awake
    llm.sleep(2, "keep", ["kv_cache"])  # `mode` stands second, as in vLLM
    assert llm.memory_status()[0].content == "valid"
    assert llm.wake_up(tags=["kv_cache"]) is True
    assert generate(llm) == first


def test_tags(llm: Child, first_tokens: list[int]) -> None:
    llm(tags_and_positions, first_tokens)


def pause(llm: Any, first: list[int]) -> None:
    llm.sleep(level=0)
    assert llm.is_sleeping() is True
    assert refused(lambda: generate(llm)) == "paused"
    assert llm.wake_up(["scheduling"]) is True  # vLLM's own name for it
    assert generate(llm) == first
    llm.sleep(level=0)
    assert llm.wake_up() is True
    assert generate(llm) == first


def test_level_0_and_vllm_s_scheduling_tag(llm: Child, first_tokens: list[int]) -> None:
    llm(pause, first_tokens)


def discard_and_update(llm: Any, folder: Path, other: list[int]) -> None:
    model = new_model(folder, OTHER_SEED)
    llm.sleep(2)
    with pytest.raises(StateConflictError):
        push(llm, model)
    llm.wake_up(["weights"])
    assert llm.memory_status()[0].content == "stale"
    answer = push(llm, model, weight_version="step-7")
    assert answer["engine"].details["weight_version"] == "step-7" == llm.weight_version()
    assert refused(lambda: generate(llm)) == "asleep"
    assert llm.wake_up() is True
    assert generate(llm) == other
    own = {name: tensor_checksum(tensor) for name, tensor in model.named_parameters()}
    assert llm.weight_checksums().tensors == own


def test_discard_and_update(llm: Child, model_folder: Path, first_tokens: list[int], other_tokens: list[int]) -> None:
    llm(discard_and_update, model_folder, other_tokens)


def answers_name_their_weights(llm: Any, folder: Path) -> None:
    from vllm import SamplingParams

    def spans() -> list[tuple[str, int, int]]:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0].outputs
        return [(span.version, span.start, span.end) for span in answer.weight_versions]

    assert spans() == [(llm.weight_version(), 0, 8)]
    push(llm, new_model(folder, OTHER_SEED), weight_version="step-41")
    assert spans() == [("step-41", 0, 8)]
    llm.update_weight_version("renamed")  # vLLM's own way
    assert llm.weight_version() == "renamed"
    assert spans() == [("renamed", 0, 8)]
    restore(llm, folder)


def test_answers_name_their_weights(llm: Child, model_folder: Path) -> None:
    llm(answers_name_their_weights, model_folder)


def freeze_a_running_request(llm: Any, folder: Path) -> None:
    from vllm import SamplingParams

    engine, before, final, other = llm.llm_engine, 0, None, new_model(folder, OTHER_SEED)
    params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    engine.add_request(f"frozen-{next(NUMBERS)}", {"prompt_token_ids": PROMPT}, params)
    while before < 5:
        before = max([before, *(len(output.outputs[0].token_ids) for output in engine.step())])
    push(llm, other, weight_version="frozen", mode="freeze")
    while engine.has_unfinished_requests():
        final = next(iter(engine.step()), final)
    assert final is not None
    spans = [(span.version, span.start, span.end) for span in final.outputs[0].weight_versions]
    assert len(spans) == 2 and spans[0][1] == 0 and spans[0][2] >= before, spans
    assert spans[1] == ("frozen", spans[0][2], 500)
    restore(llm, folder)


def test_a_frozen_request_names_both_weights(llm: Child, model_folder: Path, first_tokens: list[int]) -> None:
    llm(freeze_a_running_request, model_folder)
    assert llm(generate) == first_tokens


def wake_without_update(llm: Any) -> None:
    llm.sleep(2)
    llm.wake_up()
    assert llm.is_sleeping() is False
    assert refused(lambda: generate(llm)) == "stale"


def test_discarded_weights_do_not_answer(llm: Child, model_folder: Path, first_tokens: list[int]) -> None:
    llm(wake_without_update)


def broken_update(llm: Any, folder: Path) -> None:
    """The trainer breaks off after some buckets."""
    model = new_model(folder, OTHER_SEED)

    class Breaking:
        def specs(self) -> Any:
            from rl_memory_plugins.weights.source import spec_of

            return [spec_of(name, tensor) for name, tensor in model.state_dict().items()]

        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            for number, item in enumerate(model.state_dict().items()):
                if number == 20:
                    raise RuntimeError("the trainer broke")
                yield item

    with pytest.raises((WeightUpdateError, RuntimeError)):
        push(llm, Breaking())
    assert refused(lambda: generate(llm)) == "failed"


def test_a_failed_update_closes_the_engine(llm: Child, model_folder: Path, first_tokens: list[int]) -> None:
    llm(broken_update, model_folder)


def silent_trainer(llm: Any, folder: Path) -> None:
    """It listens and says nothing; the call names no time, so the engine's option decides."""
    with WeightSender(1) as sender, pytest.raises(WeightUpdateError, match="within 5 s"):
        llm.update_weights_from_ipc(sender.endpoints, sender.token)
    assert llm.memory_status()[0].content == "valid"  # nothing was written


def test_a_trainer_that_says_nothing(llm: Child, model_folder: Path, first_tokens: list[int]) -> None:
    llm(silent_trainer, model_folder)


def typed_errors(llm: Any, folder: Path, first: list[int]) -> None:
    for call, allowed in (
        (lambda: llm.sleep(7), [0, 1, 2]),
        (lambda: llm.sleep(-1), [0, 1, 2]),
        (lambda: llm.sleep(3), [0, 1, 2]),
        (lambda: llm.sleep(1, tags=["optimizer"]), ["kv_cache", "weights", "cuda_graph"]),
        (lambda: llm.sleep(1, tags=[]), ["kv_cache", "weights", "cuda_graph"]),
        (lambda: llm.sleep(1, mode="gently"), ["abort", "wait", "keep", "freeze"]),
        (lambda: llm.wake_up(["everything"]), ["kv_cache", "weights", "cuda_graph"]),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            call()
        assert caught.value.details["allowed"] == allowed
    tensors = dict(new_model(folder, OTHER_SEED).state_dict())
    del tensors["model.norm.weight"]
    with pytest.raises(ManifestError, match=r"model\.norm\.weight"):
        push(llm, tensors)
    with pytest.raises(WeightUpdateError):
        llm.update_weights_from_ipc({"*": "/nonexistent/socket"}, "token")
    assert generate(llm) == first


def test_errors_are_typed_and_change_nothing(llm: Child, model_folder: Path, first_tokens: list[int]) -> None:
    llm(typed_errors, model_folder, first_tokens)


def heard_of_a_step(worker: Any) -> bool:
    """Whether background work has heard of a step since the last call."""
    pace = worker.rl_memory.manager.arena.pace
    heard, pace._step = pace._step > -math.inf, -math.inf
    return bool(heard)


def steps(llm: Any) -> None:
    llm.collective_rpc(heard_of_a_step)
    assert llm.collective_rpc(heard_of_a_step) == [False]
    generate(llm)
    assert llm.collective_rpc(heard_of_a_step) == [True]
    llm.collective_rpc("execute_dummy_batch")  # of a data-parallel engine whose peers have requests
    assert llm.collective_rpc(heard_of_a_step) == [True]


def test_background_work_hears_of_each_step(llm: Child) -> None:
    """Host memory is prepared while the first requests run, and would slow them by half."""
    llm(steps)


def rpc_sleep(llm: Any, first: list[int]) -> None:
    llm.collective_rpc("sleep", args=(1,))
    assert llm.is_sleeping() is True
    assert llm.memory_status()[0].ranks[0].tags["weights"].state == "preserved"
    assert refused(lambda: generate(llm)) == "asleep"
    assert llm.collective_rpc("wake_up", kwargs={"tags": ["weights"]}) == [None]
    assert llm.is_sleeping() is True
    llm.collective_rpc("wake_up")
    assert generate(llm) == first
    llm.collective_rpc("discard", args=(["kv_cache"],))
    assert llm.memory_status()[0].asleep_tags() == ["kv_cache"]
    llm.wake_up()
    assert generate(llm) == first


def test_a_worker_s_own_sleep_leads_to_the_same_state(llm: Child, first_tokens: list[int]) -> None:
    llm(rpc_sleep, first_tokens)


def running_request(llm: Any, mode: str) -> str:
    """`sleep` while a request is in the engine; returns how the request ends after the wake."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=900 if mode == "abort" else 60, ignore_eos=True)
    number = f"running-{next(NUMBERS)}"
    engine.add_request(number, {"prompt_token_ids": PROMPT}, params)
    engine.step()
    llm.sleep(1, mode=mode)
    llm.wake_up()
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                return f"{output.outputs[0].finish_reason} {len(output.outputs[0].token_ids)}"
    return "gone"


def test_sleep_that_aborts_a_running_request(llm: Child, first_tokens: list[int]) -> None:
    """In the caller's process stock vLLM forgets to say that it has ended: whoever waits for it steps for ever."""
    reason, tokens = llm(running_request, "abort").split()
    assert reason == "abort" and int(tokens) < 900
    assert llm(generate) == first_tokens


def test_sleep_that_keeps_a_running_request(llm: Child, first_tokens: list[int]) -> None:
    assert llm(running_request, "keep") == "length 60"
    assert llm(generate) == first_tokens


def test_sleep_that_waits(llm: Child, request: pytest.FixtureRequest, first_tokens: list[int]) -> None:
    """vLLM itself cannot wait where client and core share a thread; then nothing happens, and it says so."""
    if "in-process" in request.node.name:
        with pytest.raises(AssertionError, match="UnsupportedError"):
            llm(running_request, "wait")
        llm(finish_all)
    else:
        assert llm(running_request, "wait") == "length 60"
    assert llm(generate) == first_tokens


def finish_all(llm: Any) -> None:
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


LONG_PROMPT = list(range(5, 165))  # more than a block of the KV cache


def load_here(llm: Any, folder: Path, seed: int) -> None:
    """What TRL's colocated trainer does: no call of the engine is made."""
    worker = llm.llm_engine.model_executor.driver_worker.worker
    worker.model_runner.get_model().load_weights(iter(new_model(folder, seed).state_dict().items()))


def answer(llm: Any, prompt: list[int], tokens: int = 8) -> list[int]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return list(llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0].token_ids)


def loads_without_a_call(llm: Any, folder: Path) -> None:
    first, other = (greedy(new_model(folder, seed), LONG_PROMPT) for seed in (SEED, OTHER_SEED))
    assert answer(llm, LONG_PROMPT) == first
    load_here(llm, folder, OTHER_SEED)
    assert answer(llm, LONG_PROMPT) == other  # nothing of the prefix cache
    llm.sleep(2)
    llm.wake_up()
    load_here(llm, folder, SEED)
    assert llm.memory_status()[0].content == "valid"
    assert answer(llm, LONG_PROMPT) == first


def test_a_load_that_no_call_announces(llm: Child, request: pytest.FixtureRequest, model_folder: Path) -> None:
    if "in-process" in request.node.name:  # elsewhere the model is in another process
        llm(loads_without_a_call, model_folder)


def load_in_the_middle(llm: Any, folder: Path) -> None:
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    engine.add_request(f"running-{next(NUMBERS)}", {"prompt_token_ids": LONG_PROMPT}, params)
    begun: list[int] = []
    while len(begun) < 4:
        begun = [token for output in engine.step() for token in output.outputs[0].token_ids] or begun
    load_here(llm, folder, OTHER_SEED)
    tokens = begun
    while engine.has_unfinished_requests():
        tokens = [token for output in engine.step() for token in output.outputs[0].token_ids] or tokens
    assert tokens == begun + greedy(new_model(folder, OTHER_SEED), LONG_PROMPT + begun, 12 - len(begun))


def test_a_load_beside_a_request(llm: Child, request: pytest.FixtureRequest, model_folder: Path) -> None:
    """Its keys and values are computed again."""
    if "in-process" in request.node.name:
        llm(load_in_the_middle, model_folder)


# -- AsyncLLM --------------------------------------------------------------------------------------------------


async def make_async(folder: Path) -> Any:
    from vllm.v1.engine.async_llm import AsyncLLM

    from rl_memory_plugins.vllm import AsyncEngineArgs

    options = {"drain_timeout_s": 60, "start_stale": True}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_options(folder), rl_memory=options))


async def open_for_the_first_time(engine: Any, folder: Path) -> None:
    """It has started stale, and is refused without an earlier call that would have asked for its state."""
    with pytest.raises(EngineAsleepError) as caught:
        await asyncio.wait_for(ask(engine), AT_ONCE_S)
    assert caught.value.details["reason"] == "stale"
    await engine.wake_up()
    assert (await engine.memory_status())[0].content == "stale"
    await engine.update_weights_from_checkpoint(str(folder))


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[Child]:
    with Child(make_async, model_folder, environment=environment(model_folder)) as child:
        child(open_for_the_first_time, model_folder)
        yield child


async def ask(engine: Any, tokens: int = 8, began: asyncio.Event | None = None) -> list[int]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.CUMULATIVE if began else RequestOutputKind.FINAL_ONLY
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, output_kind=kind)
    found: list[int] = []
    async for output in engine.generate({"prompt_token_ids": PROMPT}, params, f"r{next(NUMBERS)}"):
        found = list(output.outputs[0].token_ids)
        if began:
            began.set()
    return found


async def push_async(engine: Any, model: Any, **options: Any) -> Any:
    sender = WeightSender(1, bucket_bytes=1 << 20, timeout_s=60)
    sending = asyncio.create_task(asyncio.to_thread(sender.send, ModelSource(model)))
    report = await engine.update_weights_from_ipc(sender.endpoints, sender.token, **options)
    await sending
    return report


async def async_refusals(engine: Any, first: list[int]) -> None:
    assert await ask(engine) == first
    await engine.sleep(1)
    assert await engine.is_sleeping() is True
    for call in (ask(engine), _encode(engine)):
        with pytest.raises(EngineAsleepError):
            await asyncio.wait_for(call, AT_ONCE_S)
    assert await engine.wake_up(["weights"]) is False
    assert await engine.wake_up() is True
    assert await ask(engine) == first
    with pytest.raises(InvalidRequestError):
        await engine.sleep(5)
    await engine.sleep(0)
    with pytest.raises(EngineAsleepError):
        await ask(engine)
    assert await engine.wake_up(["scheduling"]) is True
    assert await ask(engine) == first


async def _encode(engine: Any) -> None:
    from vllm import PoolingParams

    async for _ in engine.encode({"prompt_token_ids": PROMPT}, PoolingParams(task="embed"), f"e{next(NUMBERS)}"):
        pass


def test_async_engine_sleeps_and_refuses(engine: Child, first_tokens: list[int]) -> None:
    engine(async_refusals, first_tokens)


async def async_update(engine: Any, folder: Path, seed: int) -> list[int]:
    await engine.sleep(2)
    await engine.wake_up(["weights"])
    report = await push_async(engine, new_model(folder, seed), weight_version=f"seed-{seed}")
    assert report.details["weight_version"] == f"seed-{seed}" == await engine.weight_version()
    assert (await engine.memory_status())[0].content == "valid"
    await engine.wake_up()
    assert len((await engine.weight_checksums()).tensors) > 40
    return await ask(engine)


def test_async_engine_updates(
    engine: Child, model_folder: Path, first_tokens: list[int], other_tokens: list[int]
) -> None:
    assert engine(async_update, model_folder, OTHER_SEED) == other_tokens
    assert engine(async_update, model_folder, SEED) == first_tokens


async def async_handoff(engine: Any, folder: Path, seed: int) -> list[int]:
    model = new_model(folder, seed)
    handoff = AsyncRolloutHandoff(engine, ModelSource(model), weights=[Offloader(model, moves=lambda tensor: True)])
    async with handoff.training(f"handoff-{seed}") as report:
        with pytest.raises(EngineAsleepError):
            await ask(engine)
    assert report.moved_bytes["offload"] > 8 << 20
    assert await engine.weight_version() == f"handoff-{seed}"
    return await ask(engine)


def test_a_handoff_of_an_async_engine(
    engine: Child, model_folder: Path, first_tokens: list[int], other_tokens: list[int]
) -> None:
    assert engine(async_handoff, model_folder, OTHER_SEED) == other_tokens
    assert engine(async_handoff, model_folder, SEED) == first_tokens


async def wake_during_wait(engine: Any) -> int:
    """Stock vLLM: a wake during a pending `wait` pause unpauses, and the pause's callback later puts the engine
    to sleep while it serves."""
    began = asyncio.Event()
    running = asyncio.create_task(ask(engine, 900, began))
    await began.wait()
    sleeping = asyncio.create_task(engine.sleep(1, mode="wait"))
    with pytest.raises(EngineAsleepError):
        while not running.done():  # until the engine is closed
            await ask(engine, 1)
    with pytest.raises(StateConflictError):
        await engine.wake_up()
    tokens = await running
    await sleeping
    assert await engine.is_sleeping() is True
    await engine.wake_up()
    return len(tokens)


@pytest.mark.long
def test_a_wake_while_a_sleep_waits_is_refused(engine: Child, first_tokens: list[int]) -> None:
    assert engine(wake_during_wait) == 900
    assert engine(ask) == first_tokens


async def _begin_session(
    engine: Any, max_tokens: int, inputs: Callable[[Callable[[], Any]], Any]
) -> tuple[asyncio.Task[None], list[str]]:
    """Begin a request that streams its input. Returns once a part of it is answered.

    Args:
        max_tokens: Of the answer to each part.
        inputs: Yields the parts; each is a call of its argument.

    Returns: the request, and the reasons by which its parts have ended so far.
    """
    from vllm import SamplingParams
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA)

    def part() -> StreamingInput:
        return StreamingInput(prompt={"prompt_token_ids": [*PROMPT]}, sampling_params=params)  # vLLM adds to the list

    reasons: list[str] = []
    asking = asyncio.create_task(_reasons(engine.generate(inputs(part), params, f"s{next(NUMBERS)}"), reasons))
    while "length" not in reasons:
        await asyncio.sleep(0)
    return asking, reasons


async def session_in_between(engine: Any, folder: Path, act: str) -> list[str]:
    """A request that streams its input and waits for more of it, while the engine sleeps or gets new weights."""
    more = asyncio.Event()

    async def inputs(part: Callable[[], Any]) -> Any:
        yield part()
        await more.wait()
        yield part()

    asking, reasons = await _begin_session(engine, 4, inputs)
    if act == "freeze":
        await push_async(engine, new_model(folder, SEED), mode="freeze")
        reasons.clear()
        more.set()
    elif act == "update":
        await push_async(engine, new_model(folder, SEED))
    else:
        await engine.sleep(1, mode=act)
        await engine.wake_up()
    await asyncio.wait_for(asking, 60)  # it is over, without the second part
    more.set()
    return reasons


async def _reasons(outputs: Any, reasons: list[str]) -> None:
    async for output in outputs:
        reasons.append(output.outputs[0].finish_reason)  # noqa: PERF401 - it is read meanwhile


def test_a_frozen_session_takes_its_next_input(engine: Child, model_folder: Path, first_tokens: list[int]) -> None:
    assert engine(session_in_between, model_folder, "freeze")[-1] == "length"
    assert engine(ask) == first_tokens


@pytest.mark.parametrize("act", ["update", "keep", "wait", "abort"])
def test_a_session_that_waits_for_input_stands_in_nobody_s_way(
    engine: Child, model_folder: Path, first_tokens: list[int], act: str
) -> None:
    """Its part of the KV cache cannot be computed again. Stock vLLM fails then to reset its prefix cache."""
    assert engine(session_in_between, model_folder, act)[-1] == "abort"
    assert engine(ask) == first_tokens


async def session_ahead(engine: Any, folder: Path, act: str) -> list[str]:
    """A request whose next inputs are there before the engine has answered the former ones."""

    async def inputs(part: Callable[[], Any]) -> Any:
        for _ in range(120):
            yield part()

    asking, reasons = await _begin_session(engine, 1, inputs)
    if act == "update":
        await push_async(engine, new_model(folder, SEED))
    else:
        await engine.sleep(1, mode=act)
        await engine.wake_up()
    await asyncio.wait_for(asking, 60)
    return reasons


@pytest.mark.parametrize("act", ["update", "keep"])
def test_a_session_that_is_ahead_stands_in_nobody_s_way(
    engine: Child, model_folder: Path, first_tokens: list[int], act: str
) -> None:
    """Between two of its parts it holds KV cache and is not scheduled: vLLM fails to reset its prefix cache."""
    assert engine(session_ahead, model_folder, act)[-1] == "abort"
    assert engine(ask) == first_tokens


async def leave_early(engine: Any) -> int:
    """A consumer that stops listening ends its request in the engine at once, as without the plugin."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=900, ignore_eos=True)
    stream = engine.generate({"prompt_token_ids": PROMPT}, params, f"left-{next(NUMBERS)}")
    async for _ in stream:
        break
    await stream.aclose()
    return len(engine.output_processor.request_states)


def test_a_consumer_that_leaves_ends_its_request(engine: Child) -> None:
    assert engine(leave_early) == 0


async def sleep_gauge(engine: Any) -> list[float]:
    """vLLM's own metric: 1 while the engine is awake."""
    from prometheus_client import REGISTRY

    def awake() -> float:
        for family in REGISTRY.collect():
            for sample in family.samples:
                if sample.name == "vllm:engine_sleep_state" and sample.labels["sleep_state"] == "awake":
                    return sample.value
        raise AssertionError("vLLM has no such metric")

    values = []
    await engine.sleep(1)
    values.append(awake())
    await engine.wake_up(["weights"])
    values.append(awake())
    await engine.wake_up()
    values.append(awake())
    return values


def test_vllm_s_sleep_metric(engine: Child) -> None:
    """Stock 0.26 reports "awake" after a partial wake."""
    assert engine(sleep_gauge) == [0, 0, 1]


def test_outputs_of_pooling_requests_pass_through() -> None:
    """They have no list of completions to look at."""
    from vllm.outputs import PoolingOutput, PoolingRequestOutput

    from rl_memory_plugins.engines.vllm.client import _checked_stream
    from rl_memory_plugins.records import EngineStatus

    output = PoolingRequestOutput(
        "p", PoolingOutput(torch.ones(4)), prompt_token_ids=PROMPT, num_cached_tokens=0, finished=True
    )

    class EngineApi:
        def status_now(self) -> list[Any]:
            return [EngineStatus(ranks=[])]

    async def outputs() -> Any:
        yield output

    async def collect() -> list[Any]:
        return [item async for item in _checked_stream(EngineApi(), outputs())]  # type: ignore[arg-type]

    assert asyncio.run(collect()) == [output]
