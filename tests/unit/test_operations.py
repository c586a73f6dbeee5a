"""The client's side of the operations, over engines that only answer."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from rl_memory_plugins import commands, operations
from rl_memory_plugins.errors import DrainTimeoutError, HostMemoryError, InvalidRequestError, StateConflictError
from rl_memory_plugins.records import EngineStatus, Reply, StepTime
from rl_memory_plugins.tags import PauseMode

REPORT = {"changes": [], "seconds": {"total": 1.0}, "details": {}}


def status(count: int, **fields: Any) -> list[EngineStatus]:
    return [EngineStatus(ranks=[], engine_rank=rank, **fields) for rank in range(count)]


class Engines:
    """Answers every command with what `answers` holds for each engine; remembers what it was asked."""

    def __init__(self, *answers: list[Any]) -> None:
        self.answers = list(answers)
        self.asked: list[commands.AnyCommand] = []

    def __call__(self, command: commands.AnyCommand) -> list[Reply[Any]]:
        self.asked.append(command)
        replies = []
        for rank, answer in enumerate(self.answers.pop(0)):
            error = answer.to_record() if isinstance(answer, Exception) else None
            replies.append(Reply(rank=rank, result=None if error else answer, error=error))
        return replies


@pytest.mark.parametrize(("level", "tags"), [(0, None), (0, ["kv_cache"]), (1, ["weights"]), (2, "weights,cuda_graph")])
def test_a_sleep_that_leaves_the_kv_cache_may_freeze(level: int, tags: object) -> None:
    assert operations.sleep(level, tags, "freeze").mode is PauseMode.FREEZE


@pytest.mark.parametrize(("level", "tags"), [(1, None), (2, ["kv_cache"]), (2, "kv_cache,weights")])
def test_a_sleep_that_releases_the_kv_cache_may_not_freeze(level: int, tags: object) -> None:
    with pytest.raises(InvalidRequestError, match="releases the KV cache") as caught:
        operations.sleep(level, tags, "freeze")
    assert caught.value.details == {"field": "mode", "got": "freeze", "allowed": ["abort", "wait", "keep"]}


def test_no_call_freezes_by_default() -> None:
    assert operations.sleep().mode is PauseMode.ABORT
    assert operations.update_weights({"*": "/x"}, "t").mode is PauseMode.KEEP


def test_one_engine_needs_one_round() -> None:
    engines = Engines([REPORT])
    report = operations.run(operations.transition(operations.sleep(2), status(1)), engines)
    assert [type(command) for command in engines.asked] == [commands.Sleep]
    assert report.seconds == {"total": 1.0}


def test_several_engines_agree_first() -> None:
    held = {"held": True}
    engines = Engines([held, held], [REPORT, {**REPORT, "seconds": {"total": 3.0}}])
    report = operations.run(operations.transition(operations.wake_up(), status(2)), engines)
    assert engines.asked[0].hold
    assert engines.asked[1] == commands.Decide(engines.asked[0].hold, commit=True)
    assert report.seconds == {"total": 3.0}


def test_the_steps_name_their_engines() -> None:
    held = {"held": True}
    steps = [StepTime("total", None, 1, 9, 8e-9), StepTime("map", 1, 2, 5, 3e-9)]
    answer = {**REPORT, "steps": msgspec.to_builtins(steps)}
    engines = Engines([held, held], [answer, answer])
    report = operations.run(operations.transition(operations.wake_up(), status(2)), engines)
    assert report.steps == [*steps, *(msgspec.structs.replace(step, engine=1) for step in steps)]


def test_one_engine_that_cannot_makes_all_undo() -> None:
    engines = Engines([{"held": True}, HostMemoryError("full")], [None, StateConflictError("nothing held")])
    with pytest.raises(HostMemoryError) as caught:
        operations.run(operations.transition(operations.sleep(1), status(2)), engines)
    assert engines.asked[1] == commands.Decide(engines.asked[0].hold, commit=False)
    assert caught.value.details == {"engine_rank": 1, "failed_engine_ranks": [1]}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_engines_hold_is_undone_where_the_way_to_them_broke_off(asynchronous: bool) -> None:
    asked: list[commands.AnyCommand] = []

    def call(command: commands.AnyCommand) -> list[Reply[Any]]:
        asked.append(command)
        if isinstance(command, commands.Decide):
            return [Reply(rank=rank) for rank in range(2)]
        raise ConnectionError("half of the answers are missing")

    async def call_later(command: commands.AnyCommand) -> list[Reply[Any]]:
        return call(command)

    operation = operations.transition(operations.sleep(1), status(2))
    with pytest.raises(ConnectionError):
        if asynchronous:
            asyncio.run(operations.run_async(operation, call_later))
        else:
            operations.run(operation, call)
    assert asked[1:] == [commands.Decide(asked[0].hold, commit=False)]  # type: ignore[union-attr]


def test_nothing_may_begin_while_an_update_runs() -> None:
    with pytest.raises(StateConflictError):
        operations.refuse_during_update([*status(1), *status(1, busy="update_weights")])
    operations.refuse_during_update(status(2, busy="sleep"))


def test_a_drain_that_takes_too_long_is_given_up() -> None:
    asked: list[commands.AnyCommand] = []
    given_up = asyncio.Event()

    async def call(command: commands.AnyCommand) -> list[Reply[Any]]:
        asked.append(command)
        if isinstance(command, commands.CancelDrain):
            given_up.set()
            return [Reply(rank=0, result={"cancelled": ["sleep"]})]
        await given_up.wait()
        return [Reply(rank=0, error=DrainTimeoutError("too long").to_record())]

    async def main() -> None:
        operation = operations.transition(operations.sleep(1, mode="wait"), status(1))
        await operations.run_within(operation, call, drain_timeout_s=0.05, turns=asyncio.Lock())

    with pytest.raises(DrainTimeoutError):
        asyncio.run(main())
    sleep, cancel = asked
    assert isinstance(sleep, commands.Sleep)
    assert isinstance(cancel, commands.CancelDrain)
    assert cancel.call == sleep.call != ""


def test_several_engines_are_drained_before_they_are_held() -> None:
    report = {**REPORT, "seconds": {"drain": 0.0, "total": 1.0}}
    drained = {"steps": msgspec.to_builtins([StepTime("drain", None, 1, 3, 2e-9)])}
    waited = [{"drained": 2.0, **drained}, {"drained": 5.0, **drained}]
    engines = Engines(waited, [{"held": True}] * 2, [report, report])
    result = operations.run(operations.transition(operations.sleep(1, mode="wait"), status(2)), engines)
    assert [type(command) for command in engines.asked] == [commands.Drain, commands.Sleep, commands.Decide]
    assert result.seconds == {"drain": 5.0, "total": 6.0}
    assert [(step.step, step.engine) for step in result.steps] == [("drain", 0), ("drain", 1)]
    drain, sleep, decide = engines.asked
    assert drain.ticket == sleep.hold == decide.ticket  # type: ignore[union-attr]


def test_engines_that_drained_open_again_where_another_did_not() -> None:
    engines = Engines([{"drained": 0.0}, DrainTimeoutError("too long")], [None, StateConflictError("nothing drained")])
    with pytest.raises(DrainTimeoutError):
        operations.run(operations.transition(operations.sleep(1, mode="wait"), status(2)), engines)
    drain, decide = engines.asked
    assert decide == commands.Decide(drain.ticket, commit=False)  # type: ignore[union-attr]


def test_held_transitions_of_one_client_take_turns() -> None:
    """Without turns each would hold one engine and be refused by the other."""
    holders: list[str] = []

    async def call(command: commands.AnyCommand) -> list[Reply[Any]]:
        await asyncio.sleep(0.001)
        if isinstance(command, commands.Decide):
            assert holders == [command.ticket]
            holders.clear()
            return [Reply(rank=rank, result=REPORT) for rank in range(2)]
        assert not holders, "two are held at once"
        holders.append(command.hold)
        return [Reply(rank=rank, result={"held": True}) for rank in range(2)]

    async def main() -> None:
        turns = asyncio.Lock()
        waking = [operations.transition(operations.wake_up(), status(2)) for _ in range(5)]
        await asyncio.gather(*(operations.run_within(one, call, drain_timeout_s=10, turns=turns) for one in waking))
        assert not turns.locked()

    asyncio.run(main())


def test_an_abort_overtakes_a_wait_of_several_engines() -> None:
    aborted = asyncio.Event()
    asked: list[str] = []

    async def call(command: commands.AnyCommand) -> list[Reply[Any]]:
        asked.append(type(command).__name__)
        if isinstance(command, commands.Drain):
            await aborted.wait()
            return [Reply(rank=rank, result={"drained": 1.0}) for rank in range(2)]
        if isinstance(command, commands.Sleep) and command.mode == "abort":
            aborted.set()
        if isinstance(command, commands.Decide):
            return [Reply(rank=rank, result={**REPORT, "seconds": {"drain": 0.0, "total": 0.0}}) for rank in range(2)]
        return [Reply(rank=rank, result={"held": True}) for rank in range(2)]

    async def main() -> None:
        turns = asyncio.Lock()

        def sleep(mode: str) -> Any:
            operation = operations.transition(operations.sleep(1, mode=mode), status(2))
            return asyncio.ensure_future(operations.run_within(operation, call, drain_timeout_s=10, turns=turns))

        waiting = sleep("wait")
        await asyncio.sleep(0.01)
        await asyncio.gather(sleep("abort"), waiting)

    asyncio.run(main())
    assert asked == ["Drain", "Sleep", "Decide", "Sleep", "Decide"]


def test_a_question_that_takes_long_gives_up_nobodys_drain() -> None:
    asked: list[commands.AnyCommand] = []

    async def call(command: commands.AnyCommand) -> list[Reply[Any]]:
        asked.append(command)
        await asyncio.sleep(0.05)
        return [Reply(rank=0, result=[])]

    asking = operations.run_within(operations.checksums(), call, drain_timeout_s=0.001, turns=asyncio.Lock())
    assert asyncio.run(asking) == [[]]
    assert [type(command) for command in asked] == [commands.Checksums]


def test_a_transition_goes_on_without_its_caller() -> None:
    finished = asyncio.Event()

    async def call(command: commands.AnyCommand) -> list[Reply[Any]]:
        await asyncio.sleep(0.01)
        finished.set()
        return [Reply(rank=0, result=REPORT)]

    async def main() -> None:
        operation = operations.transition(operations.sleep(1), status(1))
        caller = asyncio.ensure_future(operations.run_within(operation, call, drain_timeout_s=10, turns=asyncio.Lock()))
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await asyncio.wait_for(finished.wait(), 10)

    asyncio.run(main())


def test_checksums_are_in_the_order_of_engines() -> None:
    def call(command: commands.AnyCommand) -> list[Reply[Any]]:
        return [Reply(rank=1, result=["of engine 1"]), Reply(rank=0, result=["of engine 0"])]

    assert operations.run(operations.checksums(), call) == [["of engine 0"], ["of engine 1"]]


def test_an_update_without_a_time_leaves_it_to_the_engine() -> None:
    command = operations.update_weights({"*": "/s"}, "t", weight_version="v", mode="wait")
    assert command == commands.UpdateWeights({"*": "/s"}, "t", weight_version="v", mode="wait", timeout_s=None)
    assert operations.update_weights({"*": "/s"}, "t", timeout_s=2).timeout_s == 2
    assert operations.update_weights({"*": "/s"}, "t", base_version="7").base_version == "7"


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoints": None},
        {"endpoints": {}},
        {"endpoints": {"*": 1}},
        {"token": ""},
        {"token": None},
        {"mode": "later"},
        {"timeout_s": 0},
        {"timeout_s": float("inf")},
        {"timeout_s": float("nan")},
        {"timeout_s": 1e300},
        {"weight_version": "v" * 1025},
        {"weight_version": "\ud800"},
        {"weight_version": 3},
    ],
)
def test_a_wrong_update_is_refused_before_anything_is_sent(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        operations.update_weights(**{"endpoints": {"*": "/s"}, "token": "t", **wrong})


@pytest.mark.parametrize(
    "given, globs",
    [
        (None, None),
        ([], ()),
        (["*.embed.*", " norm ", "norm"], ("*.embed.*", "norm")),
        ("*.embed.*,norm", ("*.embed.*", "norm")),
    ],
)
def test_globs_of_weights_to_keep(given: object, globs: object) -> None:
    assert operations.sleep(2, keep=given).keep == globs


@pytest.mark.parametrize("given", ["", ["norm", ""], [1], 5, {"norm": True}, ["\ud800"], ["*a" * 600]])
def test_what_is_no_glob_is_refused(given: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        operations.sleep(2, keep=given)
    assert caught.value.details["field"] == "keep"


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": None},
        {"name": "n" * 257},
        {"name": "\ud800"},
        {"config": None},
        {"config": "r=4"},
        {"config": {1: 2}},
        {"endpoints": {}},
        {"token": ""},
        {"timeout_s": 0},
        {"adapter_version": 3},
        {"adapter_version": "v" * 257},
    ],
)
def test_a_wrong_update_of_an_adapter_is_refused_before_anything_is_sent(wrong: dict[str, Any]) -> None:
    right = {"name": "policy", "config": {"r": 4}, "endpoints": {"*": "/s"}, "token": "t"}
    assert operations.update_adapter(**right).adapter == "policy"
    with pytest.raises(InvalidRequestError):
        operations.update_adapter(**{**right, **wrong})


@pytest.mark.parametrize("name", ["", None, 3, "n" * 257])
def test_a_wrong_removal_is_refused_before_anything_is_sent(name: Any) -> None:
    with pytest.raises(InvalidRequestError):
        operations.remove_adapter(name)
