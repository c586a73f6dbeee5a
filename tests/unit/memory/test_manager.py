from __future__ import annotations

import ctypes

import pytest
from helpers import FakeRank, sleep, wake

from rl_memory_plugins.errors import (
    DeviceMemoryError,
    EngineFaultError,
    HostMemoryError,
    StateConflictError,
)
from rl_memory_plugins.memory import arena as arena_module
from rl_memory_plugins.memory import backup as backup_module
from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.fake import GARBAGE_BYTE
from rl_memory_plugins.tags import PUBLIC_TAGS, Content, Level, Tag, TagState

RESIDENT, PRESERVED, DISCARDED = TagState.RESIDENT, TagState.PRESERVED, TagState.DISCARDED


@pytest.fixture
def rank() -> FakeRank:
    return FakeRank()


def states(rank):
    return {tag: rank.manager.state(tag) for tag in PUBLIC_TAGS}


def update(rank, complete=True, byte=9):
    rank.manager.begin_writing()
    rank.allocator.write(rank.parameter, bytes([byte]) * rank.parameter.nbytes)
    rank.manager.finish_writing(complete)


LEVELS = {
    Level.PAUSE: (RESIDENT, RESIDENT, RESIDENT, Content.VALID),
    Level.PRESERVE: (PRESERVED, DISCARDED, PRESERVED, Content.VALID),
    Level.DISCARD: (DISCARDED, DISCARDED, PRESERVED, Content.STALE),
}


@pytest.mark.parametrize("tag", PUBLIC_TAGS)
@pytest.mark.parametrize("level", Level)
def test_every_cell_of_the_level_table(rank, level, tag):
    weights, kv_cache, cuda_graph, content = LEVELS[level]
    expected = {Tag.WEIGHTS: weights, Tag.KV_CACHE: kv_cache, Tag.CUDA_GRAPH: cuda_graph}[tag]
    size = sum(block.nbytes for block in rank.allocator.blocks(tag))
    before, used = rank.contents(), rank.device.used
    changes = sleep(rank, level, [tag])
    assert states(rank) == {**dict.fromkeys(PUBLIC_TAGS, RESIDENT), tag: expected}
    assert rank.manager.content == (content if tag is Tag.WEIGHTS else Content.VALID)
    assert rank.device.used == used - (0 if level is Level.PAUSE else size) == rank.mapped_bytes()
    if level is not Level.PAUSE:
        assert changes[tag].bytes_released == size
        assert changes[tag].state is expected
        assert wake(rank, [tag])[tag].bytes_restored == size
    assert states(rank) == dict.fromkeys(PUBLIC_TAGS, RESIDENT)
    assert rank.device.used == used

    lost = {"parameter"} if tag is Tag.WEIGHTS and level is Level.DISCARD else set()
    lost |= {"kv_cache"} if tag is Tag.KV_CACHE and level is not Level.PAUSE else set()
    after = rank.contents()
    assert {name for name in before if after[name] != before[name]} == lost


def test_level_2_preserves_what_an_update_does_not_write(rank):
    before = rank.contents()
    changes = sleep(rank, Level.DISCARD)
    assert changes["weights"].bytes_copied == rank.buffer.nbytes
    assert rank.manager.status().tags["weights"].host_bytes == rank.buffer.nbytes
    wake(rank)
    assert rank.contents()["buffer"] == before["buffer"]
    assert rank.contents()["parameter"] != before["parameter"]


def halves(rank):
    content = rank.contents()["parameter"]
    return content[: len(content) // 2], content[len(content) // 2 :]


def test_level_2_keeps_the_parameters_that_its_caller_names(rank):
    before = halves(rank)
    changes = sleep(rank, Level.DISCARD, keep=["model.frozen"])
    assert changes["weights"].bytes_copied == rank.parameter.nbytes // 2 + rank.buffer.nbytes
    assert changes["weights"].state is DISCARDED
    wake(rank)
    assert halves(rank)[0] == before[0]
    assert halves(rank)[1] != before[1]
    assert rank.manager.content is Content.STALE
    assert rank.manager.kept == {"model.frozen"}
    rank.manager.begin_writing()
    rank.manager.finish_writing(complete=True)
    assert rank.manager.kept == frozenset()


def test_level_2_that_keeps_all_parameters_leaves_them_valid(rank):
    before, epoch = rank.contents(), rank.manager.epoch
    assert sleep(rank, Level.DISCARD, keep=["*"])["weights"].state is PRESERVED
    wake(rank)
    assert rank.manager.content is Content.VALID
    assert rank.manager.epoch == epoch
    assert {**rank.contents(), "kv_cache": before["kv_cache"]} == before


def test_what_is_kept_is_not_copied_again_while_it_does_not_change(rank):
    """An update of the other weights has come in between."""
    for copied in (rank.parameter.nbytes // 2, 0, 0):
        changes = sleep(rank, Level.DISCARD, [Tag.WEIGHTS], ["model.frozen"])
        assert changes["weights"].bytes_copied == copied + rank.buffer.nbytes
        wake(rank)
        rank.manager.begin_writing()
        rank.allocator.write(rank.names.blocks["model.trained"], b"\5" * 100)
        rank.manager.finish_writing(complete=True)
    rank.allocator.write(rank.names.blocks["model.frozen"], b"\6" * 100)
    before = halves(rank)
    assert sleep(rank, Level.DISCARD, [Tag.WEIGHTS], ["model.frozen"])["weights"].bytes_copied > rank.buffer.nbytes
    wake(rank)
    assert halves(rank)[0] == before[0]


def test_undefined_weights_cannot_be_kept(rank):
    before = halves(rank)
    for keep in (["model.frozen"], ["*"]):
        sleep(rank, Level.DISCARD, keep=keep)
        wake(rank)
        assert rank.manager.kept == {"model.frozen"}
        assert rank.manager.content is Content.STALE
        assert halves(rank)[0] == before[0]
    sleep(rank, Level.DISCARD)
    wake(rank)
    assert rank.manager.kept == frozenset()


@pytest.mark.parametrize("written", ["model.frozen", "model.trained"])
def test_after_an_update_that_broke_off_only_unchanged_weights_are_kept(rank, written):
    sleep(rank, Level.DISCARD, keep=["model.frozen"])
    wake(rank)
    rank.manager.begin_writing()
    rank.allocator.write(rank.names.blocks[written], b"\5" * 100)
    rank.manager.finish_writing(complete=False)
    assert rank.manager.kept == ({"model.frozen"} if written == "model.trained" else set())


def unfilled(rank):
    """Half of the parameter is one that no load fills."""
    found = []

    def find():
        found.append("found")
        return ["model.frozen"]

    rank.manager.find_unfilled = find
    rank.manager.memory_of = lambda names: {name: rank.names.blocks[name] for name in names}
    return found


def test_level_2_always_keeps_what_no_load_fills(rank):
    found, before = unfilled(rank), halves(rank)
    for _ in range(2):
        sleep(rank, Level.DISCARD)
        wake(rank)
        assert halves(rank)[0] == before[0]
        assert rank.manager.kept == {"model.frozen"}
        assert rank.manager.content is Content.STALE
        update(rank)
        assert rank.manager.kept == {"model.frozen"}
        before = halves(rank)
    assert found == ["found"]


@pytest.mark.parametrize("level", [Level.PAUSE, Level.PRESERVE, Level.DISCARD])
def test_withheld_weights_are_stale_over_sleeps_until_a_complete_update(rank, level):
    found, before = unfilled(rank), halves(rank)
    rank.manager.withhold()
    for _ in range(2):
        assert rank.manager.content is Content.STALE
        sleep(rank, level, keep=["*"])  # weights that must not answer cannot be kept
        wake(rank)
    assert rank.manager.content is Content.STALE
    assert halves(rank)[0] == before[0]  # no load would bring it back
    assert rank.manager.learn_unfilled() == (level is not Level.DISCARD)
    assert rank.manager.kept == {"model.frozen"}
    assert found == ["found"]
    update(rank)
    assert rank.manager.content is Content.VALID


def test_withheld_weights_that_were_written_do_not_count_as_those_of_the_start(rank):
    rank.manager.withhold()
    rank.manager.note_foreign_load(complete=False)
    unfilled(rank)
    rank.manager.learn_unfilled()
    assert rank.manager.kept == frozenset()


@pytest.mark.parametrize("level", [Level.PAUSE, Level.PRESERVE])
def test_only_a_sleep_that_discards_weights_asks_what_no_load_fills(rank, level):
    found = unfilled(rank)
    sleep(rank, level)
    sleep(rank, Level.DISCARD)  # the weights are asleep: nobody could look at the model
    if level is Level.PRESERVE:
        assert found == []


@pytest.mark.parametrize("written", ["model.frozen", "model.trained"])
def test_what_no_load_fills_counts_while_no_update_has_torn_it(rank, written):
    unfilled(rank)
    rank.manager.learn_unfilled()
    update(rank, byte=3)
    rank.manager.begin_writing()
    rank.allocator.write(rank.names.blocks[written], b"\5" * 100)
    rank.manager.finish_writing(complete=False)
    whole = set() if written == "model.frozen" else {"model.frozen"}
    assert rank.manager.kept == whole
    sleep(rank, Level.DISCARD)
    wake(rank)
    assert rank.manager.kept == whole
    update(rank)
    assert rank.manager.kept == {"model.frozen"}


def test_a_foreign_load_of_valid_weights_may_write_it(rank):
    unfilled(rank)
    rank.manager.learn_unfilled()
    rank.allocator.write(rank.names.blocks["model.frozen"], b"\5" * 100)
    rank.manager.note_foreign_load(complete=False)
    rank.manager.begin_writing()
    rank.manager.finish_writing(complete=False)
    assert rank.manager.kept == {"model.frozen"}


def test_foreign_loads_of_valid_weights_cost_no_look_at_the_bytes(rank):
    unfilled(rank)
    rank.manager.learn_unfilled()
    before = dict(rank.device.calls)
    for _ in range(3):
        rank.manager.note_foreign_load(complete=False)
    assert dict(rank.device.calls) == before
    sleep(rank, Level.DISCARD)  # looks at them
    wake(rank)
    update(rank, complete=False)
    assert rank.manager.kept == set()


@pytest.mark.parametrize("written", [True, False])
def test_a_foreign_load_that_breaks_off_after_another_may_not_have_written_it(rank, written):
    unfilled(rank)
    rank.manager.learn_unfilled()
    rank.manager.note_foreign_load(complete=False)
    if written:  # by the first load or by the second
        rank.allocator.write(rank.names.blocks["model.frozen"], b"\5" * 100)
    rank.manager.mark_failed()
    assert rank.manager.kept == (set() if written else {"model.frozen"})
    assert rank.manager.unmarked == {"model.frozen"}


def test_what_is_learnt_of_undefined_weights_counts_after_a_complete_update(rank):
    """Nobody knows what an update that broke off before has written."""
    unfilled(rank)
    update(rank, complete=False)
    assert rank.manager.learn_unfilled()
    assert rank.manager.kept == frozenset()
    update(rank)
    assert rank.manager.kept == {"model.frozen"}
    assert not rank.manager.learn_unfilled()


def test_a_model_that_cannot_tell_is_asked_once(rank):
    asked = []

    def find():
        asked.append("asked")
        raise ValueError("no such layout")

    assert not rank.manager.learn_unfilled()
    rank.manager.find_unfilled = find
    for _ in range(2):
        assert not rank.manager.learn_unfilled()
        sleep(rank, Level.DISCARD)
        wake(rank)
        assert rank.manager.kept == frozenset()
    assert asked == ["asked"]


def test_kept_weights_need_host_memory():
    rank = FakeRank(arena_bytes=6000)
    with pytest.raises(HostMemoryError):
        sleep(rank, Level.DISCARD, [Tag.WEIGHTS], ["*"])
    assert rank.manager.content is Content.VALID
    sleep(rank, Level.DISCARD, [Tag.WEIGHTS])


@pytest.mark.parametrize("level", [Level.PRESERVE, Level.DISCARD])
def test_what_lies_beside_the_kv_cache_is_preserved(rank, level):
    before = rank.contents()
    assert sleep(rank, level)["kv_cache"].bytes_copied == rank.scales.nbytes
    wake(rank)
    assert rank.contents()["scales"] == before["scales"]


def test_level_2_without_buffers_forgets_an_older_backup(rank):
    """A backup of an earlier level-1 sleep must not come back at the wake after a level-2 sleep."""
    sleep(rank)
    wake(rank)
    rank.manager._discardable = rank.allocator.blocks
    sleep(rank, Level.DISCARD)
    assert rank.manager.status().tags["weights"].host_bytes == 0
    assert wake(rank)["weights"].bytes_copied == 0
    assert rank.contents()["parameter"] == bytes([GARBAGE_BYTE]) * rank.parameter.nbytes
    held = rank.arena.held_bytes
    sleep(rank)
    assert rank.arena.held_bytes == held  # the older backup's memory was there to be used


def test_transitions_are_idempotent_per_tag(rank):
    sleep(rank, tags=[Tag.WEIGHTS])
    changes = sleep(rank, Level.DISCARD)
    assert set(changes) == {"kv_cache", "cuda_graph"}
    assert rank.manager.state(Tag.WEIGHTS) is PRESERVED
    assert rank.manager.content is Content.VALID
    assert sleep(rank) == {}

    wake(rank, [Tag.KV_CACHE])
    assert set(wake(rank)) == {"weights", "cuda_graph"}
    assert wake(rank) == {}


def test_wakes_take_any_order(rank):
    before = rank.contents()
    sleep(rank)
    for tag in (Tag.CUDA_GRAPH, Tag.KV_CACHE, Tag.WEIGHTS):
        wake(rank, [tag])
        assert rank.manager.state(tag) is RESIDENT
        assert rank.device.used == rank.mapped_bytes()
    assert {**rank.contents(), "kv_cache": before["kv_cache"]} == before


# -- backups ------------------------------------------------------------------------------------------------


def test_of_a_clean_backup_only_what_is_no_parameter_is_copied_again(rank):
    """Requests write to the engine's own buffers, of which some may lie among the weights, and to graphs' memory."""
    assert sleep(rank)["weights"].bytes_copied > rank.parameter.nbytes
    wake(rank)
    for block in (rank.buffer, rank.graph):
        rank.allocator.write(block, b"\7" * block.nbytes)
    before = rank.contents()
    changes = sleep(rank, tags=[Tag.WEIGHTS, Tag.CUDA_GRAPH])
    assert changes["weights"].bytes_copied == rank.buffer.nbytes
    assert changes["cuda_graph"].bytes_copied == rank.graph.nbytes
    wake(rank)
    assert {**rank.contents(), "kv_cache": before["kv_cache"]} == before


@pytest.mark.parametrize("level", [Level.PRESERVE, Level.DISCARD])
def test_what_no_tensor_uses_is_neither_copied_nor_restored(rank, monkeypatch, level):
    monkeypatch.setattr(backup_module, "MIN_LEFT_OUT", rank.buffer.nbytes // 2)
    half = rank.buffer.nbytes // 2
    unused = Block(rank.buffer.address + half, rank.buffer.nbytes - half)
    parameter = rank.parameter.nbytes if level is Level.PRESERVE else 0
    before = rank.allocator.read(rank.buffer)
    rank.allocator.unused_blocks = [unused, rank.parameter]  # what a trainer replaces is in use, whatever torch says
    assert sleep(rank, level, [Tag.WEIGHTS])["weights"].bytes_copied == parameter + half
    assert wake(rank, [Tag.WEIGHTS])["weights"].bytes_copied == parameter + half
    assert rank.allocator.read(rank.buffer) == before[:half] + bytes([GARBAGE_BYTE]) * unused.nbytes
    rank.allocator.unused_blocks = []  # a tensor has come there since
    rank.allocator.write(rank.buffer, b"\7" * rank.buffer.nbytes)
    assert sleep(rank, level, [Tag.WEIGHTS])["weights"].bytes_copied == rank.buffer.nbytes
    wake(rank, [Tag.WEIGHTS])
    assert rank.allocator.read(rank.buffer) == b"\7" * rank.buffer.nbytes


def test_all_of_the_graphs_memory_is_kept_whatever_tensors_use(rank, monkeypatch):
    monkeypatch.setattr(backup_module, "MIN_LEFT_OUT", 1)
    rank.allocator.unused_blocks = [rank.graph]
    before = rank.allocator.read(rank.graph)
    assert sleep(rank, tags=[Tag.CUDA_GRAPH])["cuda_graph"].bytes_copied == rank.graph.nbytes
    wake(rank, [Tag.CUDA_GRAPH])
    assert rank.allocator.read(rank.graph) == before


def test_a_clean_backup_of_parameters_alone_is_not_copied(rank):
    rank.manager._discardable = lambda tag: rank.allocator.blocks(tag)
    sleep(rank, tags=[Tag.WEIGHTS])
    wake(rank)
    copies = rank.device.calls["begin_copy_to_host"]
    assert sleep(rank, tags=[Tag.WEIGHTS])["weights"].bytes_copied == 0
    assert rank.device.calls["begin_copy_to_host"] == copies


def test_a_sleep_needs_no_device_memory_to_know_what_it_copied(rank):
    """It may begin when the device is full; then the copy is only never taken for clean."""
    for _ in range(2):
        rank.device.fail("fingerprint", error=DeviceMemoryError("full"))
        assert sleep(rank, tags=[Tag.WEIGHTS])["weights"].bytes_copied > rank.parameter.nbytes
        wake(rank)


def test_what_is_kept_of_a_discarded_tag_is_copied_without_comparing(rank):
    sleep(rank, Level.DISCARD, tags=[Tag.WEIGHTS])
    wake(rank)
    assert sleep(rank, Level.DISCARD, tags=[Tag.WEIGHTS])["weights"].bytes_copied == rank.buffer.nbytes
    assert rank.device.calls["fingerprint"] == 0


def test_a_backup_of_everything_does_not_serve_for_a_part(rank):
    sleep(rank)
    wake(rank)
    sleep(rank, Level.DISCARD)
    assert rank.manager.status().tags["weights"].host_bytes == rank.buffer.nbytes


def test_aborting_a_sleep_keeps_the_backups_it_would_have_reused(rank):
    before = rank.contents()
    sleep(rank)
    wake(rank)
    rank.manager.prepare_sleep(Level.PRESERVE, PUBLIC_TAGS)
    rank.manager.abort_sleep()
    address = rank.arena.acquire(rank.parameter.nbytes + rank.buffer.nbytes)
    ctypes.memset(address, 0, rank.parameter.nbytes)  # another user of the arena
    assert sleep(rank)["weights"].bytes_copied == rank.buffer.nbytes
    wake(rank)
    assert {**rank.contents(), "kv_cache": before["kv_cache"]} == before


def test_after_an_update_the_memory_is_not_even_compared(rank):
    sleep(rank)
    wake(rank)
    update(rank, byte=1)  # the same bytes again
    compared = rank.device.calls["fingerprint"]
    changes = sleep(rank, tags=[Tag.WEIGHTS])
    assert changes["weights"].bytes_copied > rank.parameter.nbytes
    assert rank.device.calls["fingerprint"] == compared + 1  # the new copy's own


@pytest.mark.parametrize("through_the_manager", [True, False], ids=["by an update", "behind its back"])
def test_changed_weights_are_copied_again(rank, through_the_manager):
    sleep(rank)
    wake(rank)
    if through_the_manager:
        update(rank)
    else:
        rank.allocator.write(rank.parameter, b"\7")
    before = rank.contents()
    assert sleep(rank)["weights"].bytes_copied > rank.parameter.nbytes
    wake(rank)
    assert rank.contents()["parameter"] == before["parameter"]


def test_cycles_reuse_the_same_host_memory(rank):
    sleep(rank)
    held = rank.arena.held_bytes
    for byte in range(5):
        wake(rank)
        update(rank, byte=byte)
        sleep(rank)
        assert rank.arena.held_bytes == held


def test_host_memory_error_comes_before_anything_is_released():
    rank = FakeRank(arena_bytes=4096)
    before, used = rank.contents(), rank.device.used
    with pytest.raises(HostMemoryError) as caught:
        rank.manager.prepare_sleep(Level.PRESERVE, PUBLIC_TAGS)
    assert caught.value.details["rank"] == 0
    assert caught.value.details["needed_bytes"] >= rank.parameter.nbytes
    assert states(rank) == dict.fromkeys(PUBLIC_TAGS, RESIDENT)
    assert (rank.contents(), rank.device.used) == (before, used)
    assert rank.manager.content is Content.VALID
    sleep(rank, Level.PRESERVE, [Tag.CUDA_GRAPH])  # 4096 bytes: the bound holds no leftovers


def test_free_host_memory_bounds_the_arena(monkeypatch, rank):
    monkeypatch.setattr(arena_module, "free_host_bytes", lambda: 4096)
    with pytest.raises(HostMemoryError):
        rank.manager.prepare_sleep(Level.PRESERVE, PUBLIC_TAGS)
    sleep(rank, tags=[Tag.KV_CACHE])  # whose scales need one page


def test_a_failing_copy_changes_nothing(rank):
    before = rank.contents()
    rank.device.fail("begin_copy_to_host", nth=2)
    rank.manager.prepare_sleep(Level.PRESERVE, PUBLIC_TAGS)
    with pytest.raises(EngineFaultError) as caught:
        rank.manager.commit_sleep()
    assert caught.value.details["changed"] == {}
    assert (rank.contents(), states(rank)) == (before, dict.fromkeys(PUBLIC_TAGS, RESIDENT))
    assert rank.manager.status().tags["weights"].host_bytes == 0
    sleep(rank)


def test_what_is_not_copied_is_released_while_the_rest_is_on_its_way(rank):
    """A copy that breaks off then leaves its tag as it was, and says what is gone."""
    before = rank.contents()
    rank.manager.prepare_sleep(Level.PRESERVE, [Tag.KV_CACHE, Tag.WEIGHTS])
    rank.device.fail("end_copy_to_host", nth=2)  # the first is that of the cache's scales
    with pytest.raises(EngineFaultError) as caught:
        rank.manager.commit_sleep()
    assert caught.value.details["changed"] == {"kv_cache": "discarded"}
    assert states(rank)[Tag.WEIGHTS] is RESIDENT
    assert rank.contents()["parameter"] == before["parameter"]
    assert rank.manager.status().tags["weights"].host_bytes == 0
    sleep(rank)
    wake(rank)
    assert {**rank.contents(), "kv_cache": before["kv_cache"]} == before


@pytest.mark.parametrize("clean", [False, True])
def test_what_is_freed_between_the_phases_is_not_copied(rank, clean):
    """Memory that is freed may be gone: to read it would be a fault."""
    before = rank.contents()
    if clean:
        sleep(rank)
        wake(rank)
    rank.manager.prepare_sleep(Level.PRESERVE, PUBLIC_TAGS)
    rank.allocator.free(rank.buffer)
    rank.manager.commit_sleep()
    wake(rank)
    assert rank.allocator.read(rank.parameter) == before["parameter"]
    rank.manager.check_integrity()


def test_nobody_gets_the_host_memory_of_a_copy_that_is_on_its_way(rank, monkeypatch):
    calls, release = rank.device.calls, rank.arena.release
    under_way = []

    def releasing(address):
        under_way.append(calls["begin_copy_to_host"] - calls["end_copy_to_host"])
        release(address)

    monkeypatch.setattr(rank.arena, "release", releasing)
    rank.manager.prepare_sleep(Level.PRESERVE, PUBLIC_TAGS)
    rank.device.fail("release")
    with pytest.raises(EngineFaultError):
        rank.manager.commit_sleep()  # after the first copy of three
    assert calls["begin_copy_to_host"] == 3
    assert under_way == [1, 0]  # of the two that were not reached


def test_an_aborted_sleep_changes_nothing_and_returns_its_host_memory(rank):
    before = rank.contents()
    rank.manager.prepare_sleep(Level.PRESERVE, PUBLIC_TAGS)
    rank.manager.abort_sleep()
    held = rank.arena.held_bytes
    assert (rank.contents(), states(rank)) == (before, dict.fromkeys(PUBLIC_TAGS, RESIDENT))
    sleep(rank)
    assert rank.arena.held_bytes == held


def test_a_release_that_fails_leaves_the_tag_whole(rank):
    """In the middle of the second tag: its unmapped block comes back, and the error names the first tag."""
    before = rank.contents()
    rank.manager.prepare_sleep(Level.PRESERVE, PUBLIC_TAGS)
    rank.device.fail("unmap", nth=4)
    with pytest.raises(EngineFaultError) as caught:
        rank.manager.commit_sleep()
    assert caught.value.details["changed"] == {"kv_cache": "discarded"}
    assert states(rank) == {Tag.KV_CACHE: DISCARDED, Tag.WEIGHTS: RESIDENT, Tag.CUDA_GRAPH: RESIDENT}
    assert all(rank.contents()[name] == before[name] for name in ("parameter", "buffer", "graph"))
    assert rank.device.used == rank.mapped_bytes()
    assert rank.manager.content is Content.VALID
    sleep(rank)
    wake(rank)
    assert {**rank.contents(), "kv_cache": before["kv_cache"]} == before


def test_a_release_that_fails_beyond_repair_counts_as_released(rank):
    before = rank.contents()
    rank.manager.prepare_sleep(Level.PRESERVE, [Tag.WEIGHTS])
    rank.device.fail("unmap", nth=2)
    rank.device.fail("end_copy_from_host")
    with pytest.raises(EngineFaultError) as caught:
        rank.manager.commit_sleep()
    assert caught.value.details["changed"] == {"weights": "preserved"}
    assert rank.manager.state(Tag.WEIGHTS) is PRESERVED
    wake(rank)
    assert rank.contents() == before


def test_a_level_2_release_that_fails_does_not_leave_valid_weights(rank):
    rank.manager.prepare_sleep(Level.DISCARD, [Tag.WEIGHTS])
    rank.device.fail("unmap", nth=2)
    with pytest.raises(EngineFaultError) as caught:
        rank.manager.commit_sleep()
    assert caught.value.details["content"] == "stale"
    assert rank.manager.state(Tag.WEIGHTS) is RESIDENT
    assert rank.manager.content is Content.STALE


# -- wake ---------------------------------------------------------------------------------------------------


def test_device_memory_error_at_wake_changes_nothing_and_a_retry_works(rank):
    before = rank.contents()
    sleep(rank)
    capacity = rank.device.capacity
    rank.device.capacity = 10_000  # enough for the graph, which is reserved first, not for the weights
    with pytest.raises(DeviceMemoryError) as caught:
        rank.manager.prepare_wake(PUBLIC_TAGS)
    assert caught.value.details["rank"] == 0
    assert rank.device.used == 0
    assert states(rank) == {Tag.KV_CACHE: DISCARDED, Tag.WEIGHTS: PRESERVED, Tag.CUDA_GRAPH: PRESERVED}
    rank.device.capacity = capacity
    wake(rank)
    assert {**rank.contents(), "kv_cache": before["kv_cache"]} == before


def test_an_aborted_wake_gives_the_reserved_memory_back(rank):
    sleep(rank)
    rank.manager.prepare_wake(PUBLIC_TAGS)
    assert rank.device.used > 0
    rank.manager.abort_wake()
    assert rank.device.used == 0
    wake(rank)
    assert rank.device.used == rank.mapped_bytes()


@pytest.mark.parametrize(
    ("operation", "nth"),
    [("map", 1), ("map", 2), ("map", 3), ("map", 5), ("begin_copy_from_host", 1), ("end_copy_from_host", 3)],
)
def test_a_commit_that_fails_in_the_middle_undoes_the_whole_wake(rank, operation, nth):
    """Five blocks are mapped: graph, parameter, buffer, KV cache, scales; three backups are restored."""
    before = rank.contents()
    sleep(rank)
    asleep = states(rank)
    rank.manager.prepare_wake(PUBLIC_TAGS)
    rank.device.fail(operation, nth=nth)
    with pytest.raises(EngineFaultError) as caught:
        rank.manager.commit_wake()
    assert caught.value.details["changed"] == {}
    assert states(rank) == asleep
    assert rank.device.used == 0
    wake(rank)
    assert {**rank.contents(), "kv_cache": before["kv_cache"]} == before


def test_a_wake_that_can_be_neither_finished_nor_undone_is_made_good_by_the_next(rank):
    before = rank.contents()
    sleep(rank)
    rank.manager.prepare_wake([Tag.WEIGHTS])
    rank.device.fail("end_copy_from_host")
    rank.device.fail("release")
    with pytest.raises(EngineFaultError):
        rank.manager.commit_wake()
    assert rank.manager.state(Tag.WEIGHTS) is PRESERVED
    wake(rank)
    assert {**rank.contents(), "kv_cache": before["kv_cache"]} == before


def test_an_error_of_another_kind_becomes_a_typed_one(rank):
    sleep(rank)
    rank.manager.prepare_wake(PUBLIC_TAGS)
    rank.device.fail("map", error=RuntimeError("cuMemMap failed"))
    with pytest.raises(EngineFaultError, match="cuMemMap failed") as caught:
        rank.manager.commit_wake()
    assert caught.value.details["rank"] == 0


def test_restoring_leaves_memory_alone_that_was_freed_or_made_while_asleep(rank):
    before = rank.contents()
    sleep(rank)
    rank.allocator.free(rank.buffer)
    with rank.allocator.region(Tag.WEIGHTS):
        late = rank.allocator.allocate(256)
    rank.allocator.write(late, b"late" * 64)
    changes = wake(rank)
    assert changes["weights"].bytes_copied == rank.parameter.nbytes
    assert rank.allocator.read(late) == b"late" * 64
    assert rank.contents()["parameter"] == before["parameter"]


def test_memory_freed_between_the_phases_of_a_wake_is_not_touched():
    rank = FakeRank(poison=True)
    sleep(rank)
    rank.manager.prepare_wake(PUBLIC_TAGS)
    rank.allocator.free(rank.buffer)
    rank.manager.commit_wake()  # the fake device faults where freed memory is filled or copied to
    assert rank.device.used == rank.mapped_bytes()


def test_poison_marks_what_nobody_restored():
    rank = FakeRank(poison=True)
    before = rank.contents()
    sleep(rank, Level.DISCARD)
    wake(rank)
    after = rank.contents()
    assert after["parameter"] == b"\xff" * rank.parameter.nbytes
    assert after["kv_cache"] == b"\xff" * rank.kv_cache.nbytes
    assert all(after[name] == before[name] for name in ("buffer", "scales", "graph"))


@pytest.mark.parametrize("maps_zeroed", [False, True])
@pytest.mark.parametrize("poison", [False, True])
def test_zero_on_wake(poison, maps_zeroed):
    rank = FakeRank(poison=poison, zero_on_wake=[Tag.KV_CACHE], maps_zeroed=maps_zeroed)
    before = rank.contents()
    for _ in range(2):
        sleep(rank)
        wake(rank)
        assert rank.contents()["kv_cache"] == bytes(rank.kv_cache.nbytes)
        assert rank.contents()["scales"] == before["scales"]
        rank.allocator.write(rank.kv_cache, b"\7" * rank.kv_cache.nbytes)


def test_memory_that_is_mapped_zeroed_is_not_written_again():
    rank = FakeRank(zero_on_wake=[Tag.KV_CACHE], maps_zeroed=True)
    sleep(rank)
    wake(rank)
    assert rank.device.calls["fill"] == 0


# -- content of the weights ---------------------------------------------------------------------------------


def test_a_complete_update_makes_discarded_weights_valid(rank):
    sleep(rank, Level.DISCARD)
    with pytest.raises(StateConflictError):
        rank.manager.begin_writing()
    wake(rank)
    assert rank.manager.content is Content.STALE
    epoch = rank.manager.status().content_epoch
    rank.manager.begin_writing()
    assert rank.manager.content is Content.UPDATING
    rank.manager.finish_writing(complete=True)
    assert rank.manager.content is Content.VALID
    assert rank.manager.status().content_epoch > epoch


def test_an_update_that_breaks_off_fails_until_one_completes(rank):
    update(rank, complete=False)
    assert rank.manager.content is Content.FAILED
    sleep(rank)
    wake(rank)
    assert rank.manager.content is Content.FAILED
    update(rank)
    assert rank.manager.content is Content.VALID


@pytest.mark.parametrize("complete", [True, False])
def test_an_update_that_wrote_nothing_changes_nothing(rank, complete):
    epoch = rank.manager.status().content_epoch
    rank.manager.finish_writing(complete)
    assert rank.manager.content is Content.VALID
    assert rank.manager.status().content_epoch == epoch


def test_no_update_starts_between_the_phases_of_a_sleep(rank):
    """The backup has been made: what the update wrote would be lost at the wake."""
    rank.manager.prepare_sleep(Level.PRESERVE, PUBLIC_TAGS)
    for start in (rank.manager.begin_writing, rank.manager.require_writable):  # ours, and what others load
        with pytest.raises(StateConflictError):
            start()
    assert rank.manager.content is Content.VALID


def test_what_is_written_between_the_phases_all_the_same_is_not_lost(rank):
    """A backup that was clean when the sleep was prepared holds what was there then."""
    sleep(rank)
    wake(rank)
    rank.manager.prepare_sleep(Level.PRESERVE, PUBLIC_TAGS)
    rank.allocator.write(rank.parameter, b"\7" * rank.parameter.nbytes)
    rank.manager.note_foreign_load(True)
    rank.manager.commit_sleep()
    wake(rank)
    assert rank.contents()["parameter"] == b"\7" * rank.parameter.nbytes
    rank.manager.check_integrity()


# -- phases and reports -------------------------------------------------------------------------------------


def test_phases_out_of_order_are_conflicts(rank):
    with pytest.raises(StateConflictError):
        rank.manager.commit_sleep()
    with pytest.raises(StateConflictError):
        rank.manager.commit_wake()
    rank.manager.abort_sleep()
    rank.manager.abort_wake()
    rank.manager.prepare_sleep(Level.PRESERVE, PUBLIC_TAGS)
    for prepare in (
        lambda: rank.manager.prepare_sleep(Level.PRESERVE, PUBLIC_TAGS),
        lambda: rank.manager.prepare_wake(PUBLIC_TAGS),
    ):
        with pytest.raises(StateConflictError):
            prepare()
    rank.manager.commit_sleep()


def test_the_device_is_synchronised_before_anything_is_released(rank):
    rank.manager.prepare_sleep(Level.PRESERVE, PUBLIC_TAGS)
    used = rank.device.used
    rank.device.fail("synchronize")
    with pytest.raises(EngineFaultError):
        rank.manager.commit_sleep()
    assert rank.device.used == used
    assert states(rank) == dict.fromkeys(PUBLIC_TAGS, RESIDENT)
    held = rank.arena.held_bytes
    sleep(rank)
    assert rank.arena.held_bytes == held  # what the failed sleep had copied was freed


def test_seconds_name_the_steps_that_ran(rank):
    sleep(rank)
    assert rank.manager.seconds().keys() == {"synchronize", "backup", "release"}
    wake(rank)
    assert rank.manager.seconds().keys() == {"reserve", "map", "restore"}


def test_status_in_every_state(rank):
    sizes = {tag.value: sum(block.nbytes for block in rank.allocator.blocks(tag)) for tag in PUBLIC_TAGS}
    for step in (lambda: None, lambda: sleep(rank), lambda: wake(rank, [Tag.WEIGHTS])):
        step()
        status = rank.manager.status()
        assert {name: tag.bytes for name, tag in status.tags.items()} == sizes
        assert status.device_total_bytes - status.device_free_bytes == rank.mapped_bytes()
        assert status.host_arena_bytes == rank.arena.held_bytes
    assert (status.rank, status.device, status.allocator) == (0, "fake:0", "fake")


def test_what_the_arena_cannot_do_is_noted() -> None:
    rank = FakeRank(notes=["no graphs"])
    rank.arena.notes.append("pages are not locked")
    assert rank.manager.status().notes == ("no graphs", "pages are not locked")


def test_the_host_memory_knows_while_a_sleep_or_a_wake_acts(monkeypatch):
    rank = FakeRank()
    seen = []

    def noting(call):
        def run(*arguments):
            seen.append(rank.manager.arena.is_busy)
            return call(*arguments)

        return run

    for name in ("reserve", "release"):
        monkeypatch.setattr(rank.allocator, name, noting(getattr(rank.allocator, name)))
    sleep(rank)
    assert not rank.manager.arena.is_busy
    wake(rank)
    assert not rank.manager.arena.is_busy
    assert len(seen) >= 6 and all(seen)
