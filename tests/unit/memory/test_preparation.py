"""Host memory that is made before anybody waits for it: who waits for it, who ends it, and when it is given back."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import FakeRank, sleep, wake

from integration.waiting import wait_until
from rl_memory_plugins.errors import HostMemoryError
from rl_memory_plugins.memory import arena as arena_module
from rl_memory_plugins.memory import pinned, preparation, reclaim
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.preparation import PATIENCE, AllocationCancelled, Caller, Demand
from rl_memory_plugins.memory.shared_buffers import File
from rl_memory_plugins.private_directory import one_at_a_time, private_directory, try_lock
from rl_memory_plugins.tags import Content, Level

MiB = 1 << 20
TIMEOUT_S = 60  # of what would else hang
SOON_S = 20.0  # of what must not wait for anything; it takes milliseconds


class Pages:
    """Makes the arena's pages, step by step, as far as a test lets it."""

    def __init__(self, monkeypatch) -> None:
        self._touch = pinned.touch
        self._allowed = threading.Semaphore(0)
        self.made = 0
        self.efforts: list[tuple[int, int]] = []  # threads and niceness of each step
        self.waiting = threading.Event()
        self._gated = True
        monkeypatch.setattr(pinned, "touch", self._make)

    def _make(self, address, nbytes, threads, nice=0):
        if threading.current_thread().name == "rl-memory-arena" and self._gated:
            self.waiting.set()
            assert self._allowed.acquire(timeout=TIMEOUT_S)
        self._touch(address, nbytes, threads, nice)
        self.efforts.append((threads, nice))
        self.made += nbytes

    def let(self, steps: int) -> None:
        for _ in range(steps):
            self._allowed.release()

    def let_all(self) -> None:
        self._gated = False
        self.let(1000)


@pytest.fixture
def pages(monkeypatch):
    """Steps are of 4 MiB, up to 2 MiB is little, and pages are not locked."""
    monkeypatch.setattr(pinned, "STEP_BYTES", 4 * MiB)
    monkeypatch.setattr(pinned, "end_of_piece", lambda address, piece_bytes: address + 4 * MiB)
    monkeypatch.setattr(pinned, "SMALL_BYTES", 2 * MiB)
    monkeypatch.setattr(arena_module, "SMALL_BYTES", 2 * MiB)
    monkeypatch.setattr(preparation, "PAUSE_S", 0.001)
    monkeypatch.setattr(arena_module, "SPARE_SHARE", 1 << 40)
    monkeypatch.setattr(pinned, "numa_node", lambda index: None)
    monkeypatch.setattr(pinned.PinnedArena, "_register", lambda self, address, nbytes: 0)
    monkeypatch.setattr(pinned.PinnedArena, "_unregister", lambda self, address: 0)
    pages = Pages(monkeypatch)
    yield pages
    pages.let_all()


@pytest.fixture
def arenas(pages):
    made = []

    def make(**options):
        made.append(pinned.PinnedArena(0, threads=2, **options))
        return made[-1]

    yield make
    pages.let_all()
    for thread in threading.enumerate():
        if thread.name == "rl-memory-eager-backup":  # it writes into an arena
            thread.join(TIMEOUT_S)
    for arena in made:
        arena.close()
        assert arena.held_bytes == 0


def resident_bytes() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10


def soon(call, *arguments):
    """What a call returns that must not wait for another thread."""
    start = time.monotonic()
    result = call(*arguments)
    assert time.monotonic() - start < SOON_S
    return result


def test_a_buffer_that_is_being_prepared_is_waited_for(arenas, pages):
    arena, sizes = arenas(), [12 * MiB, 4 * MiB]
    arena.prepare(sizes)
    assert pages.waiting.wait(TIMEOUT_S)
    acquired = []
    thread = threading.Thread(target=lambda: acquired.extend(arena.acquire(nbytes) for nbytes in sizes))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive() and not acquired
    pages.let_all()
    thread.join(TIMEOUT_S)
    assert len(acquired) == 2
    assert arena.held_bytes == pages.made == sum(sizes)


def test_nobody_waits_for_a_buffer_of_another_size(arenas, pages, monkeypatch):
    """As a level-2 sleep, which preserves little, beside a copy of all weights in the making."""
    monkeypatch.setattr(preparation, "PAUSE_S", 2.0)
    arena = arenas()
    arena.prepare([400 * MiB])
    assert pages.waiting.wait(TIMEOUT_S)
    assert soon(arena.acquire, MiB) != soon(arena.acquire, 2 * MiB)
    threading.Timer(0.1, pages.let, [1]).start()
    soon(arena.acquire, 40 * MiB)  # so much takes turns with each step
    assert 43 * MiB <= pages.made <= 47 * MiB


@pytest.fixture
def another_process_fills_memory(monkeypatch):
    with one_at_a_time("host-memory", 1):
        yield


@pytest.mark.usefixtures("another_process_fills_memory")
def test_little_memory_needs_no_turn(arenas):
    soon(arenas().acquire, 2 * MiB)


@pytest.mark.usefixtures("another_process_fills_memory")
def test_a_preparation_that_waits_for_its_turn_ends_too(arenas):
    arena = arenas()
    running = arena.prepare([40 * MiB])
    wait_until(lambda: arena.held_bytes, "it has begun")
    arena.note_sleep(preserving=False)
    soon(running.join)
    assert arena.held_bytes == 0


def test_a_sleep_that_discards_ends_it_between_two_steps(arenas, pages):
    arena, before = arenas(), resident_bytes()
    running = arena.prepare([4 * MiB, 256 * MiB])
    pages.let(33)
    wait_until(lambda: pages.made == 132 * MiB, "half of it is made")
    assert resident_bytes() - before > 120 * MiB
    soon(arena.note_sleep, False)
    assert running.is_alive()  # nobody has waited for its step
    pages.let(1)
    soon(running.join)
    assert pages.made <= 136 * MiB
    assert arena.held_bytes == 4 * MiB  # what is finished goes after the sleep
    assert resident_bytes() - before < 20 * MiB
    arena.settle()
    wait_until(lambda: arena.held_bytes == 0, "nothing is held")


@pytest.mark.parametrize(("mode", "goes_on"), [("auto", False), ("start", True)])
def test_only_auto_is_ended(arenas, pages, mode, goes_on):
    arena = arenas(mode=mode)
    running = arena.prepare([40 * MiB])
    assert pages.waiting.wait(TIMEOUT_S)
    for _ in range(10):
        arena.note_sleep(preserving=False)
    pages.let_all()
    soon(running.join)
    arena.settle()
    if goes_on:
        assert arena.held_bytes == 40 * MiB and arena._settling is None
    else:
        wait_until(lambda: arena.held_bytes == 0, "nothing is held")


def test_at_the_first_use_nothing_is_there(arenas):
    arena = arenas(mode="first_use")
    assert arena.prepare([40 * MiB]) is None
    assert arena.held_bytes == 0
    arena.release(arena.acquire(40 * MiB))
    for _ in range(10):
        arena.note_sleep(preserving=False)
    arena.settle()
    assert arena.held_bytes == 40 * MiB and arena._settling is None


def test_a_sleep_is_not_refused_for_what_is_made_on_a_guess(arenas, pages, monkeypatch):
    monkeypatch.setattr(preparation, "PAUSE_S", 0.05)
    arena = arenas(max_bytes=64 * MiB)
    arena.prepare([60 * MiB])
    pages.let(2)
    wait_until(lambda: pages.made == 8 * MiB, "it has begun")
    threading.Timer(0.1, pages.let_all).start()
    soon(arena.acquire, 20 * MiB)
    assert arena.held_bytes == 20 * MiB
    with pytest.raises(HostMemoryError):
        arena.acquire(60 * MiB)
    assert arena.held_bytes == 20 * MiB


def test_a_buffer_that_ends_within_a_page_is_found_again(arenas, pages):
    pages.let_all()
    arena = arenas()
    arena.prepare([0, 40 * MiB + 5]).join()
    soon(arena.acquire, 40 * MiB + 5)
    assert arena.held_bytes == 40 * MiB + 4096


def test_a_guess_leaves_a_part_of_the_host_free(arenas, pages, monkeypatch, caplog):
    monkeypatch.setattr(arena_module, "SPARE_SHARE", 4)
    monkeypatch.setattr(arena_module, "host_memory_info", lambda: (120 * MiB, 400 * MiB))
    pages.let_all()
    arena = arenas()
    arena.prepare([10 * MiB, 40 * MiB]).join()
    assert arena.held_bytes == 10 * MiB
    assert "not allocated in advance" in caplog.text
    arena.acquire(40 * MiB)  # a sleep itself takes it
    certain = arenas(mode="start")
    certain.prepare([40 * MiB]).join()
    assert certain.held_bytes == 40 * MiB


def test_who_waits_may_give_up(arenas, pages):
    arena, wanted = arenas(), threading.Event()
    wanted.set()
    running = arena.prepare([40 * MiB])
    assert pages.waiting.wait(TIMEOUT_S)
    threading.Timer(0.1, wanted.clear).start()
    with pytest.raises(AllocationCancelled):
        soon(arena.acquire, 40 * MiB, Caller(wanted.is_set))
    pages.let_all()
    soon(running.join)
    with pytest.raises(AllocationCancelled):
        arena.acquire(19 * MiB, Caller(lambda: pages.made < 48 * MiB))  # it makes it itself
    assert pages.made == 48 * MiB
    assert arena.held_bytes == 40 * MiB


def test_who_discards_has_no_demand_and_who_preserved_before_has_some():
    demand = Demand("auto")
    assert not demand.is_gone
    demand.note(preserving=False)
    assert demand.is_gone
    for _ in range(2):
        demand.note(preserving=True)
        for _ in range(PATIENCE):
            assert not demand.is_gone
            demand.note(preserving=False)
        assert demand.is_gone


# -- through the manager ------------------------------------------------------------------------------------


@pytest.fixture
def rank_over(monkeypatch):
    """Makes a rank whose sleeps take host memory from an arena; its copy of all weights counts as large."""
    monkeypatch.setattr(reclaim, "DELAY_S", 0)
    ranks = []

    def make(arena, **options):
        rank = FakeRank(**options)
        rank.arena = rank.manager.arena = arena
        ranks.append(rank)
        return rank

    yield make
    for rank in ranks:
        rank.manager._end_eager_backup(wanted=False)


def settled(arena):
    for thread in threading.enumerate():
        if thread.name in ("rl-memory-reclaim", "rl-memory-give-back"):
            thread.join(TIMEOUT_S)
    return arena.held_bytes


@pytest.mark.parametrize("eager_backup", [False, True])
def test_a_level_2_sleep_at_the_start_waits_for_no_copy_of_the_weights(rank_over, arenas, pages, eager_backup):
    """Start, sleep(2), load the trainer: the common start, and the trainer wants the memory next."""
    arena = arenas()
    rank = rank_over(arena, eager_backup=eager_backup)
    kept = {name: content for name, content in rank.contents().items() if name in ("buffer", "scales", "graph")}
    arena.prepare([400 * MiB])  # for weights that a fake rank does not have
    rank.manager.warm_up()
    assert pages.waiting.wait(TIMEOUT_S)
    soon(sleep, rank, Level.DISCARD)
    wake(rank)
    assert kept.items() <= rank.contents().items()
    assert rank.manager.content is Content.STALE
    pages.let_all()
    if not eager_backup:
        wait_until(lambda: settled(arena) < MiB, "nothing large is held")


def test_a_level_2_sleep_does_not_wait_for_a_copy_in_advance_whose_memory_is_being_made(
    rank_over, arenas, pages, monkeypatch
):
    monkeypatch.setattr(pinned, "SMALL_BYTES", 4096)  # a copy of all weights is more
    monkeypatch.setattr(arena_module, "SMALL_BYTES", 4096)
    arena = arenas()
    rank = rank_over(arena, eager_backup=True)
    size = rank.parameter.nbytes + rank.buffer.nbytes
    arena.prepare([size])
    assert pages.waiting.wait(TIMEOUT_S)
    rank.manager._start_eager_backup()
    soon(sleep, rank, Level.DISCARD)
    assert rank.manager._eager is None


@pytest.mark.parametrize("make", [PagedArena, None], ids=["pageable", "pinned"])
def test_what_level_1_used_is_given_back_after_a_while_of_level_2(rank_over, arenas, pages, make):
    pages.let_all()
    arena = make() if make else arenas()
    rank = rank_over(arena)
    before = rank.contents()
    sleep(rank)
    wake(rank)
    assert rank.contents()["parameter"] == before["parameter"]
    used = settled(arena)
    for number in range(PATIENCE + 2):
        sleep(rank, Level.DISCARD)
        held = settled(arena)
        wake(rank)
        assert (held < used) == (number >= PATIENCE - 1)
    rank.manager.begin_writing()
    rank.allocator.write(rank.parameter, b"\5" * rank.parameter.nbytes)
    rank.manager.finish_writing(complete=True)
    before = rank.contents()
    sleep(rank)
    wake(rank)
    assert {**rank.contents(), "kv_cache": b""} == {**before, "kv_cache": b""}


def test_a_copy_in_advance_is_a_use(rank_over, arenas, pages):
    """Its memory would be made anew after every update."""
    pages.let_all()
    arena = arenas()
    rank = rank_over(arena, eager_backup=True)
    rank.manager.warm_up()
    for _ in range(PATIENCE + 1):
        rank.manager._end_eager_backup(wanted=True)
        used = arena.held_bytes
        sleep(rank, Level.DISCARD)
        assert settled(arena) >= used
        wake(rank)
        rank.manager.begin_writing()
        rank.manager.finish_writing(complete=True)
    assert arena._settling is None


def test_a_sleep_waits_for_what_is_being_given_back_rather_than_fail(arenas, pages, monkeypatch):
    pages.let_all()
    arena = arenas(max_bytes=64 * MiB)
    arena.release(arena.acquire(60 * MiB))
    begun, go_on = threading.Event(), threading.Event()
    discard = arena._discard

    def slowly(address, mapping, pause):
        begun.set()
        assert go_on.wait(TIMEOUT_S)
        discard(address, mapping, pause)

    monkeypatch.setattr(arena, "_discard", slowly)
    arena.note_sleep(preserving=False)
    arena.settle()
    assert begun.wait(TIMEOUT_S)
    assert arena.held_bytes == 60 * MiB  # until it is really gone
    threading.Timer(0.1, go_on.set).start()
    arena.note_sleep(preserving=True)
    arena.acquire(50 * MiB)
    assert arena.held_bytes == 50 * MiB


def test_memory_in_the_background_leaves_the_processors_to_the_engine(pages, monkeypatch):
    """Requests that came meanwhile took a third longer when all threads touched pages."""
    arena = pinned.PinnedArena(0, threads=16)
    preparation = arena.prepare([12 * MiB])
    pages.let(1)
    wait_until(lambda: pages.made == 4 * MiB, "the first step")
    waiting = threading.Thread(target=arena.acquire, args=(12 * MiB,))
    waiting.start()
    assert preparation._awaited.wait(TIMEOUT_S)
    pages.let_all()
    waiting.join(TIMEOUT_S)
    background, hurried = pages.efforts[0], pages.efforts[-1]
    assert background == (2, arena_module.BACKGROUND_NICE)
    assert hurried == (16, 0)
    arena.close()


def test_a_thread_that_touches_pages_is_nice(monkeypatch):
    seen = []
    monkeypatch.setattr(pinned.ctypes, "memset", lambda *_: seen.append(os.getpriority(os.PRIO_PROCESS, 0)))
    own = os.getpriority(os.PRIO_PROCESS, 0)
    pinned.touch(1 << 30, 8 * MiB, threads=2, nice=own + 3)
    assert seen == [own + 3] * 2
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


def test_there_is_one_pause_a_step_and_meanwhile_others_get_the_lock(arenas, pages, monkeypatch):
    """The lock is that of all ranks: a pause that held it would make each of them pause for all."""
    made = []

    def rest(self, worked_s, caller):
        descriptor = os.open(private_directory() / "host-memory.lock", os.O_RDWR | os.O_CREAT, 0o600)
        assert try_lock(descriptor)
        os.close(descriptor)
        made.append(pages.made)

    monkeypatch.setattr(preparation.Pace, "rest", rest)
    pages.let_all()
    running = arenas().prepare([12 * MiB])
    running.join(TIMEOUT_S)
    assert made == [0, 4 * MiB, 8 * MiB, 12 * MiB]  # before the three steps, and before the pages are locked


def test_the_pauses_count_all_that_a_step_did(arenas, pages, monkeypatch):
    """Kernels wait while pages are locked, more than while they are touched."""
    worked, clock = [], Clock(monkeypatch, arena_module)
    monkeypatch.setattr(preparation.Pace, "rest", lambda self, worked_s, caller: worked.append(round(worked_s, 3)))
    monkeypatch.setattr(pinned.PinnedArena, "_register", lambda self, address, nbytes: clock.sleep(0.05) or 0)
    touch = pinned.touch
    monkeypatch.setattr(pinned, "touch", lambda *arguments: clock.sleep(0.01) or touch(*arguments))
    pages.let_all()
    arenas(serves=True).prepare([12 * MiB]).join(TIMEOUT_S)
    assert worked == [0.0, 0.06, 0.06]


@pytest.mark.parametrize("shared", [False, True])
def test_the_long_pauses_are_of_memory_in_advance(arenas, pages, monkeypatch, shared):
    """New weights would overtake a copy with long pauses; and a sleep of another process waits for a shared one."""
    rests, clock = [], Clock(monkeypatch, arena_module)
    monkeypatch.setattr(preparation.Pace, "rest", lambda self, worked_s, caller: rests.append(worked_s))
    monkeypatch.setattr(pinned.PinnedArena, "_register", lambda self, address, nbytes: clock.sleep(0.05) or 0)
    pages.let_all()
    arena = arenas(serves=True)
    if shared:
        file = File(os.memfd_create("shared"), is_new=True)
        os.ftruncate(file.fd, 12 * MiB)
        arena.prepare_file(12 * MiB, lambda map_file: map_file(file, 12 * MiB)).join(TIMEOUT_S)
        os.close(file.fd)
    else:
        arena.acquire(12 * MiB, Caller(awaited=lambda: False))
    assert rests == [0.0] * 3


class Clock:
    """Stands still but for sleeps, after each of which something may happen."""

    def __init__(self, monkeypatch, module, then=lambda: None) -> None:
        self.now, self._then = 100.0, then
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._then()


@pytest.mark.parametrize("worked_s", [0.0, 0.02, 0.4])
@pytest.mark.parametrize(("serves", "ranks", "times"), [(False, 1, 0), (True, 1, 9), (True, 4, 39)])
def test_while_the_engine_computes_background_work_takes_a_tenth_of_the_time(
    monkeypatch, worked_s, serves, ranks, times
):
    pace = preparation.Pace()
    pace.ranks = ranks
    clock = Clock(monkeypatch, preparation, pace.note_step if serves else lambda: None)
    if serves:
        pace.note_step()
    pace.rest(worked_s, preparation.Caller(awaited=lambda: False))
    assert clock.now == pytest.approx(100 + max(preparation.PAUSE_S, times * worked_s))


def test_a_pause_ends_soon_after_the_last_step(monkeypatch):
    pace, clock = preparation.Pace(), Clock(monkeypatch, preparation)
    assert pace.noting(lambda factor, *, offset: 3 * factor + offset)(2, offset=1) == 7
    assert pace.engine_computes
    pace.rest(1.0, preparation.Caller(awaited=lambda: False))
    assert clock.now == pytest.approx(100 + preparation.COMPUTES_S, abs=0.02)
    assert not pace.engine_computes


@pytest.mark.parametrize("end", ["awaited", "go_on"])
def test_a_pause_ends_when_somebody_waits_or_nobody_wants_the_memory(monkeypatch, end):
    pace = preparation.Pace()
    clock = Clock(monkeypatch, preparation, pace.note_step)
    pace.note_step()
    callers = {
        "awaited": preparation.Caller(awaited=lambda: clock.now > 100.2),
        "go_on": preparation.Caller(go_on=lambda: clock.now <= 100.2, awaited=lambda: False),
    }
    pace.rest(1.0, callers[end])
    assert clock.now == pytest.approx(100.2, abs=0.02)


def test_who_waits_for_one_buffer_hurries_all(arenas, pages):
    """Their threads take turns, so that an unhurried one would hold up the one that is waited for."""
    arena = arenas()
    others = [arena.prepare([8 * MiB]), arena.prepare([40 * MiB])]
    assert pages.waiting.wait(TIMEOUT_S)
    waiting = threading.Thread(target=arena.acquire, args=(40 * MiB,))
    waiting.start()
    wait_until(lambda: all(one._awaited.is_set() for one in others), "both to hurry")
    pages.let_all()
    waiting.join(TIMEOUT_S)
    assert not waiting.is_alive()
