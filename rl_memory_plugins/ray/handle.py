"""The client of an engine in an actor: an `EngineClient` whose calls Ray carries."""

from __future__ import annotations

import math
import time
from typing import Any

import httpx
import msgspec

from rl_memory_plugins.client import STATUS_S, EngineClient
from rl_memory_plugins.errors import EngineLostError, NoAnswerError, RLMemoryError, StateConflictError, from_record
from rl_memory_plugins.extras import needs
from rl_memory_plugins.ray.actor import About
from rl_memory_plugins.ray.engines import Generated
from rl_memory_plugins.trace_context import outgoing
from rl_memory_plugins.trainer.participants import ASK_AGAIN_S
from rl_memory_plugins.weights.wire import Deadline

with needs("ray"):
    import ray
    from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError


REQUESTS = "requests"
"""Ray's concurrency group of the prompts."""

RESTART_S = 60.0
"""How long Ray may take to restart an actor that has died. Ray refuses its calls meanwhile."""

RESTART_POLL_S = 0.5

LEAVE_S = 3.0
"""How long an engine may take for each of the calls by which it leaves its fleet; and may refuse the last of them."""


class EngineActorHandle(EngineClient):
    """One engine of a fleet. `RolloutHandoff` and `push_from_all` take it as they take an `EngineClient`.

    The handle can be passed to other actors, e.g. to the processes of the trainer.

    Args:
        actor: A Ray handle of an `EngineActor`.
        number: The place of the engine in the fleet. Errors have it as `details["engine"]`.

    Raises:
        EngineLostError: by every call, if the actor has died, or has no engine since. `details["restarting"]` is true
            if Ray cannot reach the actor for now, e.g. because it restarts it.
    """

    def __init__(self, actor: Any, number: int) -> None:
        self.actor = actor
        self.number = number
        super().__init__(f"http://engine-{number}", transport=_RayTransport(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return EngineActorHandle, (self.actor, self.number)

    def about(self, *, timeout_s: float = STATUS_S) -> About:
        """What the actor says of itself; also while it has no engine."""
        return msgspec.convert(self.result(self.actor.about.remote(), timeout_s), About)

    def phase(self, reference: Any, timeout_s: float = STATUS_S) -> str:
        """The phase in the answer of the actor's `about`; `lost` if the actor has died or cannot be reached.

        An actor that does not answer has to leave, see `leave`: its calls would keep all others of the fleet waiting.
        Its phase is `left`.
        """
        try:
            return msgspec.convert(self.result(reference, timeout_s), About).phase
        except EngineLostError:
            return "lost"
        except NoAnswerError:
            self.leave()
            return "left"

    def start(self, *, closed: bool = False, timeout_s: float | None = None) -> None:
        """Start the engine, unless it has started; see `EngineActor.start`.

        Args:
            timeout_s: The longest wait in seconds; `None` for no limit.

        Raises:
            NoAnswerError: the engine has not started within `timeout_s`. Its actor was ended, and Ray restarts it.
            RLMemoryError: the engine cannot start.
        """
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        try:
            for again in (True, False):  # the first call may find that the engine has died, which ends the actor
                self._await_restart(end)
                try:
                    self._answer(self.result(self.actor.start.remote(closed), _until(end)))
                    return
                except EngineLostError as error:
                    if not (again and error.details.get("restarting")):
                        raise
        except NoAnswerError:
            self.end()  # the next start would wait for this one
            raise NoAnswerError(
                f"engine {self.number} has not started within {timeout_s:g} s, and its actor was ended",
                timeout_s=timeout_s,
                engine=self.number,
            ) from None

    def _await_restart(self, end: float) -> None:
        """Wait while Ray places or restarts the actor: for a restart at most `RESTART_S`."""
        deadline = time.monotonic() + RESTART_S
        while True:
            try:
                self.result(self.actor.about.remote(), _until(end))
                return
            except EngineLostError as error:
                if not error.details.get("restarting") or time.monotonic() >= deadline:
                    raise
            time.sleep(RESTART_POLL_S)

    def join(self, *, timeout_s: float = STATUS_S) -> None:
        """The engine takes part in the fleet from now on."""
        self.result(self.actor.join.remote(), timeout_s)

    def leave(self) -> None:
        """Take no part in the fleet from now on, and admit nothing, until `EngineFleet.replace`.

        An engine that does not close is ended: it must not serve weights that the others have left behind. Ray then
        restarts the actor, without an engine.
        """
        try:
            self.result(self.actor.leave.remote(), LEAVE_S)
            self._pause(Deadline(LEAVE_S))
            return
        except RLMemoryError:
            pass
        try:
            if self.about(timeout_s=LEAVE_S).phase == "empty":
                return
        except RLMemoryError:
            pass  # cannot be reached
        self.end()

    def _pause(self, deadline: Deadline) -> None:
        """Admit nothing. An update that breaks off refuses that for a moment, and opens the engine behind it."""
        while True:
            try:
                self.sleep(0, timeout_s=LEAVE_S)
                return
            except StateConflictError:
                if deadline.remaining() <= ASK_AGAIN_S:
                    raise
            time.sleep(ASK_AGAIN_S)

    def end(self) -> None:
        """End the actor, also one that cannot be reached from here. Ray restarts it, without an engine."""
        ray.kill(self.actor, no_restart=False)

    def ask(self, prompt: list[int], sampling: dict[str, Any]) -> Any:
        """Send a prompt. Returns a reference for `answer`."""
        return self.actor.generate.options(concurrency_group=REQUESTS).remote(prompt, sampling)

    def answer(self, reference: Any) -> Generated:
        """Wait for the answer to a prompt.

        Raises:
            EngineAsleepError: the engine admits no requests.
        """
        return msgspec.convert(self._answer(self.result(reference, None)), Generated)

    def generate(self, prompt: list[int], sampling: dict[str, Any]) -> Generated:
        """Answer one prompt; see `Engine.generate`."""
        return self.answer(self.ask(prompt, sampling))

    def result(self, reference: Any, timeout_s: float | None) -> Any:
        """The result of a call of the actor.

        Raises:
            EngineLostError: the actor died before it answered, or Ray cannot place it or set up its environment.
            NoAnswerError: it gave no answer in time.
        """
        try:
            return ray.get(reference, timeout=timeout_s)
        except RayActorError as error:
            restarting = {"restarting": True} if isinstance(error, ActorUnavailableError) else {}
            raise EngineLostError(
                f"the actor of engine {self.number} has died, or cannot be reached: {error}".strip(),
                engine=self.number,
                **restarting,
            ) from None
        except GetTimeoutError:
            raise NoAnswerError(
                f"no answer from engine {self.number} within {timeout_s:g} s: the call may be carried out yet",
                timeout_s=timeout_s,
                engine=self.number,
            ) from None
        except RayTaskError:
            raise  # the actor's own code has failed: its traceback says where
        except RayError as error:
            raise EngineLostError(
                f"the actor of engine {self.number} cannot run ({type(error).__name__}): {error}".strip(),
                engine=self.number,
            ) from None

    def _answer(self, record: dict[str, Any] | None) -> Any:
        if record is None:
            raise self.lost()
        if "error" in record:
            error = from_record(record["error"])
            error.details.setdefault("engine", self.number)
            raise error
        return record["answer"]

    def lost(self) -> EngineLostError:
        """The error of an actor without an engine."""
        return EngineLostError(
            f"the actor of engine {self.number} has been restarted and has no engine yet", engine=self.number
        )


def _until(end: float) -> float | None:
    """The seconds until `end`, as `ray.get` takes them."""
    return None if end == math.inf else max(end - time.monotonic(), 0.0)


class _RayTransport(httpx.BaseTransport):
    """Carries the requests of an `EngineClient` to the actor."""

    def __init__(self, handle: EngineActorHandle) -> None:
        self._handle = handle

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        call = self._handle.actor.call.remote(request.method, request.url.raw_path.decode(), request.read(), outgoing())
        answer = self._handle.result(call, request.extensions["timeout"]["read"])
        if answer is None:
            raise self._handle.lost()
        status, body = answer
        return httpx.Response(status, content=body, request=request)
