"""Processes with equal weights keep one copy in host memory: who writes it, who relies on it, and what their end does.

Each replica is a process of its own (`replicas.py`).
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
from pathlib import Path

import pytest
from replicas import PHASES, SIZE, Replica, ReplicaRank

from rl_memory_plugins.errors import EngineFaultError, HostMemoryError, StateConflictError
from rl_memory_plugins.memory import shared_backup
from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.backup import copies_of
from rl_memory_plugins.memory.fake import FakeAllocator
from rl_memory_plugins.memory.open_buffers import others
from rl_memory_plugins.memory.shared_backup import _parts, _steps, sources

V1, V2 = 1, 2  # seeds of the weights' bytes
SLACK = 1 << 16  # what is no parameter
SOON_S = 0.3


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def replica(directory):
    made: list[Replica] = []

    def start(seed: int = V1, own: int | None = None, **options) -> Replica:
        made.append(Replica(seed, len(made) if own is None else own, **options))
        return made[-1]

    yield start
    for each in made:
        each.kill()


def expected(seed: int, own: int) -> bytes:
    return ReplicaRank(seed, own).weights()


def names(*replicas: Replica) -> list[list[str]]:
    return [list(each.call("status")["shared"]) for each in replicas]


def entries() -> list[str]:
    return [path.name for path in Path(tempfile.gettempdir(), f"rl-memory-{os.getuid()}", "host-copies").iterdir()]


def test_equal_weights_take_one_copy(replica):
    """The replicas hold their parameters in another order of addresses."""
    first, second = replica(), replica()
    assert SIZE <= first.call("sleep") <= SIZE + SLACK
    assert second.call("sleep") <= SLACK
    statuses = [first.call("status"), second.call("status")]
    assert statuses[0]["shared"] == statuses[1]["shared"]
    assert list(statuses[0]["shared"].values()) == [SIZE]
    assert all(status["own"] <= SLACK for status in statuses)
    assert first.copy_pss() + second.copy_pss() <= 0.55 * 2 * SIZE
    assert (first.call("wake"), second.call("wake")) == (expected(V1, 0), expected(V1, 1))


def test_unequal_weights_take_a_copy_each(replica):
    first, second = replica(V1), replica(V2)
    assert min(first.call("sleep"), second.call("sleep")) >= SIZE
    [one], [other] = names(first, second)
    assert one != other
    assert (first.call("wake"), second.call("wake")) == (expected(V1, 0), expected(V2, 1))


def test_a_clean_copy_is_not_made_again(replica):
    first, second = replica(), replica()
    for each in (first, second, first, second):
        each.call("sleep")
        each.call("wake")
    assert max(first.call("sleep"), second.call("sleep")) <= SLACK


def test_two_that_sleep_at_the_same_time(replica):
    """The second waits for the first."""
    first, second = replica(), replica()
    first.pause()
    first.begin("sleep")
    second.begin("sleep")
    os.kill(first.process.pid, signal.SIGCONT)
    assert sorted(each.end() <= SLACK for each in (first, second)) == [False, True]
    assert (first.call("wake"), second.call("wake")) == (expected(V1, 0), expected(V1, 1))


@pytest.mark.parametrize(
    ("phase", "mapped"), [*((phase, False) for phase in PHASES), *((phase, True) for phase in PHASES[1:])]
)
def test_the_writer_dies(replica, phase, mapped):
    """Its buffer dies with it, unless another process has mapped the buffer. A copy counts once it is complete."""
    first, second = replica(V2), replica(V2)
    for each in (first, second):
        if mapped:
            each.call("sleep")
            each.call("wake")
        each.call("update", V1)
    before = names(second)
    first.call("stop_at", phase)
    first.begin("sleep")
    first.wait_until_stopped()
    second.begin("sleep")
    assert not second.has_answered(SOON_S)
    assert first.kill() == -signal.SIGKILL
    assert (second.end() <= SLACK) is (mapped and phase in ("share", "after"))
    assert (names(second) == before) is mapped
    assert second.call("wake") == expected(V1, 1)
    third = replica()
    assert third.call("sleep") <= SLACK
    assert third.call("wake") == expected(V1, 2)


def test_a_writer_that_hangs_is_waited_for_no_longer_than_the_bound(replica):
    first, second = replica(), replica()
    first.call("stop_at", "copy")
    first.begin("sleep")
    first.wait_until_stopped()
    second.call("patience", 0.5)
    assert second.call("sleep") >= SIZE
    assert second.call("wake") == expected(V1, 1)


@pytest.mark.parametrize("prepared", [False, True])
def test_the_writer_dies_after_others_have_found_its_copy(replica, prepared):
    first, second = replica(), replica()
    first.call("sleep")
    second.call("prepare" if prepared else "sleep")
    first.kill()
    if prepared:
        second.call("commit")
    third = replica()
    assert third.call("sleep") <= SLACK, "the copy lives on with those who rely on it"
    assert (second.call("wake"), third.call("wake")) == (expected(V1, 1), expected(V1, 2))


def test_a_reader_that_died_does_not_keep_the_buffer_from_new_bytes(replica):
    first, second = replica(), replica()
    first.call("sleep")
    second.call("sleep")
    before = names(first)
    second.kill()
    first.call("wake")
    first.call("update", V2)
    assert first.call("sleep") >= SIZE
    assert names(first) == before
    assert first.call("wake") == expected(V2, 0)


def test_new_bytes_of_all_go_to_the_same_buffer(replica):
    """Mapping and page-locking another would take longer than the copy."""
    first, second = replica(), replica()
    first.call("sleep")
    second.call("sleep")
    before = names(first, second)
    for each in (first, second):
        each.call("wake")
        each.call("update", V2)
    assert second.call("sleep") >= SIZE, "either may write"
    assert first.call("sleep") <= SLACK
    assert names(first, second) == before
    assert (first.call("wake"), second.call("wake")) == (expected(V2, 0), expected(V2, 1))


@pytest.mark.parametrize("change", ["update", "load"])
def test_new_bytes_of_one_while_the_other_sleeps(replica, change):
    first, second = replica(), replica()
    first.call("sleep")
    second.call("sleep")
    second.call("wake")
    second.call(change, V2)
    assert second.call("sleep") >= SIZE
    [old], [new] = names(first, second)
    assert old != new
    assert first.call("wake") == expected(V1, 0)
    first.call("update", V2)
    assert first.call("sleep") <= SLACK
    assert names(first, second) == [[new], [new]]
    assert first.copy_pss() + second.copy_pss() <= 0.55 * 2 * SIZE, "nobody keeps the old copy"
    assert (first.call("wake"), second.call("wake")) == (expected(V2, 0), expected(V2, 1))


def test_bytes_that_change_without_a_word_are_not_those_of_the_copy(replica):
    first, second = replica(), replica()
    first.call("sleep")
    second.call("sleep")
    second.call("wake")
    second.call("fill", V2)
    assert second.call("sleep") >= SIZE
    assert (first.call("wake"), second.call("wake")) == (expected(V1, 0), expected(V2, 1))


def test_a_load_between_the_phases_of_a_sleep_gets_a_copy_of_its_own(replica):
    first, second = replica(), replica()
    first.call("sleep")
    second.call("prepare")
    second.call("load", V2)
    assert second.call("commit") >= SIZE
    assert (first.call("wake"), second.call("wake")) == (expected(V1, 0), expected(V2, 1))


def test_an_aborted_sleep_keeps_the_copy_for_the_next(replica):
    first = replica()
    first.call("prepare")
    first.call("abort")
    assert first.call("status")["state"] == "resident"
    assert first.call("sleep") <= SIZE + SLACK
    assert first.call("wake") == expected(V1, 0)


def test_all_host_memory_can_be_given_back(replica):
    first, second = replica(), replica()
    for each in (first, second):
        each.call("sleep")
        each.call("wake")
    assert first.open_copies() == second.open_copies() == 2 + 1  # the file, mmap's duplicate of it, and the mapping
    first.call("free")
    assert second.call("sleep") <= SLACK
    assert second.call("wake") == expected(V1, 1)
    second.call("free")
    assert first.open_copies() == second.open_copies() == 0
    assert [each.call("status")["shared"] for each in (first, second)] == [{}, {}]
    assert entries() == []


def test_many_cycles_leave_no_file_open(replica):
    first, second = replica(), replica()
    for version in range(20):
        for each in (first, second):
            each.call("update", version)
        for each in (first, second):
            each.call("sleep")
        for each in (first, second):
            each.call("wake")
    assert first.open_copies() == second.open_copies() == 3
    assert len(entries()) == 2


def test_a_sleep_that_discards_lets_go_of_the_copy(replica):
    first = replica()
    first.call("sleep")
    first.call("wake")
    before = names(first)
    first.call("sleep", 2)
    first.call("wake")
    first.call("update", V2)
    assert first.call("sleep") >= SIZE
    assert names(first) == before


def test_too_little_host_memory_changes_nothing(replica):
    first = replica()
    first.call("bound", SIZE // 2)
    with pytest.raises(HostMemoryError) as caught:
        first.call("prepare")
    assert caught.value.details["needed_bytes"] >= SIZE
    assert first.call("status")["state"] == "resident"
    assert first.open_copies() == 0
    assert first.call("weights") == expected(V1, 0)
    first.call("bound", 0)
    first.call("sleep")
    assert first.call("wake") == expected(V1, 0)


def test_a_copy_that_exists_needs_no_memory(replica):
    first, second = replica(), replica()
    first.call("sleep")
    second.call("bound", SIZE // 2)
    assert second.call("sleep") <= SLACK
    assert second.call("wake") == expected(V1, 1)


def test_a_private_directory_of_another_kind_means_copies_of_ones_own(replica, tmp_path):
    Path(tmp_path, f"rl-memory-{os.getuid()}").symlink_to(tmp_path)
    first, second = replica(), replica()
    assert min(first.call("sleep"), second.call("sleep")) >= SIZE
    status = first.call("status")
    assert status["shared"] == {}
    assert status["own"] >= SIZE
    assert any("not shared" in note for note in status["notes"])
    assert (first.call("wake"), second.call("wake")) == (expected(V1, 0), expected(V1, 1))


def test_a_process_that_can_no_longer_share_lets_go_of_the_memory(replica, tmp_path):
    first, second = replica(), replica()
    first.call("sleep")
    second.call("sleep")
    second.call("wake")
    second.call("update", V2)
    folder = Path(tmp_path, f"rl-memory-{os.getuid()}")
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path)
    assert second.call("sleep") >= SIZE
    assert second.open_copies() == 0
    assert (first.call("wake"), second.call("wake")) == (expected(V1, 0), expected(V2, 1))


def test_a_host_that_shows_no_files_of_other_processes_means_copies_of_ones_own(replica):
    first, second = replica(), replica()
    first.call("sleep")
    second.call("deny")
    assert second.call("sleep") >= SIZE
    assert (first.call("wake"), second.call("wake")) == (expected(V1, 0), expected(V1, 1))


def test_a_write_of_the_own_process_to_a_copy_in_use_is_a_fault(replica):
    first, second = replica(), replica()
    first.call("sleep")
    second.call("sleep")
    second.begin("scribble")
    assert second.died_of() == signal.SIGSEGV
    assert first.call("wake") == expected(V1, 0)


def test_a_copy_that_another_program_has_overwritten_makes_no_weights_valid(replica):
    first = replica()
    first.call("sleep")
    [buffer] = others()
    os.pwrite(buffer.fd, bytes(4096), SIZE // 2)
    buffer.close()
    with pytest.raises(EngineFaultError, match="overwritten"):
        first.call("wake")
    status = first.call("status")
    assert (status["state"], status["content"]) == ("resident", "failed")
    first.call("update", V2)
    first.call("sleep")
    assert first.call("wake") == expected(V2, 0)


def test_a_forked_process_does_not_keep_the_lease(replica):
    first, second = replica(), replica()
    first.call("sleep")
    second.call("sleep")
    child = second.call("fork")
    try:
        for each in (first, second):
            each.call("wake")
            each.call("update", V2)
        before = names(first)
        first.call("sleep")
        assert names(first) == before
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_copy_in_the_background_is_shared_too(replica):
    first, second = replica(eager_backup=True), replica()
    first.call("update", V2)
    second.call("update", V2)
    assert first.call("sleep") <= SIZE + SLACK
    assert second.call("sleep") <= SLACK
    assert (first.call("wake"), second.call("wake")) == (expected(V2, 0), expected(V2, 1))


def test_an_update_is_refused_while_the_sleep_is_prepared(replica):
    first = replica()
    first.call("prepare")
    with pytest.raises(StateConflictError):
        first.call("update", V2)
    first.call("commit")
    assert first.call("wake") == expected(V1, 0)


def test_random_orders_of_calls_bring_back_each_ones_own_bytes(replica):
    """A replica dies now and then; another takes its place."""
    source = random.Random(5)
    replicas = [replica() for _ in range(3)]
    state = [(V1, index, False) for index in range(3)]  # the version, the own bytes, and whether the weights sleep
    for _ in range(150):
        at = source.randrange(3)
        version, own, asleep = state[at]
        if source.random() < 0.05:
            replicas[at].kill()
            replicas[at], state[at] = replica(V1, own), (V1, own, False)
        elif asleep:
            assert replicas[at].call("wake") == expected(version, own)
            state[at] = (version, own, False)
        elif source.random() < 0.4:
            version = source.choice([V1, V2, 3])
            replicas[at].call("update", version)
            state[at] = (version, own, False)
        else:
            replicas[at].call("sleep")
            state[at] = (version, own, True)


def test_replicas_prepare_one_buffer(replica):
    """In the background, from the start on."""
    pair = [replica(on_gpu=True) for _ in range(2)]
    for each in pair:
        each.call("warm_up")
    for each in pair:
        each.call("await_preparation")
    [one], [other] = names(*pair)
    assert one == other
    assert sum(each.copy_pss() for each in pair) <= 0.55 * 2 * SIZE
    assert all(each.call("status")["own"] <= SLACK for each in pair)
    copied = [pair[1].call("sleep"), pair[0].call("sleep")]
    assert [nbytes <= SLACK for nbytes in copied] == [False, True]
    assert names(*pair) == [[one], [one]]
    assert [each.call("wake") for each in pair] == [expected(V1, 0), expected(V1, 1)]


def test_the_buffer_of_a_replica_that_dies_while_it_prepares(replica):
    first, second = replica(on_gpu=True), replica(on_gpu=True)
    first.call("stop_at", "pages")
    first.call("warm_up")
    first.wait_until_stopped()
    second.begin("sleep")
    assert not second.has_answered(SOON_S)
    first.kill()
    assert second.end() >= SIZE
    assert second.call("wake") == expected(V1, 1)


def test_sources_that_touch_on_both_sides_are_one_copy():
    sources = [Block(100, 10), Block(110, 5), Block(200, 7), Block(115, 3)]  # the model's order
    copies = copies_of(sources, 1000)
    parts = [Block(104, 14), Block(200, 7)]
    assert list(_parts(parts, copies)) == [(Block(104, 11), 1004), (Block(115, 3), 1022), (Block(200, 7), 1015)]


def test_copies_go_in_steps_of_a_bounded_size(monkeypatch):
    monkeypatch.setattr(shared_backup, "STEP_BYTES", 8)
    steps = list(_steps([(Block(100, 3), 0), (Block(200, 20), 3), (Block(300, 1), 23)]))
    assert steps == [
        [(Block(100, 3), 0), (Block(200, 5), 3)],
        [(Block(205, 8), 8)],
        [(Block(213, 7), 16), (Block(300, 1), 23)],
    ]


def test_parameters_that_overlap_are_copied_once():
    allocator = FakeAllocator()
    with allocator.region("weights"):
        block = allocator.allocate(100)
    half = Block(block.address, 50)
    outside = Block(block.end + 5, 10)
    assert sources(allocator, "weights", [half, outside, half]) == [half]
    assert sources(allocator, "weights", [half, Block(block.address + 40, 60)]) == [block]
