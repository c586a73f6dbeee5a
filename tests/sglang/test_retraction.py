"""Running requests that return to the queue: those in no batch, and those that cannot go on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_memory_plugins.engines.sglang.hooks import SCHEDULER, hooks
from rl_memory_plugins.engines.sglang.scheduler_hooks import SglangEngine
from rl_memory_plugins.tags import PauseMode
from tests.sglang.test_engine import Ranks


def request(rid: str, **attributes: Any) -> Any:
    return SimpleNamespace(rid=rid, beam_group=None, input_embeds=None, finished=lambda: False, **attributes)


def batch(*requests: Any) -> Any:
    return SimpleNamespace(reqs=list(requests), beam_tail=None)


class Scheduler:
    """SGLang's, with requests that run. Its own step retracts those in batches, and its abort goes by prefixes."""

    _engine_paused = False
    enable_hierarchical_cache = False
    chunked_req = None
    max_queued_requests = None
    token_to_kv_pool_allocator: Any = None
    req_to_token_pool: Any = None
    beam_coordinator: Any = None
    hisparse_coordinator: Any = None

    def __init__(self, *running: Any, prefilled: Any = None) -> None:
        self.running_batch = batch(*running)
        self.last_batch = prefilled
        self.waiting_queue: list[Any] = [request("waiting")]
        self.grammar_manager = SimpleNamespace(grammar_queue=[])
        self.aborts: list[tuple[str, Any]] = []

    def pause_generation(self, pause: Any) -> None:
        self._engine_paused = True
        if self.hisparse_coordinator is not None:
            self.hisparse_coordinator.retract(self.running_batch.reqs)
        batches = [one for one in (self.running_batch, self.last_batch) if one is not None]
        self.waiting_queue += [one for each in batches for one in each.reqs if not one.finished()]
        self.running_batch.reqs, self.last_batch = [], None

    def abort_request(self, abort: Any) -> None:
        ended = [one for one in self.waiting_queue if abort.abort_all or one.rid.startswith(abort.rid)]
        self.waiting_queue = [one for one in self.waiting_queue if one not in ended]
        self.aborts += [(one.rid, abort.finished_reason) for one in ended]

    def is_fully_idle(self) -> bool:
        staging = self.hisparse_coordinator is not None and self.hisparse_coordinator.ack_staging_queue
        return not (self.running_batch.reqs or self.last_batch or self.waiting_queue or staging)


def drain(scheduler: Scheduler, mode: PauseMode, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Drain the scheduler. Returns the names of the requests in its queue."""
    monkeypatch.setitem(hooks.table, f"{SCHEDULER}.pause_generation", Scheduler.pause_generation)
    engine = SglangEngine(scheduler, Ranks(True))  # type: ignore[arg-type]
    drained = engine.drain(mode)
    engine.poll()
    assert drained.done()
    return [one.rid for one in scheduler.waiting_queue]


def test_requests_of_embeddings_end_like_aborted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock: they begin anew and answer with tokens of both beginnings, or end the server in a batch with others."""
    embeddings, prefilled = request("1"), request("2")
    embeddings.input_embeds = prefilled.input_embeds = [[0.0]]
    scheduler = Scheduler(embeddings, request("11"), prefilled=batch(prefilled, request("22")))
    assert drain(scheduler, PauseMode.KEEP, monkeypatch) == ["waiting", "11", "22"]
    assert [rid for rid, _ in scheduler.aborts] == ["1", "2"]
    assert all(reason["type"] == "abort" and "again" in reason["message"] for _, reason in scheduler.aborts)


def test_a_request_that_ends_with_its_last_step_is_no_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = request("ended")
    ended.input_embeds, ended.finished = [[0.0]], lambda: True
    scheduler = Scheduler(ended)
    assert drain(scheduler, PauseMode.KEEP, monkeypatch) == ["waiting"]
    assert scheduler.aborts == []


class HiSparse:
    """A request after its prefill, which is in no batch until its KV cache has been copied to host memory."""

    def __init__(self, staged: Any) -> None:
        self.ack_staging_queue = [SimpleNamespace(req=staged)]

    def retract(self, running: list[Any]) -> None:
        self.ack_staging_queue = [one for one in self.ack_staging_queue if one.req not in running]


def test_requests_between_prefill_and_decode_are_retracted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock: a paused engine takes them out of HiSparse's queue no more, and a drain waits for that without end."""
    scheduler = Scheduler(request("running"))
    scheduler.hisparse_coordinator = HiSparse(request("staged"))
    assert drain(scheduler, PauseMode.KEEP, monkeypatch) == ["waiting", "running", "staged"]


PROMPT, LENGTH, BEAMS = 3, 5, 3


class Beams:
    """SGLang's pools and coordinator of beam search, as far as they give memory back."""

    def __init__(self) -> None:
        self.req_to_token = torch.arange(4 * LENGTH).view(4, LENGTH)
        self.rows: list[int] = []
        self.slots: list[int] = []
        self.retired: list[str] = []

    def free_rows(self, rows: list[int]) -> None:
        self.rows += rows

    def free(self, slots: torch.Tensor) -> None:
        self.slots += slots.tolist()

    def retire_group(self, leader: Any) -> None:
        self.retired.append(leader.rid)


def searching(mode: PauseMode, paused: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Scheduler, Beams, Any, Any]:
    """A drain of a scheduler whose batch has the beams of a request behind its rows."""
    batch_tail = pytest.importorskip("sglang.srt.beam_search.batch_tail")
    leader, pools = request("beams"), Beams()
    leader.kv = SimpleNamespace(kv_allocated_len=LENGTH, kv_committed_len=LENGTH)
    members = torch.arange(1, BEAMS)
    leader.beam_group = SimpleNamespace(
        leader=leader, prompt_len=PROMPT, member_rows=members, member_rows_cpu=members, all_rows=torch.arange(BEAMS)
    )
    scheduler = Scheduler(leader, request("running"))
    scheduler._engine_paused = paused
    scheduler.req_to_token_pool = scheduler.token_to_kv_pool_allocator = pools
    scheduler.beam_coordinator = pools
    running, rows = scheduler.running_batch, torch.arange(1 + BEAMS)
    running.beam_tail = batch_tail.BeamTail(num_base_rows=2, entries=[])
    running.input_ids = running.seq_lens_cpu = None
    running.req_pool_indices = running.req_pool_indices_cpu = running.seq_lens = running.orig_seq_lens = rows
    drain(scheduler, mode, monkeypatch)
    batch_tail.strip_beam_tail(running)  # as SGLang's next pass does; it asserts that the requests are the same
    return scheduler, pools, leader, running


@pytest.mark.parametrize("paused", [False, True])
def test_a_beam_search_ends_like_an_aborted_request(paused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock: the memory of its beams stays taken, and the scheduler dies by an assertion when it goes on."""
    scheduler, pools, leader, running = searching(PauseMode.KEEP, paused, monkeypatch)
    assert [one.rid for one in scheduler.waiting_queue] == ["waiting", "running"]
    assert [rid for rid, _ in scheduler.aborts] == pools.retired == ["beams"]
    assert len(running.seq_lens) == 2
    assert pools.rows == list(range(1, BEAMS))
    assert sorted(pools.slots) == [row * LENGTH + place for row in range(BEAMS) for place in range(PROMPT, LENGTH)]
    assert leader.kv.kv_allocated_len == PROMPT, "the rest of its memory is the retraction's"


def test_an_abort_in_a_paused_engine_ends_beam_searches_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, pools, *_ = searching(PauseMode.ABORT, True, monkeypatch)
    assert pools.retired == ["beams"]
    assert scheduler.aborts == [("waiting", None), ("beams", None), ("running", None)]
