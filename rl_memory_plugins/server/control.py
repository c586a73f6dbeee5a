"""The router's control plane: the operations of an engine's face, run on asyncio."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl_memory_plugins.commands import UpdateWeights
from rl_memory_plugins.face import Face
from rl_memory_plugins.operations import Operation
from rl_memory_plugins.records import EngineStatus, Report
from rl_memory_plugins.weights.checksums import Checksums


class Control:
    """A `router.ControlPlane`.

    Args:
        face: Gives the face, whose `run` gives coroutines; raises while there is no engine yet.
    """

    def __init__(self, face: Callable[[], Face]) -> None:
        self._face = face

    async def sleep(self, level: object, tags: object, mode: object) -> Report:
        return await self._run(lambda face: face.sleep(level, tags, mode))  # type: ignore[no-any-return]

    async def wake_up(self, tags: object) -> Report:
        return await self._run(lambda face: face.wake_up(tags))  # type: ignore[no-any-return]

    async def update_weights(self, command: UpdateWeights) -> Report:
        return await self._run(lambda face: face.update_weights(command))  # type: ignore[no-any-return]

    async def status(self) -> list[EngineStatus]:
        return await self._run(lambda face: face.status())  # type: ignore[no-any-return]

    async def checksums(self) -> Checksums:
        return await self._run(lambda face: face.weight_checksums())  # type: ignore[no-any-return]

    async def _run(self, ask: Callable[[Face], Operation]) -> Any:
        face = self._face()
        return await face.run(ask(face))
