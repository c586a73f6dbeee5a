"""The file of a shared copy: whose files are taken, what nobody can do to them, and their preparation on a GPU host."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

import pytest

from integration.waiting import wait_until
from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines.rank_builder import build_manager
from rl_memory_plugins.memory import pinned
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.fake import FakeAllocator
from rl_memory_plugins.memory.open_buffers import Entry, others
from rl_memory_plugins.memory.pinned import PinnedArena
from rl_memory_plugins.memory.shared_buffer import KEY_BYTES, Header, SharedBuffer
from rl_memory_plugins.memory.shared_buffers import SharedBuffers

MiB = 1 << 20
KEY = bytes(range(KEY_BYTES))
SOON_S = 20.0


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def buffer():
    buffer = SharedBuffer.create(3 * MiB + 1)
    yield buffer
    buffer.close()


def test_another_process_finds_the_same_memory(buffer):
    buffer.header = Header(complete=True, key=KEY)
    os.pwrite(buffer.fd, b"weights", MiB)
    same = SharedBuffer.open(os.getpid(), buffer.fd)
    assert (same.name, same.nbytes, same.header) == (buffer.name, buffer.nbytes, (True, KEY))
    assert same.nbytes == 3 * MiB + 4096
    assert os.pread(same.fd, 7, MiB) == b"weights"
    same.close()


def test_nobody_can_shrink_the_file_under_a_reader(buffer):
    """A read beyond the end of a mapped file is a fault."""
    for nbytes in (0, 8 * MiB):
        with pytest.raises(PermissionError):
            os.ftruncate(buffer.fd, nbytes)


def test_locks_say_who_relies_on_the_bytes(buffer):
    others = [SharedBuffer.open(os.getpid(), buffer.fd) for _ in range(2)]
    assert buffer.lock(exclusive=True)
    assert not others[0].lock(exclusive=False)
    assert buffer.share_lock()
    assert all(other.lock(exclusive=False) for other in others)
    buffer.unlock()
    others[0].close()
    assert not buffer.lock(exclusive=True)
    others[1].close()
    assert buffer.lock(exclusive=True)


def test_a_closed_file_is_unlocked_although_a_forked_process_has_it_open():
    buffer = SharedBuffer.create(MiB)
    buffer.lock(exclusive=True)
    other, forked = SharedBuffer.open(os.getpid(), buffer.fd), os.dup(buffer.fd)
    buffer.close()
    assert other.lock(exclusive=True)
    other.close()
    os.close(forked)


def test_other_files_are_left_alone(tmp_path):
    """A number that another process has reused for something else, with a name that looks right, or without seals."""
    plain = os.open(tmp_path / "memfd:rl-memory-copy", os.O_RDWR | os.O_CREAT)
    unsealed = os.memfd_create("rl-memory-copy", os.MFD_ALLOW_SEALING)
    foreign = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    reading, writing = os.pipe()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for fd in (plain, unsealed, foreign, reading, writing, 9999):
        assert SharedBuffer.open(os.getpid(), fd) is None
    assert SharedBuffer.open(2**30, 3) is None
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    for fd in (plain, unsealed, foreign, reading, writing):
        os.close(fd)


def test_files_of_dead_processes_are_removed(tmp_path, buffer):
    entry = Entry(buffer)
    folder = tmp_path / f"rl-memory-{os.getuid()}" / "host-copies"
    (folder / "1-3").touch()
    (folder / "note").touch()
    assert list(others()) == []  # the entry is of this process
    assert sorted(path.name for path in folder.iterdir()) == sorted([f"{os.getpid()}-{buffer.fd}", "note"])
    entry.remove()
    assert [path.name for path in folder.iterdir()] == ["note"]


@pytest.mark.parametrize("share", [False, True])
def test_the_option(share):
    arena = PagedArena()
    build_manager(RLMemoryConfig(share_host_backups=share), 0, (FakeAllocator(), arena), lambda tag: [])
    assert (arena.shared is not None) is share


@pytest.fixture
def arena(monkeypatch):
    """Pages are not locked."""
    monkeypatch.setattr(pinned, "numa_node", lambda index: None)
    monkeypatch.setattr(PinnedArena, "_register", lambda self, address, nbytes: 0)
    monkeypatch.setattr(PinnedArena, "_unregister", lambda self, address: 0)
    arena = PinnedArena(0, threads=2)
    arena.shared = SharedBuffers(arena)
    yield arena
    arena.close()


def made(arena: PinnedArena) -> None:
    wait_until(lambda: not arena._running(), "the preparation ends", SOON_S)


def test_a_prepared_buffer_waits_for_the_first_sleep(arena):
    arena.shared.prepare(KEY, 40 * MiB)
    made(arena)
    [held] = arena.shared.held.values()
    assert held == arena.held_bytes == 40 * MiB
    before = arena.shared.held
    address = arena.shared.lease(KEY, 40 * MiB, lambda address: True)
    assert address
    assert arena.shared.held == before
    assert arena.held_bytes == 40 * MiB


def test_a_sleep_waits_for_the_preparation_and_makes_no_other(arena, monkeypatch):
    monkeypatch.setattr(pinned, "STEP_BYTES", 4 * MiB)
    go_on, populate = threading.Event(), pinned.populate

    def slow(*arguments):
        assert go_on.wait(SOON_S)
        populate(*arguments)

    monkeypatch.setattr(pinned, "populate", slow)
    arena.shared.prepare(KEY, 40 * MiB)
    start = time.monotonic()
    threading.Timer(0.2, go_on.set).start()
    assert arena.shared.lease(KEY, 40 * MiB, lambda address: True)
    assert time.monotonic() - start >= 0.1
    assert arena.held_bytes == 40 * MiB


def test_level_2_gives_the_prepared_memory_back(arena):
    arena.shared.prepare(KEY, 40 * MiB)
    made(arena)
    arena.note_sleep(preserving=False)
    arena.settle()
    wait_until(lambda: arena.held_bytes == 0, "the memory is given back", SOON_S)
    assert arena.shared.held == {}


def test_a_lease_is_not_given_back(arena):
    assert arena.shared.lease(KEY, 40 * MiB, lambda address: True)
    arena.free_idle()
    arena.note_sleep(preserving=False)
    arena.settle()
    time.sleep(0.1)
    assert arena.held_bytes == 40 * MiB
    arena.shared.end_lease()
    arena.free_idle()
    assert arena.held_bytes == 0


def test_a_process_has_one_lease_at_a_time(arena):
    assert arena.shared.lease(KEY, MiB, lambda address: True)
    assert arena.shared.lease(bytes(KEY_BYTES), MiB, lambda address: True) is None


def test_bytes_that_change_while_they_are_copied_are_no_copy(arena):
    assert arena.shared.lease(KEY, MiB, lambda address: False) is None
    written = []
    assert arena.shared.lease(KEY, MiB, lambda address: not written.append(address))
    assert len(written) == 1


def test_a_failed_copy_is_no_copy(arena):
    def fail(address):
        raise RuntimeError("the device is lost")

    with pytest.raises(RuntimeError):
        arena.shared.lease(KEY, MiB, fail)
    written = []
    assert arena.shared.lease(KEY, MiB, lambda address: not written.append(address))
    assert len(written) == 1
