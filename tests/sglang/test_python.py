"""SGLang's offline engine, `rl_memory_plugins.sglang.Engine`, in one process that calls it as a trainer does.

Stock, every handler that raises ends the scheduler, and with it the process that made the engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

ALL = ["cuda_graph", "kv_cache", "weights"]


@pytest.fixture(scope="module")
def found(forked_python: Callable[..., str]) -> dict[str, Any]:
    output = forked_python("""
        import asyncio, json, os, time
        from pathlib import Path
        import torch
        from sglang.srt.managers import io_struct
        torch.multiprocessing.set_sharing_strategy("file_system")
        from integration.models import new_model
        from rl_memory_plugins.sglang import Engine
        from rl_memory_plugins.trainer import push_weights

        engine = Engine(
            model_path=FOLDER, dtype="float32", device="cpu", attention_backend="torch_native",
            sampling_backend="pytorch", grammar_backend="none", disable_overlap_schedule=True,
            skip_tokenizer_init=True, max_total_tokens=4096, log_level="warning",
            rl_memory={"poison": True, "start_stale": True},
        )
        first_weights, other_weights = new_model(FOLDER, 1), new_model(FOLDER, 2)
        SAMPLING = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        api = engine.tokenizer_manager.rl_memory
        found = {}

        def tokens():
            return engine.generate(input_ids=[5, 6, 7, 8], sampling_params=SAMPLING)["output_ids"]

        def error_of(call):
            try:
                call()
            except Exception as error:
                return [type(error).__name__, getattr(error, "details", {})]
            return None

        def message_of(call):
            try:
                call()
            except Exception as error:
                return str(error)
            return ""

        saved = Path(FOLDER + "-saved")
        saved.mkdir()

        def save():
            engine.save_sharded_model(path=str(saved), pattern=None, max_size=None)

        def asleep():
            return engine.memory_status()[0].asleep_tags()

        def push(weights, version):
            post = lambda body: engine.update_weights_from_ipc(**body)
            return push_weights(post, weights, weight_version=version)

        found["at the start"] = error_of(tokens)
        engine.update_weights_from_checkpoint(FOLDER, weight_version="default")
        first = tokens()
        found["asleep before"] = [engine.is_sleeping(), asleep()]

        # -- sleep, wake, refusal
        begun = engine.generate(input_ids=[5], sampling_params=SAMPLING, stream=True)
        report = engine.sleep(2)
        found["asleep"] = [engine.is_sleeping(), asleep(), sorted({change.tag for change in report.changes})]

        async def stream():
            call = engine.async_generate(input_ids=[5], sampling_params=SAMPLING, stream=True)
            return [output async for output in await call]

        ways = {
            "generate": lambda: tokens(),
            "stream": lambda: list(engine.generate(input_ids=[5], sampling_params=SAMPLING, stream=True)),
            "stream of before": lambda: list(begun),
            "async_generate": lambda: engine.loop.run_until_complete(
                engine.async_generate(input_ids=[5], sampling_params=SAMPLING)),
            "async stream": lambda: engine.loop.run_until_complete(stream()),
        }
        found["refused"] = {way: error_of(call) for way, call in ways.items()}
        found["native update asleep"] = engine.update_weights_from_tensor(
            [("model.norm.weight", torch.ones(256))])[0]
        engine.wake_up()
        found["stale"] = error_of(tokens)

        # -- update
        push(other_weights, "other")
        other = tokens()
        found["version"] = engine.weight_version()
        found["differs"] = other != first
        other_sums = engine.weight_checksums()
        push(first_weights, "first")
        found["back"] = tokens() == first
        found["sums differ"] = engine.weight_checksums() != other_sums
        found["timeline"] = [[event.operation, event.weight_version] for event in engine.timeline().events]

        # -- SGLang's own calls
        for tags in (None, ["weights"], ["kv_cache", "weights"]):
            engine.resume_memory_occupation(tags)
        found["after resumes"] = [asleep(), tokens() == first]
        engine.release_memory_occupation(["kv_cache"])
        engine.release_memory_occupation(["kv_cache"])
        found["released"] = asleep()
        engine.resume_memory_occupation(["kv_cache"])
        engine.sleep(1, ["weights"])
        found["saved"] = [message_of(save), list(saved.glob("*.safetensors")) == []]
        engine.wake_up(["weights"])
        found["saved"] += [message_of(save), list(saved.glob("*.safetensors")) != []]
        found["resumed"] = [asleep(), tokens() == first]
        found["unknown"] = [error_of(lambda: engine.release_memory_occupation(["bogus"])),
                            error_of(lambda: engine.resume_memory_occupation(["bogus"])), asleep()]
        found["bad level"] = error_of(lambda: engine.sleep(9))
        engine.release_memory_occupation()
        engine.resume_memory_occupation()
        everything = [(name, tensor.clone()) for name, tensor in other_weights.state_dict().items()]
        found["without session"] = engine.update_weights_from_tensor(everything)
        engine.begin_weight_update()
        found["bad name"] = engine.update_weights_from_tensor([("nonsense", torch.ones(256))])[0]
        found["bad shape"] = engine.update_weights_from_tensor([("model.norm.weight", torch.ones(7))])[0]
        found["native update"] = engine.update_weights_from_tensor(everything)
        engine.end_weight_update()
        found["after native update"] = tokens() == other

        attached = engine.loop.run_until_complete(engine.tokenizer_manager.attach_hicache_storage("file"))
        found["attached"] = [attached.success, attached.message]

        # -- paused and asleep
        def score():
            return engine.score(query=[5, 6], items=[[7], [8]], label_token_ids=[1, 2])

        tokenizer = engine.tokenizer_manager
        in_place = io_struct.PauseGenerationReqInput(mode="in_place")
        engine.loop.run_until_complete(tokenizer.pause_generation(in_place))
        engine.sleep(1, ["kv_cache"])
        direct = io_struct.GenerateReqInput(input_ids=[5], sampling_params=SAMPLING)
        found["paused and asleep"] = [
            error_of(score),
            error_of(lambda: engine.loop.run_until_complete(
                asyncio.wait_for(tokenizer.generate_request(direct).__anext__(), 20))),
        ]
        engine.wake_up()
        engine.loop.run_until_complete(tokenizer.continue_generation(io_struct.ContinueGenerationReqInput()))
        found["scores"] = error_of(score)

        # -- a call that is cancelled after it was sent
        async def cancelled(call):
            task = asyncio.ensure_future(call)
            for _ in range(3):
                await asyncio.sleep(0)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                return True
            return False

        found["cancelled"] = engine.loop.run_until_complete(cancelled(api.run(api.sleep(1))))
        deadline = time.monotonic() + 30
        while not engine.is_sleeping() and time.monotonic() < deadline:
            time.sleep(0.05)
        found["went on"] = asleep()
        found["replies"] = [
            sorted({change.tag for change in engine.wake_up(["weights"]).changes}),
            sorted({change.tag for change in engine.wake_up(["kv_cache"]).changes}),
            sorted({change.tag for change in engine.sleep(1, ["kv_cache"]).changes}),
        ]
        found["cancelled natively"] = engine.loop.run_until_complete(
            cancelled(engine.tokenizer_manager.resume_memory_occupation(type("Tags", (), {"tags": None}))))
        time.sleep(0.5)
        engine.release_memory_occupation(["kv_cache"])
        found["after"] = asleep()
        engine.wake_up()
        found["tokens after"] = tokens() == other

        # -- requests that run while it goes to sleep
        async def race():
            long = {**SAMPLING, "max_new_tokens": 1000}
            running = [asyncio.ensure_future(engine.async_generate(input_ids=[5, 6, 7, 8], sampling_params=long))
                       for _ in range(3)]
            while sum(load.num_running_reqs for load in await engine.tokenizer_manager.get_loads()) < 3:
                assert not any(request.done() for request in running)
                await asyncio.sleep(0.01)
            refused = await asyncio.gather(
                api.run(api.native_release(None)), return_exceptions=True)
            await api.run(api.sleep(1, None, "wait"))
            late = await asyncio.gather(
                engine.async_generate(input_ids=[5], sampling_params=SAMPLING), return_exceptions=True)
            await api.run(api.wake_up())
            lengths = [len((await request)["output_ids"]) for request in running]
            return [type(refused[0]).__name__, type(late[0]).__name__, lengths]

        found["race"] = engine.loop.run_until_complete(race())
        found["last"] = tokens() == other
        engine.shutdown()
        print(json.dumps(found))
    """)
    return json.loads(output.splitlines()[-1])


def test_sleep_releases_and_refuses_in_every_way(found: dict[str, Any]) -> None:
    assert found["asleep before"] == [False, []]
    assert found["asleep"] == [True, ALL, ALL]
    for way, error in found["refused"].items():
        assert error is not None, way
        assert error[0] == "EngineAsleepError", way
        assert error[1]["reason"] == "asleep", way


def test_an_engine_that_starts_stale_answers_after_the_first_update(found: dict[str, Any]) -> None:
    assert found["at the start"][0] == "EngineAsleepError"
    assert found["at the start"][1]["reason"] == "stale"


def test_the_timeline_has_the_calls_of_the_engine(found: dict[str, Any]) -> None:
    assert found["timeline"][:3] == [["update_weights", "default"], ["sleep", "default"], ["wake_up", "default"]]
    assert found["timeline"][3:] == [["update_weights", "other"], ["update_weights", "first"]]


def test_discarded_weights_are_refused_until_they_are_sent(found: dict[str, Any]) -> None:
    assert found["stale"][0] == "EngineAsleepError"
    assert found["stale"][1]["reason"] == "stale"
    assert found["version"] == "other"
    assert found["differs"] and found["back"] and found["sums differ"]


def test_a_native_resume_of_what_was_not_released(found: dict[str, Any]) -> None:
    """Stock: `KeyError` in the scheduler; it kills the process that made the engine."""
    assert found["after resumes"] == [[], True]


def test_native_release_and_resume_keep_working(found: dict[str, Any]) -> None:
    assert found["released"] == ["kv_cache"]
    assert found["resumed"] == [[], True]


def test_a_checkpoint_is_not_saved_of_weights_that_sleep(found: dict[str, Any]) -> None:
    """Stock: a file of zeros."""
    refused, nothing, done, something = found["saved"]
    assert "the weights are asleep" in refused and nothing
    assert (done, something) == ("", True)


def test_bad_arguments_are_typed_and_change_nothing(found: dict[str, Any]) -> None:
    """Stock: `KeyError`, killed, or noted as released for ever."""
    *errors, asleep = found["unknown"]
    assert [error[0] for error in errors] == ["InvalidRequestError"] * 2
    assert "kv_cache" in errors[0][1]["allowed"]
    assert asleep == []
    assert found["bad level"][0] == "InvalidRequestError"


def test_native_updates(found: dict[str, Any]) -> None:
    """Stock: an update of released weights writes into unmapped memory, one of a bad shape ends the scheduler."""
    assert found["native update asleep"] is False
    success, message = found["without session"]  # SGLang's own rule, which stays without `implicit_update_session`
    assert not success and "begin_weight_update" in message
    assert found["bad name"] is False and found["bad shape"] is False
    assert found["native update"][0] is True, found["native update"]
    assert found["after native update"]


def test_a_store_that_outlives_updates_is_not_attached(found: dict[str, Any]) -> None:
    """Stock: the KV cache of older weights is found in it after an update."""
    attached, why = found["attached"]
    assert not attached and "would find them again" in why


def test_a_request_does_not_wait_for_the_end_of_a_pause_and_a_sleep(found: dict[str, Any]) -> None:
    """Stock: it waits for `continue_generation`, and then runs on memory that is not there."""
    score, direct = found["paused and asleep"]
    assert score[0] == "EngineAsleepError" and score[1]["reason"] == "asleep"
    assert direct[0] == "HTTPException"  # what SGLang's own servers make a 503 of
    assert found["scores"] is None


def test_a_cancelled_call_does_not_shift_replies(found: dict[str, Any]) -> None:
    """Stock: replies are matched by order; after a cancelled call each is given to the call before its own."""
    assert found["cancelled"] and found["went on"] == ALL
    assert found["replies"] == [["weights"], ["kv_cache"], ["kv_cache"]]
    assert found["cancelled natively"] and found["after"] == ["kv_cache"]
    assert found["tokens after"]


def test_running_requests_end_and_late_ones_are_refused(found: dict[str, Any]) -> None:
    """Stock: the release is an `AssertionError`, killed."""
    assert found["race"] == ["StateConflictError", "EngineAsleepError", [1000] * 3]
    assert found["last"]
