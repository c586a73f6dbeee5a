"""The scheduler as the controller sees it, without an engine."""

from __future__ import annotations

import time
import types
from typing import Any

import pytest

from rl_memory_plugins.engines.sglang.hooks import SCHEDULER, hooks
from rl_memory_plugins.engines.sglang.scheduler_hooks import SglangEngine
from rl_memory_plugins.errors import StateConflictError
from rl_memory_plugins.tags import PauseMode


class Ranks:
    """A group whose other rank always says the same."""

    def __init__(self, other: bool) -> None:
        self._other = other

    def all(self, mine: bool) -> bool:
        return mine and self._other


@pytest.mark.parametrize("other", [True, False])
def test_ranks_with_their_own_requests_refuse_together(other: bool) -> None:
    """One that raised alone would leave the others in a collective that it never joins."""
    paused = types.SimpleNamespace(_engine_paused=True, is_fully_idle=lambda: True)
    engine = SglangEngine(paused, Ranks(other))  # type: ignore[arg-type]
    if other:
        assert not engine.drain(PauseMode.WAIT).done()
    else:
        with pytest.raises(StateConflictError):
            engine.drain(PauseMode.WAIT)
        assert not engine.draining


@pytest.mark.parametrize("other", [True, False])
def test_ranks_are_idle_together(other: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = types.SimpleNamespace(_engine_paused=False, is_fully_idle=lambda: True)
    engine = SglangEngine(scheduler, Ranks(other))  # type: ignore[arg-type]
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 10)
    assert engine.is_idle(9) is other
    assert not engine.is_idle(11)
    engine.note_request()
    assert not engine.is_idle(1)
    engine._since = now
    scheduler._engine_paused = True
    assert not engine.is_idle(9)
    scheduler._engine_paused, scheduler.is_fully_idle = False, lambda: False
    assert not engine.is_idle(9)


class PausedScheduler:
    """SGLang's, paused, with a request whose grammar is compiled until the third look and a limit of its queue."""

    _engine_paused = True
    enable_hierarchical_cache = True
    running_batch = last_batch = chunked_req = hisparse_coordinator = None

    def __init__(self) -> None:
        self.grammar_manager = self.tree_cache = self
        self.grammar_queue = ["with a grammar"]
        self.waiting_queue: list[str] = []
        self.running = ["running"]
        self.aborted: list[str] = []
        self.max_queued_requests: int | None = 1
        self.copies = 2  # of the KV cache, to host memory
        self.looks = 0

    def check_hicache_events(self) -> None:
        self.copies = max(self.copies - 1, 0)

    def get_ready_grammar_requests(self) -> list[str]:
        self.looks += 1
        ready, self.grammar_queue = (self.grammar_queue, []) if self.looks == 3 else ([], self.grammar_queue)
        return ready

    def _add_request_to_queue(self, request: str) -> None:
        full = self.max_queued_requests is not None and len(self.waiting_queue) >= self.max_queued_requests
        (self.aborted if full else self.waiting_queue).append(request)

    def pause_generation(self, request: Any) -> None:
        running, self.running = self.running, []
        for one in running:
            self._add_request_to_queue(one)

    def abort_request(self, request: Any) -> None:
        self.aborted += self.waiting_queue
        self.waiting_queue = []

    def is_fully_idle(self) -> bool:
        return not (self.grammar_queue or self.waiting_queue or self.running or self.copies)


def drained(mode: PauseMode, monkeypatch: pytest.MonkeyPatch) -> PausedScheduler:
    monkeypatch.setitem(hooks.table, f"{SCHEDULER}.pause_generation", PausedScheduler.pause_generation)
    scheduler = PausedScheduler()
    engine = SglangEngine(scheduler, Ranks(True))  # type: ignore[arg-type]
    done = engine.drain(mode)
    for _ in range(5):
        engine.poll()
    assert done.done()
    assert scheduler.max_queued_requests == 1
    return scheduler


def test_a_paused_engine_keeps_requests_with_grammars_and_full_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loop looks neither at grammars that are compiled nor at copies that have ended; who waits for them must."""
    scheduler = drained(PauseMode.KEEP, monkeypatch)
    assert scheduler.aborted == []
    assert sorted(scheduler.waiting_queue) == ["running", "with a grammar"]


def test_a_paused_engine_aborts_requests_with_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock: such a request ends by a forward pass, which no paused engine makes."""
    scheduler = drained(PauseMode.ABORT, monkeypatch)
    assert sorted(scheduler.aborted) == ["running", "with a grammar"]
    assert scheduler.waiting_queue == []
