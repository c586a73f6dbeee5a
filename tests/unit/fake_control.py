"""A control plane without an engine."""

import asyncio
from typing import Any

from rl_memory_plugins import operations
from rl_memory_plugins.commands import UpdateWeights
from rl_memory_plugins.records import EngineStatus, RankStatus, Report, TagChange, TagStatus
from rl_memory_plugins.tags import PUBLIC_TAGS, Content, TagState, parse_tags


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


class FakeControl:
    """Notes every call; `failure` is raised by the next one; transitions wait for `may_finish`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.failure: Exception | None = None
        self.asleep: set[str] = set()
        self.engines: list[EngineStatus] | None = None
        self.may_finish: asyncio.Event | None = None
        self.finished: list[str] = []

    async def _run(self, name: str, arguments: Any) -> None:
        self.calls.append((name, arguments))
        if self.failure is not None:
            raise self.failure
        if self.may_finish is not None:
            await self.may_finish.wait()
        self.finished.append(name)

    def _report(self, tags: object, state: TagState) -> Report:
        changes = [TagChange(rank=0, tag=tag.value, state=state, bytes_released=4096) for tag in parse_tags(tags)]
        return Report(changes=changes, seconds={"total": 0.5, "drain": 0.0})

    async def sleep(self, level: object, tags: object, mode: object) -> Report:
        await self._run("sleep", (level, tags, mode))
        self.asleep |= {tag.value for tag in parse_tags(tags)}
        return self._report(tags, TagState.PRESERVED)

    async def wake_up(self, tags: object) -> Report:
        await self._run("wake_up", operations.wake_up(tags).tags)
        self.asleep -= {tag.value for tag in parse_tags(tags)}
        return self._report(tags, TagState.RESIDENT)

    async def update_weights(self, command: UpdateWeights) -> Report:
        await self._run("update_weights", command)
        return Report(changes=[], seconds={"total": 0.1})

    async def status(self) -> list[EngineStatus]:
        if self.failure is not None:
            raise self.failure
        if self.engines is not None:
            return self.engines
        return [EngineStatus([rank_status(**dict.fromkeys(self.asleep, TagState.PRESERVED))], "v7")]

    async def checksums(self) -> dict[str, Any]:
        await self._run("checksums", None)
        return {"engines": [[{"rank": 0, "layer.weight": "ab12"}]]}
