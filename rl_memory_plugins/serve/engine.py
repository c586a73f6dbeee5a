"""One engine behind `rl-memory serve`: its server's process, and what it says of itself."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import httpx

from rl_memory_plugins.client import ROUTES
from rl_memory_plugins.errors import EngineAsleepError, EngineLostError, RLMemoryError
from rl_memory_plugins.serve.configuration import ModelEntry
from rl_memory_plugins.serve.processes import ProcessTree

logger = logging.getLogger(__name__)

START_S = 3600.0
"""The longest start of an engine: it may download its model."""

ANSWER_S = 10.0
"""How long a server may take to say how its engine is."""

LOOK_S = 0.2


class ServedEngine:
    """The engine of one model.

    Args:
        entry: What the file says of it.
        port: Where its server listens.
        options: Of this package.
        api_key: The key of its server; empty for none.
        http: Asks the server.

    Attributes:
        devices: Its GPUs, as soon as they are known; see `RankStatus.device`.
        restarts: How often it has been started again.
    """

    def __init__(
        self, entry: ModelEntry, port: int, options: Mapping[str, Any], api_key: str, http: httpx.AsyncClient
    ) -> None:
        self.name = entry.name
        self.kind = entry.engine
        self.url = f"http://127.0.0.1:{port}"
        self.devices: set[str] = set()
        self.restarts = 0
        self.created = int(time.time())
        self._http = http
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        keys = {"VLLM_API_KEY": api_key} if api_key and entry.engine == "vllm" else {}
        self._processes = ProcessTree(_command(entry, port, options, api_key), {**os.environ, **entry.env, **keys})
        self._has_started = False
        self._next_start = 0.0  # of `time.monotonic`, while the engine is down
        self._end = ""  # how its processes have ended; empty while they run, and before their first start

    # -- its processes --------------------------------------------------------------------------------------------

    async def start(self, taken: Collection[str]) -> bool:
        """Start the server, and wait until the engine has started.

        Args:
            taken: GPUs whose turn somebody else has: an engine on any of them has started when it sleeps.

        Returns: whether it has. If not, none of its processes is left.
        """
        self._has_started, self._end = False, ""
        try:
            await self._processes.start()
        except OSError as error:
            self._end = f"cannot be started: {error}"
            return False
        exit_code = self._processes.exit
        assert exit_code is not None
        deadline = time.monotonic() + START_S
        while not exit_code.done() and time.monotonic() < deadline:
            memory = await self.memory()
            if memory is not None:
                self.devices = {rank["device"] for engine in memory["engines"] for rank in engine["ranks"]}
                may_be_awake = not self.devices.intersection(taken)
                if memory["is_sleeping"] or (memory["admitting"] and may_be_awake):
                    self._processes.look()
                    self._has_started = True
                    return True
            await asyncio.wait([exit_code], timeout=LOOK_S)
        if not exit_code.done():
            logger.error("model %r: its engine has not started within %g s", self.name, START_S)
            await self._processes.stop()
        await self._ended(exit_code.result())
        return False

    async def warmed_up(self) -> None:
        """Wait until a server that has started is healthy, or has ended. SGLang's asks its engine something first."""
        deadline = time.monotonic() + START_S
        while self._processes.runs and time.monotonic() < deadline and not await self.is_healthy():
            await asyncio.sleep(LOOK_S)

    async def ended(self) -> None:
        """Wait until the server's process has ended, and end those that it has left."""
        if self._processes.exit is not None and not self._end:
            await self._ended(await asyncio.shield(self._processes.exit))

    async def _ended(self, code: int) -> None:
        self._end = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        await self._processes.kill()

    async def stop(self) -> None:
        await self._processes.stop()

    def rests(self, delay_s: float) -> None:
        """It will be started again in `delay_s` seconds."""
        self.restarts += 1
        self._next_start = time.monotonic() + delay_s

    @property
    def pid(self) -> int | None:
        return self._processes.pid

    @property
    def end(self) -> str:
        return self._end

    # -- its state ------------------------------------------------------------------------------------------------

    def refusal(self) -> RLMemoryError | None:
        """Why no request can be passed on; `None` if its server runs."""
        if self._end:
            seconds = max(1, round(self._next_start - time.monotonic()))
            return EngineLostError(
                f"the engine of model {self.name!r} {self._end}; it starts again in {seconds} s",
                engine=self.name,
                retry_after_s=seconds,
            )
        if not self._has_started:
            return EngineAsleepError(f"the engine of model {self.name!r} is starting", reason="starting")
        return None if self._processes.runs else self.lost("its process has ended")

    def lost(self, why: str) -> EngineLostError:
        """The error of a request that its server has not answered."""
        return EngineLostError(f"the engine of model {self.name!r} gave no answer: {why}", engine=self.name)

    async def state(self) -> str:
        """`awake`, `asleep`, `starting`, `down`, `silent`, or another reason why it admits no requests."""
        if self._end:
            return "down"
        if not self._has_started:
            return "starting"
        memory = await self.memory()
        if memory is None:
            return "silent" if self._processes.runs else "down"
        return "awake" if memory["admitting"] else str(memory["reason"])

    async def is_healthy(self) -> bool:
        """What its server says at `/health`: a sleeping engine is healthy."""
        answer = await self._ask("/health") if self.refusal() is None else None
        return answer is not None and answer.status_code == 200

    async def metrics(self) -> str:
        """Its own `/metrics`; empty if it has none now."""
        answer = await self._ask("/metrics") if self.refusal() is None else None
        return answer.text if answer is not None and answer.status_code == 200 else ""

    async def memory(self) -> dict[str, Any] | None:
        """`GET /memory`; `None` without an answer, e.g. from a server that does not listen yet."""
        answer = await self._ask(f"{ROUTES}/memory")
        if answer is None or answer.status_code != 200:
            return None
        with suppress(ValueError):
            found: dict[str, Any] = answer.json()
            return found if found.get("engines") else None
        return None

    async def wake_up(self) -> None:
        with suppress(httpx.HTTPError):  # a request wakes it too
            await self._http.post(f"{self.url}{ROUTES}/wake_up", headers=self._headers)

    async def _ask(self, path: str) -> httpx.Response | None:
        try:
            return await self._http.get(self.url + path, headers=self._headers, timeout=ANSWER_S)
        except httpx.HTTPError:
            return None


def _command(entry: ModelEntry, port: int, options: Mapping[str, Any], api_key: str) -> list[str]:
    # vLLM has a variable for its key, which is not seen in the list of processes.
    key = ["--api-key", api_key] if api_key and entry.engine == "sglang" else []
    return [
        *(entry.python, "-m", "rl_memory_plugins", "serve", entry.engine, entry.model),
        *("--served-model-name", entry.name, "--host", "127.0.0.1", "--port", str(port)),
        *(*entry.args, *key, "--rl-memory", json.dumps(options)),
    ]
