"""The scheduler as the controller sees it, and the engine core's loop, without a model."""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import DPEngineCoreProc, EngineCore, EngineCoreProc

from rl_memory_plugins.engines.vllm.capabilities import capabilities_of
from rl_memory_plugins.engines.vllm.core import _native_collective_rpc
from rl_memory_plugins.engines.vllm.core_hooks import VllmEngine, VllmRanks, reset_caches
from rl_memory_plugins.errors import StateConflictError
from rl_memory_plugins.tags import PauseMode


class IdleCore(EngineCoreProc):
    """vLLM's own loop around a scheduler with one kept request."""

    def __init__(self) -> None:
        self.input_queue: Any = queue.Queue()
        self.aborts_queue: Any = queue.Queue()
        self.process_input_queue_block = True
        self._idle_state_callbacks = []
        self.paused = True
        self.scheduler: Any = SimpleNamespace(pause_state=PauseState.UNPAUSED, set_pause_state=self._set_pause_state)

    def _set_pause_state(self, state: PauseState) -> None:
        self.scheduler.pause_state = state

    def has_work(self) -> bool:
        return not self.paused

    def is_running(self) -> bool:
        return True

    def pause_scheduler(self, mode: Any = "abort", clear_cache: bool = True) -> None:
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        self.paused = True

    def resume_scheduler(self) -> None:
        self.paused = False

    def _reject_add_in_shutdown(self, request: Any) -> bool:
        return False


def test_no_worker_is_called_between_the_two_phases_of_a_sleep() -> None:
    """It may change the weights behind the back of everything; the sleep has found already that they are unchanged."""

    def refuse() -> None:
        raise StateConflictError("sleep waits for the decision of its second phase")

    core = SimpleNamespace(rl_memory=SimpleNamespace(require_free=refuse))
    call = _native_collective_rpc(lambda *args: pytest.fail("it was called"))
    with pytest.raises(StateConflictError):
        call(core, "scale_weights")


def test_what_follows_a_reply_is_done_also_where_no_loop_would_come_to_it() -> None:
    """A core in the caller's process has vLLM's list of callbacks, and nobody who calls them."""
    core, done = SimpleNamespace(_idle_state_callbacks=[]), []
    VllmEngine(core).call_after_reply(lambda: done.append(True))
    assert done == [True] and core._idle_state_callbacks == []


def assert_goes_on(core: IdleCore, fault: str) -> None:
    loop = threading.Thread(target=core._process_input_queue, daemon=True)
    loop.start()
    loop.join(20)
    assert not loop.is_alive(), fault


def test_requests_kept_until_a_batch_in_flight_ended_go_on() -> None:
    """An operation that waits for that batch ends in a callback of the idle loop, which then blocks for the next
    message though there is work again: seen with asynchronous scheduling, which vLLM's CPU platform switches off."""
    core = IdleCore()
    engine = VllmEngine(core)
    engine.drain(PauseMode.KEEP)
    core._idle_state_callbacks.append(lambda core: engine.resume(lift_pause=False))
    assert_goes_on(core, "the loop sleeps over its work")
    assert core.has_work()


def test_a_stop_to_be_agreed_on_does_not_wait_for_the_next_message() -> None:
    """It begins in a callback of the idle loop; engines that step together agree in a step, so the loop must go on."""
    core = IdleCore()
    core.paused = False  # a request runs
    core.pause_scheduler = lambda *args, **kwargs: setattr(core, "paused", False)  # type: ignore[method-assign]
    drained = VllmEngine(core).drain(PauseMode.WAIT)
    core.paused = True  # it ends
    assert_goes_on(core, "the loop sleeps over the stop")
    assert drained.done()


def test_a_stop_that_peers_have_not_agreed_to_is_taken_back() -> None:
    """Where a peer refuses to stop: vLLM itself resumes only what has stopped."""
    core = IdleCore()
    engine = VllmEngine(core)
    engine.drain(PauseMode.KEEP)
    core.pending_pause = True  # type: ignore[attr-defined]
    engine.resume(lift_pause=False)
    assert not core.pending_pause  # type: ignore[attr-defined]
    assert core.scheduler.pause_state is PauseState.UNPAUSED
    assert core.paused, "vLLM's own way would wait for the peers"


def test_an_engine_is_idle_from_its_last_request_or_resume_on(monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished: list[str] = []
    core = SimpleNamespace(
        scheduler=SimpleNamespace(has_unfinished_requests=lambda: bool(unfinished)), is_scheduler_paused=lambda: paused
    )
    paused = False
    engine = VllmEngine(core)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 10)
    assert engine.is_idle(9)
    assert not engine.is_idle(11)
    unfinished.append("a request")
    assert not engine.is_idle(9)
    unfinished.clear()
    paused = True
    assert not engine.is_idle(9)
    paused = False
    engine.note_request()
    assert not engine.is_idle(1)
    engine._since = now
    engine.resume(lift_pause=True)
    assert not engine.is_idle(1)


def test_a_pause_of_the_users_own_survives_until_a_wake() -> None:
    core = IdleCore()
    engine = VllmEngine(core)
    core.pause_scheduler("keep", clear_cache=False)
    engine.drain(PauseMode.KEEP)
    for _ in range(2):
        engine.resume(lift_pause=False)
        assert core.scheduler.pause_state is PauseState.PAUSED_ALL
        assert core.paused
    engine.resume(lift_pause=True)
    assert not core.paused


@pytest.mark.parametrize(
    ("core", "can_wait", "steps_with_peers"),
    [(EngineCore, False, False), (EngineCoreProc, True, False), (DPEngineCoreProc, True, True)],
)
def test_what_a_core_can_do_is_known_before_it_is_whole(core: type, can_wait: bool, steps_with_peers: bool) -> None:
    """The controller is made when the KV cache is: most attributes of the core are set after that."""
    found = capabilities_of(object.__new__(core), SimpleNamespace(lora_config=None, parallel_config=SimpleNamespace()))
    assert (PauseMode.WAIT in found.modes, found.steps_with_peers) == (can_wait, steps_with_peers)
    assert PauseMode.FREEZE in found.modes


def test_a_prefix_cache_in_host_memory_is_named() -> None:
    config = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=object()), lora_config=None, parallel_config=SimpleNamespace()
    )
    found = capabilities_of(object.__new__(EngineCoreProc), config)
    assert PauseMode.FREEZE not in found.modes
    assert "HiSparse" in found.no_freeze


def test_a_reset_drops_what_was_computed_from_the_weights() -> None:
    """Keys and values, and embeddings of images. Stock: an update drops neither."""
    dropped: list[str] = []

    def prefix_cache(**options: bool) -> bool:
        dropped.append("prefix")
        return options == {"reset_running_requests": True, "reset_connector": True}

    core = SimpleNamespace(
        scheduler=SimpleNamespace(requests={}, has_requests=lambda: False),
        reset_prefix_cache=prefix_cache,
        reset_encoder_cache=lambda: dropped.append("embeddings"),
        reset_mm_cache=lambda: pytest.fail("clients hold the other half of it"),
    )
    reset_caches(core)
    assert dropped == ["prefix", "embeddings"]


@pytest.mark.parametrize(("frozen", "dropped"), [(False, ["half", "waiting"]), (True, ["waiting"])])
def test_pooled_rows_are_dropped_of_requests_that_begin_again(
    monkeypatch: pytest.MonkeyPatch, frozen: bool, dropped: list[str]
) -> None:
    """A frozen request goes on behind its rows."""

    def request(name: str, computed: int, pooling: object) -> Any:
        return SimpleNamespace(
            request_id=name, num_computed_tokens=computed, pooling_params=pooling, status=None, block_hashes=[]
        )

    half, waiting, tokens = request("half", 16, object()), request("waiting", 0, object()), request("tokens", 0, None)

    def preempt_all(**options: bool) -> bool:
        half.num_computed_tokens = 0
        return True

    core = SimpleNamespace(
        scheduler=SimpleNamespace(requests={one.request_id: one for one in (half, waiting, tokens)}),
        reset_prefix_cache=preempt_all,
        reset_encoder_cache=lambda: None,
        model_executor=None,
    )
    calls: list[tuple[str, Any]] = []
    monkeypatch.setattr(VllmRanks, "call", lambda self, method, **given: calls.append((method, given)) or [])
    VllmEngine(core).reset_caches(frozen=frozen, released=True)
    assert calls == [("drop_pooled_rows", {"requests": dropped})]
