"""The directories of boards and sockets."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import tempfile
from pathlib import Path

import pytest

from rl_memory_plugins.board import StatusBoard
from rl_memory_plugins.doctor.checks import places
from rl_memory_plugins.doctor.finding import Status

OK, WARNING, FAILURE = Status.OK, Status.WARNING, Status.FAILURE


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """The temporary directory of this process, of which a test may set another."""

    def use(folder):
        monkeypatch.setenv("TMPDIR", str(folder))
        monkeypatch.setattr(tempfile, "tempdir", None)

    use(tmp_path)
    return use


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_private_directory_that_is_none(temporary, tmp_path, kind):
    assert places.private_place().status is OK
    path = tmp_path / f"rl-memory-{os.getuid()}"
    path.rmdir()
    path.touch() if kind == "file" else path.symlink_to(tmp_path)
    found = places.private_place()
    assert found.status is FAILURE and "TMPDIR" in found.remedy


def test_a_private_directory_without_locks(temporary, monkeypatch):
    """As on Lustre that is mounted with `noflock`."""

    def refuse(fd, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    found = places.private_place()
    assert found.status is FAILURE and "locks" in found.seen and "TMPDIR" in found.remedy


def test_boards_of_running_and_ended_engines(temporary, tmp_path):
    board = StatusBoard()
    ended = tmp_path / f"rl-memory-{os.getuid()}" / "1-x.board"
    ended.touch()
    found = places.private_place()
    assert found.details == {"boards": [board.path], "ended": [str(ended)]}
    board.close()


def test_a_directory_whose_path_is_too_long_for_a_socket(temporary, tmp_path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    temporary(long)
    found = places.sockets()
    assert found.status is FAILURE and 'directory="/tmp"' in found.remedy


def test_a_temporary_directory_that_does_not_exist(temporary, tmp_path):
    assert places.sockets().status is OK
    temporary(tmp_path / "absent")
    assert places.sockets().status is WARNING


def test_a_stale_socket(temporary, tmp_path):
    path = tmp_path / "rl-memory-x" / "weights.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as trainer:
        trainer.bind(str(path))
        trainer.listen()
        assert places.sockets().status is OK
    found = places.sockets()
    assert found.status is WARNING
    assert found.details["stale"] == [str(path)]


def test_the_longest_path_of_a_socket_is_the_kernels(tmp_path):
    with pytest.raises(OSError), socket.socket(socket.AF_UNIX) as one:
        one.bind("/tmp/" + "x" * (places._LONGEST_SOCKET_PATH - 4))


def test_checks_leave_nothing_behind_but_the_private_directory(temporary, tmp_path):
    places.private_place()
    places.sockets()
    assert [path.name for path in tmp_path.iterdir()] == [f"rl-memory-{os.getuid()}"]
    assert list(Path(tmp_path, f"rl-memory-{os.getuid()}").iterdir()) == []
