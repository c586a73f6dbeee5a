"""Locks between the processes of a host."""

from __future__ import annotations

import os
import signal
import tempfile

import pytest

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
