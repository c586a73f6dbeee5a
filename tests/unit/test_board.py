from __future__ import annotations

import itertools
import os
import signal
import stat
import tempfile
import time
from pathlib import Path

import msgspec
import pytest

from rl_memory_plugins.board import BoardReader, Boards, StatusBoard
from rl_memory_plugins.errors import EngineFaultError
from rl_memory_plugins.records import EngineStatus


@pytest.fixture
def board(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    board = StatusBoard()
    yield board
    board.close()


def status(version: str) -> EngineStatus:
    return EngineStatus(ranks=[], weight_version=version)


def test_readers_see_the_latest_status(board):
    reader = BoardReader(board.path)
    for version in ("1", "a longer one", "2"):
        board.publish(status(version))
        assert reader.read().weight_version == version
        assert BoardReader(board.path).read() == status(version)


def test_readers_see_whether_the_writer_lives(tmp_path, monkeypatch):
    """The board itself may say for ever that an update runs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    receiving, sending = os.pipe()
    writer = os.fork()
    if writer == 0:
        board = StatusBoard()
        board.publish(EngineStatus(ranks=[], busy="update_weights"))
        os.write(sending, board.path.encode())
        signal.pause()
    path = os.read(receiving, 1000).decode()
    boards = Boards([{"board": path}, {"board": "/on/another/host", "status": msgspec.to_builtins(status("1"))}])
    try:
        for _ in range(2):  # a look changes nothing
            assert boards.writers_live()
        Path(path).unlink()  # as by a cleaner of temporary files
        assert boards.writers_live()
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    for _ in range(2):
        assert not boards.writers_live()
    assert boards.read()[0].busy == "update_weights"


def test_an_unchanged_board_is_not_decoded_again(board):
    reader = BoardReader(board.path)
    board.publish(status("1"))
    assert reader.read() is reader.read()


def test_readers_never_see_half_a_write(board, monkeypatch):
    """Every status is one letter repeated, as often as the letter says; a torn one would mix them."""
    monkeypatch.setattr("rl_memory_plugins.board._WRITE_TIMEOUT_S", 30.0)  # the writer may be paused within a write
    board.publish(status("a"))
    writer = os.fork()
    if writer == 0:
        for number in itertools.count():  # until it is killed
            board.publish(status("abcdefg"[number % 7] * (1 + 9973 * (number % 7))))
    try:
        reader, changes, last = BoardReader(board.path), 0, ""
        deadline = time.monotonic() + 60
        while changes < 200 and time.monotonic() < deadline:
            version = reader.read().weight_version
            assert set(version) == {version[0]}
            assert len(version) == 1 + 9973 * "abcdefg".index(version[0])
            changes += version != last
            last = version
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    assert changes == 200


def test_a_payload_that_is_not_all_there_is_not_shown(board, monkeypatch):
    """As a processor shows it that lets the sequence number pass the payload."""
    monkeypatch.setattr("rl_memory_plugins.board._WRITE_TIMEOUT_S", 0.05)
    board.publish(status("aaaa"))
    former = bytes(board._memory[:])
    board.publish(status("bbbb"))
    whole = bytes(board._memory[:])
    at = next(at for at, pair in enumerate(zip(former, whole, strict=True)) if pair == (ord("a"), ord("b")))
    board._memory[at + 2 : at + 4] = b"aa"
    reader = BoardReader(board.path)
    with pytest.raises(EngineFaultError):
        reader.read()
    board._memory[at + 2 : at + 4] = b"bb"
    assert reader.read().weight_version == "bbbb"


def test_an_unchanged_board_costs_one_comparison(board, monkeypatch):
    reader = BoardReader(board.path)
    board.publish(status("1"))
    seen = reader.read()
    monkeypatch.setattr("rl_memory_plugins.board._checksum", None)
    assert reader.read() is seen


def test_a_status_that_does_not_fit_leaves_the_board_readable(board):
    reader = BoardReader(board.path)
    board.publish(status("1"))
    with pytest.raises(ValueError, match="does not fit"):
        board.publish(status("x" * (1 << 20)))
    assert BoardReader(board.path).read().weight_version == "1"
    board.publish(status("2"))
    assert reader.read().weight_version == "2"


def test_only_this_user_can_enter(board):
    directory = Path(board.path).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(Path(board.path).stat().st_mode) == 0o600


def test_a_board_stays_whose_process_has_another_number_here(board, monkeypatch):
    """Containers that share the directory do not see each other's processes."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 4_000_000)  # there is no such process
        theirs = StatusBoard()
    StatusBoard().close()
    assert Path(theirs.path).exists()
    Path(theirs.path).unlink()


def test_boards_of_dead_processes_are_removed_and_others_stay(board):
    directory = Path(board.path).parent
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    (directory / f"{pid}-x.board").touch()
    other = StatusBoard()
    assert set(directory.glob("*.board")) == {Path(board.path), Path(other.path)}
    other.close()
    assert not Path(other.path).exists()
