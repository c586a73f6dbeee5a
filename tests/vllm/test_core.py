"""The engine core's loop and the controller's hooks, without a model."""

from __future__ import annotations

import queue
import threading
from functools import partial
from typing import Any

from vllm.v1.engine.core import EngineCoreProc

from rl_memory_plugins.engines.vllm.core import VllmEngine


class IdleCore(EngineCoreProc):
    """vLLM's own loop around a scheduler with one kept request."""

    def __init__(self) -> None:
        self.input_queue: Any = queue.Queue()
        self.aborts_queue: Any = queue.Queue()
        self.process_input_queue_block = True
        self._idle_state_callbacks = []
        self.paused = True

    def has_work(self) -> bool:
        return not self.paused

    def is_running(self) -> bool:
        return True

    def resume_scheduler(self) -> None:
        self.paused = False

    def _reject_add_in_shutdown(self, request: Any) -> bool:
        return False


def test_requests_kept_until_a_batch_in_flight_ended_go_on() -> None:
    """An operation that waits for that batch ends in a callback of the idle loop, which then blocks for the next
    message though there is work again: seen with asynchronous scheduling, which vLLM's CPU platform switches off."""
    core = IdleCore()

    def operation(engine: VllmEngine, core: Any) -> None:
        engine.resume(lift_pause=False)

    core._idle_state_callbacks.append(partial(operation, VllmEngine(core)))
    loop = threading.Thread(target=core._process_input_queue, daemon=True)
    loop.start()
    loop.join(20)
    assert not loop.is_alive(), "the loop sleeps over its work"
    assert core.has_work()
