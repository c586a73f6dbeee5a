"""The engine API over engines that only answer: what it asks, and when it asks again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from fake_control import rank_status

from rl_memory_plugins import admission, board, commands, operations
from rl_memory_plugins.board import StatusBoard
from rl_memory_plugins.capabilities import Capabilities
from rl_memory_plugins.engine_api import ANSWER_S, AsyncioApi, EngineApi
from rl_memory_plugins.errors import (
    HostMemoryError,
    InvalidRequestError,
    RLMemoryError,
    StateConflictError,
    UnsupportedError,
)
from rl_memory_plugins.operations import Operation, Transition
from rl_memory_plugins.records import UNANSWERED, EngineStatus, Reply
from rl_memory_plugins.tags import TagState

REPORT = {"changes": [], "seconds": {"total": 1.0}, "details": {}}


class Engine:
    """One engine that obeys at once; its board is on this host or, where `local` is false, on another."""

    def __init__(self, rank: int = 0, local: bool = True, hosts: int = 1) -> None:
        self.rank = rank
        self.hosts = hosts
        self.board = StatusBoard() if local else None
        self.asleep: list[str] = []
        self.held: list[str] = []  # what would be asleep after the second phase
        self.fails = False
        self.checksums: list[dict[str, Any]] = []
        self.publish()

    def status(self) -> EngineStatus:
        states = dict.fromkeys(self.asleep, TagState.PRESERVED)
        can = Capabilities(hosts=self.hosts)
        return EngineStatus([rank_status(**states)], f"v{self.rank}", engine_rank=self.rank, capabilities=can)

    def publish(self) -> None:
        if self.board is not None:
            self.board.publish(self.status())

    def answer(self, command: commands.AnyCommand) -> Any:
        if isinstance(command, commands.Hello):
            path = "/nonexistent/other-host.board" if self.board is None else self.board.path
            return {"board": path, "status": self.status()}
        if isinstance(command, commands.Checksums):
            return self.checksums
        if isinstance(command, commands.Sleep | commands.WakeUp):
            if self.fails:
                raise HostMemoryError("full")
            self.held = command.tags or [] if isinstance(command, commands.Sleep) else []
            if command.hold:
                return {"held": True}
        if not isinstance(command, commands.Resume) and getattr(command, "commit", True):
            self.asleep = self.held
            self.publish()
        return REPORT


class SlowEngine(Engine):
    """Answers nothing while it is `busy`, as an engine whose scheduler is at work; what comes waits for its turn."""

    def __init__(self, local: bool = False) -> None:
        super().__init__(local=local)
        self.busy = asyncio.Lock()
        self.lasts: asyncio.Event | None = None  # how long the next transition takes

    async def answer_in_turn(self, command: commands.AnyCommand) -> Any:
        async with self.busy:
            if self.lasts is not None and isinstance(command, Transition):
                await self.lasts.wait()
            return self.answer(command)


class RemoteApi(AsyncioApi):
    def __init__(self, engine: SlowEngine) -> None:
        super().__init__(drain_timeout_s=60)
        self.engine = engine
        self.asked: list[str] = []

    async def _call(self, command: commands.AnyCommand) -> list[Reply[Any]]:
        self.asked.append(type(command).__name__)
        try:
            return [Reply(0, msgspec.to_builtins(await self.engine.answer_in_turn(command)))]
        except RLMemoryError as error:
            return [Reply(0, error=error.to_record())]


class LocalApi(EngineApi):
    def __init__(self, *engines: Engine) -> None:
        super().__init__()
        self.engines = engines
        self.asked: list[commands.AnyCommand] = []

    def run(self, operation: Operation) -> Any:
        return operations.run(operation, self._call)

    def _call(self, command: commands.AnyCommand) -> list[Reply[Any]]:
        self.asked.append(command)
        return [self._reply(engine, command) for engine in self.engines]

    @staticmethod
    def _reply(engine: Engine, command: commands.AnyCommand) -> Reply[Any]:
        try:
            return Reply(engine.rank, msgspec.to_builtins(engine.answer(command)))
        except RLMemoryError as error:
            return Reply(engine.rank, error=error.to_record())

    def names(self) -> list[str]:
        return [type(command).__name__ for command in self.asked]


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.board.close()


def test_the_status_is_read_from_the_board_after_one_question(engine: Engine) -> None:
    api = LocalApi(engine)
    assert api.status_now() == []  # nobody has asked yet
    assert api.run(api.memory_status()) == [engine.status()] == api.status_now()
    assert not api.run(api.is_sleeping())
    api.run(api.sleep(1, ["weights"]))
    assert api.run(api.is_sleeping())
    assert api.run(api.weight_version()) == "v0"
    api.run(api.wake_up())
    assert not api.run(api.is_sleeping())
    assert api.names() == ["Hello", "Sleep", "WakeUp"]


@pytest.mark.parametrize("local", [True, False], ids=["boards", "told"])
def test_several_engines_resume_together_or_not_at_all(local: bool) -> None:
    engines = [Engine(rank, local=local) for rank in range(2)]
    api = LocalApi(*engines)
    api.run(api.sleep(1))
    assert "Resume" not in api.names()
    api.run(api.wake_up())
    assert api.asked[-1] == commands.Resume(lift_pause=True)
    engines[1].fails = True
    asked = len(api.asked)
    with pytest.raises(HostMemoryError):
        api.run(api.sleep(1))
    assert [type(command) for command in api.asked[asked:] if not isinstance(command, commands.Hello)] == [
        commands.Sleep,
        commands.Decide,
        commands.Resume,
    ]
    engines[1].asleep = ["weights"]  # where only one of them changed
    engines[1].publish()
    asked = len(api.asked)
    with pytest.raises(HostMemoryError):
        api.run(api.sleep(1))
    assert commands.Resume not in [type(command) for command in api.asked[asked:]]
    for engine in engines:
        if engine.board is not None:
            engine.board.close()


def test_a_board_on_another_host_is_asked_for_again_after_a_transition() -> None:
    api = LocalApi(Engine(local=False))
    assert not api.run(api.is_sleeping())
    api.run(api.sleep(1))
    assert api.status_now()[0].asleep_tags()
    assert api.run(api.is_sleeping())
    assert api.names() == ["Hello", "Sleep", "Hello"]


def test_what_was_told_by_another_host_is_not_believed_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server of the same engines may have changed it."""
    monkeypatch.setattr(board, "ANSWER_VALID_S", 60.0)
    engine = Engine(local=False)
    api = LocalApi(engine)
    assert not api.run(api.is_sleeping())
    engine.asleep = ["weights"]
    assert not api.run(api.is_sleeping())
    monkeypatch.setattr(board, "ANSWER_VALID_S", -1.0)
    assert api.status_now() == []
    assert api.run(api.is_sleeping())


async def at_once(awaitable: Any) -> Any:
    """The result, which needs no answer of an engine that gives none."""
    return await asyncio.wait_for(awaitable, ANSWER_S + 30)


async def until(condition: Any) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("begin", ["sleep", "wake_up", "update_weights"])
def test_an_engine_on_another_host_is_known_to_be_busy_while_this_client_s_transition_runs(
    begin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "ANSWER_VALID_S", 0.01)
    monkeypatch.setattr("rl_memory_plugins.engine_api.ANSWER_S", 30.0)  # nothing waits for it

    async def main() -> None:
        engine = SlowEngine()
        api = RemoteApi(engine)
        await api.run(api.status())
        engine.lasts = asyncio.Event()
        operation = (
            api.update_weights_from_ipc({"*": "/s"}, "t") if begin == "update_weights" else getattr(api, begin)()
        )
        running = asyncio.ensure_future(api.run(operation))
        await until(lambda: len(api.asked) == 2)
        await asyncio.sleep(0.05)  # what it told is old by now
        start = time.monotonic()
        assert admission.first_refusal(api.status_now()) is not None, "a request is refused at once"
        assert [engine.busy for engine in await api.run(api.memory_status())] == [begin]
        if begin == "update_weights":
            with pytest.raises(StateConflictError):
                await api.run(api.sleep())
        assert time.monotonic() - start < 15
        monkeypatch.setattr(board, "ANSWER_VALID_S", 60.0)
        engine.lasts.set()
        await running
        assert bool(admission.first_refusal(api.status_now())) is (begin == "sleep")
        assert api.asked[1:] == [api.asked[1], "Hello"]

    asyncio.run(main())


def test_the_status_of_an_engine_that_does_not_answer_is_given_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another client's transition runs, or a long step."""
    monkeypatch.setattr(board, "ANSWER_VALID_S", 0.01)

    async def main() -> None:
        engine = SlowEngine()
        api = RemoteApi(engine)
        await api.run(api.status())
        await engine.busy.acquire()
        await asyncio.sleep(0.05)
        for _ in range(3):
            assert api.status_now() == [], "a request is left to the engine's own gate"
            [status] = await at_once(api.run(api.memory_status()))
            assert status.busy == UNANSWERED
            assert "does not answer" in str(admission.first_refusal([status]))
        assert api.asked == ["Hello", "Hello"], "it is asked once at a time"
        engine.asleep = ["weights"]
        engine.busy.release()
        found: list[Any] = []
        await until(lambda: found or found.extend(api.status_now()))
        assert found[0].asleep_tags() == ["weights"]

    asyncio.run(main())


def test_an_old_status_is_asked_for_again_and_seldom_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "ANSWER_VALID_S", 60.0)

    async def main() -> None:
        engine = SlowEngine()
        api = RemoteApi(engine)
        assert api.status_now() == []
        assert await api.status_at_first() == [engine.status()]
        monkeypatch.setattr(board, "ANSWER_VALID_S", 0.05)
        engine.asleep = ["weights"]
        await asyncio.sleep(0.06)
        assert await api.status_at_first() == []
        assert await api.run(api.is_sleeping())

    asyncio.run(main())


def test_an_engine_that_is_gone_is_an_error_and_not_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "ANSWER_VALID_S", -1.0)

    async def main() -> None:
        api = RemoteApi(SlowEngine())
        await api.run(api.status())

        async def broken(command: commands.AnyCommand) -> Any:
            raise ConnectionError("it is gone")

        api.engine.answer_in_turn = broken  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(ConnectionError):
                await api.run(api.status())

    asyncio.run(main())


def test_a_wrong_argument_is_refused_before_anything_is_asked(engine: Engine) -> None:
    api = LocalApi(engine)
    for wrong in (api.sleep(9), api.wake_up(["bogus"]), api.update_weights_from_ipc({}, "t")):
        with pytest.raises(InvalidRequestError):
            api.run(wrong)
    assert api.asked == []


def test_an_update_names_no_time_unless_its_caller_does(engine: Engine) -> None:
    api = LocalApi(engine)
    api.run(api.update_weights_from_ipc({"*": "/s"}, "t"))
    api.run(api.update_weights_from_ipc({"*": "/s"}, "t", timeout_s=3, weight_version="v"))
    assert [command.timeout_s for command in api.asked[1:]] == [None, 3]


def test_checksums_cover_every_engine() -> None:
    engines = [Engine(0), Engine(1)]
    for engine, value in zip(engines, ("aa", "bb"), strict=True):
        engine.checksums = [{"layout": "engine", "parameters": {"same": "11", "own": value}}]
    api = LocalApi(*engines)
    found = api.run(api.weight_checksums())
    assert found.tensors == {"same@0": "11"}
    assert found.differing == ["own@0"]
    assert [one.tensors["own@0"] for one in found.engines] == ["aa", "bb"]
    for engine in engines:
        engine.board.close()


@pytest.mark.parametrize(
    ("engines", "named"),
    [
        ([{"hosts": 2}], "ranks of this engine"),
        ([{}, {"rank": 1, "local": False}], "1 of 2 engines"),
    ],
    ids=["one engine over two hosts", "an engine elsewhere"],
)
def test_files_are_refused_at_once_where_they_reach_no_rank(engines: list[dict[str, Any]], named: str) -> None:
    api = LocalApi(*(Engine(**options) for options in engines))
    with pytest.raises(UnsupportedError, match=named):
        api.run(api.update_weights_from_checkpoint("/models/any"))
    assert [type(command) for command in api.asked] == [commands.Hello]
    for engine in api.engines:
        if engine.board is not None:
            engine.board.close()
