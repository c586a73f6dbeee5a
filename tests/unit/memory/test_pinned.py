"""How the pinned arena makes pages; page-locking itself needs a GPU (`tests/gpu/test_pinned.py`)."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import interrupts, refuse_threads

from integration.waiting import wait_until
from rl_memory_plugins.errors import HostMemoryError
from rl_memory_plugins.memory import arena as arena_module
from rl_memory_plugins.memory import copies, pinned, preparation
from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.arena import address_of
from rl_memory_plugins.memory.preparation import Caller, Demand
from rl_memory_plugins.memory.shared_buffer import SharedBuffer
from rl_memory_plugins.memory.shared_buffers import File

MiB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.fixture
def mapping():
    mapping = mmap.mmap(-1, 65 * MiB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    yield mapping
    mapping.close()


def test_touching_makes_every_page_resident(mapping):
    before = resident_bytes()
    pinned.touch(address_of(mapping), len(mapping), threads=3)
    assert abs(resident_bytes() - before - len(mapping)) < 4 * MiB


def test_pages_can_still_be_made_while_python_ends():
    """A copy in the background may need them then; an executor would refuse, with a traceback in the engine's log."""
    code = """
        import mmap, threading, time
        from rl_memory_plugins.memory import pinned
        from rl_memory_plugins.memory.arena import address_of

        def make():
            threading.main_thread().join()
            mapping = mmap.mmap(-1, 8 << 20)
            pinned.touch(address_of(mapping), len(mapping), threads=2)
            print("made")

        threading.Thread(target=make).start()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "made", "")


def test_a_preferred_node_is_only_a_hint(mapping):
    for node in (None, 0, 1000):
        pinned.prefer_node(address_of(mapping), len(mapping), node)
    mapping[-1:] = b"x"
    assert mapping[-1:] == b"x"


@pytest.fixture
def arena(monkeypatch):
    """An arena whose pages are not locked."""
    monkeypatch.setattr(pinned, "numa_node", lambda index: None)
    monkeypatch.setattr(pinned.PinnedArena, "_register", lambda self, address, nbytes: 0)
    monkeypatch.setattr(pinned.PinnedArena, "_unregister", lambda self, address: 0)
    arena = pinned.PinnedArena(0, mode="start", threads=2)
    yield arena
    arena.close()


def test_memory_that_stays_page_locked_stays_mapped(arena, monkeypatch):
    address = arena.acquire(4 * MiB)
    arena.release(address)
    monkeypatch.setattr(arena, "_unregister", lambda address: 700)
    arena.close()
    assert ctypes.c_char.from_address(address).value == b"\0"  # a fault if it were gone
    assert arena.held_bytes == 0


def test_a_turn_that_ends_with_an_error_leaves_no_memory_in_use(arena, monkeypatch):
    """Each retry would take the memory of another copy, page-locked and known to nobody."""

    @contextmanager
    def turn(*_):
        yield
        raise OSError("the lock cannot be given back")

    monkeypatch.setattr(arena_module, "one_at_a_time", turn)
    with pytest.raises(OSError, match="given back"):
        arena.acquire(40 * MiB)
    assert arena.held_bytes == 0
    buffer = SharedBuffer.create(40 * MiB)
    with pytest.raises(OSError, match="given back"):
        arena.map_file(File(buffer.fd, is_new=True), 40 * MiB)
    assert arena.held_bytes == 0
    buffer.close()


def test_an_interrupt_while_pages_are_locked_leaves_none_locked(arena, monkeypatch):
    """Pages that stay locked after their mapping has gone would be read in place of those of a later mapping."""
    locked, begun = set(), threading.Event()

    def lock(address, nbytes):
        begun.set()
        time.sleep(0.3)
        locked.add(address)
        return 0

    def unlock(address):
        locked.remove(address)
        return 0

    monkeypatch.setattr(arena, "_register", lock)
    monkeypatch.setattr(arena, "_unregister", unlock)
    with pytest.raises(KeyboardInterrupt), interrupts(begun):
        arena.acquire(4 * MiB)
    assert begun.is_set() and not locked
    assert arena.held_bytes == 0 and not arena._kept
    address = arena.acquire(4 * MiB)
    assert locked == {address}
    arena.release(address)
    arena.close()
    assert not locked


def test_without_a_thread_to_be_had_memory_is_made_when_it_is_needed(arena, monkeypatch):
    with monkeypatch.context() as patch:
        refuse_threads(patch)
        arena.prepare([4 * MiB])
    assert arena.held_bytes == 0
    arena.acquire(4 * MiB)
    assert arena.held_bytes == 4 * MiB


def slow_pages(monkeypatch):
    """Returns what tells whether every thread that began to write has ended."""
    begun, ended = [], []

    def memset(address, value, nbytes):
        begun.append(address)
        time.sleep(0.2)
        ended.append(address)

    monkeypatch.setattr(ctypes, "memset", memset)
    return lambda: bool(begun) and sorted(begun) == sorted(ended)


def test_without_a_thread_to_be_had_the_pages_are_made_here_and_not_more_slowly_after(mapping, monkeypatch):
    all_ended, niceness = slow_pages(monkeypatch), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    refuse_threads(monkeypatch)
    pinned.touch(address_of(mapping), len(mapping), threads=4, nice=5)
    assert all_ended()
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == niceness


def test_a_thread_whose_start_was_interrupted_writes_nothing(mapping, monkeypatch):
    """It may begin after the interruption, when the memory is gone."""
    written, late = [], []

    def interrupted(thread):
        late.append(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "memset", lambda address, value, nbytes: written.append(address))
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pinned.touch(address_of(mapping), len(mapping), threads=4)
        late[0].run()
    assert len(late) == 1 and written == []


def test_no_thread_outlives_an_interruption(mapping, monkeypatch):
    begun, ended = threading.Event(), []

    def memset(address, value, nbytes):
        begun.set()
        time.sleep(1.0 if address == address_of(mapping) else 0.1)
        ended.append(address)

    monkeypatch.setattr(ctypes, "memset", memset)
    with interrupts(begun, 3), pytest.raises(KeyboardInterrupt):
        pinned.touch(address_of(mapping), len(mapping), threads=4)
    left = len(ended)
    assert ended[-1] == address_of(mapping)
    time.sleep(0.5)
    assert len(ended) == left


class Driver:
    """Locks pages, of at most so many bytes."""

    def __init__(self, monkeypatch, arena, *, allowed=1 << 30):
        self.locked: dict[int, int] = {}  # bytes by address
        self._allowed = allowed
        monkeypatch.setattr(arena, "_register", self._lock)
        monkeypatch.setattr(arena, "_unregister", self._unlock)

    def _lock(self, address, nbytes):
        if sum(self.locked.values()) + nbytes > self._allowed:
            return 2
        self.locked[address] = nbytes
        return 0

    def _unlock(self, address):
        del self.locked[address]
        return 0


@pytest.fixture
def serving(arena, monkeypatch):
    """An arena of a process that answers requests, in pieces of 3 MiB, at whose ends no mapping begins by itself, and
    of 1 MiB while the engine computes."""
    for module in (arena_module, pinned):
        monkeypatch.setattr(module, "LARGE_PIECE_BYTES", 3 * MiB)
    monkeypatch.setattr(arena_module, "PIECE_BYTES", MiB)
    monkeypatch.setattr(preparation, "PAUSE_S", 0.001)
    monkeypatch.setattr(arena, "_serves", True)
    return arena


def stops_after_two(monkeypatch):
    """Preparations stop behind two steps until somebody waits for them. Returns the event of a stop."""
    pauses, stopped = iter(range(2)), threading.Event()

    def rest(self, worked_s, caller):
        if next(pauses, None) is None:
            stopped.set()
            wait_until(lambda: caller.awaited() or not caller.go_on(), "the end of a pause")

    monkeypatch.setattr(preparation.Pace, "rest", rest)
    return stopped


def test_what_is_prepared_beside_requests_is_locked_in_pieces(serving, monkeypatch):
    driver = Driver(monkeypatch, serving)
    serving.prepare([18 * MiB]).join()
    address = serving.acquire(18 * MiB)
    ends = [start + nbytes for start, nbytes in sorted(driver.locked.items())]
    assert len(ends) in (6, 7) and min(driver.locked) == address and ends[-1] == address + 18 * MiB
    assert sorted(driver.locked)[1:] == ends[:-1] and all(end % (3 * MiB) == 0 for end in ends[:-1])
    assert_copies_fit(driver, Block(1 << 40, 18 * MiB), address)
    serving.release(address)
    serving.close()
    assert driver.locked == {}


def assert_copies_fit(driver, block, address):
    """No copy reaches over two pieces."""
    for part, start in copies.by_pieces([(block, address)], MiB):
        assert any(piece <= start and start + part.nbytes <= piece + size for piece, size in driver.locked.items())


def test_while_the_engine_computes_the_pieces_are_small(serving, monkeypatch):
    """All work on the GPU waits while a piece is locked: requests of 19 ms took 21.5 beside pieces of 128 MiB."""
    driver, steps = Driver(monkeypatch, serving), iter([True] * 3 + [False] * 2 + [True] * 100)
    monkeypatch.setattr(preparation.Pace, "engine_computes", property(lambda self: next(steps)))
    monkeypatch.setattr(preparation.Pace, "rest", lambda self, worked_s, caller: None)
    serving.prepare([18 * MiB]).join()
    address = serving.acquire(18 * MiB)
    assert_copies_fit(driver, Block(1 << 40, 18 * MiB), address)
    pieces = sorted(driver.locked.items())
    assert sum(driver.locked.values()) == 18 * MiB
    assert max(nbytes for _, nbytes in pieces[:3]) <= MiB
    assert pieces[4][1] == 3 * MiB
    assert max(nbytes for _, nbytes in pieces[5:]) <= MiB


def test_a_copy_of_new_weights_is_made_in_large_pieces_though_the_engine_computes(serving, monkeypatch):
    """Each piece has a pause behind it, and the next weights would overtake the copy."""
    driver = Driver(monkeypatch, serving)
    for module in (pinned, arena_module):
        monkeypatch.setattr(module, "SMALL_BYTES", MiB)
    serving.pace.note_step()
    serving.acquire(18 * MiB, Caller(awaited=lambda: False))
    assert len(driver.locked) in (6, 7)


def test_what_is_needed_at_once_is_locked_in_pieces_without_pauses(serving, monkeypatch):
    """They are unlocked while requests run."""
    driver, paused = Driver(monkeypatch, serving), []
    monkeypatch.setattr(pinned, "time", SimpleNamespace(sleep=paused.append))
    address = serving.acquire(18 * MiB)
    assert not paused
    assert len(driver.locked) in (6, 7) and min(driver.locked) == address
    serving.release(address)
    serving.free_idle()
    assert driver.locked == {} and paused.count(pinned.UNLOCK_PAUSE_S) >= 5


def test_a_caller_who_waits_has_the_rest_made_in_one_step(serving, monkeypatch):
    driver, two_made, steps = Driver(monkeypatch, serving), stops_after_two(monkeypatch), []
    monkeypatch.setattr(pinned, "touch", lambda address, nbytes, *effort: steps.append(nbytes))
    preparing = serving.prepare([40 * MiB])
    assert two_made.wait(60)
    address = serving.acquire(40 * MiB)
    preparing.join()
    assert len(steps) == 3 and sum(steps) == sum(driver.locked.values()) == 40 * MiB
    assert max(driver.locked) + driver.locked[max(driver.locked)] == address + 40 * MiB


def test_a_preparation_that_ends_leaves_no_piece_locked(serving, monkeypatch):
    driver, two_made = Driver(monkeypatch, serving), stops_after_two(monkeypatch)
    preparing = serving.prepare([40 * MiB])
    assert two_made.wait(60)
    assert len(driver.locked) == 2
    preparing.end()
    preparing.join()
    assert driver.locked == {} and serving.held_bytes == 0


def test_a_copy_for_which_nobody_waits_yet_gets_its_memory_in_pieces(serving, monkeypatch):
    driver, awaited = Driver(monkeypatch, serving), threading.Event()
    monkeypatch.setattr(pinned, "SMALL_BYTES", MiB)
    monkeypatch.setattr(arena_module, "SMALL_BYTES", MiB)
    address = serving.acquire(40 * MiB, Caller(awaited=awaited.is_set))
    assert len(driver.locked) > 40 * MiB // (3 * MiB)
    serving.release(address)
    serving.free_idle()
    efforts = []
    monkeypatch.setattr(pinned, "touch", lambda start, nbytes, threads, nice=0: efforts.append(nice) or awaited.set())
    serving.acquire(40 * MiB, Caller(awaited=awaited.is_set))
    assert efforts == [arena_module.BACKGROUND_NICE, 0]  # the rest in one step
    assert sum(driver.locked.values()) == 40 * MiB


def test_who_waits_later_for_a_pending_buffer_hurries_it_then(serving, monkeypatch):
    Driver(monkeypatch, serving)
    stopped, awaited, acquired = stops_after_two(monkeypatch), threading.Event(), []
    preparing = serving.prepare([40 * MiB])
    copying = threading.Thread(
        target=lambda: acquired.append(serving.acquire(40 * MiB, Caller(awaited=awaited.is_set)))
    )
    copying.start()
    assert stopped.wait(60)
    assert not preparing._awaited.is_set() and not acquired
    awaited.set()
    copying.join(60)
    assert acquired and preparing._awaited.is_set()


def test_pieces_that_are_refused_stay_pageable_and_are_noted_once(serving, monkeypatch):
    driver = Driver(monkeypatch, serving, allowed=9 * MiB)
    serving.prepare([18 * MiB]).join()
    assert len(serving.notes) == 1 and "could not be page-locked" in serving.notes[0]
    assert 0 < sum(driver.locked.values()) <= 9 * MiB
    serving.close()
    assert driver.locked == {} and serving.held_bytes == 0


def test_a_piece_that_stays_locked_keeps_the_mapping(serving, monkeypatch):
    driver = Driver(monkeypatch, serving)
    serving.prepare([18 * MiB]).join()
    stays = sorted(driver.locked)[1]
    unlock = serving._unregister
    monkeypatch.setattr(serving, "_unregister", lambda address: 700 if address == stays else unlock(address))
    serving.close()
    assert ctypes.c_char.from_address(stays).value == b"\0"  # a fault if it were gone
    assert serving.held_bytes == 0 and len(serving._kept) == 1


# -- memory that the background gives back beside a sleep or a wake -------------------------------------------


@pytest.fixture
def unneeded(serving, monkeypatch):
    """Sleeps at level 2 have shown that nobody needs the memory that is made."""
    monkeypatch.setattr(serving, "demand", Demand("auto"))
    monkeypatch.setattr(arena_module, "SPARE_SHARE", 1 << 40)  # however little memory the host has free
    return serving


@pytest.fixture
def pauses(monkeypatch):
    """The pauses of the background, which take no time."""
    made = []
    monkeypatch.setattr(arena_module, "time", SimpleNamespace(sleep=made.append, monotonic=time.monotonic))
    return made


def first_pause_lasts_until(monkeypatch, condition):
    """Returns: the pauses, and the event of the first."""
    begun, pauses = threading.Event(), []

    def pause(seconds):
        pauses.append(seconds)
        begun.set()
        wait_until(condition, "somebody who waits")

    monkeypatch.setattr(arena_module, "time", SimpleNamespace(sleep=pause, monotonic=time.monotonic))
    return pauses, begun


def give_back(arena) -> None:
    arena.note_sleep(preserving=False)
    arena.settle()


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_sleep_or_a_wake_has_the_driver_nearly_for_itself(unneeded, pauses, monkeypatch, is_busy):
    driver = Driver(monkeypatch, unneeded)
    unneeded.prepare([18 * MiB]).join()
    locked = len(driver.locked)
    unneeded.is_busy = is_busy
    give_back(unneeded)
    unneeded._settling.join()
    assert driver.locked == {} and unneeded.held_bytes == 0
    unmapped = 1  # the pages too are freed in pieces, which are larger
    assert pauses == [arena_module.PAUSE_S] * (locked + unmapped if is_busy else 0)


def test_nothing_pauses_once_somebody_waits_for_the_memory(unneeded, monkeypatch):
    pauses, begun = first_pause_lasts_until(monkeypatch, lambda: unneeded._waiting)
    driver = Driver(monkeypatch, unneeded)
    unneeded.prepare([18 * MiB]).join()
    unneeded.is_busy = True
    give_back(unneeded)
    assert begun.wait(60)
    unneeded.free_idle()
    assert driver.locked == {} and len(pauses) == 1
    assert unneeded._waiting == 0


def test_what_a_sleep_makes_unneeded_before_it_is_whole_is_given_back_slowly_too(unneeded, pauses, monkeypatch):
    stopped = stops_after_two(monkeypatch)
    driver = Driver(monkeypatch, unneeded)
    preparation_of_all = unneeded.prepare([18 * MiB])
    assert stopped.wait(60)
    locked = len(driver.locked)
    unneeded.is_busy = True
    unneeded.note_sleep(preserving=False)
    preparation_of_all.join()
    assert driver.locked == {} and unneeded.held_bytes == 0
    assert locked >= 2 and len(pauses) == locked + 1


def test_nor_does_a_buffer_that_has_ended_pause_once_somebody_waits_for_it(unneeded, monkeypatch):
    pauses, begun = first_pause_lasts_until(monkeypatch, lambda: preparation_of_all._awaited.is_set())
    stopped = stops_after_two(monkeypatch)
    driver = Driver(monkeypatch, unneeded)
    preparation_of_all = unneeded.prepare([18 * MiB])
    assert stopped.wait(60)
    unneeded.is_busy = True
    unneeded.note_sleep(preserving=False)
    assert begun.wait(60)
    preparation_of_all.hurry()
    preparation_of_all.join()
    assert driver.locked == {} and len(pauses) == 1


def test_a_shared_file_is_freed_at_once_because_a_sleep_may_want_the_lock_of_who_frees_it(
    unneeded, pauses, monkeypatch
):
    stopped = stops_after_two(monkeypatch)
    driver = Driver(monkeypatch, unneeded)
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, 18 * MiB)
        file = File(fd, is_new=True)
        preparation_of_file = unneeded.prepare_file(18 * MiB, lambda map_file: map_file(file, 18 * MiB))
        assert stopped.wait(60) and driver.locked
        unneeded.is_busy = True
        unneeded.note_sleep(preserving=False)
        preparation_of_file.join()
        assert driver.locked == {} and pauses == []
    finally:
        os.close(fd)


def test_pages_of_a_file_that_the_kernel_refuses_are_a_typed_error(arena, monkeypatch):
    """A copy would end the process at the first of them."""
    monkeypatch.setattr(pinned, "populate", lambda *part: errno.ENOMEM)
    file = File(os.memfd_create("shared"), is_new=True)
    os.ftruncate(file.fd, 8 * MiB)
    with pytest.raises(HostMemoryError, match="Cannot allocate memory"):
        arena.map_file(file, 8 * MiB)
    os.close(file.fd)
    assert arena.held_bytes == 0
