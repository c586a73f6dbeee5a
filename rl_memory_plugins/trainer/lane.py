"""The sender of one engine, in a thread of its own: what happens to it happens to no other engine."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.memory.threads import await_end, await_that, on_this_gpu
from rl_memory_plugins.trainer.fan_out import FanOut, Reader
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.answers import Findings, Senders
from rl_memory_plugins.weights.sender import WeightSender

CUT_S = 0.5
"""How long a rank of a cancelled lane may take no bytes. Then its connection ends, and nothing tells the rank why."""


class Lane(Senders):
    """Sends one update to the ranks of one engine that this process serves.

    Args:
        devices: The devices of these ranks.
        fan: The tensors.
        number: The number of the lane in this process. A port that `advertise` names is that of lane 0; the others take
            the ports that follow.
        token, timeout_s, options: As for `WeightSender`.

    Attributes:
        error: Why the engine did not get the update from this process; `None` while that is not known.
        report: The report of the sender, if it has ended well.

    Raises:
        InvalidRequestError: as `WeightSender`.
    """

    def __init__(
        self, devices: Sequence[str], fan: FanOut, number: int, token: str, timeout_s: float, options: dict[str, Any]
    ) -> None:
        if options.get("advertise") is not None:
            options = {**options, "advertise": next_ports(options["advertise"], number)}
        self._sender = WeightSender(devices, timeout_s=timeout_s, token=token, senders=self, **options)
        self.endpoints = self._sender.endpoints
        self.error: RLMemoryError | None = None
        self.report: dict[str, Any] | None = None
        self._reader = Reader(fan)
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._findings: Findings | None = None  # of this lane, while it waits for a verdict
        self._verdict: Findings | RLMemoryError | None = None
        self._has_ended = False

    def start(self, partial: bool) -> None:
        send = on_this_gpu(lambda: self._sender.send(self._reader, partial=partial))
        self._thread = threading.Thread(target=self._run, args=(send,), name="rl-memory-send-weights", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # this process cannot start more threads
            self._thread = None
            self._end(wire.as_update_error(error))

    def _run(self, send: Callable[[], dict[str, Any]]) -> None:
        try:
            self.report = send()  # may fail before it sends: the GPU can be broken
        except Exception as error:
            # The frames must not keep tensors alive as long as the report does.
            traceback.clear_frames(error.__traceback__)
            self._end(wire.as_update_error(error).with_traceback(None))
        else:
            self._end()

    def _end(self, error: RLMemoryError | None = None) -> None:
        self._reader.leave()
        with self._changed:
            self.error, self._has_ended = error, True
            self._changed.notify_all()

    # -- the lane's thread ----------------------------------------------------------------------------------

    def settle(self, findings: Findings | None) -> Findings:
        return self.consult(findings)

    def consult(self, findings: Findings | None) -> Findings:
        with self._changed:
            self._findings = findings
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._verdict is not None)
            verdict, self._verdict = self._verdict, None
        assert verdict is not None
        if isinstance(verdict, RLMemoryError):
            raise verdict
        return verdict

    # -- the trainer's thread -------------------------------------------------------------------------------

    def findings(self) -> Findings | None:
        """What the ranks answer to the manifest, once all have answered; `None` if the lane has ended."""
        with self._changed:
            await_that(lambda: self._findings is not None or self._has_ended, self._changed)
            found, self._findings = self._findings, None
        return found

    def decide(self, verdict: Findings | RLMemoryError) -> None:
        """Let the lane go on with the findings of all senders, or end with an error. After `findings`."""
        with self._changed:
            self._verdict = verdict
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until the lane has ended. Each of its own waits has a limit."""
        if self._thread is not None:
            await_end(self._thread)

    def cancel(self, error: RLMemoryError) -> None:
        """Have the lane end with `error` if it has not ended. Does not wait."""
        if self._thread is not None and not self._has_ended:
            self.decide(error)
            self._sender.cancel(error)

    def close(self) -> None:
        """Wait for the end of a lane that has ended or was cancelled, and release everything."""
        thread = self._thread
        if thread is not None:
            with self._changed:
                while not self._changed.wait_for(lambda: self._has_ended or not thread.is_alive(), CUT_S):
                    self._sender.cut()
            await_end(thread)
        self._sender.close()


def next_ports(advertise: str | Sequence[str], number: int) -> str | list[str]:
    """The entries of `advertise` with ports that are `number` higher. Entries without a port stay as they are."""
    if not isinstance(advertise, str):
        return [str(next_ports(entry, number)) for entry in advertise]
    host, colon, port = advertise.rpartition(":")
    has_port = colon and port.isdigit() and int(port) > 0 and (":" not in host or host.endswith("]"))
    return f"{host}:{int(port) + number}" if has_port else advertise
