"""An engine API without an engine."""

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec

from rl_memory_plugins.commands import AnyCommand, Checksums, RemoveAdapter, Sleep, UpdateAdapter, UpdateWeights, WakeUp
from rl_memory_plugins.engine_api import AsyncioApi
from rl_memory_plugins.operations import Operation
from rl_memory_plugins.records import EngineStatus, RankStatus, Reply, Report, TagChange, TagStatus
from rl_memory_plugins.tags import PUBLIC_TAGS, Content, Tag, TagState


def rank_status(rank: int = 0, content: Content = Content.VALID, **states: TagState) -> RankStatus:
    tags = {tag.value: TagStatus(states.get(tag.value, TagState.RESIDENT), bytes=4096) for tag in PUBLIC_TAGS}
    return RankStatus(
        rank=rank,
        device=f"cpu:{rank}",
        allocator="fake",
        tags=tags,
        content=content,
        content_epoch=1,
        device_free_bytes=10,
        device_total_bytes=20,
        host_arena_bytes=0,
    )


class FakeControl(AsyncioApi):
    """Notes every command; `failure` is raised by the next one; transitions wait for `may_finish`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.failure: Exception | None = None
        self.kept: tuple[str, ...] | None = None  # the globs of the latest sleep
        self.asleep: set[Tag] = set()
        self.engines: list[EngineStatus] | None = None
        self.may_finish: asyncio.Event | None = None
        self.finished: list[str] = []
        super().__init__(drain_timeout_s=60)

    def status(self) -> Operation:
        if self.failure is not None:
            raise self.failure
        yield from ()
        return self.status_now()

    def status_now(self) -> list[EngineStatus]:
        if self.engines is not None:
            return self.engines
        return [EngineStatus([rank_status(**dict.fromkeys(self.asleep, TagState.PRESERVED))], "v7")]

    def _status_after(self) -> Operation:
        return (yield from self.status())

    async def _call(self, command: AnyCommand) -> list[Reply[Any]]:
        match command:
            case Sleep():
                self.kept = command.keep
                await self._run("sleep", (command.level, [*command.tags], command.mode))
                self.asleep |= {*command.tags}
                result: Any = self._report(command.tags, TagState.PRESERVED)
            case WakeUp():
                await self._run("wake_up", [*command.tags])
                self.asleep -= {*command.tags}
                result = self._report(command.tags, TagState.RESIDENT)
            case UpdateWeights():
                await self._run("update_weights", msgspec.structs.replace(command, call=""))
                result = Report(changes=[], seconds={"total": 0.1})
            case UpdateAdapter() | RemoveAdapter():
                await self._run(command.name, command)
                details = {"adapter": command.adapter, "adapter_version": "a1"}
                result = Report(changes=[], seconds={"total": 0.1}, details=details)
            case Checksums():
                await self._run("checksums", None)
                result = [{"layout": "engine", "parameters": {"layer.weight": "ab12"}}]
            case _:
                raise AssertionError(command)
        return [Reply(0, msgspec.to_builtins(result))]

    async def _run(self, name: str, arguments: Any) -> None:
        self.calls.append((name, arguments))
        if self.failure is not None:
            raise self.failure
        if self.may_finish is not None:
            await self.may_finish.wait()
        self.finished.append(name)

    def _report(self, tags: Iterable[Tag], state: TagState) -> Report:
        changes = [TagChange(rank=0, tag=tag.value, state=state, bytes_released=4096) for tag in tags]
        return Report(changes=changes, seconds={"total": 0.5, "drain": 0.0})
