"""Backups that are made in advance. Copies stop where a test says, so every overlap happens for certain."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from helpers import FakeRank

from rl_memory_plugins.memory import backup as backup_module
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.eager import EagerBackup
from rl_memory_plugins.memory.fake import GARBAGE_BYTE
from rl_memory_plugins.memory.host import PAGE, HostAllocator
from rl_memory_plugins.tags import Content, Level, Tag

TIMEOUT_S = 60  # of what would else hang


class Gate:
    """Stops the device's copies to the host before each step, until it is opened."""

    def __init__(self, device, monkeypatch) -> None:
        self._copy = device.begin_copy_to_host
        self.reached, self._open = threading.Event(), threading.Event()
        monkeypatch.setattr(device, "begin_copy_to_host", self._stop)

    def _stop(self, pairs):
        self.reached.set()
        assert self._open.wait(TIMEOUT_S)
        return self._copy(pairs)

    def wait_for_copy(self) -> None:
        assert self.reached.wait(TIMEOUT_S)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def rank():
    rank = FakeRank(eager_backup=True)
    yield rank
    rank.manager._end_eager_backup(wanted=False)
    rank.arena.close()


@pytest.fixture
def gate(rank, monkeypatch):
    gate = Gate(rank.device, monkeypatch)
    yield gate
    gate.open()


def join(rank) -> None:
    if rank.manager._eager is not None:
        rank.manager._eager.join(TIMEOUT_S)


def update(rank, byte: int, complete: bool = True) -> None:
    rank.manager.begin_writing()
    rank.allocator.write(rank.parameter, bytes([byte]) * rank.parameter.nbytes)
    rank.manager.finish_writing(complete)


def sleep(rank, level=Level.PRESERVE, tags=(Tag.WEIGHTS,)):
    rank.manager.prepare_sleep(level, tags)
    change = {change.tag: change for change in rank.manager.commit_sleep()}
    rank.manager.check_integrity()
    return change


def wake(rank) -> None:
    rank.manager.prepare_wake([Tag.WEIGHTS])
    rank.manager.commit_wake()
    rank.manager.check_integrity()


def everything(rank) -> int:
    """What a sleep copies for which no copy is there."""
    return rank.parameter.nbytes + rank.buffer.nbytes


def assert_kept_by_a_sleep(rank, copied: int) -> None:
    """The sleep copies so much itself, and the wake brings everything back."""
    before = rank.contents()
    assert sleep(rank)["weights"].bytes_copied == copied
    wake(rank)
    assert rank.contents() == before


def test_after_an_update_the_next_sleep_only_unmaps(rank):
    update(rank, 9)
    join(rank)
    held = rank.manager.status().tags["weights"].host_bytes
    assert held == everything(rank)
    copies = rank.device.calls["begin_copy_to_host"]
    before = rank.contents()
    assert sleep(rank)["weights"].bytes_copied == rank.buffer.nbytes
    assert rank.device.calls["begin_copy_to_host"] == copies + 1  # of the buffer
    wake(rank)
    assert rank.contents() == before


def test_after_the_start_too(rank):
    rank.manager.warm_up()
    assert_kept_by_a_sleep(rank, copied=rank.buffer.nbytes)
    rank.manager.warm_up()  # what was copied is as good as then
    assert rank.manager._eager is None


def test_without_the_option_nothing_is_copied_in_advance():
    rank = FakeRank()
    rank.manager.warm_up()
    update(rank, 9)
    assert rank.manager._eager is None
    assert sleep(rank)["weights"].bytes_copied == everything(rank)


def test_a_sleep_meanwhile_waits_for_the_copy_and_uses_it(rank, gate):
    update(rank, 9)
    gate.wait_for_copy()
    threading.Timer(0.05, gate.open).start()
    assert_kept_by_a_sleep(rank, copied=rank.buffer.nbytes)


def test_a_discarding_sleep_meanwhile_ends_the_copy_before_it_releases(rank, gate):
    update(rank, 9)
    gate.wait_for_copy()
    eager = rank.manager._eager
    threading.Timer(0.05, gate.open).start()
    buffer = rank.contents()["buffer"]
    change = sleep(rank, Level.DISCARD)["weights"]
    assert not eager.is_alive()
    assert rank.device.calls["begin_copy_to_host"] == 2  # one step of the given-up copy, and the buffer
    assert change.bytes_copied == rank.buffer.nbytes
    assert rank.manager.status().tags["weights"].host_bytes == rank.buffer.nbytes
    wake(rank)
    assert rank.contents()["buffer"] == buffer
    assert rank.contents()["parameter"] == bytes([GARBAGE_BYTE]) * rank.parameter.nbytes


def test_other_tags_sleep_without_waiting(rank, gate):
    update(rank, 9)
    gate.wait_for_copy()
    rank.manager._discardable = rank.allocator.blocks  # nothing of the KV cache is to be copied, which would wait
    sleep(rank, Level.PRESERVE, [Tag.KV_CACHE])
    sleep(rank, Level.PAUSE, [Tag.WEIGHTS])
    assert rank.manager._eager.is_alive()


@pytest.mark.parametrize("complete", [True, False])
def test_an_update_meanwhile_throws_the_copy_away(rank, gate, complete):
    update(rank, 9)
    gate.wait_for_copy()
    update(rank, 10, complete)
    gate.open()
    assert_kept_by_a_sleep(rank, copied=rank.buffer.nbytes if complete else everything(rank))
    assert rank.manager.content is (Content.VALID if complete else Content.FAILED)


def test_an_update_that_has_begun_throws_the_copy_away(rank, gate):
    """Its writes are not all there when the sleep looks, and its end has not moved the epoch on."""
    update(rank, 9)
    gate.wait_for_copy()
    rank.manager.begin_writing()
    gate.open()
    join(rank)
    assert rank.manager.status().tags["weights"].host_bytes == 0


def test_a_write_behind_its_back_throws_the_copy_away(rank, gate):
    """The bytes were copied before or after the write, and the fingerprint taken on the other side of it."""
    update(rank, 9)
    gate.wait_for_copy()
    rank.allocator.write(rank.parameter, b"\7")
    gate.open()
    join(rank)
    assert rank.manager.status().tags["weights"].host_bytes == 0
    assert_kept_by_a_sleep(rank, copied=everything(rank))


def test_a_write_after_the_copy_is_seen_by_the_sleep(rank):
    update(rank, 9)
    join(rank)
    rank.allocator.write(rank.parameter, b"\7")
    assert_kept_by_a_sleep(rank, copied=everything(rank))


def test_what_requests_change_meanwhile_is_copied_again(rank, gate):
    """An engine's own buffers may lie among the weights: a copy made beside requests is no worse for it."""
    update(rank, 9)
    gate.wait_for_copy()
    rank.allocator.write(rank.buffer, b"\7")
    gate.open()
    join(rank)
    rank.allocator.write(rank.buffer, b"\7\7")
    assert_kept_by_a_sleep(rank, copied=rank.buffer.nbytes)


def test_a_load_by_others_begins_it_when_it_is_complete(rank):
    rank.manager.note_foreign_load(complete=False)
    assert rank.manager._eager is None
    rank.manager.note_foreign_load(complete=True)
    rank.manager.note_foreign_load(complete=True)
    assert sleep(rank)["weights"].bytes_copied == rank.buffer.nbytes


def test_nothing_is_copied_while_the_weights_are_not_there(rank):
    sleep(rank)
    rank.manager.note_foreign_load(complete=True)
    assert rank.manager._eager is None
    wake(rank)


def test_copies_in_advance_take_no_more_host_memory_than_a_sleep(rank):
    update(rank, 1)
    join(rank)
    held = rank.manager.status().host_arena_bytes
    for byte in range(2, 6):
        update(rank, byte)
        join(rank)
    sleep(rank)
    assert rank.manager.status().host_arena_bytes == held


def test_without_host_memory_the_sleep_says_so_and_not_the_update(rank, caplog):
    small = FakeRank(eager_backup=True, arena_bytes=4096)
    update(small, 9)
    join(small)
    assert "not copied in advance" in caplog.text
    assert small.manager.content is Content.VALID
    assert small.arena.held_bytes == 0
    with pytest.raises(Exception, match="host memory"):
        small.manager.prepare_sleep(Level.PRESERVE, [Tag.WEIGHTS])
    small.manager.abort_sleep()


def test_a_device_that_fails_leaves_no_backup(rank, caplog):
    rank.device.fail("begin_copy_to_host")
    update(rank, 9)
    join(rank)
    assert "injected failure" in caplog.text
    assert rank.manager.status().tags["weights"].host_bytes == 0
    assert sleep(rank)["weights"].bytes_copied == everything(rank)


def test_large_blocks_are_copied_in_steps(rank, monkeypatch):
    monkeypatch.setattr(backup_module, "STEP_BYTES", 1000)
    update(rank, 9)
    before = rank.contents()
    assert sleep(rank)["weights"].bytes_copied == rank.buffer.nbytes
    assert rank.device.calls["begin_copy_to_host"] == 9 + 1 + 1  # the buffer twice
    wake(rank)
    assert rank.contents() == before


def test_tensors_that_go_meanwhile_stay_until_the_copy_has_ended(monkeypatch):
    allocator, arena = HostAllocator(), PagedArena()
    with allocator.region(Tag.WEIGHTS):
        tensor = torch.full((64 * PAGE,), 7, dtype=torch.uint8)
    gate = Gate(allocator.device, monkeypatch)
    eager = EagerBackup(allocator, arena, allocator.blocks(Tag.WEIGHTS), epoch=0)
    gate.wait_for_copy()
    del tensor
    assert len(allocator.blocks(Tag.WEIGHTS)) == 1
    gate.open()
    backup = eager.finish()
    assert backup is not None
    assert allocator.blocks(Tag.WEIGHTS) == []
    arena.close()


def test_the_interpreter_ends_in_the_middle_of_a_copy():
    code = """
        import sys, threading
        sys.path.insert(0, "tests/unit")
        from helpers import FakeRank
        from rl_memory_plugins.memory import backup

        backup.STEP_BYTES = 1
        rank = FakeRank(eager_backup=True)
        first = threading.Event()
        copy, ended = rank.device.begin_copy_to_host, threading.main_thread()

        def slow(*arguments):
            first.set()
            ended.join()  # until the interpreter has begun to end
            return copy(*arguments)

        rank.device.begin_copy_to_host = slow
        rank.manager.warm_up()
        first.wait()
        print("ends")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")


def test_a_thread_that_cannot_be_had_costs_no_update(rank, monkeypatch, caplog):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        update(rank, 9)
    assert rank.manager.content is Content.VALID
    assert "not copied in advance" in caplog.text
    assert_kept_by_a_sleep(rank, everything(rank))
