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

SLEEP_S = 120.0
"""How long an engine that has started may admit requests before it sleeps, if another one's turn makes it sleep."""

WARM_UP_S = 900.0
"""The longest time after a start until a server is healthy: SGLang's first request waits for a turn."""

HANG_S = 300.0
"""A server whose `/health` gives no answer for so long, or 503, is stopped, and starts again."""

ANSWER_S = 10.0
"""How long a server may take to say how its engine is."""

PORT_ANSWER_S = 2.5
"""The same for answers of the port: Prometheus waits no longer than 10 s for all engines, if nobody tells it to."""

LOOK_S = 0.2
HEALTH_EVERY_S = 5.0

MEMORY = f"{ROUTES}/memory"

NO_ANSWER = 0

_NEVER = {
    401: "it asks for another key than that of rl-memory serve",
    403: "it asks for another key than that of rl-memory serve",
    404: "it has no routes of this package, or is another program's",
}

_SIGNALS = {number.value: number.name for number in signal.Signals}  # without most of the real-time ones


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
        restarts: How often a start has been tried after the first one.
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
        # A key of the environment of `rl-memory serve` is none of its engines.
        keys = {"VLLM_API_KEY": api_key if entry.engine == "vllm" else ""}
        self._processes = ProcessTree(_command(entry, port, options, api_key), {**os.environ, **entry.env, **keys})
        self._was_started = False
        self._has_started = False
        self._next_start = 0.0  # of `time.monotonic`, while the engine is down
        self._end = ""  # how its processes have ended; empty while they run, and before their first start

    # -- its processes --------------------------------------------------------------------------------------------

    async def start(self, taken: Collection[str]) -> bool:
        """Start the server, and wait until the engine has started.

        Args:
            taken: GPUs whose turn somebody else has: an engine on any of them has started when it sleeps.

        Returns: whether it has. If not, none of its processes is left, and `end` says why.
        """
        self.restarts += self._was_started
        self._was_started = True
        self._has_started, self._end = False, ""
        try:
            await self._processes.start()
        except (OSError, ValueError) as error:
            self._end = f"cannot be started: {error}"
            return False
        exit_code = self._processes.exit
        assert exit_code is not None
        failure = await self._starts(taken, exit_code)
        if failure is not None:
            await self._stop_because(failure)
        elif exit_code.done():
            await self._ended(exit_code.result())
        else:
            self._processes.look()
            self._has_started = True
        return self._has_started

    async def _starts(self, taken: Collection[str], exit_code: asyncio.Future[int]) -> str | None:
        """Wait until the engine has started or its server has ended. Returns why it never will, or `None`."""
        deadline = time.monotonic() + START_S
        asleep_by: float | None = None
        is_logged = False
        while not exit_code.done():
            if time.monotonic() >= deadline:
                return f"has not started within {START_S:g} s"
            answer = await self._ask(MEMORY, ANSWER_S)
            status = _status(answer)
            if status in _NEVER:
                return f"answers {status} at {MEMORY}: {_NEVER[status]}"
            if answer is not None and status != 200 and not is_logged:
                is_logged = True
                logger.info("model %r: its server answers %d at %s: %s", self.name, status, MEMORY, _said(answer))
            memory = _memory(answer)
            if memory is not None:
                self.devices = {rank["device"] for engine in memory["engines"] for rank in engine["ranks"]}
                may_be_awake = not self.devices.intersection(taken)
                if memory["is_sleeping"] or (memory["admitting"] and may_be_awake):
                    return None
                if memory["admitting"]:
                    asleep_by = asleep_by or time.monotonic() + SLEEP_S
                    if time.monotonic() >= asleep_by:
                        return f"does not fall asleep: it still runs after {SLEEP_S:g} s, and its log says why"
            await asyncio.wait([exit_code], timeout=LOOK_S)
        return None

    async def warmed_up(self) -> None:
        """Wait until a server that has started is healthy, or has ended. SGLang's asks its engine something first.

        One that hangs is stopped.
        """
        await self._watch(LOOK_S, WARM_UP_S, until_healthy=True)

    async def ended(self) -> None:
        """Wait until the server's process has ended, and end those that it has left. A server that hangs is stopped."""
        await self._watch(HEALTH_EVERY_S, HANG_S)
        if self._processes.exit is not None and not self._end:
            await self._ended(await asyncio.shield(self._processes.exit))

    async def _watch(self, every_s: float, longest_s: float, until_healthy: bool = False) -> None:
        """Ask for its health while its process runs. Stop it after `longest_s` in which no answer was a good one."""
        exit_code = self._processes.exit
        hangs_at = time.monotonic() + longest_s
        while exit_code is not None and not exit_code.done() and not self._end:
            if _status(await self._ask("/health", ANSWER_S)) not in (NO_ANSWER, 503):
                if until_healthy:
                    return
                hangs_at = time.monotonic() + longest_s
            elif time.monotonic() >= hangs_at and not exit_code.done():
                await self._stop_because(f"gave no answer at /health for {longest_s:g} s, or 503")
            await asyncio.wait([exit_code], timeout=every_s)

    async def _ended(self, code: int) -> None:
        self._end = f"ended by {_SIGNALS.get(-code, f'signal {-code}')}" if code < 0 else f"ended with exit code {code}"
        await self._processes.kill()

    async def _stop_because(self, why: str) -> None:
        logger.error("model %r: its engine %s; it is stopped", self.name, why)
        self._end = f"was stopped: it {why}"
        await self._processes.stop()

    async def stop(self) -> None:
        await self._processes.stop()

    def rests(self, delay_s: float, why: str = "") -> None:
        """It will be started again in `delay_s` seconds, or later if it waits for its turn then.

        Args:
            why: Its end, if it does not know itself.
        """
        self._end = self._end or why
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
            left = self._next_start - time.monotonic()
            seconds = max(1, round(left))
            when = f"in {seconds} s" if left > 0 else "when it has its turn"
            return EngineLostError(
                f"the engine of model {self.name!r} {self._end}; it starts again {when}",
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
        """`awake`, `asleep`, `starting`, `down`, `unreachable`, or another reason why it admits no requests."""
        if self._end:
            return "down"
        if not self._has_started:
            return "starting"
        memory = await self.memory()
        if memory is None:
            return "unreachable" if self._processes.runs else "down"
        return "awake" if memory["admitting"] else str(memory["reason"])

    async def is_healthy(self) -> bool:
        """What its server says at `/health`: a sleeping engine is healthy."""
        return self.refusal() is None and _status(await self._ask("/health", PORT_ANSWER_S)) == 200

    async def metrics(self) -> str:
        """Its own `/metrics`; empty if it has none now."""
        answer = await self._ask("/metrics", PORT_ANSWER_S) if self.refusal() is None else None
        return answer.text if answer is not None and answer.status_code == 200 else ""

    async def memory(self) -> dict[str, Any] | None:
        """`GET /memory`; `None` without an answer, e.g. from a server that does not listen yet."""
        return _memory(await self._ask(MEMORY, PORT_ANSWER_S))

    async def wake_up(self) -> str:
        """Returns why it could not wake; empty if it has."""
        try:
            answer = await self._http.post(f"{self.url}{ROUTES}/wake_up", headers=self._headers)
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        return "" if answer.is_success else f"{answer.status_code}: {_said(answer)}"

    async def _ask(self, path: str, timeout_s: float) -> httpx.Response | None:
        asking = self._http.get(self.url + path, headers=self._headers, timeout=None)
        try:
            return await asyncio.wait_for(asking, timeout_s)
        except (httpx.HTTPError, asyncio.TimeoutError):
            return None


def _status(answer: httpx.Response | None) -> int:
    return NO_ANSWER if answer is None else answer.status_code


def _said(answer: httpx.Response) -> str:
    return answer.text[:300]


def _memory(answer: httpx.Response | None) -> dict[str, Any] | None:
    if answer is None or answer.status_code != 200:
        return None
    with suppress(ValueError):
        found: dict[str, Any] = answer.json()
        return found if found.get("engines") else None
    return None


def _command(entry: ModelEntry, port: int, options: Mapping[str, Any], api_key: str) -> list[str]:
    # vLLM has a variable for its key, which is not seen in the list of processes.
    key = ["--api-key", api_key] if api_key and entry.engine == "sglang" else []
    return [
        *(entry.python, "-m", "rl_memory_plugins", "serve", entry.engine, entry.model),
        *("--served-model-name", entry.name, "--host", "127.0.0.1", "--port", str(port)),
        *(*entry.args, *key, "--rl-memory", json.dumps(options)),
    ]
