"""Locks between the processes of a host."""

from __future__ import annotations

import os
import signal
import stat
import tempfile

import pytest

from rl_memory_plugins.board import StatusBoard
from rl_memory_plugins.private_directory import one_at_a_time, private_directory, try_lock


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
