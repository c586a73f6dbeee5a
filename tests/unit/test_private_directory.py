"""Locks between the processes of a host."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import tempfile

import pytest

from rl_memory_plugins.board import BoardReader, StatusBoard
from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.memory.open_buffers import Entry, others
from rl_memory_plugins.memory.shared_buffer import SharedBuffer
from rl_memory_plugins.private_directory import one_at_a_time, private_directory, try_lock
from rl_memory_plugins.server.lease import GpuLease


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def is_free(what: str) -> bool:
    with (private_directory() / f"{what}.lock").open("w") as file:
        return try_lock(file.fileno())


def test_one_at_a_time():
    with one_at_a_time("this", 60):
        assert not is_free("this")
        assert is_free("that")
    assert is_free("this")


def test_a_fork_does_not_keep_the_turn():
    with one_at_a_time("this", 60):
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
    try:
        assert is_free("this")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_turn_that_takes_too_long_is_not_waited_for(caplog):
    with one_at_a_time("this", 60), one_at_a_time("this", 0.05):
        assert "more than 0.05 s" in caplog.text


def test_a_planted_link_leads_nowhere(tmp_path):
    """Anybody can plant one in /tmp, to any directory of this user."""
    other = tmp_path / "home"
    other.mkdir(mode=0o755)
    (other / "mine.board").write_text("not the package's")
    (tmp_path / f"rl-memory-{os.getuid()}").symlink_to(other)
    for use in (private_directory, StatusBoard, lambda: one_at_a_time("this", 1).__enter__()):
        with pytest.raises(PermissionError, match="TMPDIR"):
            use()
    assert stat.S_IMODE(other.stat().st_mode) == 0o755
    assert [path.name for path in other.iterdir()] == ["mine.board"]


def test_a_file_in_its_place_is_refused(tmp_path):
    (tmp_path / f"rl-memory-{os.getuid()}").touch()
    with pytest.raises(PermissionError, match="cannot be opened as a directory"):
        private_directory()


def test_a_directory_of_this_user_becomes_private(tmp_path):
    directory = tmp_path / f"rl-memory-{os.getuid()}"
    directory.mkdir(mode=0o755)
    assert private_directory() == directory
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path):
    target = tmp_path / "target"
    target.write_text("kept")
    (private_directory() / "this.lock").symlink_to(target)
    with pytest.raises(OSError), one_at_a_time("this", 1):
        pass
    assert target.read_text() == "kept"


@pytest.fixture(params=[errno.ENOSYS, errno.ENOLCK])
def no_locks(request, monkeypatch):
    """A file system without locks: Lustre that is mounted with `noflock`, NFS without its lock daemon."""

    def refuse(fd, operation):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_where_there_are_no_locks_nobody_waits_for_one(no_locks, caplog):
    done = []
    for _ in range(2):
        with one_at_a_time("this", 60, lambda: pytest.fail("waits for a process that does not exist")):
            done.append(True)
    assert len(done) == 2
    [record] = caplog.records
    assert str(private_directory()) in record.getMessage() and "TMPDIR" in record.getMessage()


@pytest.mark.parametrize("make", [StatusBoard, lambda: GpuLease(["GPU-1"])], ids=["board", "lease"])
def test_what_tells_the_living_from_the_dead_by_locks_is_refused(no_locks, make):
    with pytest.raises(UnsupportedError, match="TMPDIR"):
        make()
    assert list(private_directory().iterdir()) == []


def test_without_locks_nothing_counts_as_dead(monkeypatch):
    """The writer has its lock, but this reader's mount has none."""
    board, buffer = StatusBoard(), SharedBuffer.create(4096)
    entry = Entry(buffer)

    def refuse(fd, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        assert BoardReader(board.path).writer_lives()
        path = private_directory() / "host-copies" / "1-3"
        path.touch()
        assert list(others()) == [] and path.exists()
    entry.remove()
    board.close()
    buffer.close()


def test_an_entry_without_a_lock_goes_like_others(no_locks):
    class Buffer:
        fd = 7

    Entry(Buffer()).remove()
    assert list((private_directory() / "host-copies").iterdir()) == []
